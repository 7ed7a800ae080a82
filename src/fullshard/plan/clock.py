"""The clocks of a simulated step: of the device, of the host, and of each axis of the mesh.

A message starts when its axis is free and what it reads is computed. A wait for one that has not arrived is exposed
time. On a CPU the host computes, so both clocks are one.
"""

from __future__ import annotations

from .account import Exposed, Simulated
from .description import WAIT
from .machine import Hardware
from .spans import Message, Work

AXES = ("shard", "replicate", "block", "host")
# Those whose messages belong to divided layers.
ALONG = ("tp", "cp", "ep", "pp")
# The kind of a collective by what an operation is called; and how often the bytes of a `Sent` go into the message of
# which a rank sends all but its own part, where these are not those of the message already.
_KINDS = (
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("all_reduce", "all-reduce"),
    ("all_to_all", "all-to-all"),
    ("ring", "send"),
)
# Attention over the keys that are there runs beside the message that brings the next ones.
OVERLAPS = ("ring",)


def whole_nbytes(message: Message, ranks: int) -> tuple[str, float]:
    """The kind of the collective of `message` over `ranks`, and its bytes as `Hardware.collective` takes them.

    >>> whole_nbytes(Message(Work(), "cp", "all_to_all", 300.0), 4), whole_nbytes(Message(Work(), "cp", "ring", 9.0), 4)
    (('all-to-all', 400.0), ('send', 9.0))
    """
    kind = next(kind for name, kind in _KINDS if message.operation.startswith(name))
    if message.operation == "all_gather of tokens":
        return kind, message.nbytes * ranks  # it has those of a part
    # Of an all-to-all what leaves is known, of others the whole.
    leaves = kind == "all-to-all" and message.axis != "tp"
    return kind, message.nbytes * ranks / (ranks - 1) if leaves else message.nbytes


