"""What `fullshard plan` says of a pipeline is counted on gloo: bytes of each stage, and messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fullshard import Parallelism
from fullshard.plan import Plan
from tests.harness.pipelines_counted import TOKENS, Counted, counted, llama, planned
from tests.harness.pool import pool

# Of what the library holds, and of activations: the planner's promise.
LIBRARY, ACTIVATIONS = 0.02, 0.05
SAMPLES = 8
_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}, {}),
    "reshard": ({"sharding": {"reshard_after_forward": True}}, {}, {"reshard": True}),
    "recomputed": ({"activation_checkpointing": "units"}, {}, {"recompute": "whole"}),
    "bf16": ({"precision": {"mode": "DEFAULT"}}, {}, {"compute": "bfloat16", "reduce": "float32"}),
    "hsdp": ({}, {"data_parallel_replicate_degree": 2}, {}),
    "tp": ({}, {"tensor_parallel_degree": 2}, {}),
}
CASES = [
    ("1F1B", 4, 0, 4, ""),
    ("ZBVZeroBubble", 4, 0, 2, ""),
    ("GPipe", 4, 0, 2, ""),
    ("Interleaved1F1B", 4, 2, 2, ""),
    ("LoopedBFS", 4, 2, 2, ""),
    ("InterleavedZeroBubble", 4, 2, 2, ""),
    ("DualPipeV", 4, 0, 2, ""),
    ("1F1B", 8, 0, 4, "reshard"),
    ("Interleaved1F1B", 4, 2, 4, "reshard"),
    ("1F1B", 4, 0, 4, "recomputed"),
    ("1F1B", 4, 0, 4, "bf16"),
    ("InterleavedZeroBubble", 4, 2, 4, "bf16"),
    ("1F1B", 2, 0, 4, "hsdp"),
    ("1F1B", 4, 0, 4, "tp"),
    ("Interleaved1F1B", 4, 2, 4, "tp"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "number", "each", "world", "config"), CASES)
def test_bytes_and_messages_of_each_stage(schedule: str, number: int, each: int, world: int, config: str) -> None:
    keys, degrees, dials = _CONFIGS[config]
    plan = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_num_microbatches": number,
        "pipeline_parallel_stages_per_rank": each,
        **degrees,
    }
    whole = planned(llama, Parallelism(**plan), world, SAMPLES, TOKENS, **dials)
    keys = {"wrap": {"group_ends": False}, **keys}
    ranks = pool(world).run(counted, llama, plan, keys, SAMPLES, TOKENS, timeout=240.0)
    for number, rank in enumerate(ranks):
        check(whole.ranks[number * 2 // world], rank)


def check(plan: Plan, found: Counted) -> None:
    assert plan.here == found.stages
    there = Counter({name: int(nbytes) for name, nbytes in plan.terms})
    # At rest, exactly.
    assert (there["parameters"] + there["buffers"], there["optimizer"]) == (found.shards, found.state)
    peak = max(found.step, found.optimizer) + found.rest
    activations = there["activations"] + there["loss"] + there["batch"]
    allowed = LIBRARY * (peak - activations) + ACTIVATIONS * activations
    if plan.strategy.tensor == 1:  # of an embedding over `tp` torch holds more than the tape has
        assert abs(plan.simulated.peak.total - peak) <= allowed, f"counted {peak:,}, predicted {there}"
    # Messages, exactly: to other stages, along `tp`, and over shards and copies.
    sent = [each for each in plan.given if each.operation.startswith("send")]
    assert found.messages["send", "pp"] == (sum(m.count for m in sent), int(sum(m.nbytes for m in sent)))
    along = Counter[str]()
    for each in plan.divided_messages:
        if each.axis == "tp" and "digests" not in each.operation:
            along[each.operation.partition(" ")[0]] += each.count
    assert {kind: count for (kind, axis), (count, _) in found.messages.items() if axis == "tp"} == dict(along)
    traffic = plan.simulated.traffic
    sharing = ("allgather_base", "alltoall_base", "send")
    assert sum(found.messages.get((kind, "own"), (0, 0))[0] for kind in sharing) == traffic["shard"].calls
    # In place: what a step begins with over `pp` and `tp`, and the loss; and one in which copies compare facts.
    compared = sum("all_reduce" in each.operation for each in plan.given) + (plan.strategy.tensor > 1)
    copies = plan.strategy.replicas > 1
    reduced = sum(count for (kind, _), (count, _) in found.messages.items() if kind == "allreduce")
    assert reduced == compared + traffic["replicate"].calls + copies
