"""Brings the records of a pipeline together: each part of it wrote the tensors of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

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


# What is said of a parameter that stages share.
SHARED = "another stage of the pipeline has this parameter with other values"


class Entry(NamedTuple):
    """A tensor of a record. `name`: of the parameter, or of a tensor of its optimizer state."""

    phase: str
    name: str
    value: Tensor


def tensors_of(record: Step) -> list[Entry]:
    """The tensors of a record."""
    found = [Entry("backward", name, value) for name, value in record.gradients.items() if value is not None]
    found += [Entry("optimizer step", *item) for item in record.parameters.items()]
    for name, entries in record.state.items():
        tensors = {f"{name}.{key}": value for key, value in entries.items() if isinstance(value, Tensor)}
        found += [Entry("optimizer state", *item) for item in tensors.items()]
    return found


def shared_in(
    records: Sequence[Sequence[Entry]], setting: Setting
) -> Iterator[tuple[tuple[str, str, Tensor, Tensor], int]]:
    """((phase, name, value, that of the first stage with it), rank) of what several stages hold, of `records` of all
    ranks. They are to be the same bits."""
    known = dict[tuple[str, str], Tensor]()
    for rank, record in enumerate(records):
        for phase, name, value in record if setting.leads(rank) else ():
            wanted = known.setdefault((phase, name), value)
            if wanted is not value:
                yield (phase, name, value, wanted), rank
