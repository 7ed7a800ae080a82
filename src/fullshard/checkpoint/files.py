"""All file operations of checkpoints: by names below an open directory, synced, without following links.

A `Folder` is an open directory. Names are checked and looked up only in it; a link, a pipe or a device instead of a
file is rejected and never followed or waited for. Functions of `os` are looked up at the moment of the call, so that
tests can make any of them fail.

Checksums are CRC-32 of blocks of bytes, computed by the fastest code installed: the package isal (the extra
`checkpoint`) uses the processor's polynomial multiplication, some 12 GiB/s from memory and 80 from cache, where zlib
reaches 2. Both give the same numbers, so files written with one can be read with the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from .errors import CheckpointBusy, CheckpointDamaged, CheckpointError, io_error
from .manifest import is_file_name

# Bytes per system call.
_PIECE_NBYTES = 8 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Buffer = memoryview


# ---- checksums -------------------------------------------------------------------------------------------------


def _fastest() -> tuple[Callable[[bytes | bytearray | memoryview], int], bool]:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        return zlib.crc32, False
    return crc32, True


# Both release the interpreter lock. FAST: much faster than writing the same bytes.
crc32, FAST = _fastest()


def of_blocks(buffer: Buffer, block_nbytes: int) -> tuple[int, ...]:
    """The CRC-32 of each block of `buffer`, the last one shorter."""
    return tuple(crc32(buffer[i : i + block_nbytes]) for i in range(0, len(buffer), block_nbytes))


def compare(block: Buffer, expected: int, where: str, start: int) -> None:
    """Raise `CheckpointDamaged` unless `block`, from byte `start` of the file `where`, has the expected checksum."""
    found = crc32(block)
    if found != expected:
        raise CheckpointDamaged(
            f"{where}: bytes {start} to {start + len(block)} are not those that were saved (checksum {expected:08x} "
            f"expected, {found:08x} found); load an older checkpoint, or restore this file"
        )


# ---- directories and files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Turn an `OSError` inside into a `CheckpointIOError` that names the operation, `what`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise io_error(error, what) from error


class _Descriptor:
    """A file or directory that is open, until `close` or the end of a `with` block. `path`: its name in errors."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def sync(self) -> None:
        """Make everything written, created, renamed and removed survive a power loss."""
        os.fsync(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Folder(_Descriptor):
    """An open directory."""

    @classmethod
    def open(cls, path: str) -> Folder:
        """The directory at `path`, which may be or contain a link: the user named it."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def sub(self, name: str) -> Folder:
        """The directory `name` in this one; not a link."""
        self._checked(name)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return Folder(f"{self.path}/{name}", os.open(name, flags, dir_fd=self.fd))

    # ---- inspecting ----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of everything in it, sorted."""
        return sorted(os.listdir(self.fd))

    def nbytes(self, name: str) -> int:
        """The size of the plain file `name`; `CheckpointDamaged` if it is anything else."""
        self._checked(name)
        found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointDamaged(f"{self.path}/{name}: expected a plain file, found a link, directory or device")
        return found.st_size

    def saved_at(self, name: str) -> float | None:
        """Seconds since 1970, by the clock of the file system; None where a store does not say."""
        return os.stat(name, dir_fd=self.fd).st_mtime

    def read(self, name: str, limit: int) -> bytes:
        """All of a small file; `CheckpointDamaged` beyond `limit` bytes."""
        with self.reading(name) as file:
            if file.nbytes > limit:
                raise CheckpointDamaged(f"{file.path}: expected at most {limit} bytes, found {file.nbytes}")
            data = bytearray(file.nbytes)
            file.read_into(memoryview(data), 0)
            return bytes(data)

    def reading(self, name: str) -> ReadFile:
        """`name`, open for reading."""
        self._checked(name)
        path = f"{self.path}/{name}"
        try:
            # Non-blocking: opening a pipe would wait for a writer.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise CheckpointDamaged(f"{path}: expected a plain file, found a link or a device") from None
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointDamaged(f"{path}: expected a plain file, found a directory, pipe or device")
        except BaseException:
            os.close(fd)
            raise
        return ReadFile(path, fd, found.st_size)

    # ---- changing ------------------------------------------------------------------------------------------

    def make_folder(self, name: str) -> None:
        """A new, empty directory."""
        os.mkdir(self._checked(name), dir_fd=self.fd)

    def writing(self, name: str) -> WriteFile:
        """A new file `name`; never overwrites an existing one."""
        self._checked(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return WriteFile(f"{self.path}/{name}", os.open(name, flags, 0o666, dir_fd=self.fd))

    def write(self, name: str, data: bytes) -> None:
        """A new file with `data`, synced."""
        with self.writing(name) as file:
            file.write(memoryview(data))
            file.sync()

    def rename(self, old: str, new: str) -> None:
        """Rename a directory to an unused name."""
        os.rename(self._checked(old), self._checked(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def replace(self, old: str, new: str) -> None:
        """Replace `new` by the file `old`, atomically."""
        os.replace(self._checked(old), self._checked(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        os.unlink(self._checked(name), dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(self._checked(name), dir_fd=self.fd)

    def lock(self, name: str) -> int | None:
        """Hold the lock file `name` until the returned descriptor is closed or this process ends in any way.

        None on a file system without locks. Raises `CheckpointBusy` if another process holds it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._checked(name), flags, 0o666, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_LOCKS:
                return None
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointBusy(
                    f"{self.path}: expected to be the only saver, found that another one is writing there now; "
                    f"wait for it (an async_save by its future), or save to another directory"
                ) from None
            raise
        return fd

    def _checked(self, name: str) -> str:
        # Our own names may begin with a dot; otherwise the rule is that of names in manifests.
        if not is_file_name(name.removeprefix(".")):
            raise CheckpointDamaged(f"{self.path}: expected the name of a file in this directory, found {name!r}")
        return name


class ReadFile(_Descriptor):
    """A plain file of `nbytes`."""

    def __init__(self, path: str, fd: int, nbytes: int) -> None:
        super().__init__(path, fd)
        self.nbytes = nbytes

    def read_into(self, buffer: Buffer, start: int) -> None:
        """Fill `buffer` from byte `start` on; `CheckpointDamaged` if the file ends before."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self.fd, [buffer[done : done + _PIECE_NBYTES]], start + done)
            if count == 0:
                raise CheckpointDamaged(
                    f"{self.path}: expected bytes up to {start + len(buffer)}, found that it ends at {start + done}"
                )
            done += count

    def read_each(self, buffers: Sequence[Buffer], start: int) -> None:
        """`read_into` for buffers one after another, in few calls; at most the system's limit of them, 1024."""
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            count = os.preadv(self.fd, left, start)
            if count == 0:
                raise CheckpointDamaged(
                    f"{self.path}: expected bytes up to {start + sum(map(len, left))}, found that it ends at {start}"
                )
            start += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


class WriteFile(_Descriptor):
    """A new file, written from beginning to end; `nbytes` counts the bytes written, and `advance` hears of them, in a
    store when they have arrived, on any thread."""

    nbytes = 0

    def __init__(self, path: str, fd: int) -> None:
        super().__init__(path, fd)
        self.advance: Callable[[int], object] = lambda _: None

    def write(self, buffer: Buffer) -> None:
        """Append all of `buffer`."""
        done = 0
        while done < len(buffer):
            count = os.write(self.fd, buffer[done : done + _PIECE_NBYTES])
            if count == 0:
                raise OSError(errno.ENOSPC, "nothing was written")
            done += count
        self.nbytes += done
        self.advance(done)

    def write_summed(self, buffer: Buffer, block_nbytes: int) -> tuple[int, ...]:
        """`write`; returns the checksum of each block, computed just before its write, while it is in the cache."""
        found = []
        for first in range(0, len(buffer), block_nbytes):
            block = buffer[first : first + block_nbytes]
            found.append(crc32(block))
            self.write(block)
        return tuple(found)


# ---- progress ------------------------------------------------------------------------------------------------
# What a long read or write shows on stderr: a bar on a terminal, lines elsewhere.

# Seconds between two lines.
_PAUSE = 10.0


@contextlib.contextmanager
def shown_progress(total_nbytes: int, title: str, *, lines: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes of each finished tensor. On a terminal a bar, or a percentage if rich is
    missing; elsewhere, if `lines`, one line every ten seconds and one at the end."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich import progress
        from rich.console import Console

        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        ends = (progress.TextColumn("{task.description}"), progress.TimeRemainingColumn())
        with progress.Progress(ends[0], *columns, ends[1], console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total_nbytes)
            yield lambda nbytes: bar.advance(task, nbytes)
        return
    terminal, begun, done, due = sys.stderr.isatty(), time.monotonic(), 0, time.monotonic() + _PAUSE

    def show(text: str, end: str = "\n") -> None:
        print(text, end=end, file=sys.stderr, flush=True)

    def advance(nbytes: int) -> None:
        nonlocal done, due
        done += nbytes
        if terminal:
            show(f"\r{title} {done / max(total_nbytes, 1):4.0%}", end="")
        elif lines and time.monotonic() >= due:
            due = time.monotonic() + _PAUSE
            show(f"{title}: {done / 1e6:,.1f} of {total_nbytes / 1e6:,.1f} MB")

    try:
        yield advance
    finally:
        if terminal:
            show("")
        elif lines:
            show(f"{title}: {done / 1e6:,.1f} of {total_nbytes / 1e6:,.1f} MB in {time.monotonic() - begun:.1f} s")