class Clock:
    """`now`: when the device has done all that it was given; `host`: when the host has given it. What happens is
    written to `found`."""

    def __init__(self, hardware: Hardware, itemsize: int, *, compiled: bool = False, float8: bool = False) -> None:
        self.hardware = hardware
        self.itemsize = itemsize
        # The share that is left of operations that are no products; how many times faster products are.
        self._fused = hardware.fused if compiled else 1.0
        self._gain = hardware.float8 if float8 else 1.0
        # Nothing takes time: the step records the order alone.
        self.still = False
        self.begin(Simulated())

    def begin(self, found: Simulated) -> None:
        """Starts anew, at zero."""
        self.found = found
        self.now = self.host = 0.0
        self.free = dict.fromkeys(AXES + ALONG, 0.0)
        # When messages along these axes arrive, in their order.
        self._arrive: dict[str, list[float]] = {axis: [] for axis in ALONG}
        self._busy: list[tuple[float, float]] = []

    def compute(self, work: Work) -> None:
        """The device does `work`, slower while messages take a part of it."""
        if self.still:
            return
        hardware, begun = self.hardware, self.now
        launching = self.launching(work)
        self.host += launching
        seconds = self.seconds(work)
        overlap = sum(max(0.0, min(stop, begun + seconds) - max(start, begun)) for start, stop in self._busy)
        self._busy = [(start, stop) for start, stop in self._busy if stop > begun]
        self.found.compute += seconds
        seconds += min(overlap, seconds) * hardware.contention
        if hardware.blocking:
            self.now = begun + seconds + launching
        else:
            self.now = max(begun + seconds, self.host)
        self.found.host_bound += max(0.0, self.now - begun - seconds)

    def seconds(self, work: Work) -> float:
        """The roofline: matrix products by their operations or by their bytes, the rest by its bytes."""
        hardware = self.hardware
        stream = hardware.memory_rate(self.itemsize)
        operations = work.matmul / (hardware.peak_flops(self.itemsize) * hardware.matmul) / self._gain
        operations += work.attention / hardware.attention_flops(self.itemsize)
        return max(operations, work.matmul_nbytes / stream) + work.nbytes * self._fused / stream

    def launching(self, work: Work) -> float:
        """Seconds in which the host gives `work` to the device."""
        return work.kernels * self.hardware.launch * self._fused

    def copy(self, nbytes: float) -> None:
        """The device reads and writes `nbytes`, both together."""
        if self.still:
            return
        seconds = nbytes / (self.hardware.bandwidth * self.hardware.stream)
        self.now += seconds
        self.found.compute += seconds

    def send(
        self,
        axis: str,
        ranks: int,
        stride: int,
        nbytes: float,
        calls: int,
        kind: str = "all-gather",
        *,
        leaving: float = 0.0,
    ) -> float:
        """Issue a collective of `nbytes`, of which each rank sends (ranks - 1) / ranks, twice in an all-reduce; when it
        arrives. leaving: bytes that a host sends of it to others."""
        if ranks == 1 or not calls or self.still:
            return self.now
        seconds = self.hardware.collective(kind, ranks, stride, nbytes)
        start = self._begin(axis, seconds)
        traffic = self.found.traffic[axis]
        traffic.calls += calls
        traffic.nbytes += nbytes * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
        traffic.seconds += seconds
        traffic.leaving += leaving
        return start + seconds

    def _begin(self, axis: str, seconds: float) -> float:
        """A message of `seconds` is issued; when it begins."""
        start = max(self.free[axis], self.now)
        self.free[axis] = start + seconds
        self._busy.append((start, start + seconds))
        return start

    def pass_on(self, message: Message, ranks: int, stride: int, unit: str) -> None:
        """Send a message of divided layers over `ranks`, and wait for it unless it overlaps; or wait for one that
        does."""
        axis = message.axis
        if ranks == 1 or self.still:
            return
        if message.operation == WAIT:
            self.wait(self._arrive[axis][-1 - int(message.nbytes)], unit, f"messages along {axis}")
            return
        kind, nbytes = whole_nbytes(message, ranks)
        seconds = self.hardware.collective(kind, ranks, stride, nbytes)
        arrives = self._begin(axis, seconds) + seconds
        self.found.along[axis] = self.found.along.get(axis, 0.0) + seconds
        if message.operation in OVERLAPS:
            self._arrive[axis].append(arrives)
        else:
            self.wait(arrives, unit, f"messages along {axis}")

    def alone(self, message: Message, ranks: int, stride: int) -> float:
        """The seconds that `pass_on` waits at least."""
        if ranks == 1 or message.operation == WAIT or message.operation in OVERLAPS:
            return 0.0
        kind, nbytes = whole_nbytes(message, ranks)
        return self.hardware.collective(kind, ranks, stride, nbytes)

    def give(self, nbytes: float, stride: int) -> float:
        """Send `nbytes` to a stage on the device `stride` ranks away; when they arrive."""
        seconds = self.hardware.collective("send", 2, stride, nbytes)
        self.found.along["pp"] = self.found.along.get("pp", 0.0) + seconds
        return self._begin("pp", seconds) + seconds

    def upload(self, nbytes: float, calls: int = 1) -> float:
        """Copy to or from the host, beside compute; when it is there."""
        if self.still:
            return self.now
        start = max(self.free["host"], self.now)
        self.free["host"] = start + nbytes / self.hardware.host
        traffic = self.found.traffic["host"]
        traffic.calls += calls
        traffic.nbytes += nbytes
        traffic.seconds += nbytes / self.hardware.host
        return self.free["host"]

    def wait(self, when: float, unit: str, what: str) -> None:
        """Compute cannot continue before `when`."""
        if when > self.now:
            self.found.exposed.append(Exposed(unit, what, when - self.now))
            self.now = when

    def skip(self, seconds: float, compute: float) -> None:
        """Time passes as before, `compute` of it in kernels."""
        self.now += seconds
        self.host += seconds
        self.found.compute += compute
        self.free = {axis: free + seconds for axis, free in self.free.items()}
