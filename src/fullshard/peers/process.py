"""The state of a process as seen from outside (gone, stopped, running), and the user code that a thread is in."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

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
        frame = frames().get(thread)
        while frame is not None:
            if not frame.f_code.co_filename.startswith((torch, _PACKAGE, "<")):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return ""

    def called(self, thread: int, torch: str) -> str:
        """The function of torch or fullshard that the user's line called; "" if unknown."""
        frame, name = frames().get(thread), ""
        while frame is not None and frame.f_code.co_filename.startswith((torch, _PACKAGE, "<")):
            if frame.f_code.co_name not in _WRAPPERS:
                name = frame.f_code.co_name
            frame = frame.f_back
        return name

    def is_within(self, thread: int, folder: str, torch: str) -> bool:
        """Whether `thread` runs code called from below `folder`, a part of `torch`, and no other code between."""
        frame = frames().get(thread)
        while frame is not None and frame.f_code.co_filename.startswith(torch):
            if frame.f_code.co_filename.startswith(folder):
                return True
            frame = frame.f_back
        return False
