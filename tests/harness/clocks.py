"""Which accesses to memory are ordered: vector clocks over the host, streams and communicators of one process.

    actor      the host, a stream of a device, or the messages of a communicator, by a name
    launch     work on a stream comes after the work before it on that stream, and after what the host knew then
    event      remembers what its stream had reached; another stream, or the host, may wait for that
    access     bytes of an allocation, read or written by an actor

Two accesses of which one writes are a race unless one comes after the other. Memory goes back to the stream that
allocated it (the rule of caching allocators), so all its accesses must come before that stream's next work when it is
freed: another owner may write it then. Pure: `tests/harness/simulated.py` says what happens.

>>> clocks = Clocks()
>>> clocks.allocate(1, 64, "main")
>>> clocks.access(1, 0, 64, "side", writes=True, what="fill")
>>> clocks.access(1, 0, 64, "main", writes=False, what="sum")
>>> print(clocks.races[0])
sum on main reads bytes 0 to 64 of an allocation of 64, and nothing orders it after fill on side, which writes them
>>> clocks.wait("main", clocks.now("side"))
>>> clocks.access(1, 0, 64, "main", writes=False, what="sum")
>>> len(clocks.races)
1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

HOST = "the host"
Clock = dict[str, int]
# How many accesses of one allocation are kept at least before those are dropped that can race with nothing any more.
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Access:
    """`time`: of the actor's own clock. `stack`: where the host was, innermost last."""

    actor: str
    time: int
    start: int
    stop: int
    writes: bool
    what: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses without an order; `second` is None where `first` may still run when its memory has another owner."""

    first: Access
    second: Access | None
    nbytes: int
    owner: str

    def __str__(self) -> str:
        of = f"bytes {self.first.start} to {self.first.stop} of an allocation of {self.nbytes}"
        verb = "writes" if self.first.writes else "reads"
        if self.second is None:
            return (
                f"{self.first.what} on {self.first.actor} {verb} {of}, and nothing orders it before the memory goes "
                f"back to {self.owner}"
            )
        verb = "writes" if self.second.writes else "reads"
        other = "writes" if self.first.writes else "reads"
        of = of.replace(f"{self.first.start} to {self.first.stop}", f"{self.second.start} to {self.second.stop}")
        return (
            f"{self.second.what} on {self.second.actor} {verb} {of}, and nothing orders it after {self.first.what} on "
            f"{self.first.actor}, which {other} them"
        )

    def explain(self) -> str:
        """With both stacks."""
        lines = [str(self), f"  {self.first.what}:", *(f"    {line}" for line in self.first.stack)]
        if self.second is not None:
            lines += [f"  {self.second.what}:", *(f"    {line}" for line in self.second.stack)]
        return "\n".join(lines)


@dataclass
class _Allocation:
    nbytes: int
    owner: str
    accesses: list[Access] = field(default_factory=list)
    # Other streams whose work, as it is when the memory is freed, comes before its next owner (`record_stream`).
    users: set[str] = field(default_factory=set)


class Clocks:
    """The clocks of one process and the accesses that they order. `races`: what was found, in the order found."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._allocations: dict[int, _Allocation] = {}

    # ---- order ----

    def now(self, actor: str) -> Clock:
        """What `actor` has reached, for a later `wait`."""
        return dict(self._of(actor))

    def wait(self, actor: str, reached: Clock) -> None:
        """Work of `actor` from now on comes after `reached`."""
        clock = self._of(actor)
        for other, time in reached.items():
            if clock.get(other, 0) < time:
                clock[other] = time

    def record(self, event: int, actor: str) -> None:
        """`event` remembers what `actor` has reached."""
        self._launch(actor)
        self._events[event] = self.now(actor)

    def wait_event(self, actor: str, event: int) -> None:
        """As `wait`, for what `event` remembers; one that was never recorded orders nothing."""
        self._launch(actor)
        self.wait(actor, self._events.get(event, {}))

    def knows(self, actor: str, event: int) -> bool:
        """Whether work of `actor` comes after what `event` remembers already."""
        clock = self._of(actor)
        return all(clock.get(other, 0) >= time for other, time in self._events.get(event, {}).items())

    def synchronize(self, actors: Callable[[str], bool]) -> None:
        """The host waits for all work of the actors whose name fulfils `actors`."""
        for name in [name for name in self._clocks if name != HOST and actors(name)]:
            self.wait(HOST, self._of(name))

    def _of(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def _launch(self, actor: str) -> None:
        if actor != HOST:
            self.wait(actor, self._clocks[HOST])

    # ---- memory ----

    def allocate(self, base: int, nbytes: int, owner: str, stack: tuple[str, ...] = ()) -> None:
        """`nbytes` at the address `base` belong to `owner`, the stream to which they go back. Earlier work of `owner`
        may still use them for another purpose, so others come after it."""
        self._allocations[base] = _Allocation(nbytes, owner)
        if owner != HOST:
            self.access(base, 0, nbytes, owner, writes=True, what="what had this memory before", stack=stack)

    def free(self, base: int) -> None:
        """The memory goes back to its owner. Accesses that are not ordered before the owner's next work are races."""
        allocation = self._allocations.pop(base, None)
        if allocation is None:
            return
        self._launch(allocation.owner)
        clock = self.now(allocation.owner)
        for actor in allocation.users:
            for other, time in self._of(actor).items():
                clock[other] = max(clock.get(other, 0), time)
        for access in allocation.accesses:
            if clock.get(access.actor, 0) < access.time:
                self.races.append(Race(access, None, allocation.nbytes, allocation.owner))

    def use(self, base: int, actor: str) -> None:
        """The memory goes back when the work of `actor` at that time is over, too."""
        if base in self._allocations:
            self._allocations[base].users.add(actor)

    def forget(self, base: int) -> None:
        """The memory is gone, and that was in order."""
        self._allocations.pop(base, None)

    def access(
        self,
        base: int,
        start: int,
        stop: int,
        actor: str,
        *,
        writes: bool,
        what: str,
        stack: tuple[str, ...] = (),
    ) -> None:
        """`actor` reads or writes bytes [start, stop) of the allocation at `base`; of one that is not known, nothing is
        kept."""
        allocation = self._allocations.get(base)
        if allocation is None:
            return
        self._launch(actor)
        clock = self._of(actor)
        clock[actor] = time = clock.get(actor, 0) + 1
        new = Access(actor, time, start, stop, writes, what, stack)
        kept = []
        for old in allocation.accesses:
            overlap = old.start < stop and start < old.stop
            ordered = clock.get(old.actor, 0) >= old.time
            if overlap and not ordered and (writes or old.writes):
                self.races.append(Race(old, new, allocation.nbytes, allocation.owner))
            # What is ordered before a write of the same bytes races with nothing that this write does not race with;
            # likewise a read before a later read by the same actor.
            covered = start <= old.start and old.stop <= stop and ordered
            if not (covered and (writes or (not old.writes and old.actor == actor))):
                kept.append(old)
        kept.append(new)
        allocation.accesses = kept
