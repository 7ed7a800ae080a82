"""Waits for other ranks, the faults that end them, and the exceptions that they raise. No torch here.

    PeerFailed, RanksDisagree   the exceptions, both `RuntimeError`s
    Fault                       the failure of one rank, as a text in the store
    Failures                    what failed in the current epoch of a scope (scope.py)
    Loss                        what a failure on a device spoiled: values of the model, until a load
    Wait                        a wait of this rank

After a second the rank's record reports a wait, and the leader (diagnosis.py) finds out why it lasts.

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

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from .store import Host, Records, Wakeup, runs

_Value = TypeVar("_Value")

# ---- errors ----------------------------------------------------------------------------------------------------------


class PeerFailed(RuntimeError):
    """Raised where this rank waits for another one that raised, was killed, was stopped or ended.

    `rank`: its rank in the default process group. `step`: the number of optimizer steps it had taken. `unit`: its
    activity, with the name of the sharded module ("the all-gather of layers.3"), or "" if unknown. `text`: its error.
    """

    def __init__(self, message: str, *, rank: int, step: int = -1, unit: str = "", text: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.unit, self.text = rank, step, unit, text

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PeerFailed, rank=self.rank, step=self.step, unit=self.unit, text=self.text), self.args


class RanksDisagree(RuntimeError):
    """Ranks were about to do different things, or have different models. `by_rank`: the value on each rank."""

    def __init__(self, message: str, *, what: str = "", by_rank: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.what, self.by_rank = what, dict(by_rank or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RanksDisagree, what=self.what, by_rank=self.by_rank), self.args


# ---- fault -----------------------------------------------------------------------------------------------------------
# The failure of a rank, reported by itself or found by another one.

# Longer texts are cut before they are sent.
TEXT_CHARACTERS = 2000
# Kinds found by another rank: they end every wait of the epoch.
_FOUND = ("lost", "late", "disagree")


@dataclass(frozen=True)
class Fault:
    """Why waits for `rank` will never end. `kind`:

        raised     an exception left a step of that rank
        ended      its process ended
        lost       it is gone, stopped or silent: found by another rank
        late       it did not come within the time limit of the process group: found by another rank
        disagree   ranks do different things: found by another rank
        look       not a fault: a request to check the silent process `text` on this machine

    `scope`, `epoch`: where it is valid (scope.py). `issued`: how many messages the rank had sent over each data group
    of that scope; `asked`: how many questions it had answered. Waits for these messages and answers still complete.
    """

    rank: int
    kind: str
    text: str
    scope: str = ""
    epoch: int = 0
    step: int = -1
    doing: str = ""
    issued: Mapping[str, int] = field(default_factory=dict)
    asked: int = 0
    # The number of the rank's guarded blocks that had failed, this one included.
    attempts: int = 0
    # The number of the block of messages (`Failures.block`) that the rank left, or was about to begin.
    block: int = 0
    # Whether the exception is not known yet: the fault is published again with it.
    vague: bool = False
    # The time since which each rank has been in a meeting, of found faults. The fault ends that meeting and no other.
    meets: Mapping[str, float] = field(default_factory=dict)
    # Whether its process was observed to have ended: it will not come back.
    gone: bool = False

    def dumps(self, rank: int = -1) -> str:
        """The text for `rank`, with its own meeting only: ten thousand would be too long."""
        one = str(rank)
        meets = {one: self.meets[one]} if one in self.meets else {}
        return json.dumps(asdict(replace(self, meets=meets)), separators=(",", ":"))

    @staticmethod
    def loads(text: str | bytes) -> Fault:
        return Fault(**json.loads(text))

    @property
    def is_found(self) -> bool:
        """Whether another rank found it, so that it ends waits whatever the rank had sent."""
        return self.kind in _FOUND

    @property
    def message(self) -> str:
        if self.kind in ("lost", "late"):
            return f"rank {self.rank} {self.text}"
        step = f" at step {self.step}" if self.step >= 0 else ""
        doing = f" in {self.doing}" if self.doing else ""
        return f"rank {self.rank} {'ended' if self.kind == 'ended' else 'raised'}{step}{doing}: {self.text}"

    def withholds(self, group: str, number: int) -> bool:
        """Whether the failed rank will not send message `number` of the data group `group`."""
        return self.is_found or self.issued.get(group, number) < number

    def error(self, waiting: str = "") -> RuntimeError:
        """The exception for the other ranks; `waiting`: what this rank waits for."""
        if self.kind == "disagree":
            return RanksDisagree(self.text)
        return PeerFailed(
            f"expected every rank to take part in {waiting or 'its next message'}, found that {self.message}",
            rank=self.rank,
            step=self.step,
            unit=self.doing,
            text=self.text,
        )


def silent_store(scope: str = "", epoch: int = 0) -> Fault:
    """The fault if the store is gone or silent, and nothing else is known."""
    text = (
        "gave no sign of life since the store through which ranks meet is gone or silent, with the process that "
        "served it (rank 0, or a launcher)"
    )
    return Fault(0, "lost", text, scope, epoch)


@contextmanager
def store_answers(waiting: str, fault: Callable[[], Fault] = silent_store) -> Iterator[None]:
    """Replace the store's connection errors, which mean that the store is gone, by the error of `fault()`."""
    try:
        yield
    except (PeerFailed, RanksDisagree):
        raise
    except RuntimeError as error:
        raise fault().error(waiting) from error


