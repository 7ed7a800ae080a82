"""Loads that check the pages of files where they are: locked until all ranks agree, and copied after that."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard import checkpoint
from fullshard.checkpoint import CheckpointDamaged, loading, resident
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.manifest import BLOCK_NBYTES
from fullshard.checkpoint.plan import Box
from fullshard.checkpoint.resident import NotResident, ResidentFile


def state(version: int) -> dict[str, Any]:
    """Rows that do not divide a block, and elements of every size, which are not aligned to each other."""
    generator = torch.Generator().manual_seed(version)
    return {
        "w": torch.randn(656, 1000, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "bytes": torch.randint(0, 255, (5,), generator=generator, dtype=torch.uint8),
        "complex": torch.randn(3, dtype=torch.complex128, generator=generator),
        "none": torch.empty(0, 4),
        "step": version,
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value, key


def locked_nbytes() -> int:
    (found,) = re.findall(r"VmLck:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of version 1 where pages can be locked."""
    checkpoint.save(state(1), checkpoint_id=tmp_path / "c", no_dist=True)
    (file,) = tmp_path.glob("c/g*/data-*")
    try:
        with Folder.open(str(file.parent)) as folder, ResidentFile(folder.reading(file.name)):
            pass
    except NotResident as error:
        pytest.skip(f"this system or its temporary directory does not lock the pages of files: {error}")
    return tmp_path / "c"


def test_nothing_is_read_into_other_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is locked when all agree, and no longer when it was copied."""
    (file,) = saved.glob("g*/data-*")
    before, during = locked_nbytes(), list[int]()
    original = loading.write

    def write(*arguments: Any) -> None:
        during.append(locked_nbytes())
        original(*arguments)

    monkeypatch.setattr(loading, "write", write)
    monkeypatch.delattr(loading, "staging")
    target = state(2)
    checkpoint.load(target, checkpoint_id=saved, no_dist=True)
    assert_equal(target, state(1))
    assert during[0] >= before + file.stat().st_size
    assert locked_nbytes() == before


def test_each_call_that_the_system_refuses(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load reads into memory of its own, and leaves nothing locked."""
    before, original, in_memory = locked_nbytes(), resident.call, loading.staging
    for name in ("fstatfs", "mmap", "mlock2", "madvise"):
        for at in range(20):
            calls, struck, staged = Counter[str](), list[bool](), list[bool]()

            def refuse(
                called: str, *arguments: object, name=name, at=at, calls=calls, struck=struck
            ) -> int:  # of this round
                calls[called] += 1
                if called == name and calls[called] == at + 1:
                    struck.append(True)
                    raise NotResident(name)
                return original(called, *arguments)

            def staging(wanted: Any, staged=staged) -> list[Tensor]:  # of this round
                staged.append(True)
                return in_memory(wanted)

            monkeypatch.setattr(resident, "call", refuse)
            monkeypatch.setattr(loading, "staging", staging)
            target = state(2)
            checkpoint.load(target, checkpoint_id=saved, no_dist=True)
            assert_equal(target, state(1))
            assert locked_nbytes() == before, (name, at)
            assert staged == struck, (name, at)
            assert calls["munmap"] == calls["mmap"] - (name == "mmap" and bool(struck)), (name, at)
            if not struck:
                break
        assert at > 0, name


def test_a_server_may_take_pages_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_LOCAL", frozenset())
    with checkpoint.open_checkpoint(saved) as opened:
        with pytest.raises(NotResident, match="local file system"):
            opened.lend_each([(opened.manifest.tensors["w"], Box((0, 0), (656, 1000)), state(2)["w"])])
    target = state(2)
    checkpoint.load(target, checkpoint_id=saved, no_dist=True)
    assert_equal(target, state(1))


def test_what_the_system_answers_is_seen() -> None:
    """A function that is not there, and one of each kind that fails: nothing is at the address 0."""
    with pytest.raises(NotResident, match="no_such_function"):
        resident.call("no_such_function")
    for name, *arguments in (
        ("mlock2", 0, 4096, 1),
        ("madvise", 0, 4096, 22),
        ("munmap", 1, 4096),
        ("fstatfs", -1, 0),
        ("mmap", 0, 4096, 1, 2, -1, 0),
    ):
        with pytest.raises(NotResident, match=f"{name}: "):
            resident.call(name, *arguments)


def test_any_part_of_a_tensor(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns, into another dtype; and only the blocks that they touch are read."""
    read, original = [0], resident._Pages.read

    def counting(pages: Any, start: int, stop: int) -> None:
        read[0] += stop - start
        original(pages, start, stop)

    monkeypatch.setattr(resident._Pages, "read", counting)
    tensor = state(1)["w"]
    with checkpoint.open_checkpoint(saved) as opened:
        entry = opened.manifest.tensors["w"]
        for box in (
            *(Box((0, 0), (656, 1000)), Box((0, 0), (1, 1)), Box((262, 0), (1, 1000)), Box((262, 0), (2, 1000))),
            *(Box((525, 0), (131, 1000)), Box((3, 5), (600, 990)), Box((3, 5), (0, 990)), Box((600, 999), (1, 1))),
        ):
            rows = slice(box.offsets[0], box.offsets[0] + box.lengths[0])
            columns = slice(box.offsets[1], box.offsets[1] + box.lengths[1])
            into = torch.zeros(box.lengths, dtype=torch.float64)
            read[0] = 0
            copies = opened.lend_each([(entry, box, into)])
            assert not into.any(), "nothing is written yet"
            for region, lent in copies:
                region.copy_(lent)
            assert torch.equal(into, tensor[rows, columns].double()), box
            first = 4 * (box.offsets[0] * 1000 + box.offsets[1]) // BLOCK_NBYTES
            last = 4 * ((rows.stop - 1) * 1000 + columns.stop) - 1
            wanted = min((last // BLOCK_NBYTES + 1) * BLOCK_NBYTES, entry.nbytes) - first * BLOCK_NBYTES
            assert read[0] == (wanted if into.numel() else 0), box


def test_a_damaged_block_is_found_before_anything_is_copied(saved: Path) -> None:
    (file,) = saved.glob("g*/data-*")
    start = next(iter(checkpoint.inspect(saved).files)).header_nbytes
    data = bytearray(file.read_bytes())
    data[start + BLOCK_NBYTES + 100] ^= 1
    file.write_bytes(data)
    target = state(2)
    with pytest.raises(CheckpointDamaged, match="checksum"):
        checkpoint.load(target, checkpoint_id=saved, no_dist=True)
    assert_equal(target, state(2))


def test_a_block_that_cannot_be_read_is_an_error_of_the_system(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that the disk refuses are not locked; the error is that of the read which follows."""
    import os

    def refuse(fd: int, buffers: list[memoryview], offset: int, original: Any = os.preadv) -> int:
        if sum(map(len, buffers)) > 100_000:
            raise OSError(5, "Input/output error")
        return int(original(fd, buffers, offset))

    def populate(pages: Any, start: int, stop: int) -> None:
        raise NotResident("madvise: Bad address")

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(resident._Pages, "read", populate)
    target = state(2)
    with pytest.raises(checkpoint.CheckpointIOError) as caught:
        checkpoint.load(target, checkpoint_id=saved, no_dist=True)
    assert caught.value.errno == 5
    assert_equal(target, state(2))
