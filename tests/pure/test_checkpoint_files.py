"""File operations of checkpoints one by one: what is followed, waited for, written over, or left open."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fullshard.checkpoint.errors import CheckpointBusy, CheckpointDamaged, CheckpointIOError
from fullshard.checkpoint.files import Folder, compare, crc32, doing


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    with Folder.open(str(tmp_path)) as opened:
        yield opened


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_new_and_synced(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), original(fd))[1])
    folder.write("a", b"first")
    assert synced == [str(tmp_path / "a")]
    for name in ("a", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FileExistsError):
            folder.write(name, b"second")
    assert (tmp_path / "a").read_bytes() == b"first" and not (tmp_path / "elsewhere").exists()


def test_links_and_what_is_no_file_are_refused_and_nothing_stays_open(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    before = open_files()
    for name in ("link", "pipe", "real"):
        for call in (folder.reading, folder.nbytes):
            with pytest.raises(CheckpointDamaged, match="expected a plain file"):
                call(name)
    with pytest.raises(OSError, match="Not a directory|Too many levels"):
        folder.sub("folder")
    for name in ("../a", "real/../a", "", ".", "..", "/etc/passwd"):
        for call in (folder.sub, folder.reading, folder.nbytes, folder.remove, folder.make_folder):
            with pytest.raises(CheckpointDamaged, match="expected the name of a file in this directory"):
                call(name)
    assert open_files() == before


def test_a_pipe_is_not_waited_for(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = threading.Event()

    def read() -> None:
        try:
            folder.reading("pipe")
        except CheckpointDamaged:
            ended.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    waited = not ended.wait(5)
    # Let it end, whatever it waits for.
    fd = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    thread.join(5)
    os.close(fd)
    assert not waited


def test_a_small_file_is_small(folder: Folder) -> None:
    folder.write("a", b"12345")
    assert folder.read("a", 5) == b"12345"
    with pytest.raises(CheckpointDamaged, match="at most 4 bytes, found 5"):
        folder.read("a", 4)


def test_one_process_holds_a_lock_and_a_file_system_may_have_none(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = folder.lock("LOCK")
    assert held is not None
    before = open_files()
    with pytest.raises(CheckpointBusy, match="another one is writing"):
        folder.lock("LOCK")
    os.close(held)

    def refuse(number: int) -> Any:
        def flock(fd: int, operation: int) -> None:
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    assert folder.lock("LOCK") is None
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        folder.lock("LOCK")
    assert open_files() == before - 1


def test_what_the_system_takes_in_parts_is_read_and_written_whole(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a read or write that moves nothing is not tried for ever."""
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: preadv(fd, [buffers[0][:3]], start))
    folder.write("a", b"0123456789")
    assert folder.read("a", 100) == b"0123456789"
    calls = []

    def nothing(*_: object) -> int:
        calls.append(1)
        if len(calls) > 9:
            raise AssertionError("tried for ever")
        return 0

    monkeypatch.setattr(os, "preadv", nothing)
    with pytest.raises(CheckpointDamaged, match="it ends at 0"):
        folder.read("a", 100)
    monkeypatch.setattr(os, "write", nothing)
    with pytest.raises(OSError, match="nothing was written") as caught:
        folder.write("b", b"1")
    assert caught.value.errno == errno.ENOSPC


def test_pieces_are_read_one_after_another_wherever_the_system_stops(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("a", b"0123456789")
    preadv = os.preadv
    for most in range(1, 11):

        def some(fd: int, buffers: list[memoryview], start: int, most: int = most) -> int:
            left, parts = most, []
            for buffer in buffers:
                parts.append(buffer[:left])
                left -= len(parts[-1])
            return preadv(fd, parts, start)

        monkeypatch.setattr(os, "preadv", some)
        pieces = [bytearray(n) for n in (4, 0, 1, 5)]
        with folder.reading("a") as file:
            file.read_each([memoryview(one) for one in pieces], 0)
        assert b"".join(pieces) == b"0123456789", most


def test_a_block_that_was_changed_is_damaged() -> None:
    compare(memoryview(b"abc"), crc32(b"abc"), "here", 8)
    with pytest.raises(CheckpointDamaged, match="here: bytes 8 to 11 are not those that were saved"):
        compare(memoryview(b"abd"), crc32(b"abc"), "here", 8)


def test_an_error_of_the_system_says_what_was_done_once() -> None:
    with pytest.raises(CheckpointIOError) as caught:
        with doing("the outer"), doing("writing a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.errno == errno.ENOSPC
    assert "writing a" in str(caught.value) and "the outer" not in str(caught.value)
