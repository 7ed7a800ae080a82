"""What is raised when ranks disagree, or when one of them is gone: ordinary `RuntimeError`s, on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

# ---- errors ----------------------------------------------------------------------------------------------------------


class PeerFailed(RuntimeError):
    """Another rank raised, was killed, was stopped or ended while this one waits for it.

    `rank`: of the default process group. `step`: optimizer steps that rank had taken. `unit`: what it was
    doing, with the name of the sharded module ("the gather of layers.3"), "" where that is not known. `text`: what that
    rank said.
    """

    def __init__(self, message: str, *, rank: int, step: int = -1, unit: str = "", text: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.unit, self.text = rank, step, unit, text

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PeerFailed, rank=self.rank, step=self.step, unit=self.unit, text=self.text), self.args


class RanksDisagree(RuntimeError):
    """Ranks were about to do different things, or have different models. `by_rank`: what each of them had."""

    def __init__(self, message: str, *, what: str = "", by_rank: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.what, self.by_rank = what, dict(by_rank or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RanksDisagree, what=self.what, by_rank=self.by_rank), self.args


# ---- fault -----------------------------------------------------------------------------------------------------------
# What a rank says to the others when it fails, or what is found out about it.

# A longer text is cut before it is sent: it is for an error message.
TEXT_CHARACTERS = 2000
# What somebody else finds out about a rank, and not the rank itself: it holds for every wait of the epoch.
_FOUND = ("lost", "late", "disagree")


@dataclass(frozen=True)
class Fault:
    """Why waits for `rank` are in vain. `kind`:

        raised     an exception left a step of that rank
        ended      its process ended
        lost       it is gone, stopped or silent: found by another rank
        late       it did not come within the time limit of the process group: found by another rank
        disagree   ranks do different things: found by another rank
        look       none of these: `text` is a process of this machine, which gives no sign of life; look at it

    `scope`, `epoch`: where it counts (scope.py). `issued`: how many messages the rank had sent over each data group of
    that scope, `asked`: how many questions it had answered. Who waits for one of these will get it.
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
    # How many of the rank's guarded blocks had failed, with this one.
    attempts: int = 0
    # The exception is not known yet: it is said again, with that.
    vague: bool = False
    # Of what was found out: by rank, since when it meets after a failure, which is in vain too. That meeting and no
    # other one.
    meets: Mapping[str, float] = field(default_factory=dict)
    # Its process has ended, and was seen to: it will not come back.
    gone: bool = False

    def dumps(self, rank: int = -1) -> str:
        """For `rank`: of the meetings its own. Ten thousand are too many for a text."""
        one = str(rank)
        meets = {one: self.meets[one]} if one in self.meets else {}
        return json.dumps(asdict(replace(self, meets=meets)), separators=(",", ":"))

    @staticmethod
    def loads(text: str | bytes) -> Fault:
        return Fault(**json.loads(text))

    @property
    def is_found(self) -> bool:
        """Whether another rank found it out, so that it holds whatever the rank had sent."""
        return self.kind in _FOUND

    @property
    def message(self) -> str:
        if self.kind in ("lost", "late"):
            return f"rank {self.rank} {self.text}"
        step = f" at step {self.step}" if self.step >= 0 else ""
        doing = f" in {self.doing}" if self.doing else ""
        return f"rank {self.rank} {'ended' if self.kind == 'ended' else 'raised'}{step}{doing}: {self.text}"

    def withholds(self, group: str, number: int) -> bool:
        """Whether message `number` of the data group of that name will not be sent by the rank that failed."""
        return self.is_found or self.issued.get(group, number) < number

    def error(self, waiting: str = "") -> RuntimeError:
        """What the others raise; `waiting`: what this rank is waiting for."""
        if self.kind == "disagree":
            return RanksDisagree(self.text)
        return PeerFailed(
            f"expected every rank to take part in {waiting or 'its next message'}, found that {self.message}",
            rank=self.rank,
            step=self.step,
            unit=self.doing,
            text=self.text,
        )
