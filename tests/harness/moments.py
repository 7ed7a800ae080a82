"""Threads of a process at one moment, for what they share: each race is in its worst order, every time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

# How long a thread waits for another one that may not come. A test passes without it, and never fails because of it.
SECONDS = 0.2


class Meeting:
    """Two threads that come wait for each other; one that alone may come waits a moment."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def __call__(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(SECONDS)


class Shared(list[Any]):
    """A list to which two threads add something, or from which they take something, at one moment."""

    def __init__(self, *members: Any) -> None:
        super().__init__(members)
        self._meet = Meeting()

    def append(self, one: Any) -> None:
        self._meet()
        super().append(one)

    def pop(self, *place: Any) -> Any:
        self._meet()
        return super().pop(*place)

    def __delitem__(self, place: Any) -> None:
        self._meet()
        super().__delitem__(place)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What `calls`, each in a thread of its own, return."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


@contextlib.contextmanager
def meanwhile(do: Callable[[], object], *files: str) -> Iterator[None]:
    """Inside, `do()` is called before each line of `files` that this thread runs, as if another thread had its turn."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
