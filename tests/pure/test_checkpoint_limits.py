"""What does not fit is refused before the first byte, with the numbers."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import limits
from fullshard.checkpoint.files import Folder
from fullshard.checkpoint.limits import Need, Quota, Room, file_limit, problems, quotas_of, room_in, sees

NEED = Need(1000, 5, 600, "g000001-0/data-00000.safetensors")
ENOUGH = Room(1000, 5, 255, 4096, None)


@pytest.mark.parametrize(
    ("room", "code", "words"),
    [
        (ENOUGH, 0, ""),
        (Room(None, None, None, None, None), 0, ""),
        (ENOUGH._replace(nbytes=999), errno.ENOSPC, "room for 1,000 bytes, found 999 bytes free on its file system"),
        (ENOUGH._replace(num_files=4), errno.ENOSPC, "room for 5 files, found 4 inodes free"),
        (ENOUGH._replace(file_nbytes=599), errno.EFBIG, "files of up to 600 bytes, found a limit of 599 bytes"),
        (ENOUGH._replace(file_nbytes=600), 0, ""),
        (ENOUGH._replace(name_nbytes=21), errno.ENAMETOOLONG, "names of up to 22 bytes, found a limit of 21"),
        (ENOUGH._replace(path_nbytes=35), errno.ENAMETOOLONG, "paths of up to 36 bytes"),
        (ENOUGH._replace(path_nbytes=36), 0, ""),
        (ENOUGH._replace(quotas=(Quota("user 7", 999, 5),)), errno.EDQUOT, "999 bytes left of the quota of user 7"),
        (ENOUGH._replace(quotas=(Quota("group 7", None, 0),)), errno.EDQUOT, "0 inodes left of the quota of group 7"),
    ],
)
def test_what_does_not_fit(room: Room, code: int, words: str) -> None:
    found = problems("/x", NEED, room)
    assert [one.errno for one in found] == ([code] if code else [])
    assert all(words in one.text for one in found)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    room = Room(1, 1, 1, 1, 1, (Quota("user 7", 1, 1),))
    with pytest.raises(checkpoint.CheckpointIOError, match=r"1,000 bytes.*5 files.*quota.*names.*paths") as caught:
        limits.refuse("/x", problems("/x", NEED, room))
    assert caught.value.errno == errno.ENOSPC


def test_the_limit_of_a_file_is_asked_for_without_a_write(tmp_path: Path) -> None:
    """As the file system has it: here some number of terabytes, which is found exactly."""
    (tmp_path / "LOCK").touch()
    with Folder.open(str(tmp_path)) as folder:
        assert file_limit(folder, "LOCK", 1 << 30) is None
        limit = file_limit(folder, "LOCK", (1 << 63) - 1)
        if limit is not None:  # a file system may have none
            with open(tmp_path / "LOCK", "rb") as file:
                assert file.seek(limit) == limit
                with pytest.raises(OSError, match="Invalid argument"):
                    file.seek(limit + 1)
    assert (tmp_path / "LOCK").stat().st_size == 0


def test_a_room_is_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "LOCK").touch()
    with Folder.open(str(tmp_path)) as folder:
        room, told = room_in(folder, "LOCK", 1), os.statvfs(tmp_path)
    assert room.nbytes is not None and abs(room.nbytes / told.f_frsize - told.f_bfree) <= told.f_blocks
    assert room.name_nbytes == told.f_namemax and room.path_nbytes == os.pathconf(tmp_path, "PC_PATH_MAX")
    assert room.file_nbytes is None


def test_a_system_that_does_not_tell_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of object stores say that they have nothing; others have no inodes to count."""
    told = list(os.statvfs(tmp_path))
    told[2:10] = [0] * 8
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result((*told, 0)))
    (tmp_path / "LOCK").touch()
    with Folder.open(str(tmp_path)) as folder:
        assert room_in(folder, "LOCK", 1)[:3] == (None, None, None)
    checkpoint.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize(
    ("hard", "used", "inodes", "used_inodes", "left"),
    [(0, 5, 0, 5, None), (4, 1000, 0, 9, (3096, None)), (4, 9000, 7, 3, (0, 4)), (0, 0, 7, 9, (None, 0))],
)
def test_a_quota_is_what_is_left_of_its_hard_limit(
    hard: int, used: int, inodes: int, used_inodes: int, left: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of blocks are in KiB. The kernel's answer is imitated: `struct if_dqblk` of linux/quota.h."""

    class System:
        def syscall(self, number: Any, fd: Any, command: Any, who: Any, answer: Any) -> int:
            assert number.value == 443 and command.value & 0xFF in (0, 1)
            if command.value & 0xFF:
                return -1  # no quota of groups
            raw = b"".join(value.to_bytes(8, "little") for value in (hard, 0, used, inodes, 0, used_inodes, 0, 0))
            ctypes.memmove(ctypes.addressof(answer._obj), raw, len(raw))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: System())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        found = quotas_of(fd)
        assert [(one.nbytes, one.num_files) for one in found] == ([left] if left else [])
        assert all(one.whose == "user 1000" for one in found)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert quotas_of(fd) == ()
    finally:
        os.close(fd)


