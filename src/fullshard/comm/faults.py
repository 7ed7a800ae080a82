"""What a rank says to the others when it fails, and how they wait for each other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .errors import PeerFailed, RanksDisagree, shown_ranks

# A text longer than this is cut before it is told: it is for an error message.
TEXT_CHARACTERS = 2000


@dataclass(frozen=True)
class Fault:
    """What a rank says when it fails. `kind`: "raised", "followed" (it raised because another one failed), "ended" (its
    process did), "lost" (no sign of life: said by another), "disagree".

    `issued` is how many messages it had sent over each line (lines.py) of the domain: who waits for one of these will
    get it, and who waits for a later one will not.
    """

    rank: int
    kind: str
    text: str
    step: int = -1
    doing: str = ""
    issued: Mapping[str, int] = field(default_factory=dict)
    # And how many questions (`agree`) it had asked.
    asked: int = 0
    # And how many of its guarded blocks had failed, with this one.
    attempts: int = 0

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: bytes) -> Fault:
        return Fault(**json.loads(text))

    @property
    def message(self) -> str:
        if self.kind == "lost":
            return f"rank {self.rank} gave no sign of life {self.text}"
        step = f" at step {self.step}" if self.step >= 0 else ""
        doing = f" in {self.doing}" if self.doing else ""
        how = "ended" if self.kind == "ended" else "raised"
        return f"rank {self.rank} {how}{step}{doing}: {self.text}"

    def withholds(self, line: str, number: int) -> bool:
        """Whether message `number` of `line` will not be sent by the rank that failed."""
        return self.kind in ("lost", "disagree") or self.issued.get(line, number) < number

    def error(self, waiting: str = "") -> RuntimeError:
        """What the others raise; `waiting`: what this rank is waiting for."""
        if self.kind == "disagree":
            return RanksDisagree(self.text)
        what = waiting or "its next message"
        return PeerFailed(
            f"expected every rank to take part in {what}, found that {self.message}",
            rank=self.rank,
            step=self.step,
            unit=self.doing,
            text=self.text,
        )


def about_to(what: str, doing: str, value: str, asking: Sequence[int], here: int) -> str:
    """The error of rank `here`, which waits in `doing` while ranks `asking` ask `what` with `value`."""
    return (
        f"{what}: expected all ranks to do the same, found {shown_ranks(list(asking))} about to do {value}, while rank "
        f"{here} waits in {doing or 'a message'}, as in the steps before; make all ranks run the same modules in the "
        f"same order"
    )


def looks(limit: float = 0.05) -> Iterator[float]:
    """Yield the seconds waited so far: at once and often in the beginning, `limit` apart in the end."""
    begun, pause = time.monotonic(), 0.0
    while True:
        waited = time.monotonic() - begun
        yield waited
        if waited < 0.0003:
            time.sleep(0)
            continue
        pause = min(limit, pause * 1.5 + 0.0001)
        time.sleep(pause)
