"""Brings the records of a pipeline together: each part of it wrote the tensors of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .setting import Setting
from .subject import Before, Step

R = TypeVar("R")


def of_pipelines(records: Sequence[R], setting: Setting, merge: Callable[[Sequence[R]], R]) -> list[R]:
    """`records` of all ranks, the first with what its whole pipeline has."""
    stride = setting.world // setting.strategy.pipeline
    if stride == setting.world:
        return list(records)
    return [merge(records[::stride]), *records[1:]]


def merged_before(records: Sequence[Before]) -> Before:
    """The first of `records` with the parameters of all of them."""
    parameters, cuts = dict[str, Tensor](), dict[str, int]()
    for record in records:
        parameters |= record.parameters
        cuts |= record.cuts
    stages = {name: number for record in records for name, number in record.stages.items()}
    return records[0]._replace(parameters=parameters, cuts=cuts, stages=stages)


def merged_step(records: Sequence[Step]) -> Step:
    """The first of `records` with the gradients, parameters and state of all of them."""
    gradients: dict[str, Tensor | None] = {}
    parameters, state = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for record in records:
        gradients |= record.gradients
        parameters |= record.parameters
        state |= record.state
    return records[0]._replace(gradients=gradients, parameters=parameters, state=state)
