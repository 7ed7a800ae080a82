"""What ranks tell each other besides tensors: one control for a process, one domain for the ranks of a mesh.

    agree      all ranks of a domain compare a value; nobody goes on before all have asked
    publish    this rank failed: how far it had come, and why
    faults     what the others published
    meet       all ranks of a domain come together after a failure, wherever each of them was

Carried by the store through which the process group was made, under a prefix of ours: no collective, so nobody counts
one and it cannot get out of step with those of the model; and no wait without an end, because whoever waits looks up
now and then whether a peer failed. A question costs each rank three requests, some hundred microseconds on a machine;
the store's server answers three for each rank, some tens of milliseconds at 1,000. So nothing is asked in a step that
is like the ones before (lifecycle/order.py).

Everything is counted from the last meeting on (an *epoch*): a failure before it is not one behind it.

In the fake process group, and in a world of one, everybody agrees and nothing is sent.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from .._torch_compat import default_store, timeout_of
from .alive import identity, is_gone
from .domain import Domain
from .elsewhere import Lookout
from .faults import Fault
from .roster import Roster

# How often a process gives a sign of life, and looks after who waits.
BEAT_SECONDS = 0.5
# The key of the signs of life of a rank counts them, below this, and above it the knocks of others (roster.py).
_KNOCK = 1 << 32


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Control:
    """The end of one process (in tests: of one thread)."""

    def __init__(self, store: Store, rank: int, timeout_seconds: float = 1800.0) -> None:
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.domains: dict[tuple[int, ...], Domain] = {}
        # What this rank trains, for those who wait for it in vain.
        self.roster = Roster(self)
        # Of each rank, its last sign of life and since when it is the last (on our clock).
        self._beats: dict[int, tuple[int, float]] = {}
        # The thread that runs the model.
        self.thread = threading.get_ident()
        self.lookout = Lookout(self)
        # Ranks that waited in vain for this one, before it had a domain with them: they meet there first.
        self.accused: set[tuple[int, ...]] = set()
        self._has_beaten = False
        self._knocks = 0

    def domain(self, ranks: Sequence[int]) -> Domain:
        """The domain of these ranks of the default group. Every one of them makes this call at its first time."""
        key = tuple(sorted(ranks))
        if key not in self.domains:
            self.domains[key] = Domain(self, key)
        return self.domains[key]

    def beat(self) -> None:
        """Give a sign of life, and answer who knocked since the last one."""
        if not self._has_beaten:
            self.store.set(f"fullshard/process/{self.rank}", identity())
            self._has_beaten = True
        knocks = self.store.add(f"fullshard/beat/{self.rank}", 1) // _KNOCK
        if knocks != self._knocks:
            self.roster.answer(knocks)
            self._knocks = knocks

    def knock(self, rank: int) -> int:
        """Ask `rank` to answer at its next sign of life. The number of this knock."""
        return self.store.add(f"fullshard/beat/{rank}", _KNOCK) // _KNOCK

    def silent_for(self, rank: int) -> float:
        """Seconds since the last change of the sign of life of `rank`, as far as this rank has looked; infinite for a
        process of this machine that has ended."""
        key, now = f"fullshard/beat/{rank}", time.monotonic()
        last = int(self.store.get(key)) % _KNOCK if self.store.check([key]) else 0
        known = self._beats.get(rank)
        if known is None or known[0] != last or not last:
            self._beats[rank] = known = (last, now)
        if not last:
            return 0.0
        return math.inf if is_gone(self.store.get(f"fullshard/process/{rank}").decode()) else now - known[1]

    def silent(self, ranks: Sequence[int], seconds: float) -> Fault | None:
        """The first other rank of these without a sign of life for so long; 0: none."""
        if not seconds:
            return None
        for rank in ranks:
            if rank != self.rank and (silent := self.silent_for(rank)) > seconds:
                ended = silent == math.inf
                text = "since its process has ended" if ended else f"for {seconds:g} s: killed, stopped or hanging"
                return Fault(rank, "lost", text)
        return None

    def publish(self, kind: str, text: str) -> None:
        """To everybody who shares a domain with this rank."""
        for domain in list(self.domains.values()):
            domain.publish(kind, text)


_controls: dict[int, tuple[weakref.ref[dist.ProcessGroup], Control | None]] = {}


def control() -> Control | None:
    """This process's control; None where nobody is to be told anything (no process group, or a fake one)."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    key = id(world)
    known = _controls.get(key)
    if known is not None and known[0]() is world:
        return known[1]
    silent = dist.get_backend(world) == "fake" or dist.get_world_size(world) == 1
    made = None if silent else Control(default_store(), dist.get_rank(world), timeout_of(world))
    _controls[key] = (weakref.ref(world, lambda _: _controls.pop(key, None)), made)
    return made


def is_current(which: Control) -> bool:
    """Whether `which` is of the process group that is there now. From any thread."""
    world = dist.group.WORLD if dist.is_initialized() else None
    known = None if world is None else _controls.get(id(world))
    return known is not None and known[0]() is world and known[1] is which


def domain_of(ranks: Sequence[int]) -> Domain | None:
    """The domain of these ranks; None where they have nobody to ask."""
    here = control()
    return None if here is None or len(ranks) < 2 else here.domain(ranks)


def has_peers() -> bool:
    """Whether this process has somebody to ask."""
    return control() is not None
