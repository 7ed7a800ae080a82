"""What a hand-over sends, counted: an 8B model from FSDP on 8 ranks to tensor parallelism on 2, and buckets of one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.hand_over import CASES, LIMIT, counted, llama_8b
from fullshard import fully_shard, weights
from fullshard.comm import exchange
from fullshard.comm.data_group import Line
from tests.harness.fake import fake_world


@pytest.mark.slow
def test_an_8b_model_from_fsdp_on_8_ranks_to_tensor_parallelism_on_2() -> None:
    """float32 shards, bfloat16 targets. `counted` compares each rank's bytes with the plan's, and raises unless each
    element of a target arrives once, from others or from its own shard."""
    assert sum(map(math.prod, llama_8b().values())) == 8_030_261_248
    found = counted(*CASES["FSDP 8 -> TP 2 on two of them"])
    # Half of the model for each engine rank in bfloat16, and the norms whole on both.
    norms = 65 * 4096 * 2
    half = (16_060_522_496 - norms) // 2 + norms
    assert found.wanted == {0: half, 1: half} | dict.fromkeys(range(2, 8), 0)
    assert sum(found.sent.values()) + sum(found.copied.values()) == 2 * half
    assert found.buffer_nbytes == LIMIT
    assert found.plan.startswith("291 tensors, 15316.5 MiB, from 8 rank(s) to 2; messages of 256.0 MiB\n")


@pytest.mark.parametrize("case", [case for case in CASES if "others" in case])
def test_disjoint_ranks_and_replicas(case: str) -> None:
    """No rank sends much more than its share, replicas neither: tensors alternate between them."""
    source, target, world = CASES[case]
    found = counted(source, target, world, layers=1, limit_nbytes=64 << 20)
    assert found.received == {rank: found.wanted[rank] for rank in (8, 9)} and not sum(found.copied.values())
    share = sum(found.sent.values()) / 8
    assert max(found.sent.values()) <= 1.1 * share


@pytest.mark.parametrize("fault", ["twice", "bytes"])
def test_the_counting_finds_what_it_is_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, world = CASES["FSDP 8 -> TP 2 on two others"]
    order = exchange.Exchange._order
    if fault == "twice":
        unpack = exchange.Exchange._unpack

        def twice(self: Any, message: Tensor, cuttings: Any) -> None:
            unpack(self, message, cuttings)
            unpack(self, message, cuttings[:1])

        monkeypatch.setattr(exchange.Exchange, "_unpack", twice)
    else:
        monkeypatch.setattr(exchange.Exchange, "_order", lambda self, rank, most: order(self, rank, most)[1:])
    with pytest.raises(AssertionError, match="not each element once" if fault == "twice" else "rank 0"):
        counted(source, target, world, layers=0)


def test_a_bucket_is_one_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each parameter: 48 here."""
    gathers = []
    gather = Line.gather_into

    def counted(self: Line, out: Tensor, piece: Tensor) -> Any:
        gathers.append(out.nbytes)
        return gather(self, out, piece)

    monkeypatch.setattr(Line, "gather_into", counted)
    with fake_world(8):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))
        for module in (*model, model):
            fully_shard(module)
        whole = sum(parameter.numel() * 4 for parameter in model.parameters())
        for nbytes in (1 << 30, whole // 4, 1):
            gathers.clear()
            found = weights(model, bucket_nbytes=nbytes)
            assert sum(tensor.nbytes for _, tensor in found.tensors()) == whole
            assert len(gathers) == len(found)
            assert len(found) == {1 << 30: 1, whole // 4: 4, 1: 48}[nbytes]
            assert sum(gathers) == whole
