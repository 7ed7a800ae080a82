"""The one way to wait. Whatever a rank waits for, its record says so after a second, and somebody finds out why it
lasts.

    kind       the rank waits for                                   ended by the watch (watch.py)
    message    a message over a data group, in its backend          the data groups of the scope are cut
    ask        the answer to a question of its scope                the loop below raises
    meet       all ranks of its scope, after a failure              the loop below raises
    connect    the others, to make a data group with them           the loop below raises, inside of the backend's store
    torch      others in a torch collective of the user's     nobody: it is the user's; others hear of it

A message is waited for in its backend (`DataGroup`, comm/data_group.py): only that wakes up the moment it comes. What
is in the store is asked for, with growing pauses: often at first, and at last so rarely that ten thousand ranks do no
harm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import Fault
from .process import Event, Host
from .store import Records, runs

# ---- settings --------------------------------------------------------------------------------------------------------
# What users choose about the guard, read once for each process group.
#
# FULLSHARD_GUARD    full       (default) ranks compare structure, initial values, the order of messages and what
#                               they do to shards; failures and waits in vain have names
#                    structure  structure and order are compared, values and facts are not
#                    off        nothing is compared but this setting itself, once; failures and waits still have names
# FULLSHARD_SILENCE  seconds without a sign of life after which a rank counts as lost; 0: never. Default: 60, or a
#                    third of the time limit of the process group where that is less

MODES = ("full", "structure", "off")
_MOST_SILENCE = 60.0
# Two signs of life are so far apart at most.
_BEAT_SECONDS = 5.0
_REMOVED = {
    "FULLSHARD_AGREE": "full (all), structure or off (none)",
    "FULLSHARD_ORDER": "full (check) or off (trust)",
}


@dataclass(frozen=True)
class Settings:
    """The resolved choices. `limit_seconds`: the time limit of the process group."""

    mode: str = "full"
    silence_seconds: float = _MOST_SILENCE
    limit_seconds: float = 1800.0

    @classmethod
    def read(cls, limit_seconds: float, environ: Mapping[str, str] | None = None) -> Settings:
        """From the environment. `ValueError` names the variable, its value and what it may be."""
        source = os.environ if environ is None else environ
        for name, instead in _REMOVED.items():
            if name in source:
                raise ValueError(f"{name}: this variable was removed; set FULLSHARD_GUARD in its place: {instead}")
        mode = source.get("FULLSHARD_GUARD") or MODES[0]
        if mode not in MODES:
            raise ValueError(f"FULLSHARD_GUARD: expected one of {', '.join(MODES)}, found {mode!r}")
        text = (source.get("FULLSHARD_SILENCE") or "").strip()
        silence = min(_MOST_SILENCE, limit_seconds / 3)
        if text:
            try:
                silence = float(text)
            except ValueError:
                silence = -1.0
            if not 0 <= silence < float("inf"):
                raise ValueError(f"FULLSHARD_SILENCE: expected a number of seconds >= 0, found {text!r}")
        return cls(mode, silence, limit_seconds)

    @property
    def beat_seconds(self) -> float:
        """How far two signs of life are apart."""
        return min(_BEAT_SECONDS, self.silence_seconds / 4) if self.silence_seconds else _BEAT_SECONDS


# ---- wait ------------------------------------------------------------------------------------------------------------

# A rank that waits for no longer tells nobody.
PATIENCE_SECONDS = 1.0
# An epoch in which somebody failed is over for everybody: who still waits after so long gives up.
GRACE_SECONDS = 2.0
# Who raised may catch that and continue, where all ranks raised at the same place: so long it is waited for.
SETTLING_SECONDS = 0.3
# Requests of all ranks together that a store answers while they wait (it can do about ten times as many).
_REQUESTS_PER_SECOND = 2000
_QUICK_RANKS = 64
# Who waits for something in the store looks for it, and writes its record, so much more rarely than each `pace`:
# together one request.
STORE_WAIT_LOOKS, STORE_WAIT_POSTS = 3.0, 1.5
# Without a thread that looks after waits (watch.py) the loop below does so at least as often.
_UNWATCHED_SECONDS = 0.05


def pace(ranks: int) -> float:
    """Seconds between two requests of a rank that waits, of so many.

    >>> [pace(n) for n in (2, 8, 64, 1000, 10_000)]
    [0.25, 0.25, 1.0, 1.0, 5.0]
    """
    return max(0.25, min(ranks / _QUICK_RANKS, 1.0), ranks / _REQUESTS_PER_SECOND)


def pauses(ranks: int) -> Iterator[float]:
    """Seconds to sleep between two looks into the store, for a rank of so many.

    They grow quickly at first: a question of many ranks takes its time anyway. In the end the looks and the record,
    which is then written more rarely too, together are one request each `pace`.

    >>> [round(pause, 4) for pause, _ in zip(pauses(64), range(8))]
    [0.0, 0.0013, 0.0051, 0.0205, 0.0819, 0.3277, 1.3107, 3.0]
    """
    total = 0.0
    if ranks <= _QUICK_RANKS:
        yield total
    pause = max(0.0002, 20e-6 * ranks * max(1.0, ranks / _REQUESTS_PER_SECOND))
    while True:
        yield pause
        total += pause
        if ranks <= 8:
            pause = min(1.6 * pause, max(0.05, total / 8), pace(ranks))
        else:
            pause = min(4 * pause, STORE_WAIT_LOOKS * pace(ranks))


class Waiting(Protocol):
    """What `Watch.waits` takes: a `Wait`, or what makes one when somebody asks."""

    since: float

    @property
    def wait_described(self) -> Wait: ...


class AnyWatch(Protocol):
    """The watch of this process (watch.py), as far as waits and scopes need it."""

    rank: int
    host: Host
    records: Records
    settings: Settings
    is_watched: bool

    def begin(self) -> None: ...
    def send_beside(self, more: int) -> None: ...
    def waits(self, wait: Wait) -> AbstractContextManager[None]: ...
    def enter(self, waiting: Waiting) -> int: ...
    def over(self, thread: int) -> None: ...
    def look_unless_watched(self) -> None: ...
    def post(self) -> None: ...
    def tell(self, ranks: Iterable[int], faults: Sequence[Fault]) -> None: ...


class AnyScope(Protocol):
    """The ranks that wait for each other (scope.py)."""

    watch: AnyWatch
    name: str
    ranks: tuple[int, ...]
    rank: int
    epoch: int
    attempts: int
    has_raised: bool
    heard: list[tuple[Fault, float]]

    @property
    def base(self) -> str: ...
    def is_of_others(self, fault: Fault) -> bool: ...
    def end(self, wait: Wait, fault: Fault) -> None: ...


class Wait:
    """Something that a rank waits for, as its record tells it. `needs` and `number` depend on the kind: the ranks of
    the group (message, connect, torch) and the number of the message or question."""

    __slots__ = ("_ended", "also", "epoch", "fault", "kind", "name", "number", "ranks", "scope", "since", "what")

    def __init__(
        self,
        kind: str,
        scope: AnyScope | None,
        what: str | Callable[[], str],
        *,
        name: str = "",
        number: int = 0,
        ranks: Sequence[int] = (),
        also: str = "",
        since: float | None = None,
    ) -> None:
        self.kind, self.scope, self.what = kind, scope, what
        self.name, self.number, self.ranks, self.also = name, number, ranks, also
        self.epoch = 0 if scope is None else scope.epoch
        self.since = since if since is not None else time.monotonic() if scope is None else scope.watch.host.now()
        # Why it is in vain.
        self.fault: Fault | None = None
        self._ended: Event | None = None if scope is None or kind == "message" else scope.watch.host.event()

    @property
    def is_over(self) -> bool:
        """Whether its epoch is. An exception may come before the watch is told that a wait ended."""
        return self.scope is not None and self.epoch != self.scope.epoch

    @property
    def asks_store(self) -> bool:
        """Whether its loop asks the store again and again."""
        return self.kind in ("ask", "meet", "connect")

    def end(self, fault: Fault) -> None:
        """It is in vain. From any thread."""
        self.fault = fault
        if self._ended is not None:
            self._ended.set()

    def sleep(self, seconds: float) -> None:
        """Until its end, at most so long."""
        if self._ended is not None:
            self._ended.wait(seconds)
        elif self.scope is not None:
            self.scope.watch.host.sleep(seconds)

    @property
    def doing(self) -> str:
        """What is waited for, as a text says it."""
        return self.what if isinstance(self.what, str) else self.what()

    def is_ended_by(self, fault: Fault, since: float) -> bool:
        """Whether it is in vain because of `fault`, of its own scope and epoch, known for `since` seconds."""
        if self.kind == "meet":
            # Who meets has failed, as that rank has. But one that ended does not come; and one that failed once more
            # often did so in the attempt that this rank wants to begin. One that was lost may have come back: what
            # was found out about it ends the meetings that were waited for then.
            if fault.kind == "ended" or fault.gone or self.scope is None:
                return True
            return fault.attempts > self.scope.attempts or fault.meets.get(str(self.scope.rank)) == self.since
        if fault.kind == "raised" and not fault.attempts and self.also != "closed" and since < SETTLING_SECONDS:
            return False
        return fault.is_found or self._is_withheld(fault) or since > GRACE_SECONDS

    def _is_withheld(self, fault: Fault) -> bool:
        if self.kind == "message":
            return fault.rank in self.ranks and fault.withholds(self.name, self.number)
        if self.kind == "ask":
            return fault.asked <= self.number
        return True

    def told(self) -> dict[str, Any]:
        """For the record."""
        scope = self.scope
        return {
            "kind": self.kind,
            "scope": "" if scope is None else scope.name,
            "epoch": self.epoch,
            "name": self.name,
            "number": self.number,
            "ranks": runs(self.ranks or (() if scope is None else scope.ranks)),
            "what": self.doing,
            "also": self.also,
            "since": self.since,
        }


def wait_until(is_there: Callable[[], bool], wait: Wait, *, alone: bool = False) -> None:
    """Return when `is_there()`, which asks the store. Raises what the watch finds out, `PeerFailed` or
    `RanksDisagree`. `alone`: only one rank of the scope does so, and may ask more often."""
    scope = wait.scope
    assert scope is not None
    watch = scope.watch
    with watch.waits(wait):
        for pause in pauses(1 if alone else len(scope.ranks)):
            if pause:
                wait.sleep(pause if watch.is_watched else min(pause, _UNWATCHED_SECONDS))
            if is_there():
                return
            watch.look_unless_watched()
            if wait.fault is not None:
                scope.has_raised = True
                raise wait.fault.error(wait.doing)
