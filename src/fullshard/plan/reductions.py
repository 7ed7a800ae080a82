"""Reductions of a simulated step: their buffers and messages, one after the other, as `engine/executor.py` and
`comm/reduce.py` have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ..layout import UnitMemory
from ..layout.gather import DOWNLOADS_IN_FLIGHT
from .account import Bytes, Pool
from .clock import Clock
from .strategy import Group, Limits, Strategy, Unit


@dataclass
class Flight:
    """A reduction under way. `arrives`: the time of its message; `stage`: 0 over the shards, 1 among the replicas, 2
    the result of one rank, which sends nothing; `apart`: that result is the tensors that autograd made, not one buffer
    into which they were cast."""

    unit: Unit
    group: Group
    arrives: float
    stage: int = 0
    cast: float = 0.0
    apart: bool = False

    @property
    def held_nbytes(self) -> float:
        """Bytes of its message over the shards, at both ends."""
        sent = self.group.sent
        return 0.0 if sent is None or self.stage else sent.send_nbytes + sent.receive_nbytes + self.cast

    @property
    def has_next(self) -> bool:
        """Whether a message among the replicas follows."""
        return not self.stage and self.group.sent is not None and self.group.sent.replicas > 1


class Reductions:
    """The reductions under way: `sharing` over the shards, then `replicating` among the replicas. `waiting`: bytes of
    gradients of the running backward that are not sent yet, where they are limited."""

    def __init__(
        self, strategy: Strategy, limits: Limits, counted: Bytes, host: Bytes, pool: Pool, clock: Clock
    ) -> None:
        self.strategy, self.limits = strategy, limits
        self.bytes, self.host, self.pool, self.clock = counted, host, pool, clock
        self.waiting: dict[str, float] = {}
        self.sharing: deque[Flight] = deque()
        self.replicating: deque[Flight] = deque()
        self.downloads: deque[tuple[str, float]] = deque()

    def make_room(self) -> None:
        """Before a message is made: wait for a send buffer, if their number is limited."""
        buffers = self.limits.send_buffers
        if buffers is None:
            return
        while len(self.sharing) >= buffers:
            self.advance(self.sharing)
        while sum(f.group.memory.pack.world == 1 for f in self.replicating) + len(self.sharing) >= buffers:
            self.advance(self.replicating)

    def limit(self) -> None:
        """After the messages of a unit: wait for all but the latest."""
        while self.limits.send_buffers is None and len(self.sharing) > self.limits.reductions_in_flight:
            self.advance(self.sharing)
        if self.limits.gradient_nbytes is not None:
            self._shrink(self.limits.gradient_nbytes)

    def limited(self, unit: Unit, nbytes: float) -> Iterator[float]:
        """`nbytes` of gradients of `unit` as they come: one by one if bytes are limited, where each waits for room."""
        limit, name = self.limits.gradient_nbytes, unit.shape.title
        if limit is None:
            yield nbytes
            return
        sizes = [
            segment.layout.numel * group.sent.compute_itemsize
            for group in unit.groups
            if group.sent is not None
            for segment in group.sent.pack.segments
        ]
        largest, left = float(max(sizes, default=0)), nbytes
        self._shrink(limit - largest)
        for size in reversed(sizes):
            part = min(float(size), left)
            left -= part
            self.waiting[name] = self.waiting.get(name, 0.0) + part
            yield part
            if left:
                self._shrink(limit - largest)

    def take(self, unit: Unit) -> None:
        """The gradients of `unit` are about to be sent: their message, when it arrived, takes as much memory again."""
        if self.limits.gradient_nbytes is not None:
            self._shrink(self.limits.gradient_nbytes - self.waiting.get(unit.shape.title, 0.0))
            self.waiting.pop(unit.shape.title, None)

    def _shrink(self, nbytes: float) -> None:
        """Wait for the oldest messages until gradients and messages fit into `nbytes`."""
        while self.sharing and not self.sharing[0].has_next:
            if sum(self.waiting.values()) + sum(flight.held_nbytes for flight in self.sharing) <= nbytes:
                return
            self.advance(self.sharing)

    def finish(self) -> None:
        """Wait for all."""
        for flights in (self.sharing, self.replicating):
            while flights:
                self.advance(flights)
        while self.downloads:
            self._downloaded()
        if self.strategy.offload:
            self.clock.wait(self.clock.free["host"], "root", "copies to the host")

    def issue(self, unit: Unit, group: Group, own: float, *, held: bool) -> float:
        """Make and send the message of a group. `own`: bytes of its gradients, whole, 0 for those that a window holds
        until the end; `held`: they are those of a window. Returns how much of `own` was copied, and is there for as
        long as the caller has it."""
        sent, name = group.sent, unit.shape.title
        assert sent is not None
        if sent.pack.world == 1 and sent.replicas == 1:
            # The result is the gradients, cast if their dtype is another.
            if sent.storage_itemsize != (sent.held_itemsize if held else sent.compute_itemsize):
                self.bytes.add("gradients of shards", name, sent.reduced_nbytes)
                self.clock.copy(sent.reduced_nbytes + own)
                copied = own
            elif own:
                self.bytes.add("gradients", name, -own)
                self.bytes.add("gradients of shards", name, own)
                copied = 0.0
            else:
                # The memory is that of what was held.
                self.bytes.add("held gradients", name, -float(sent.held_nbytes))
                self.bytes.add("gradients of shards", name, float(sent.reduced_nbytes))
                copied = 0.0
            if sent.offloaded:
                # It is copied to the host when the next one is made.
                self.sharing.append(Flight(unit, group, self.clock.now, stage=2, apart=not copied))
            return copied
        self.pool.take("messages", name, self._key("send", group), sent.send_nbytes)
        made_of = sent.held_itemsize if held else sent.compute_itemsize
        cast = float(sent.leaving_nbytes) if sent.wire_itemsize != made_of else 0.0
        self.bytes.add("messages", name, cast)
        self._receive(group, name, take=True)
        self.clock.copy(2.0 * sent.send_nbytes + 2.0 * cast)
        leaving = 0.0 if cast or not own else float(sent.leaving_nbytes)
        # What is sent from where it is stays until its message left; the rest was copied.
        self.bytes.add("gradients", name, -leaving)
        self.bytes.add("messages", name, leaving)
        flight = Flight(unit, group, self.clock.now, cast=cast + leaving)
        if sent.pack.world > 1:
            ranks = sent.pack.world
            kind = "all-to-all" if sent.exchanges else "reduce-scatter"
            nbytes, calls = group.reduced_message_nbytes, group.reduce_calls
            leaving = (group.placed or self.strategy.placed).reduced(nbytes)
            stride = self.strategy.stride(ranks)
            flight.arrives = self.clock.send("shard", ranks, stride, nbytes, calls, kind, leaving=leaving)
            self.sharing.append(flight)
        else:
            flight.stage = 1
            flight.arrives = self._all_reduce(group)
            self.replicating.append(flight)
            while len(self.replicating) > self.limits.reductions_in_flight:
                self.advance(self.replicating)
        return own - leaving

    @staticmethod
    def _key(use: str, group: Group) -> Hashable:
        sent = group.sent
        assert sent is not None
        return use, group.sent_names, sent.pack, sent.sent_itemsize, sent.direct_gradients

    def _receive(self, group: Group, name: str, *, take: bool) -> None:
        sent = group.sent
        assert sent is not None
        nbytes = float(sent.receive_nbytes)
        if sent.sums_here:
            (self.pool.take if take else self.pool.give)("messages", name, self._key("receive", group), nbytes)
        else:
            self.bytes.add("messages", name, nbytes if take else -nbytes)

    def _all_reduce(self, group: Group) -> float:
        nbytes = group.replicated_message_nbytes
        ranks, apart = 0 if group.sent is None else group.sent.replicas, self.strategy.shard * self.strategy.tensor
        leaving = (group.placed or self.strategy.placed).replicated(nbytes)
        return self.clock.send("replicate", ranks, apart, nbytes, 1, "all-reduce", leaving=leaving)

    def advance(self, flights: deque[Flight]) -> None:
        """Wait for the oldest message; then send the next one of its reduction, or take the result."""
        flight = flights.popleft()
        group, name = flight.group, flight.unit.shape.title
        sent = group.sent
        assert sent is not None
        if flight.stage == 2:
            self._to_host(sent, name, apart=flight.apart)
            return
        self.clock.wait(flight.arrives, name, "all-reduce" if flight.stage else "reduce-scatter")
        if flight.stage == 0:
            chunk = sent.receive_nbytes if not sent.sums_here else 0
            if sent.sums_here:
                # The sum over ranks, in the dtype of the sum.
                summed = self._chunk(group, sent.sum_itemsize)
                self.bytes.add("messages", name, summed)
                self.clock.copy(sent.receive_nbytes + summed)
            else:
                summed = float(chunk)
            self.pool.give("messages", name, self._key("send", group), sent.send_nbytes)
            self.bytes.add("messages", name, -flight.cast)
            if sent.sums_here:
                self._receive(group, name, take=False)
            flight.cast = summed
            if sent.replicas > 1:
                flight.stage = 1
                flight.arrives = self._all_reduce(group)
                self.replicating.append(flight)
                while len(self.replicating) > self.limits.reductions_in_flight:
                    self.advance(self.replicating)
                return
        self._collect(flight)

    @staticmethod
    def _chunk(group: Group, itemsize: int) -> float:
        assert group.sent is not None
        sent = group.sent
        return sent.reduced_nbytes / sent.storage_itemsize * itemsize

    def _collect(self, flight: Flight) -> None:
        group, name = flight.group, flight.unit.shape.title
        sent = group.sent
        assert sent is not None
        result = float(sent.reduced_nbytes)
        alone = sent.pack.world == 1
        # The result is in the memory of the sum, unless its dtype is another, or a pool keeps that memory.
        copied = sent.sum_itemsize != sent.storage_itemsize or (alone and self.pool.keeps)
        if copied:
            self.bytes.add("gradients of shards", name, result)
        if alone:
            self.pool.give("messages", name, self._key("send", group), sent.send_nbytes)
        else:
            self.bytes.add("messages", name, -flight.cast)
        if not copied:
            self.bytes.add("gradients of shards", name, result)
        self._to_host(sent, name)

    def _to_host(self, sent: UnitMemory, name: str, *, apart: bool = False) -> None:
        """Begin to copy the result of a reduction to the host, if its shards are there. `apart`: as in `Flight`."""
        if not sent.offloaded:
            return
        result = float(sent.reduced_nbytes)
        if apart and len(sent.pack.segments) > 1:
            # They are put together first, so that one copy brings them to the host (comm/offload.py).
            self.bytes.add("gradients of shards", name, result)
            self.bytes.add("gradients of shards", name, -result)
            self.clock.copy(2 * result)
        self.host.add("gradients of shards", name, result)
        self.downloads.append((name, result))
        self.clock.upload(result)
        while len(self.downloads) > DOWNLOADS_IN_FLIGHT:
            self._downloaded()

    def _downloaded(self) -> None:
        name, nbytes = self.downloads.popleft()
        self.bytes.add("gradients of shards", name, -nbytes)
