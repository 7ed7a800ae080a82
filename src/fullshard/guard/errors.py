"""What is raised when ranks disagree, or when one of them is gone: ordinary `RuntimeError`s, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any


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
