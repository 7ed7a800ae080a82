"""Copies of state within a bound: which parts are copied, what the caller waits for, and what changes meanwhile."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint.companions import ROOM
from fullshard.checkpoint.errors import CheckpointError
from fullshard.checkpoint.saving import stored_part
from fullshard.checkpoint.staging import Live, Named, Staging, StagingMemory, slabs
from fullshard.checkpoint.state import Part, part_of


def parts(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Named]:
    made: list[Named] = []
    for number, size in enumerate(sizes):
        part = part_of(torch.full((size,), float(number), dtype=dtype))
        assert isinstance(part, Part)
        made.append(((f"t{number}",), part))
    return made


def change(held: list[Named]) -> None:
    for _, part in held:
        assert part.local is not None
        part.local.fill_(-1)


def test_all_is_copied_without_a_bound_and_the_memory_serves_again() -> None:
    memory, held = StagingMemory(), parts(3, 0, 5)
    staging = Staging(memory)
    copied = staging.before(held)
    change(held)
    assert [part.local.tolist() for _, part in copied if part.local is not None] == [[0.0] * 3, [], [2.0] * 5]
    assert staging.live.is_over and staging.copied_nbytes == 32
    again = Staging(memory).before(held)
    assert all(
        a.local.data_ptr() == b.local.data_ptr() for (_, a), (_, b) in zip(copied, again, strict=True) if a.nbytes
    )  # type: ignore[union-attr]
    # Another shape or dtype gets memory of its own, and the old one is not written.
    for other in (parts(4, 0, 4), parts(3, 0, 5, dtype=torch.float64)):
        made = Staging(memory).before(other)
        assert all(torch.equal(a.local, b.local) for (_, a), (_, b) in zip(made, other, strict=True))  # type: ignore[arg-type]
        assert [part.local.dtype for _, part in made] == [part.local.dtype for _, part in other]  # type: ignore[union-attr]
    assert again[0][1].local.eq(-1).all()  # type: ignore[union-attr]


def test_with_a_bound_the_end_of_what_is_read_is_copied() -> None:
    """Property: as much as fits, from the end of the order, and never more than the bound."""
    draw = random.Random(0)
    for _ in range(200):
        held = parts(*(draw.randrange(6) for _ in range(draw.randrange(7))))
        order = draw.sample(range(len(held)), draw.randint(0, len(held)))
        bound = draw.randrange(60)
        staging = Staging(StagingMemory(), bound)
        if staging.before(held) is not held and staging.live.is_over:
            assert staging.copied_nbytes == sum(part.nbytes for _, part in held) <= bound
            continue
        made = staging.after_plan(held, order)
        moved = [made[i][1].local is not held[i][1].local for i in order]
        sizes = [held[i][1].nbytes for i in order]
        read = [i for i in order if held[i][1].nbytes]
        first = next((n for n, i in enumerate(order) if moved[n]), len(order))
        assert staging.copied_nbytes == sum(size for size, move in zip(sizes, moved, strict=True) if move) <= bound
        assert all(move or not size for move, size in zip(moved[first:], sizes[first:], strict=True))
        left = [size for size, move in zip(sizes, moved, strict=True) if size and not move]
        assert not left or staging.copied_nbytes + left[-1] > bound, "another part would have fitted"
        for i in read:
            assert staging.live.is_over == all(moved[order.index(j)] for j in read[read.index(i) :])
            staging.live.read(i)
        assert staging.live.is_over


def test_companions_are_not_copied_again() -> None:
    held: list[Named] = [((ROOM, "model", "config.json"), stored_part(b"{}")), *parts(2)]
    staging = Staging(StagingMemory(), 0)
    assert staging.before(held)[0][1] is held[0][1] and not staging.live.is_over
    staging.after_plan(held, [0, 1])
    staging.live.read(1)
    assert staging.live.is_over and not staging.copied_nbytes


def test_a_caller_that_was_interrupted_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live()
    live.begin([0, 1])

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(live._over, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        live.wait()
    live.read(0)
    live.read(1)
    with pytest.raises(CheckpointError, match="it was interrupted"):
        live.check()
    # One that was interrupted when all was read does no harm.
    late = Live()
    late.begin([0])
    late.read(0)
    monkeypatch.setattr(late._over, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        late.wait()
    late.check()


def test_slabs_of_pinned_memory_are_powers_of_two_and_hold_each_piece_once() -> None:
    draw = random.Random(1)
    for _ in range(200):
        nbytes = [draw.randrange(1, 400) for _ in range(draw.randrange(1, 9))]
        sizes, places = slabs(nbytes, 512)
        assert all(size & (size - 1) == 0 for size in sizes)
        taken: dict[int, list[tuple[int, int]]] = {}
        for (slab, start), size in zip(places, nbytes, strict=True):
            assert start % 64 == 0 and start + size <= sizes[slab]
            taken.setdefault(slab, []).append((start, start + size))
        for spans in taken.values():
            assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


# ---- a slow disk -----------------------------------------------------------------------------------------------------


class SlowDisk:
    """Writes of the thread that saves: the first one waits until the caller is back, or for a moment if it is not; and
    none is done beyond `nbytes` before `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
        self.back, self.go, self.done = threading.Event(), threading.Event(), 0
        original = os.write

        def write(fd: int, data: Any) -> int:
            if threading.current_thread().name != "fullshard-save":
                return original(fd, data)
            if not self.done:
                self.back.wait(0.3)
            if self.done + len(data) > nbytes:
                self.go.wait(20)
            self.done += len(data)
            return original(fd, data)

        monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("fast", [True, False], ids=["isal", "zlib"])
def test_a_step_in_place_after_the_call_changes_nothing_that_is_saved(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the state fits: the call waits until the disk has the other half, and not for the whole."""
    from fullshard.checkpoint import files

    monkeypatch.setattr(files, "FAST", fast)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    nbytes = 64 * 64 * 4
    # The header, and three of six tensors.
    disk = SlowDisk(monkeypatch, 3 * nbytes + 4096)
    summed, count, stepped = files.of_blocks, [0], threading.Event()

    def slowly(data: Any, block_nbytes: int) -> tuple[int, ...]:
        count[0] += 1
        if count[0] == 3:  # the last one that the caller waits for
            stepped.wait(0.3)
        return summed(data, block_nbytes)

    monkeypatch.setattr(files, "of_blocks", slowly)
    future = checkpoint.async_save(
        {"model": model.state_dict()}, checkpoint_id=tmp_path / "c", staging_nbytes=3 * nbytes
    )
    disk.back.set()
    assert disk.done > 3 * nbytes, "what was not copied is written"
    assert not future.done() and future.copied_nbytes == 3 * nbytes
    for _ in range(3):
        optimizer.step()
    stepped.set()
    disk.go.set()
    future.result()
    assert future.waited.writing > 0 and future.waited.seconds >= future.waited.writing
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    checkpoint.load({"model": found}, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # Nothing fits: the call is as long as the save.
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    again = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", staging_nbytes=0)
    optimizer.step()
    again.result()
    assert not again.copied_nbytes
    checkpoint.load({"model": found}, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    checkpoint.close()
