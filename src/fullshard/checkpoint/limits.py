"""The needs of a save, compared with what the file system has before its first byte is written.

The first rank compares the sum of all ranks with the free space, the inodes and the quota of the directory, and the
longest names with what the system takes; each rank its largest file with the limits of a file. One rank of each other
host looks for the directory that the first rank made. Only what cannot succeed is refused: sizes are those of tensors
alone, and what a file system does not tell is not compared.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from .errors import CheckpointIOError
from .files import Folder

# The system call of Linux 5.14, of the same number on all architectures; earlier ones answer ENOSYS.
_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
_UNIT_NBYTES = 1024
# Names of a network file system may be remembered as missing for some seconds.
_SEEN_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


class Need(NamedTuple):
    """The amount that a save of all ranks writes. `largest`: bytes of its largest file. `longest`: the longest path of
    a file, from the directory of the checkpoint on."""

    nbytes: int
    num_files: int
    largest: int
    longest: str


class Quota(NamedTuple):
    """The rest of a quota: `whose` ("user 1000"); None where it has no limit."""

    whose: str
    nbytes: int | None
    num_files: int | None


class Room(NamedTuple):
    """The room that a directory has; None where the file system does not tell."""

    nbytes: int | None
    num_files: int | None
    name_nbytes: int | None
    path_nbytes: int | None
    file_nbytes: int | None
    quotas: tuple[Quota, ...] = ()


class Problem(NamedTuple):
    """Why a save cannot succeed. `errno`: what its write would fail with."""

    errno: int
    text: str


def problems(path: str, need: Need, room: Room) -> list[Problem]:
    """Why what is needed does not fit into the directory `path`.

    >>> problems("/x", Need(4096, 1, 4096, "g/data"), Room(1024, None, 255, 4096, None))[0].text
    'expected room for 4,096 bytes, found 1,024 bytes free on its file system'
    """
    found = []
    for whose, left, files, code in (
        ("free on its file system", room.nbytes, room.num_files, errno.ENOSPC),
        *((f"left of the quota of {one.whose}", one.nbytes, one.num_files, errno.EDQUOT) for one in room.quotas),
    ):
        if left is not None and left < need.nbytes:
            found.append(Problem(code, f"expected room for {need.nbytes:,} bytes, found {left:,} bytes {whose}"))
        if files is not None and files < need.num_files:
            found.append(Problem(code, f"expected room for {need.num_files:,} files, found {files:,} inodes {whose}"))
    if room.file_nbytes is not None and room.file_nbytes < need.largest:
        text = f"expected files of up to {need.largest:,} bytes, found a limit of {room.file_nbytes:,} bytes"
        found.append(Problem(errno.EFBIG, text))
    longest = max((len(os.fsencode(name)) for name in need.longest.split("/")), default=0)
    if room.name_nbytes is not None and room.name_nbytes < longest:
        text = f"expected names of up to {longest} bytes, found a limit of {room.name_nbytes}"
        found.append(Problem(errno.ENAMETOOLONG, text))
    whole = len(os.fsencode(f"{path}/{need.longest}")) + 1
    if room.path_nbytes is not None and room.path_nbytes < whole:
        text = f"expected paths of up to {whole} bytes with their end, found a limit of {room.path_nbytes}"
        found.append(Problem(errno.ENAMETOOLONG, text))
    return found


def refuse(path: str, found: Sequence[Problem]) -> None:
    """Raise `CheckpointIOError` with all problems, if there are any."""
    if found:
        texts = "; ".join(one.text for one in found)
        raise CheckpointIOError(
            found[0].errno,
            f"{path}: {texts}; nothing was written: free space, keep fewer checkpoints, or save to another directory",
        )


# ---- what there is ---------------------------------------------------------------------------------------------------


def room_in(folder: Folder, file: str, largest: int) -> Room:
    """The room in `folder`. `file`: the name of a plain file in it, which is asked for the largest size, `largest`."""
    found = os.fstatvfs(folder.fd)
    reserved = os.geteuid() == 0  # root may use blocks that are reserved for it
    blocks, inodes = (found.f_bfree, found.f_ffree) if reserved else (found.f_bavail, found.f_favail)
    try:
        path_nbytes: int | None = os.fpathconf(folder.fd, "PC_PATH_MAX")
    except (OSError, ValueError):
        path_nbytes = None
    return Room(
        blocks * found.f_frsize if found.f_blocks else None,
        inodes if found.f_files else None,
        found.f_namemax or None,
        path_nbytes,
        file_limit(folder, file, largest),
        quotas_of(folder.fd),
    )


def file_limit(folder: Folder, file: str, largest: int) -> int | None:
    """The most bytes of a file there, if that is less than `largest`; else None.

    A position beyond the limit of the file system is refused without a write.
    """
    with folder.reading(file) as opened:

        def fits(nbytes: int) -> bool:
            try:
                os.lseek(opened.fd, nbytes, os.SEEK_SET)
            except OSError:
                return False
            return True

        if fits(largest):
            return None
        low, high = 0, largest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def process_limit() -> int | None:
    """The most bytes of a file that this process may write (`ulimit -f`); None for no limit."""
    found = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if found == resource.RLIM_INFINITY else found


class _DiskQuota(ctypes.Structure):
    """`struct if_dqblk` of Linux. Limits of blocks are in KiB; 0 is none."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("hard_blocks", "soft_blocks", "nbytes")),
        *((name, ctypes.c_uint64) for name in ("hard_inodes", "soft_inodes", "inodes", "block_time", "inode_time")),
        ("valid", ctypes.c_uint32),
    )