def test_this_system_can_be_asked_for_quotas(tmp_path: Path) -> None:
    """Whatever it answers: nobody here need have one."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert all(isinstance(one, Quota) for one in quotas_of(fd))
    finally:
        os.close(fd)


# ---- saves -----------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> checkpoint.CheckpointIOError:
    """The error of a save over an older one, which is kept, and of which no byte was written."""
    path = tmp_path / "c"
    written: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: written.append(len(data)))
        with pytest.raises(checkpoint.CheckpointIOError) as caught:
            checkpoint.save({"w": torch.zeros(100)}, checkpoint_id=path)
        with pytest.raises(checkpoint.CheckpointIOError):
            checkpoint.async_save({"w": torch.zeros(100)}, checkpoint_id=path).result()
    assert not written and len(os.listdir(path)) == 3
    found = {"w": torch.zeros(100)}
    checkpoint.load(found, checkpoint_id=path)
    assert found["w"].eq(1).all()
    return caught.value


def test_a_full_file_system_is_found_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "c")
    original = os.fstatvfs

    def less(blocks: int, files: int) -> Any:
        def told(fd: int) -> Any:
            found = list(original(fd))
            found[1:8] = 1, found[2], blocks, blocks, found[5], files, files
            return os.statvfs_result((*found, 0))

        return told

    monkeypatch.setattr(os, "fstatvfs", less(blocks=399, files=1 << 20))
    error = refused(tmp_path, monkeypatch)
    assert error.errno == errno.ENOSPC and "room for 400 bytes, found 399 bytes" in str(error)
    monkeypatch.setattr(os, "fstatvfs", less(blocks=1 << 30, files=2))
    assert "room for 3 files, found 2 inodes" in str(refused(tmp_path, monkeypatch))
    monkeypatch.setattr(os, "fstatvfs", less(blocks=400, files=3))
    checkpoint.save({"w": torch.zeros(100)}, checkpoint_id=tmp_path / "c")


def test_a_file_that_the_process_may_not_write_is_found_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "c")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (399, resource.RLIM_INFINITY))
    error = refused(tmp_path, monkeypatch)
    assert error.errno == errno.EFBIG and "files of up to 400 bytes, found a limit of 399 bytes" in str(error)


def test_a_path_that_is_too_long_is_found_before_the_first_byte(tmp_path: Path) -> None:
    folder = tmp_path
    while len(os.fsencode(folder)) < 4000:
        folder = folder / ("x" * 60)
    folder.mkdir(parents=True)
    name = "c" * (4096 - len(os.fsencode(folder)) - 41 - 24)
    with pytest.raises(
        checkpoint.CheckpointIOError, match="paths of up to 4097 bytes.* found a limit of 4096"
    ) as caught:
        checkpoint.save({"w": torch.ones(3)}, checkpoint_id=folder / name)
    assert caught.value.errno == errno.ENAMETOOLONG
    checkpoint.save({"w": torch.ones(3)}, checkpoint_id=folder / name[:-1])
    checkpoint.verify(folder / name[:-1])


# ---- hosts -----------------------------------------------------------------------------------------------------------


def test_a_directory_is_seen_late_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may remember a name as missing: it is asked again, and so are the directories around it."""
    (tmp_path / "c" / "made").mkdir(parents=True)
    assert sees(str(tmp_path / "c"), "made") is None
    assert sees(str(tmp_path / "c"), "other", seconds=0) == "does not see it"
    assert sees(str(tmp_path / "d"), "made", seconds=0) == "does not see it"
    listed: list[str] = []
    original = os.listdir

    def refresh(path: Any) -> list[str]:
        listed.append(str(path))
        (tmp_path / "late" / "made").mkdir(parents=True, exist_ok=True)
        return original(path)

    monkeypatch.setattr(os, "listdir", refresh)
    monkeypatch.setattr(limits.time, "sleep", lambda seconds: None)
    assert sees(str(tmp_path / "late"), "made", seconds=20) is None
    assert listed == [str(tmp_path), str(tmp_path / "late")]


def test_a_directory_that_a_host_may_not_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert sees(str(tmp_path), "made") == "may not write there"
