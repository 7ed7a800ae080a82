"""Pipelines as numbers: the schedules of torch with their rules, who has which stages, and balanced parts. No torch.

A pipeline has `degree` ranks with one or several *stages* each. In a loop rank r has the stages r, r + degree, ...; in
the shape of a V it has r and the r-th from the end, so that the first rank has the first and the last stage.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..keys import ConfigError, invalid

_KEY = "parallelism.pipeline_parallel_schedule"


@dataclass(frozen=True, slots=True)
class Schedule:
    """name: torch's, for `get_schedule_class`. stages: how many a rank has; 0 for any number. v: in the shape of a V.
    splits: whether gradients of inputs and of weights are computed apart, which needs weights that stay full."""

    name: str
    stages: int = 0
    v: bool = False
    splits: bool = False

    def problem(self, micro_batches: int, degree: int, stages: int) -> str:
        """Says what is wrong with so many micro-batches on `degree` ranks with `stages` in all; "" if nothing is."""
        if self.name in ("1F1B", "DualPipeV") and micro_batches < stages:
            return f"{self.name} needs at least as many as there are stages, {stages}"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            rounds = max(1, micro_batches // degree)
            if micro_batches % rounds:
                return f"{self.name} runs them in {rounds} rounds, one for each {degree}, which have to be equal"
        return ""

    def numbers(self, samples: int, degree: int, stages: int) -> list[int]:
        """The legal numbers of micro-batches for `samples` samples."""
        divisors = (n for n in range(1, samples + 1) if samples % n == 0)
        return [n for n in divisors if not self.problem(n, degree, stages)]


SCHEDULES = {
    found.name: found
    for found in (
        Schedule("1F1B", 1),
        Schedule("GPipe", 1),
        Schedule("Interleaved1F1B"),
        Schedule("LoopedBFS"),
        Schedule("InterleavedZeroBubble", splits=True),
        Schedule("ZBVZeroBubble", 2, v=True, splits=True),
        Schedule("DualPipeV", 2, v=True, splits=True),
    )
}


def find_schedule(name: Any) -> Schedule:
    """The schedule of that name, in torchtitan's words or as torch's class or its name. Raises `ConfigError`."""
    text = getattr(name, "__name__", name)
    folded = {known.lower(): schedule for known, schedule in SCHEDULES.items()}
    if isinstance(text, str):
        short = text.lower().removeprefix("schedule")
        if short in folded:
            return folded[short]
        close = difflib.get_close_matches(short, folded, n=1, cutoff=0.0)[0]
        raise invalid(_KEY, text, f"expected one of {', '.join(SCHEDULES)}", f'"{folded[close].name}"')
    raise invalid(_KEY, text, "expected the name of a schedule", '"1F1B"')


def stages_per_rank(schedule: Schedule, asked: int) -> int:
    """How many stages each rank has; `asked`: 0 for what the schedule wants. Raises `ConfigError`."""
    if asked and schedule.stages and asked != schedule.stages:
        problem = f"{schedule.name} has {schedule.stages} on each rank"
        raise invalid("parallelism.pipeline_parallel_stages_per_rank", asked, problem, str(schedule.stages))
    return asked or schedule.stages or 2


def stages_of(place: int, degree: int, each: int, schedule: Schedule) -> tuple[int, ...]:
    """The stages of the rank at `place` of the pipeline.

    >>> stages_of(0, 2, 2, SCHEDULES["ZBVZeroBubble"])
    (0, 3)
    """
    if schedule.v:
        return place, 2 * degree - 1 - place
    return tuple(range(place, degree * each, degree))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a module. work: elements that multiply each token, so that a lookup in a table costs nothing; size:
    all of its elements."""

    work: int
    size: int


def balanced(costs: Sequence[Cost], parts: int) -> list[int]:
    """Where each of `parts` runs of `costs` begins, none of them empty: the most work of a part is as small as it can
    be, and among those the largest size of a part.

    >>> balanced([Cost(0, 9), Cost(4, 4), Cost(4, 4), Cost(4, 4), Cost(4, 4)], 2)
    [0, 3]
    """
    if len(costs) < parts:
        raise ValueError(f"expected at least {parts} modules, found {len(costs)}")
    most = _least_largest([cost.work for cost in costs], [math.inf] * len(costs), parts, math.inf)[0]
    return _least_largest([cost.size for cost in costs], [cost.work for cost in costs], parts, most)[1]


def _least_largest(sizes: Sequence[int], limited: Sequence[float], parts: int, limit: float) -> tuple[float, list[int]]:
    """The smallest largest sum of `sizes` over a part, where the sum of `limited` is at most `limit`; and the first of
    the divisions that have it, in which earlier parts are as long as they can be."""
    count = len(sizes)
    # best[k][i]: of the first i in k parts, and where the last of these begins.
    best: list[list[tuple[float, int]]] = [[(math.inf, 0)] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, parts + 1):
        for end in range(k, count + 1):
            size, held = 0.0, 0.0
            for begin in range(end - 1, k - 2, -1):
                size, held = size + sizes[begin], held + limited[begin]
                if held > limit:
                    break
                largest = max(best[k - 1][begin][0], size)
                if largest < best[k][end][0]:
                    best[k][end] = (largest, begin)
    begins, end = [], count
    for k in range(parts, 0, -1):
        end = best[k][end][1]
        begins.append(end)
    return best[parts][count][0], begins[::-1]


def parts_of(value: Any) -> tuple[tuple[str, ...], ...]:
    """`module_fqns_per_model_part` as it is kept. Raises `ConfigError` for anything but lists of names."""
    name = "parallelism.module_fqns_per_model_part"
    if not isinstance(value, (list, tuple)):
        raise invalid(
            name, value, "expected a list with the names of modules for each stage", '[["embedding"], ["head"]]'
        )
    for number, part in enumerate(value):
        if not isinstance(part, (list, tuple)) or not part or not all(isinstance(each, str) and each for each in part):
            raise invalid(f"{name}[{number}]", part, "expected a list with names of modules", '["layers.0"]')
    names = [each for part in value for each in part]
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise ConfigError(f"{name}: expected each module once, found {twice} twice; leave one out")
    return tuple(tuple(part) for part in value)
