"""The tables of torch's schedules: what each rank of a pipeline does, action by action, in torch's words.

A schedule with several stages on a rank has such a table itself, with its messages and the parameters that it frees.
`1F1B` and `GPipe` run without one (torch's `_get_pipeline_order` of 1F1B leaves out the first micro-batch of the last
rank), so theirs are written here as these schedules run. Source: torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..keys import ConfigError
from .schedules import Schedule, stages_of


class _Stage:
    """Has what a schedule of torch reads of a stage before it runs."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, 0, ranks, stages
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, False
        self.device, self.group, self.submod = "cpu", None, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def rows_of(schedule: Schedule, degree: int, each: int, number: int) -> tuple[tuple[str, ...], ...]:
    """The rows of `degree` ranks with `each` stages, for `number` micro-batches; messages included. A word is an action
    of torch, such as "0F1", "0SEND_F1" or "0REDUCE_GRAD", and "0SENT", where a rank waits until what it sent is there.
    Raises `ConfigError` for a number that the schedule does not take.

    >>> from .schedules import SCHEDULES
    >>> " ".join(rows_of(SCHEDULES["GPipe"], 2, 1, 2)[1])
    '1RECV_F0 1F0 1RECV_F1 1F1 1SENT 1B0 1SEND_B0 1B1 1SEND_B1 1SENT 1REDUCE_GRAD'
    """
    if problem := schedule.problem(number, degree, degree * each):
        raise ConfigError(f"pipeline: {number} micro-batches: {problem}")
    if schedule.stages == 1:
        row = _gpipe if schedule.name == "GPipe" else _one_f_one_b
        return tuple(tuple(row(rank, degree, number)) for rank in range(degree))
    # It brings torch's compiler: imported where there is a pipeline.
    from torch.distributed.pipelining.schedules import get_schedule_class

    own: Any = [_Stage(index, degree, degree * each) for index in stages_of(0, degree, each, schedule)]
    kind: Any = get_schedule_class(schedule.name)
    order = kind(own, number, loss_fn=lambda *_: None).pipeline_order_with_comms
    return tuple(tuple(word for action in order[rank] for word in _words(action)) for rank in range(degree))


def _words(action: Any) -> Iterator[str]:
    """Two actions that overlap run one after the other where nothing else is asked for."""
    for inner in getattr(action, "sub_actions", None) or ():
        yield from _words(inner)
    if not getattr(action, "sub_actions", None):
        yield str(action)


def _gpipe(rank: int, degree: int, number: int) -> Iterator[str]:
    for micro in range(number):
        yield from _forward(rank, degree, micro)
    yield f"{rank}SENT"
    for micro in range(number):
        yield from _backward(rank, degree, micro)
    yield f"{rank}SENT"
    yield f"{rank}REDUCE_GRAD"


def _one_f_one_b(rank: int, degree: int, number: int) -> Iterator[str]:
    """Forwards until the last rank has one; then a backward and a forward in turn, with their messages together; then
    the other backwards."""
    first = min(number, degree - rank)
    for micro in range(first):
        yield from _forward(rank, degree, micro)
    for micro in range(number):
        # The messages of the last forward and of this backward are waited for together; later that of the backward
        # before this one.
        is_last = micro + first > number
        yield from _backward(rank, degree, micro, before=not is_last, between=is_last)
        if micro + first < number:
            yield f"{rank}SENT"
            yield from _forward(rank, degree, micro + first)
    yield f"{rank}SENT"
    yield f"{rank}REDUCE_GRAD"


def _forward(rank: int, degree: int, micro: int) -> Iterator[str]:
    if rank:
        yield f"{rank}RECV_F{micro}"
    yield f"{rank}F{micro}"
    if rank < degree - 1:
        yield f"{rank}SEND_F{micro}"


def _backward(rank: int, degree: int, micro: int, *, before: bool = False, between: bool = False) -> Iterator[str]:
    """`before`, `between`: waits until what was sent is there, before the backward and before its own message."""
    if before:
        yield f"{rank}SENT"
    if rank < degree - 1:
        yield f"{rank}RECV_B{micro}"
    yield f"{rank}B{micro}"
    if between:
        yield f"{rank}SENT"
    if rank:
        yield f"{rank}SEND_B{micro}"
