"""The books of a simulated step: bytes by kind and unit, message buffers, moments, waits and messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

# Kinds of bytes. The first ones are there all the time.
KINDS = (
    "parameters",
    "optimizer",
    "buffers",
    "batch",
    "stage buffers",
    "gradients of shards",
    "held gradients",
    "full parameters",
    "kept parts",
    "staging",
    "gradients",
    "messages",
    "activations",
    "loss",
    "optimizer step",
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the step: when, in which phase (`forward layers.3`), and bytes by kind, in the order of `KINDS`."""

    seconds: float
    phase: str
    nbytes: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.nbytes)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Time that compute waited for a message."""

    unit: str
    what: str
    seconds: float


@dataclass
class Traffic:
    """Messages of a step on one axis. `nbytes`: what this rank sends; `leaving`: what the busiest host sends to other
    hosts."""

    calls: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    leaving: float = 0.0


class OwnersStep(NamedTuple):
    """The most that a step of matrices costs one rank. `flops`: operations of Newton-Schulz iterations, in bfloat16;
    `messages`, `sent_nbytes`: of a step; `nbytes`: of whole tensors, messages and results beside the shards."""

    flops: float
    messages: int
    chunks: int
    sent_nbytes: int
    nbytes: int


@dataclass
class Simulated:
    """One step. `peak`: its largest moment; `terms`: (name, bytes) there, the largest first. `compute`: seconds of
    kernels; `exposed`: where compute waited. `host_bound`: seconds in which the device waited for the host. `on_host`:
    (kind, bytes) of this rank in host memory when there is most of it."""

    moments: list[Moment] = field(default_factory=list)
    peak: Moment = Moment(0.0, "never", (0.0,) * len(KINDS))
    terms: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    compute: float = 0.0
    optimizer_seconds: float = 0.0
    host_bound: float = 0.0
    exposed: list[Exposed] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    # Seconds of the first words of phases, waits included, and until when; not of pipelines.
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    passed: float = 0.0
    # Seconds on the wire along `tp`, `cp`, `ep` and `pp`; their messages and bytes are those of the step.
    along: dict[str, float] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    on_host: tuple[tuple[str, float], ...] = ()
    # Seconds in which a rank of a pipeline waited for other stages; part of `exposed`.
    bubble: float = 0.0
    # The step of matrices on their owners, if the optimizer is Muon.
    owners: OwnersStep | None = None

    @property
    def exposed_seconds(self) -> float:
        return sum(wait.seconds for wait in self.exposed)


class Bytes:
    """Counts the bytes that are there, by kind and unit."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], float] = {}
        self.kinds = dict.fromkeys(KINDS, 0.0)
        self.total = 0.0
        self.most = 0.0
        self.is_new_peak = False
        # When there was most: by kind and unit, and by kind. They are noted when it becomes less.
        self._at_most: dict[tuple[str, str], float] = {}
        self._peak: tuple[float, ...] = (0.0,) * len(KINDS)
        self._grew = False

    @property
    def at_most(self) -> list[tuple[str, str, float]]:
        """The (kind, unit, bytes) when there was most."""
        self._look()
        return [(kind, name, nbytes) for (kind, name), nbytes in self._at_most.items() if nbytes > 0]

    @property
    def peak(self) -> tuple[float, ...]:
        """The bytes of each kind when there was most."""
        self._look()
        return self._peak

    def add(self, kind: str, name: str, nbytes: float) -> None:
        if not nbytes:
            return
        if self._grew and nbytes < 0:
            self._look()
        self.there[kind, name] = self.there.get((kind, name), 0.0) + nbytes
        self.kinds[kind] += nbytes
        self.total += nbytes
        if self.total > self.most:
            self.most = self.total
            self._grew = self.is_new_peak = True

    def set(self, kind: str, name: str, nbytes: float) -> None:
        self.add(kind, name, nbytes - self.there.get((kind, name), 0.0))

    def clear(self, kind: str, name: str) -> float:
        self._look()
        nbytes = self.there.pop((kind, name), 0.0)
        self.kinds[kind] -= nbytes
        self.total -= nbytes
        return nbytes

    def rename(self, kind: str, name: str, other: str, nbytes: float) -> None:
        """Count `nbytes` that are there as `other`."""
        self.there[kind, name] = self.there.get((kind, name), 0.0) - nbytes
        self.there[kind, other] = self.there.get((kind, other), 0.0) + nbytes

    def nbytes(self, kind: str, name: str) -> float:
        return self.there.get((kind, name), 0.0)

    def forget(self) -> None:
        """Look for the peak anew."""
        self.most = 0.0
        self._at_most, self._grew = {}, False

    def _look(self) -> None:
        """Note what is there, if it is more than ever."""
        if self._grew:
            self._grew = False
            self._peak, self._at_most = tuple(self.kinds.values()), self.there.copy()


class Pool:
    """Message buffers; on a CPU they are kept, as in `comm/pool.py`."""

    def __init__(self, counted: Bytes, *, keep: bool) -> None:
        self._counted, self.keeps = counted, keep
        self._free: Counter[Hashable] = Counter()

    def take(self, kind: str, name: str, key: Hashable, nbytes: float) -> None:
        if not nbytes:
            return
        if self.keeps:
            if self._free[key]:
                self._free[key] -= 1
                return
            name = "kept from step to step"
        self._counted.add(kind, name, nbytes)

    def give(self, kind: str, name: str, key: Hashable, nbytes: float) -> None:
        if not nbytes:
            return
        if self.keeps:
            self._free[key] += 1
        else:
            self._counted.add(kind, name, -nbytes)
