"""Garbage is collected at random: at other points on each rank, and on some ranks never.

When Python's cyclic collector runs depends on what else a process allocates, so it differs between ranks of a healthy
job. What a rank sends must not rest on it. In this mode (`pytest --collect-at-random=SEED`, or `at_random(seed)` around
ranks) each rank has the automatic collector off and collects at Python calls that are drawn from the seed, the job and
the rank. Ranks that are threads share one collector: there the points differ, and what is collected is everybody's.
With `--ranks=gloo`, and in the pool, each rank has its own.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Ranks are processes too, and read it there.
_VARIABLE = "TESTS_COLLECT_AT_RANDOM"
# Python calls between two collections, on average. A tiny training step takes some thousand.
MEAN_CALLS = 4000
# How many ranks in a hundred never collect.
NEVER = 30

# Collections of this process in this mode, so that a test can tell that there were some.
collections = 0

_lock = threading.Lock()
_active = 0


def seed_of_run() -> str:
    """The seed; empty where the mode is off."""
    return os.environ.get(_VARIABLE, "")


def begin(seed: int) -> None:
    """For all ranks from now on, those of processes that are started too."""
    os.environ[_VARIABLE] = str(seed)


@contextmanager
def at_random(seed: int) -> Iterator[None]:
    """For the ranks that are started meanwhile. Processes of the pool that exist already are not told."""
    before = seed_of_run()
    begin(seed)
    try:
        yield
    finally:
        if before:
            os.environ[_VARIABLE] = before
        else:
            del os.environ[_VARIABLE]


@contextmanager
def on_rank(rank: int, job: str) -> Iterator[None]:
    """Around what `rank` does of `job`: nothing, unless the mode is on."""
    if not seed_of_run():
        yield
        return
    rng = random.Random(f"{seed_of_run()} {job} {rank}")
    _switch_off()
    before = sys.getprofile()
    if rng.randrange(100) >= NEVER:
        sys.setprofile(_Collector(rng))
    try:
        yield
    finally:
        sys.setprofile(before)
        _switch_on()


class _Collector:
    """A profile function: of the thread that sets it, and nothing but it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.left = self._drawn()

    def _drawn(self) -> int:
        return 1 + int(self.rng.expovariate(1 / MEAN_CALLS))

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        global collections
        if event != "call":
            return
        self.left -= 1
        if self.left <= 0:
            self.left = self._drawn()
            collections += 1
            gc.collect()


def _switch_off() -> None:
    global _active
    with _lock:
        _active += 1
        if _active == 1:
            # What is there already, torch above all, is not looked at each time.
            gc.freeze()
            gc.disable()


def _switch_on() -> None:
    global _active
    with _lock:
        _active -= 1
        if _active == 0:
            gc.enable()
            gc.unfreeze()
