"""One rank alone is out of memory, at a chosen step, piece and place; its peers wait for it in a message. All of them
try again with smaller pieces, within seconds, bitwise as if these had been small at once."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.hang import patience
from tests.harness.models import seeded
from tests.harness.pool import pool
from tests.threads.programs import Model, shard
from tests.threads.test_micro_batches import SAMPLES, Memory, _inputs, _loss_of, _state, allocator_raises, really

SECONDS = 5.0  # from a failure to the end of the window that is tried again


class Lacks(NamedTuple):
    """Rank `rank` has memory for `limit` rows in `where` of block `block`, from its `after`-th call on."""

    rank: int
    block: int
    where: str
    limit: int = 2
    after: int = 0


def trained(
    rank: int, lacks: tuple[Lacks, ...], size: int | None, reduce: str, steps: int = 3
) -> tuple[list[Tensor], list[int | None], int, float]:
    """State, the sizes of the windows, how often memory was lacking here, and the seconds of the longest window."""
    torch.use_deterministic_algorithms(True)
    model: Any = shard(seeded(Model))
    kind = {"forward": really, "backward": allocator_raises}
    memories = [
        Memory(model.layers[one.block], one.limit, one.where, kind[one.where], one.after)
        for one in lacks
        if one.rank == rank
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: Any = {"search": "halve" if size is None else "fixed", "size": size, "reduce": reduce}
    micro = fullshard.MicroBatches(model, **options)
    sizes, seconds = [], 0.0
    for step in range(steps):
        begun = time.monotonic()
        micro.backward(_loss_of(model, _inputs(rank, step)), SAMPLES)
        seconds = max(seconds, time.monotonic() - begun)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(micro.size)
    return _state(model, optimizer), sizes, sum(memory.failures for memory in memories), seconds


def _equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max():g}"


FAST = [
    (2, Lacks(1, 1, "forward"), "last"),
    (2, Lacks(0, 2, "backward"), "each"),
    (3, Lacks(1, 0, "backward"), "last"),
]
SLOW = [
    (world, Lacks(rank, block, where), reduce)
    for world in (2, 3, 4)
    for rank in (0, world - 1)
    for block in (0, 2)
    for where in ("forward", "backward")
    for reduce in ("last", "each")
]


@pytest.mark.sample(1, full=8)
@behaviour(
    "one rank alone out of memory: all ranks try the step again in smaller pieces, within seconds",
    area="failures",
    torch="none",
    reason="torch's peers wait for the time-out of the process group",
)
@pytest.mark.parametrize(
    ("world", "lacks", "reduce"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_one_rank_alone(world: int, lacks: Lacks, reduce: str) -> None:
    found = pool(world).run(trained, (lacks,), None, reduce, timeout=60)
    expected = pool(world).run(trained, (), 2, reduce, timeout=60)
    for rank, (state, sizes, failures, seconds) in enumerate(found):
        assert sizes == [2, 2, 2]
        assert failures == (2 if rank == lacks.rank else 0)  # 8 and 4 were tried
        assert seconds < patience(2 * SECONDS)
        _equal(state, expected[rank][0])


@pytest.mark.slow
def test_one_rank_after_the_other() -> None:
    """Rank 0 in the first step's forward; rank 1 in the third step's backward, and then again."""
    lacks = (Lacks(0, 1, "forward", limit=4), Lacks(1, 2, "backward", limit=1, after=1 + 2 + 2))
    found = pool(2).run(trained, lacks, None, "last", 4, timeout=60)
    assert [sizes for _, sizes, _, _ in found] == [[4, 4, 1, 1]] * 2
    assert [failures for _, _, failures, _ in found] == [1, 2]
    assert max(seconds for _, _, _, seconds in found) < 2 * SECONDS


def one_sample(rank: int) -> tuple[str, str]:
    """The type and the text of what is raised where rank 1 does not even have memory for one sample."""
    model: Any = shard(seeded(Model))
    memory = Memory(model.layers[1], 0 if rank == 1 else SAMPLES, "forward", really)
    micro = fullshard.MicroBatches(model)
    with pytest.raises(RuntimeError) as caught:
        micro.backward(_loss_of(model, _inputs(rank, 0)), SAMPLES)
    assert all(p.grad is None for p in model.parameters())
    memory.limit = SAMPLES
    micro.backward(_loss_of(model, _inputs(rank, 0)), SAMPLES)  # all ranks can go on
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.slow
def test_where_one_sample_does_not_fit_on_one_rank() -> None:
    peer, lacking = pool(2).run(one_sample, timeout=60)
    assert peer[0] == "PeerFailed" and "rank 1 ran out of memory" in peer[1]
    assert lacking[0] == "RuntimeError" and "can't allocate memory" in lacking[1] and "shards of" in lacking[1]


def both(rank: int, before_the_model: bool) -> tuple[str, str, list[Tensor]]:
    """Rank 0 is out of memory and rank 1 raises something else, in the same window; then a good one."""
    model: Any = shard(seeded(Model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    good = _loss_of(model, _inputs(rank, 0))

    def loss_of(piece: slice) -> Tensor:
        if rank == 0 and before_the_model:
            really()
        loss = good(piece)
        if rank == 0:
            allocator_raises()
        raise KeyError("a bad token") if rank == 1 else AssertionError(loss)

    micro = fullshard.MicroBatches(model)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        micro.backward(loss_of, SAMPLES)
    fullshard.MicroBatches(model).backward(good, SAMPLES)
    optimizer.step()
    return type(caught.value).__name__, str(caught.value), _state(model, optimizer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("before_the_model", [False, True])
def test_memory_here_and_another_error_there(before_the_model: bool) -> None:
    """Also before the very first forward of a model on one rank: then the other one does not come to its own error."""
    here, there = pool(2).run(both, before_the_model, timeout=60)
    if before_the_model:
        assert here[0] == "RuntimeError" and "can't allocate memory" in here[1]
        assert there[0] == "PeerFailed" and "rank 0 ran out of memory" in there[1]
    else:
        assert there[:2] == ("KeyError", "'a bad token'")
        assert here[0] == "PeerFailed" and "rank 1 raised: KeyError: 'a bad token'" in here[1]
    expected = pool(2).run(trained, (), SAMPLES, "last", 1, timeout=60)
    _equal(here[2], expected[0][0])
    _equal(there[2], expected[1][0])