@dataclass(slots=True)
class Failures:
    """The failures on the ranks of a scope since their last meeting, which replaces them."""

    # Whether all ranks must meet before the next message.
    must_meet: bool = False
    # The fault that this rank published; and the one for which the data groups were cut.
    own: Fault | None = None
    cause: Fault | None = None
    # Whether `cause`, or what followed from it, was raised.
    has_raised: bool = False
    # Whether an exception left a wait: connections may be incomplete, and ranks at different messages.
    is_torn: bool = False
    # The number of this rank's guarded blocks that failed.
    attempts: int = 0
    # The number of this rank's blocks of messages that are over, and so of the next one (`Messenger.together`).
    block: int = 0


# ---- losses ----------------------------------------------------------------------------------------------------------
# On a device `Work.wait()` orders streams; the host continues. An abort releases the streams, so what was queued after
# an unfinished message, perhaps an optimizer step, ran on memory that never arrived. The rank on which that happened
# notes a `Loss`. In the next meeting each rank reports a mark beside its word, so that all ranks know:
#
#     word!3    lost in epoch 3, and not restored yet
#     word?     messages are under way now: lost if the meeting gives their connections up
#
# Nothing of this happens on a CPU, where a wait returns only with its message.

LOST, PERHAPS = "!", "?"


@dataclass(frozen=True)
class Loss:
    """`epoch`: in which connections were cut; `ranks`: where messages were under way then; `text`: which ones, and
    why."""

    epoch: int
    ranks: tuple[int, ...]
    text: str


def settled(state: str, epoch: int, *, renews: bool) -> str:
    """The word of a rank after it is known whether the meeting that ends `epoch` gives connections up.

    >>> settled("3?", 2, renews=True), settled("3?", 2, renews=False), settled("3!1", 2, renews=True)
    ('3!2', '3', '3!1')
    """
    word, perhaps, _ = state.partition(PERHAPS)
    return f"{word}{LOST}{epoch}" if perhaps and renews else word


def lost_in(state: str) -> int:
    """The epoch of the loss that a word reports, or -1.

    >>> lost_in("3!2"), lost_in("3")
    (2, -1)
    """
    epoch = state.partition(LOST)[2]
    return int(epoch) if epoch else -1


# ---- ranks in texts --------------------------------------------------------------------------------------------------


def variants(by_rank: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """The different values with their ranks: the most frequent first, ties by the lowest rank."""
    found: dict[_Value, list[int]] = {}
    for rank in sorted(by_rank):
        found.setdefault(by_rank[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1])))


def shown_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> shown_ranks([3]), shown_ranks([0, 1]), shown_ranks([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0 and 1', 'ranks 0 to 3 and 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


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
    """The interface of the watch (watch.py) to waits, scopes and its leader."""

    host: Host
    records: Records
    settings: Settings
    is_watched: bool
    waiting: Waits

    @property
    def scopes(self) -> dict[tuple[tuple[int, ...], str], Any]: ...
    @property
    def rank(self) -> int: ...
    def begin(self) -> None: ...
    def look_unless_watched(self) -> None: ...
    def end_waits(self, now: float) -> None: ...
    def post(self) -> None: ...
    def tell(self, ranks: Iterable[int], faults: Sequence[Fault]) -> None: ...
    def ask(self, rank: int, looks: Sequence[Fault]) -> None: ...


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
        waits = {thread: described(waiting) for thread, waiting in self.copy().items()}
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
