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

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import Fault
from .process import Event
from .store import runs

if TYPE_CHECKING:
    from .scope import Scope

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


class Wait:
    """Something that a rank waits for, as its record tells it. `needs` and `number` depend on the kind: the ranks of
    the group (message, connect, torch) and the number of the message or question."""

    __slots__ = ("_ended", "also", "epoch", "fault", "kind", "name", "number", "ranks", "scope", "since", "what")

    def __init__(
        self,
        kind: str,
        scope: Scope | None,
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
