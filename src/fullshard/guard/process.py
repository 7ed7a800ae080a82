"""What can be seen of a process from outside: whether it exists, is stopped, or computes without giving a sign of life;
and where one of its own threads is."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Protocol

_PROC = Path("/proc")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Decorators' functions: not what the user called.
_WRAPPERS = ("wrapper", "_no_grad_wrapper", "decorate_context", "inner", "_fn", "apply", "__call__")
# Of /proc/PID/stat, after the name: the state, the processor time in the process and in the kernel, when it began.
_STATE, _USER, _SYSTEM, _BEGAN = 0, 11, 12, 19


@cache
def machine() -> str:
    """Machine, and the namespace of its process numbers; "" where that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def node() -> str:
    """The computer: the same in all of its containers, another one after it was started anew."""
    return machine().partition("/")[0] or socket.gethostname()


def identity() -> str:
    """This process, for `condition` in another one: machine, number, and when it began."""
    fields = _fields(os.getpid())
    return f"{machine()} {os.getpid()} {fields[_BEGAN]}" if machine() and fields else ""


def condition(process: str) -> tuple[str, int]:
    """What the process of that `identity` is, and the processor time that it has used (ticks):

    gone       it was one of this machine, and has ended
    stopped    by a signal or a debugger
    exists     it runs, sleeps or waits for a disk
    unknown    of another machine
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


def _fields(process: int) -> list[str]:
    try:
        # After the name, which may hold anything.
        return (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def place(thread: int, torch: str) -> str:
    """The innermost line of the user's that `thread` of this process is in: "train.py:31 in step"; "" outside of any.
    `torch`: the folder of that package, which is not the user's; nor is ours."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((torch, _PACKAGE, "<")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def called(thread: int, torch: str) -> str:
    """The function, of torch's or ours, that the user's line called; "" where that is not known."""
    frame, name = sys._current_frames().get(thread), ""
    while frame is not None and frame.f_code.co_filename.startswith((torch, _PACKAGE, "<")):
        if frame.f_code.co_name not in _WRAPPERS:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def is_within(thread: int, folder: str, torch: str) -> bool:
    """Whether what `thread` runs was called from a file below `folder`, a part of `torch`, with no code of others
    between."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(torch):
        if frame.f_code.co_filename.startswith(folder):
            return True
        frame = frame.f_back
    return False


class Event(Protocol):
    """What is used of `threading.Event`."""

    def set(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Host:
    """The time, and what is seen of processes, for one `Watch`. Benchmarks and tests give it another one."""

    def now(self) -> float:
        """Seconds, of a clock that is never put back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let other threads continue."""
        time.sleep(seconds)

    def event(self) -> Event:
        """What one thread waits for, and another one sets."""
        return threading.Event()

    def identity(self) -> str:
        """See `identity`."""
        return identity()

    def condition(self, process: str) -> tuple[str, int]:
        """See `condition`."""
        return condition(process)

    def place(self, thread: int, torch: str) -> str:
        """See `place`."""
        return place(thread, torch)

    def called(self, thread: int, torch: str) -> str:
        """See `called`."""
        return called(thread, torch)

    def is_within(self, thread: int, folder: str, torch: str) -> bool:
        """See `is_within`."""
        return is_within(thread, folder, torch)
