"""What `fullshard plan` says of several axes is counted on ranks: bytes that the library holds, and messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import Parallelism
from fullshard.plan import Plan
from tests.harness.axes import llama
from tests.harness.axes_counted import Counted, counted, joins_noted, planned_step
from tests.harness.threads import run_ranks

# How the threaded group calls what the plan says.
_KINDS = {
    "all_reduce": "AllReduce",
    "all_gather_into_tensor": "AllGather",
    "reduce_scatter_tensor": "ReduceScatter",
}


def check(plan: Plan, ranks: list[Counted], copies: int) -> None:
    there: Counter[str] = Counter()
    for unit in plan.units:
        for group in unit.groups:
            there["shards"] += group.memory.shard_nbytes
            there["state"] += group.state_nbytes
            there["gradients"] += group.sent.reduced_nbytes if group.sent is not None else 0
    for found in ranks:
        assert (found.shards, found.state) == (there["shards"], there["state"])
        assert found.gradients == there["gradients"] and found.buffers == plan.model.buffer_nbytes
        # Along `tp`: each operation, with its bytes.
        counts: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for sent in (each for each in plan.divided_messages if each.axis == "tp"):
            kind = _KINDS[sent.operation.partition(" ")[0]]
            counts[kind] += sent.count
            nbytes[kind] += int(sent.nbytes)
        own = {kind: count for (axis, kind), count in found.counts.items() if axis == "tp"}
        assert own == dict(counts)
        assert {kind: size for (axis, kind), size in found.nbytes.items() if axis == "tp"} == dict(nbytes)
        # Over shards: gathers, and gradients that are exchanged, each with its padding. A rank sends all but its part.
        traffic, shards = plan.simulated.traffic, plan.strategy.shard
        sharing = {kind: count for (axis, kind), count in found.counts.items() if axis == "dp_shard"}
        assert sum(sharing.values()) == traffic["shard"].calls
        sent = sum(size for (axis, _), size in found.nbytes.items() if axis == "dp_shard")
        assert sent * (shards - 1) / shards == traffic["shard"].nbytes
        # Over copies: the shards' gradients, once around and back; and one message by which copies compare facts.
        replicating = sum(count for (axis, _), count in found.counts.items() if axis == "dp_replicate")
        assert replicating == traffic["replicate"].calls + (copies > 1)
        summed = sum(size for (axis, _), size in found.nbytes.items() if axis == "dp_replicate")
        if copies > 1:
            assert 0 <= summed - traffic["replicate"].nbytes * copies / (2 * (copies - 1)) <= 128


@pytest.mark.slow
@pytest.mark.threads_only(reason="what is counted is what the threaded group joins")
@pytest.mark.parametrize(
    ("world", "copies", "sequence", "config"),
    [
        pytest.param(4, 1, True, {}, id="tp-sp-fsdp"),
        pytest.param(4, 1, False, {}, id="tp-fsdp", marks=pytest.mark.slow),
        pytest.param(4, 1, False, {"activation_checkpointing": "units"}, id="recomputed", marks=pytest.mark.slow),
        pytest.param(4, 1, True, {"activation_checkpointing": "units"}, id="sp-recomputed", marks=pytest.mark.slow),
        pytest.param(8, 2, True, {}, id="hsdp-tp-sp", marks=pytest.mark.slow),
        pytest.param(8, 2, False, {}, id="hsdp-tp", marks=pytest.mark.slow),
        pytest.param(4, 2, True, {}, id="replicas-tp-sp", marks=pytest.mark.slow),
        pytest.param(8, 1, True, {}, id="tp-4", marks=pytest.mark.slow),
    ],
)
def test_bytes_and_messages_of_several_axes(world: int, copies: int, sequence: bool, config: Any) -> None:
    tensor = 4 if (world, copies) == (8, 1) else 2
    declared = Parallelism(tensor, sequence, data_parallel_replicate_degree=copies)
    make = llama if tensor == 2 else wide
    with joins_noted():
        ranks = run_ranks(world, counted, make, declared, {"wrap": {"group_ends": False}, **config})
    dials = {"recompute": "whole"} if config else {}
    check(planned_step(make, declared, world, **dials), ranks, copies)


# ---- sequences and experts over ranks --------------------------------------------------------------------------------


class EvenRouter(nn.Linear):
    """Scores by which each expert gets as many tokens, as a plan takes it."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = super().forward(x) * 0
        first = torch.arange(len(x), device=x.device).unsqueeze(1) * 2
        chosen = (first + torch.arange(2, device=x.device)) % scores.shape[1]
        return scores + torch.zeros_like(scores).scatter(1, chosen, 1.0)


def with_experts(**sizes: int) -> nn.Module:
    model = llama(experts=4, experts_per_token=2, **sizes)
    for block in model.layers:
        block.ffn.router.__class__ = EvenRouter  # type: ignore[union-attr, assignment]
    return model


_EXCHANGED = {"all_to_all": "AllToAllBase", "ring": "AllToAllBase", "all_reduce": "AllReduce"}
CASES = {
    "ulysses": (4, llama, {"context_parallel_degree": 2, "context_parallel_variant": "ulysses"}, {}),
    "ring": (4, llama, {"context_parallel_degree": 2, "context_parallel_variant": "ring"}, {}),
    "ring of 4": (8, llama, {"context_parallel_degree": 4, "context_parallel_variant": "ring"}, {}),
    "recomputed": (4, llama, {"context_parallel_degree": 2}, {"activation_checkpointing": "units"}),
    "experts": (4, with_experts, {"expert_parallel_degree": 2}, {}),
    "experts, all of them apart": (8, with_experts, {"expert_parallel_degree": 4}, {}),
    "experts and sequences": (8, with_experts, {"expert_parallel_degree": 4, "context_parallel_degree": 2}, {}),
    "copies of experts, recomputed": (
        8,
        with_experts,
        {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2},
        {"activation_checkpointing": "units"},
    ),
}


@pytest.mark.sample(1)
@pytest.mark.threads_only(reason="what is counted is what the threaded group joins")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("ring", "experts") else pytest.mark.slow) for name in CASES]
)
def test_bytes_and_messages_of_sequences_and_experts(name: str) -> None:
    """Shards and state, those of experts on their own mesh too; and each message along `cp` and `ep`."""
    world, make, degrees, config = CASES[name]
    declared = Parallelism(**degrees)
    with joins_noted():
        ranks = run_ranks(world, counted, make, declared, {"wrap": {"group_ends": False}, **config})
    plan = planned_step(make, declared, world, **({"recompute": "whole"} if config else {}))
    there: Counter[str] = Counter()
    for group in (group for unit in plan.units for group in unit.groups):
        there["shards"] += group.memory.shard_nbytes
        there["state"] += group.state_nbytes
    expected: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for sent in plan.divided_messages:
        kind = _EXCHANGED[sent.operation.partition(" ")[0]]
        expected[sent.axis, kind] += sent.count
        nbytes[sent.axis, kind] += int(sent.nbytes)
    # Of the first rank: later ones have no rows of small parameters.
    assert ranks[0].state == there["state"]
    for found in ranks:
        assert found.shards == there["shards"]
        own = {key: count for key, count in found.counts.items() if key[0] in ("cp", "ep")}
        assert own == dict(expected)
        assert {key: size for key, size in found.nbytes.items() if key in own} == dict(nbytes)
        calls = sum(count for (axis, _), count in found.counts.items() if axis in ("dp_shard", "efsdp"))
        assert calls == plan.simulated.traffic["shard"].calls


def wide() -> Any:
    return llama(heads=8, kv_heads=4, dim=32, ffn_dim=48)
