"""All waits for other ranks. After a second the rank's record reports the wait, and the leader finds out why it lasts.

    kind       the rank waits for                                   ended by the watch (watch.py)
    message    a message over a data group, in its backend          the data groups of the scope are cut
    ask        the answer to a question of its scope                the loop below raises
    meet       all ranks of its scope, after a failure              the loop below raises
    connect    the others, to make a data group with them           the loop below raises; the backend connects in a
                                                                    thread of its own
    torch      others in one of the user's torch collectives        not ended: it is the user's; others are notified

A wait for a message is in its backend (`DataGroup`, comm/data_group.py), which wakes up as soon as it arrives. Other
waits poll the store with growing pauses: often at first, finally so rarely that ten thousand ranks do no harm.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .failures import Failures, Fault
from .process import Host, Wakeup
from .store import Mail, Records, runs

# ---- settings --------------------------------------------------------------------------------------------------------
# The user's settings of the guard, read once per process group.
#
# FULLSHARD_GUARD    full       (default) ranks compare structure, initial values, the order of messages and what
#                               they do to shards; errors name failed ranks and explain endless waits
#                    structure  structure and order are compared, values and facts are not
#                    off        only this setting itself is compared, once; errors still name failed ranks
# FULLSHARD_SILENCE  seconds without a sign of life after which a rank counts as lost; 0: never. Default: 60, or a
#                    third of the time limit of the process group if that is less

MODES = ("full", "structure", "off")
_MOST_SILENCE = 60.0
# The longest time between two signs of life.
_BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Settings:
    """The resolved choices. `limit_seconds`: the time limit of the process group."""

    mode: str = "full"
    silence_seconds: float = _MOST_SILENCE
    limit_seconds: float = 1800.0

    @classmethod
    def read(cls, limit_seconds: float, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment. `ValueError` names the variable, its value and the allowed values."""
        source = os.environ if environ is None else environ
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
        """Seconds between two signs of life."""
        return min(_BEAT_SECONDS, self.silence_seconds / 4) if self.silence_seconds else _BEAT_SECONDS


# ---- wait ------------------------------------------------------------------------------------------------------------

# Shorter waits are not reported.
PATIENCE_SECONDS = 1.0
# After a failure the epoch is over for all ranks: a rank that still waits after so long gives up.
GRACE_SECONDS = 2.0
# If all ranks raised at the same place, a rank may catch the exception and continue: peers wait so long for it.
SETTLING_SECONDS = 0.3
# Requests of all ranks together that a store answers while they wait (it can do about ten times as many).
_REQUESTS_PER_SECOND = 2000
_QUICK_RANKS = 64
# A rank that polls the store looks, and writes its record, so many times more rarely than each `pace`: together one
# request per pace.
STORE_WAIT_LOOKS, STORE_WAIT_POSTS = 3.0, 1.5
# Without a watch thread (watch.py) the loop below checks the waits at least this often.
_UNWATCHED_SECONDS = 0.05


def pace(ranks: int) -> float:
    """Seconds between two requests of a waiting rank, for a number of ranks.

    >>> [pace(n) for n in (2, 8, 64, 1000, 10_000)]
    [0.25, 0.25, 1.0, 1.0, 5.0]
    """
    return max(0.25, min(ranks / _QUICK_RANKS, 1.0), ranks / _REQUESTS_PER_SECOND)


