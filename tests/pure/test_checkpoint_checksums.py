"""Checksums and the bytes beneath them: the same numbers from whatever computes them, and no byte too many."""

from __future__ import annotations

import random
import sys
import types
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointDamaged, files
from fullshard.checkpoint.files import ReadFile
from fullshard.checkpoint.manifest import BLOCK_NBYTES
from fullshard.checkpoint.plan import Box, whole
from fullshard.checkpoint.state import _OWN_MAP_NBYTES, bytes_of, staging
from fullshard.checkpoint.table import Table
from tests.harness.behaviours import behaviour


def test_every_implementation_gives_the_crc_32_of_zlib() -> None:
    data = random.Random(0).randbytes(3 << 20)
    for size in (0, 1, 15, 16, 255, 256, 257, 5000, 1 << 20, (1 << 20) + 1, 3 << 20):
        for start in (0, 1, 7):
            part = memoryview(data)[start : start + size]
            assert files.crc32(part) == zlib.crc32(part), (start, size)
    assert files.FAST == (find_spec("isal") is not None), "what is installed is used"


def test_the_package_is_used_where_it_is_and_not_missed_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = types.ModuleType("isal.isal_zlib")
    there.crc32 = lambda data: 7
    monkeypatch.setitem(sys.modules, "isal", types.ModuleType("isal"))
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", there)
    assert files._fastest() == (there.crc32, True)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert files._fastest() == (zlib.crc32, False)


def large() -> Tensor:
    """Of rows that do not divide a block: two blocks and a half."""
    return torch.randn(656, 1000, generator=torch.Generator().manual_seed(0))


@behaviour(
    "a checkpoint written with fast checksums is that of slow ones, byte for byte, and loads without them",
    area="checkpoints",
    torch="none",
    reason="DCP has no checksums",
)
def test_fast_and_slow_checksums_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": large(), "b": torch.arange(7), "step": 3}
    found = {}
    for fast in (False, True):
        # What is slow is computed beside the writing, what is fast on the way.
        monkeypatch.setattr(files, "FAST", fast)
        checkpoint.save(state, checkpoint_id=tmp_path / str(fast), no_dist=True)
        (path,) = (tmp_path / str(fast)).glob("g*/data-*")
        (file,) = checkpoint.inspect(tmp_path / str(fast)).files
        found[fast] = path.read_bytes()[file.header_nbytes :]
    # The header has the id of the save, and the table its checksum first.
    start = -file.table_nbytes
    assert found[True][:start] == found[False][:start] and found[True][start + 4 :] == found[False][start + 4 :]
    monkeypatch.setattr(files, "crc32", zlib.crc32)
    place = Table.parse(found[True][start:], BLOCK_NBYTES, "f").find("w")
    data = bytes_of(large())
    assert place and list(place.crcs) == [
        zlib.crc32(data[i : i + BLOCK_NBYTES]) for i in range(0, len(data), BLOCK_NBYTES)
    ]
    for fast in (False, True):
        checkpoint.verify(tmp_path / str(fast))
        target = {"w": torch.zeros(656, 1000), "b": torch.zeros(7, dtype=torch.int64), "step": 0}
        checkpoint.load(target, checkpoint_id=tmp_path / str(fast), no_dist=True)
        assert torch.equal(target["w"], large()) and target["step"] == 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save({"w": large()}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_any_part_of_a_tensor_of_several_blocks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin and end anywhere in a block, all of a block, less than one; columns; and what they read."""
    read = [0]
    original = ReadFile.read_each

    def counting(self: ReadFile, buffers: Sequence[memoryview], start: int) -> None:
        read[0] += sum(map(len, buffers))
        original(self, buffers, start)

    monkeypatch.setattr(ReadFile, "read_each", counting)
    tensor, row = large(), 4000
    rows = [(0, 656), (0, 1), (262, 1), (262, 2), (263, 262), (0, 263), (524, 132), (525, 131), (655, 1), (100, 400)]
    generator = random.Random(1)
    rows += [(first := generator.randrange(656), generator.randrange(1, 657 - first)) for _ in range(30)]
    with checkpoint.open_checkpoint(saved) as opened:
        opened.tensor("w", Box((0, 0), (1, 1)))  # the header is read once
        for first, count in rows:
            read[0] = 0
            assert torch.equal(opened.tensor("w", Box((first, 0), (count, 1000))), tensor[first : first + count])
            begin, end = first * row // BLOCK_NBYTES, -(-(first + count) * row // BLOCK_NBYTES)
            assert read[0] == min(end * BLOCK_NBYTES, 656 * row) - begin * BLOCK_NBYTES, "a block once, and no other"
        assert torch.equal(opened.tensor("w", Box((3, 5), (600, 990))), tensor[3:603, 5:995])
        assert opened.tensor("w", Box((3, 5), (0, 990))).shape == (0, 990)


def test_a_block_of_which_a_part_is_wanted_is_checked(saved: Path) -> None:
    """And one of which nothing is wanted is not read."""
    (file,) = saved.glob("g*/data-*")
    start = checkpoint.inspect(saved).files[0].header_nbytes
    data = bytearray(file.read_bytes())
    data[start + BLOCK_NBYTES + 5] ^= 4
    file.write_bytes(data)
    tensor = large()
    with checkpoint.open_checkpoint(saved) as opened:
        assert torch.equal(opened.tensor("w", Box((0, 0), (262, 1000))), tensor[:262])
        assert torch.equal(opened.tensor("w", Box((525, 0), (131, 1000))), tensor[525:])
        for box in (whole((656, 1000)), Box((262, 0), (1, 1000)), Box((500, 0), (10, 1000)), Box((524, 0), (2, 1000))):
            with pytest.raises(CheckpointDamaged, match=f"bytes {start + BLOCK_NBYTES} to"):
                opened.tensor("w", box)


@pytest.mark.parametrize("numel", [3, _OWN_MAP_NBYTES])
def test_memory_for_what_is_read(numel: int) -> None:
    """Aligned, apart from each other, of one piece, alive as long as any of it; small or in pages of its own."""
    wanted: list[tuple[str, tuple[int, ...]]] = [
        ("uint8", (numel,)),
        ("float64", (3, 5)),
        ("bool", ()),
        ("bfloat16", (0, 4)),
    ]
    made = staging(wanted)
    assert [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in made] == wanted
    assert all(t.is_contiguous() and t.data_ptr() % t.element_size() == 0 for t in made)
    assert len({t.untyped_storage().data_ptr() for t in made if t.numel()}) == 1
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert all(
        (tensor == (number > 0 if tensor.dtype is torch.bool else number)).all() for number, tensor in enumerate(made)
    )
    last = made[1]
    del made, tensor
    assert (last + 1 == 2).all()
    assert staging([]) == []
