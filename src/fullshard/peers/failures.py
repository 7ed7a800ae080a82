"""Describes what fails: the exceptions that all ranks raise, faults as ranks send them to each other, and losses; and
values and ranks as texts show them.

    PeerFailed, RanksDisagree   the exceptions, both `RuntimeError`s
    Fault                       the failure of one rank, as a text in the store
    Failures                    what failed in the current epoch of a scope (scope.py)
    Loss                        what a failure on a device spoiled: values of the model, until a load

No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

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