def quotas_of(fd: int) -> tuple[Quota, ...]:
    """The quotas of this process's user and group on the file system of the open directory `fd`, where the system
    tells them: Linux, on local file systems. Root has none. (Those of projects show as free space.)"""
    if not sys.platform.startswith("linux") or os.geteuid() == 0:
        return ()
    syscall, found = ctypes.CDLL(None, use_errno=True).syscall, list[Quota]()
    for kind, what, number in ((0, "user", os.geteuid()), (1, "group", os.fstat(fd).st_gid)):
        held = _DiskQuota()
        command = ctypes.c_int(_GET_QUOTA << 8 | kind)
        if syscall(ctypes.c_long(_QUOTACTL_FD), ctypes.c_int(fd), command, ctypes.c_int(number), ctypes.byref(held)):
            continue  # no quota, or nothing that can be asked
        nbytes = max(held.hard_blocks * _UNIT_NBYTES - held.nbytes, 0) if held.hard_blocks else None
        inodes = max(held.hard_inodes - held.inodes, 0) if held.hard_inodes else None
        if nbytes is not None or inodes is not None:
            found.append(Quota(f"{what} {number}", nbytes, inodes))
    return tuple(found)


# ---- hosts -----------------------------------------------------------------------------------------------------------


def view() -> str:
    """A name for the file systems that this process sees: the same for processes of one host that see the same ones."""
    try:
        return f"{host()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return host()


def host() -> str:
    """The name of this host."""
    return socket.gethostname()


def sees(path: str, name: str, seconds: float = _SEEN_SECONDS) -> str | None:
    """Why this process cannot write to the directory `name` in `path`, which another host made; None if it can."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with Folder.open(path) as folder, folder.sub(name) as made:
                effective = os.access in os.supports_effective_ids
                may = os.access(".", os.W_OK, dir_fd=made.fd, effective_ids=effective)
                return None if may else "may not write there"
        except (FileNotFoundError, NotADirectoryError):
            if time.monotonic() > deadline:
                return "does not see it"
            _refresh(path)
            time.sleep(_PAUSE_SECONDS)


def _refresh(path: str) -> None:
    """Read the directories, so that a network file system asks its server for their names again."""
    for each in (os.path.dirname(path), path):
        try:
            os.listdir(each)
        except OSError:
            return
