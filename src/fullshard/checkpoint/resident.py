"""Files whose pages stay in memory once they were read, until they are no longer used.

A load reads and checks such pages where they are, in the page cache, and copies from them when all ranks agree. So it
needs no memory of its own for what it reads, and touches no new page: what is cached already is not copied twice, and
what is not is in memory once.

The pages are locked (mlock), so that nothing which was checked is read from the disk again. That needs Linux 5.14, a
local file system, because the server of another one may take pages back, and the right to lock as many bytes
(`ulimit -l`, or the capability IPC_LOCK). Without one of these `NotResident` is raised. No torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

from .files import Buffer, ReadFile

# Types of file systems, as `statfs` has them: ext, XFS, btrfs, tmpfs.
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994})
# The size of `struct statfs`, and more. Its first word is the type.
_STATFS_NBYTES = 256
# Of Linux, on all architectures; Python's mmap has the other numbers.
_MLOCK_ONFAULT, _MADV_POPULATE_READ = 1, 22

_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS = {
    "fstatfs": (_int, _pointer),
    "mmap": (_pointer, _size, _int, _int, _int, ctypes.c_long),
    "mlock2": (_pointer, _size, _int),
    "madvise": (_pointer, _size, _int),
    "munmap": (_pointer, _size),
}


class NotResident(Exception):
    """Raised where pages of a file cannot be locked: read them into other memory."""


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library. Raises `NotResident` if there is none, or if it fails."""
    try:
        function = getattr(_libc, name)
    except AttributeError:
        raise NotResident(f"{name}: {os.strerror(errno.ENOSYS)}") from None
    # Of the result of an int the other half of the word is not defined.
    function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_ssize_t if name == "mmap" else ctypes.c_int
    found: int = function(*arguments)
    if found == -1:
        raise NotResident(f"{name}: {os.strerror(ctypes.get_errno())}")
    return found


class ResidentFile(ReadFile):
    """A file that is mapped. What `read_each` has read stays in memory as long as the file or a buffer of it is used.
    It takes over the descriptor of `file`; only the pages that were read may be looked at."""

    def __init__(self, file: ReadFile) -> None:
        super().__init__(file.path, file.fd, file.nbytes)
        self._pages = _Pages(file)
        file.fd = -1

    def read_each(self, buffers: Sequence[Buffer], start: int) -> None:
        """Read the pages of `buffers`, which are this file's from byte `start` on. Raises `NotResident`."""
        self._pages.read(start, start + sum(map(len, buffers)))

    def at(self, start: int, nbytes: int) -> Buffer:
        """The bytes from `start` on, not to be written to."""
        return memoryview(self._pages.memory).cast("B")[start : start + nbytes]


class _Pages:
    """The mapping of a file, for as long as it or its `memory` is referred to."""

    def __init__(self, file: ReadFile) -> None:
        kind = ctypes.create_string_buffer(_STATFS_NBYTES)
        call("fstatfs", file.fd, ctypes.addressof(kind))
        if ctypes.c_long.from_buffer(kind).value not in _LOCAL:
            raise NotResident(f"{file.path}: not on a local file system")
        self._nbytes = file.nbytes
        self._address = call("mmap", None, file.nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fd, 0)
        try:
            call("mlock2", self._address, file.nbytes, _MLOCK_ONFAULT)
            call("madvise", self._address, file.nbytes, mmap.MADV_SEQUENTIAL)
        except NotResident:
            self._unmap()
            raise

    @property
    def memory(self) -> ctypes.Array[ctypes.c_char]:
        found = (ctypes.c_char * self._nbytes).from_address(self._address)
        found.owner = self  # type: ignore[attr-defined]
        return found

    def read(self, start: int, stop: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        call("madvise", self._address + first, stop - first, _MADV_POPULATE_READ)

    def _unmap(self) -> None:
        call("munmap", self._address, self._nbytes)
        self._address = 0

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            self._unmap()