def pauses(ranks: int) -> Iterator[float]:
    """Seconds to sleep between two looks into the store, for a number of ranks.

    They grow quickly at first, because a question of many ranks takes time anyway. Finally the looks and the record,
    which is then written more rarely too, are one request per `pace` together.

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
    """An object that makes a `Wait` on demand, for frequent waits."""

    since: float

    @property
    def wait_described(self) -> Wait: ...


class AnyWatch(Protocol):
    """The interface of the watch (watch.py) to waits and scopes."""

    host: Host
    records: Records
    settings: Settings
    is_watched: bool
    waiting: Waits
    mail: Mail

    @property
    def rank(self) -> int: ...
    def begin(self) -> None: ...
    def look_unless_watched(self) -> None: ...
    def post(self) -> None: ...


class AnyScope(Protocol):
    """The ranks that wait for each other (scope.py)."""

    watch: AnyWatch
    name: str
    ranks: tuple[int, ...]
    epoch: int
    failures: Failures
    faults: list[tuple[Fault, float]]

    @property
    def rank(self) -> int: ...
    @property
    def base(self) -> str: ...
    def is_of_others(self, fault: Fault) -> bool: ...
    def end(self, wait: Wait, fault: Fault) -> None: ...


class Wait:
    """A wait of this rank, as its record reports it. By kind, `ranks` are those of the group (message, connect, torch),
    and `number` is that of the message or question."""

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
        # The fault because of which it will never end by itself.
        self.fault: Fault | None = None
        self._ended: Wakeup | None = None if scope is None or kind == "message" else scope.watch.host.event()

    @property
    def is_over(self) -> bool:
        """Whether its epoch is over. An exception may come before the wait is unregistered."""
        return self.scope is not None and self.epoch != self.scope.epoch

    @property
    def asks_store(self) -> bool:
        """Whether its loop polls the store."""
        return self.kind in ("ask", "meet", "connect")

    def end(self, fault: Fault) -> None:
        """End the wait because of `fault`. Thread-safe."""
        self.fault = fault
        self.wake()

    def wake(self) -> None:
        """Let its loop look again now. Thread-safe."""
        if self._ended is not None:
            self._ended.set()

    def sleep(self, seconds: float) -> None:
        """Sleep until `end` or `wake`, at most `seconds`."""
        if self._ended is not None:
            self._ended.wait(seconds)
        elif self.scope is not None:
            self.scope.watch.host.sleep(seconds)

    @property
    def doing(self) -> str:
        """The description for error texts."""
        return self.what if isinstance(self.what, str) else self.what()

    def is_ended_by(self, fault: Fault, since: float) -> bool:
        """Whether `fault`, of its scope and epoch and known for `since` seconds, ends the wait."""
        if self.kind == "meet":
            # Ranks in a meeting have failed anyway. But a rank that ended will not come, and one with more attempts
            # failed in the attempt that this rank wants to begin. A lost rank may have come back: a found fault ends
            # only the meetings that were open then.
            if fault.kind == "ended" or fault.gone or self.scope is None:
                return True
            return fault.attempts > self.scope.failures.attempts or fault.meets.get(str(self.scope.rank)) == self.since
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
        """The wait as part of the record."""
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


class Waits(dict[int, "Wait | Waiting"]):
    """The waits of the threads of one process, by thread."""

    def __init__(self) -> None:
        super().__init__()
        # The thread that runs the model; the others are those of background saves.
        self.model_thread = threading.get_ident()
        # The number of threads that send messages beside it.
        self.beside = 0
        self._lock = threading.Lock()

    def send_beside(self, more: int) -> None:
        """`more` threads begin to send messages beside the model's; negative: they end."""
        with self._lock:
            self.beside += more

    @contextmanager
    def within(self, wait: Wait) -> Iterator[None]:
        """Register a wait of this thread inside."""
        thread = threading.get_ident()
        before = self.get(thread)
        self[thread] = wait
        try:
            yield
        finally:
            if before is None:
                self.pop(thread, None)
            else:
                self[thread] = before

    def current(self) -> dict[int, Wait]:
        """The current waits, without those whose epoch is over."""
        waits = {thread: described(waiting) for thread, waiting in list(self.items())}
        return {thread: wait for thread, wait in waits.items() if not wait.is_over}

    @property
    def are_several(self) -> bool:
        """Whether another thread than the model's may send something, so that a wait does not block the rank."""
        return self.beside > 0 or len(self.current()) > 1


def described(waiting: Wait | Waiting) -> Wait:
    """The `Wait` of an object that makes it on demand."""
    return waiting if isinstance(waiting, Wait) else waiting.wait_described


def wait_until(is_there: Callable[[], bool], wait: Wait, *, alone: bool = False) -> None:
    """Return when `is_there()`, which asks the store. Raises the fault that ends the wait: `PeerFailed` or
    `RanksDisagree`. `alone`: only one rank of the scope does this, and may ask more often."""
    scope = wait.scope
    assert scope is not None
    watch = scope.watch
    with watch.waiting.within(wait):
        for pause in pauses(1 if alone else len(scope.ranks)):
            if pause:
                wait.sleep(pause if watch.is_watched else min(pause, _UNWATCHED_SECONDS))
            if is_there():
                return
            watch.look_unless_watched()
            if wait.fault is not None:
                scope.failures.has_raised = True
                raise wait.fault.error(wait.doing)
