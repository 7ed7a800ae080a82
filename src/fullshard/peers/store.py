"""The record of each rank in the store of their process group, and the state of processes on this machine.

A rank rewrites its record repeatedly, in exchange for the one that it wrote last (`compare_set`). So one request is a
sign of life, reports the rank's activity, and fetches mail from other ranks:

    the rank     post('{"n": 7, ...}')     finds its own record: written
    another one  tell([3], "mail")         overwrites it
    the rank     post('{"n": 8, ...}')     finds the mail, and writes after it has read it

Two ranks that tell a third one something at the same time overwrite each other. So a message that must not get lost is
in the sender's own record as well, where the leader (diagnosis.py) finds it.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Protocol

# ---- records ---------------------------------------------------------------------------------------------------------

_MAIL = '{"mail":'


class Store(Protocol):
    """The part of a torch store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def has_extended_api(self) -> bool: ...
    def append(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class Records:
    """The records of all ranks, as used by `rank`. `store`: for the thread that runs the model; `beside`: another
    connection, so that a sign of life does not wait for a question."""

    def __init__(self, store: Store, beside: Store, rank: int) -> None:
        self.store, self._beside, self.rank = store, beside, rank
        # A process group may be made again over the same store, equally often on all ranks.
        self.prefix = f"fullshard/{store.add(f'fullshard/made/{rank}', 1)}"
        self._last = self._machine = ""
        # Held while the record is exchanged: two threads would overwrite each other's record.
        self._posting = threading.Lock()

    def key(self, rank: int) -> str:
        """The key of the record of `rank`."""
        return f"{self.prefix}/rank/{rank}"

    def join(self, machine: str) -> None:
        """Register this rank and its machine, once."""
        self.append(f"{self.prefix}/ranks", f"{self.rank} ")
        self._machine = f"{self.prefix}/machine/{machine}"
        self.store.add(self._machine, 1)
        self.store.add(f"{self.prefix}/machines", 1)

    def is_one_machine(self) -> bool:
        """Whether all ranks that have joined are on this machine, where their processes are visible."""
        return self.store.add(self._machine, 0) == self.store.add(f"{self.prefix}/machines", 0)

    def post(self, record: str) -> list[str]:
        """Write this rank's record; return the mail that it replaces."""
        mail: list[str] = []
        with self._posting:
            for _ in range(8):
                found = _text(self._beside.compare_set(self.key(self.rank), self._last, record))
                if found == record:
                    self._last = record
                    break
                self._last = found  # mail; or this rank's last record, if an exception prevented noting it
                if found.startswith(_MAIL):
                    mail += json.loads(found)["mail"]
        return mail

    def tell(self, ranks: Iterable[int], texts: Sequence[str], own: Mapping[int, Sequence[str]] | None = None) -> None:
        """Leave `texts` for `ranks`: one request. `own`: other texts for some of them."""
        told = [rank for rank in ranks if rank != self.rank]
        keys, mail, own = [self.key(rank) for rank in told], _mail(texts), own or {}
        mails = [_mail(own[rank]) if rank in own else mail for rank in told]
        if keys and self._beside.has_extended_api():
            self._beside.multi_set(keys, mails)
        elif keys:
            for key, one in zip(keys, mails, strict=True):
                self._beside.set(key, one)

    def joined(self) -> frozenset[int]:
        """The ranks that have a record."""
        return frozenset(map(int, self.read(f"{self.prefix}/ranks", self._beside).split()))

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """The records of `ranks`, all of which have joined. One request."""
        keys = [self.key(rank) for rank in ranks]
        if self._beside.has_extended_api():
            found = self._beside.multi_get(keys) if keys else []
        else:
            found = [self._beside.get(key) for key in keys]
        return dict(zip(ranks, map(_text, found), strict=True))

    def claim(self, key: str, before: str = "") -> str:
        """Claim `key` if `before` holds it; return the holder."""
        return _text(self._beside.compare_set(key, before, str(self.rank)))

    def release(self, key: str) -> None:
        """Let others claim it."""
        self._beside.set(key, "")

    def append(self, key: str, text: str) -> None:
        """Add `text` to the list of texts at `key`."""
        if self.store.has_extended_api():
            self.store.append(key, text)
        else:  # a file
            self.store.set(f"{key}/{self.store.add(key, 1)}", text)

    def read(self, key: str, store: Store | None = None) -> str:
        """The concatenated texts appended at `key`, of which there is at least one."""
        store = store or self.store
        if store.has_extended_api():
            return _text(store.get(key))
        parts = [f"{key}/{number}" for number in range(1, store.add(key, 0) + 1)]
        return "".join(_text(store.get(part)) for part in parts if store.check([part]))


def _mail(texts: Sequence[str]) -> str:
    return f"{_MAIL}{json.dumps(list(texts))}}}"


def _text(found: bytes | str) -> str:
    return found if isinstance(found, str) else found.decode()


def runs(ranks: Sequence[int]) -> list[list[int]]:
    """`ranks` as runs (first, count, step), so that ten thousand fit into a record.

    >>> runs([0, 4, 8, 9]), ranks_of(runs([0, 4, 8, 9]))
    ([[0, 3, 4], [9, 1, 1]], [0, 4, 8, 9])
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return [[ranks[0], len(ranks), step]]
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == 1 and rank > found[-1][0]:
            found[-1][1:] = [2, rank - found[-1][0]]
        elif found and rank == found[-1][0] + found[-1][1] * found[-1][2]:
            found[-1][1] += 1
        else:
            found.append([rank, 1, 1])
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> list[int]:
    """The reverse of `runs`."""
    return [first + step * i for first, count, step in found for i in range(count)]


# ---- processes -------------------------------------------------------------------------------------------------------
# The state of a process as seen from outside (gone, stopped, running), and the user code that a thread is in.

_PROC = Path("/proc")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Wrappers of decorators, which the user did not call by name.
_WRAPPERS = ("wrapper", "_no_grad_wrapper", "decorate_context", "inner", "_fn", "apply", "__call__")
# Fields of /proc/PID/stat after the name: state, processor time in user mode and in the kernel, start time.
_STATE, _USER, _SYSTEM, _BEGAN = 0, 11, 12, 19


@cache
def machine() -> str:
    """The machine and its PID namespace; "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def node() -> str:
    """The node: the same in all of its containers, different after a reboot."""
    return machine().partition("/")[0] or socket.gethostname()


def _fields(process: int) -> list[str]:
    try:
        # Split after the name, which may contain anything.
        return (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def frames() -> dict[int, FrameType]:
    """Returns the frame that each thread of this process runs, by its number.

    In Python before 3.11.9 `sys._current_frames` holds a lock that threads take, with the interpreter lock, when they
    begin and end. A garbage collection in it may hand over the interpreter lock: then no thread continues
    (https://github.com/python/cpython/issues/106883). So none may begin there.
    """
    if sys.version_info >= (3, 11, 9):
        return sys._current_frames()
    with _one_call:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


_one_call = threading.Lock()


def _after_fork() -> None:
    """Replaces the lock, which another thread of the parent may have held."""
    global _one_call
    _one_call = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _stack(thread: int) -> Iterator[FrameType]:
    """The frames that `thread` of this process is in, the innermost first."""
    frame = frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Wakeup(Protocol):
    """The used part of `threading.Event`."""

    def set(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Host:
    """The clock and the view of processes of one `Watch`. Benchmarks and tests replace it."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let other threads continue."""
        time.sleep(seconds)

    def event(self) -> Wakeup:
        """A new event for waits between threads."""
        return threading.Event()

    def identity(self) -> str:
        """This process, for `condition` on another rank: machine, PID and start time."""
        fields = _fields(os.getpid())
        return f"{machine()} {os.getpid()} {fields[_BEGAN]}" if machine() and fields else ""

    def condition(self, process: str) -> tuple[str, int]:
        """The state of the process with that `identity`, and the processor time that it has used (ticks):

        gone       it was on this machine, and has ended
        stopped    by a signal or a debugger
        exists     it runs, sleeps or waits for a disk
        unknown    on another machine
        """
        where, _, rest = process.partition(" ")
        if not process or where != machine():
            return "unknown", 0
        number, _, began = rest.partition(" ")
        fields = _fields(int(number))
        if not fields or fields[_BEGAN] != began or fields[_STATE] in "ZX":
            return "gone", 0
        used = int(fields[_USER]) + int(fields[_SYSTEM])
        return ("stopped" if fields[_STATE] in "Tt" else "exists"), used

    def place(self, thread: int, torch: str) -> str:
        """The innermost user code that `thread` of this process is in: "train.py:31 in step"; "" if none. `torch`:
        torch's package folder, which like fullshard's is not user code."""
        for frame in _stack(thread):
            if not frame.f_code.co_filename.startswith((torch, _PACKAGE, "<")):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return ""

    def called(self, thread: int, torch: str) -> str:
        """The function of torch or fullshard that the user's line called; "" if unknown."""
        ours = takewhile(lambda at: at.f_code.co_filename.startswith((torch, _PACKAGE, "<")), _stack(thread))
        names = [frame.f_code.co_name for frame in ours]
        return next((name for name in reversed(names) if name not in _WRAPPERS), "")

    def is_within(self, thread: int, folder: str, torch: str) -> bool:
        """Whether `thread` runs code called from below `folder`, a part of `torch`, and no other code between."""
        ours = takewhile(lambda at: at.f_code.co_filename.startswith(torch), _stack(thread))
        return any(frame.f_code.co_filename.startswith(folder) for frame in ours)
