"""The hang timer: a test that does not end in time says where every thread and every rank stands, and fails.

Two stages. First a signal interrupts the main thread, which raises `Hang` with all stacks in it: the test fails, the
others go on. If the main thread sits in C code and never comes back to Python, a second timer some seconds later
writes the stacks of all threads to the terminal and ends the process: a hung test run must end, with its reason on
the last lines.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from tests.harness.errors import format_stacks

# How long after the first stage the process is ended. Collecting the ranks' stacks takes some of it.
GRACE_SECONDS = 20.0

_sources: list[Callable[[], str]] = []


def patience(seconds: float) -> float:
    """`seconds` of an idle machine: longer where more programs run than there are cores, five times at most, so that a
    test does not seem to hang because others run."""
    return seconds * min(5.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Hang(Exception):
    """The test did not end in time."""


def add_source(source: Callable[[], str]) -> None:
    """Let `source` add its text to the report of a hang: the stacks of other processes, for one."""
    _sources.append(source)


def remove_source(source: Callable[[], str]) -> None:
    if source in _sources:
        _sources.remove(source)


@contextmanager
def limit(seconds: float, what: str, *, terminal: TextIO | None = None) -> Iterator[None]:
    """Raise `Hang` in the main thread if the block takes longer than `seconds`. Does not nest."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        parts = [f"{what} did not end within {seconds:g} s; all threads of this process:", format_stacks()]
        for source in list(_sources):
            parts.append(source())
        raise Hang("\n".join(part for part in parts if part))

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if terminal is not None:
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=terminal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if terminal is not None:
            faulthandler.cancel_dump_traceback_later()
