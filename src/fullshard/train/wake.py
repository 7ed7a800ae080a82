"""Processes of a run that are stopped (SIGSTOP, a debugger that left) when they are told to end.

A stopped process gets no signal but SIGKILL, which torchrun's agent sends when its patience is over: half a minute in
which nothing happens. One that was told to end, and is stopped, is therefore woken: it ends as the others do. Nobody
else is touched. Linux; elsewhere the agent's patience it is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_SECONDS = 0.5
_PROC = Path("/proc")


@contextmanager
def waking_stopped() -> Iterator[None]:
    """Inside, children of this process that are stopped and have a SIGTERM that they did not get are woken."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            for process in _children():
                if _is_stopped_and_told_to_end(process):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=look, name="fullshard: wakes stopped processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _children() -> list[int]:
    found: list[int] = []
    for task in _PROC.glob("self/task/*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, task.read_text().split())
    return found


def _is_stopped_and_told_to_end(process: int) -> bool:
    try:
        lines = (_PROC / str(process) / "status").read_text().splitlines()
    except OSError:
        return False
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    waiting = int(status.get("ShdPnd", "0"), 16)  # one bit for each signal that it was sent and did not get
    # Stopped by a debugger that is still there is "t".
    return status.get("State", "").startswith("T") and bool(waiting >> (signal.SIGTERM - 1) & 1)
