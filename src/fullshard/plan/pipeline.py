"""How long a pipeline's step takes: each rank does its row of a table of actions, and waits for what it needs.

A table has a row for each rank: actions in order, as torch's schedules have them. No formula says what a schedule
wastes: its own table does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Kinds of actions: a forward, a whole backward, and its halves: gradients of inputs, and of weights.
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"


class Action(NamedTuple):
    """One action of a rank: a kind, a stage, and a micro-batch."""

    kind: str
    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one stage and micro-batch: of a forward, of the two halves of a backward, and of a message between
    neighbours, which a rank does not wait for when it sends."""

    forward: float
    inputs: float
    weights: float
    message: float = 0.0

    def of(self, kind: str) -> float:
        return {
            FORWARD: self.forward,
            BACKWARD: self.inputs + self.weights,
            INPUTS: self.inputs,
            WEIGHTS: self.weights,
        }[kind]


class Ran(NamedTuple):
    """A table that ran. `busy`: of each rank, seconds of its actions."""

    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle seconds by busy ones, of the rank that has most to do."""
        return (self.seconds - max(self.busy)) / max(self.busy)


def run_table(table: Sequence[Sequence[Action]], costs: Mapping[int, Costs] | Costs) -> Ran:
    """Run `table`. `costs`: of each stage, or of all. Raises `ValueError` for a table in which ranks wait for each
    other without end, or that lacks what an action needs."""
    rank_of = {(action.stage): rank for rank, row in enumerate(table) for action in row}
    last = max(rank_of)
    known = {action for row in table for action in row}
    halves = {(action.stage, action.micro) for action in known if action.kind == INPUTS}
    done: dict[Action, float] = {}
    at, now, busy = [0] * len(table), [0.0] * len(table), [0.0] * len(table)

    def needs(action: Action) -> tuple[tuple[Action, bool], ...]:
        """Returns what has to be there before, and whether it comes from another stage."""
        kind, stage, micro = action
        own = (Action(FORWARD, stage, micro), False)
        if kind == FORWARD:
            return ((Action(FORWARD, stage - 1, micro), True),) if stage else ()
        if kind == WEIGHTS:
            return ((Action(INPUTS, stage, micro), False),)
        if stage == last:
            return (own,)
        above = INPUTS if (stage + 1, micro) in halves else BACKWARD
        return own, (Action(above, stage + 1, micro), True)

    def cost(stage: int) -> Costs:
        return costs if isinstance(costs, Costs) else costs[stage]

    left = sum(map(len, table))
    while left:
        moved = False
        for rank, row in enumerate(table):
            while at[rank] < len(row):
                action = row[at[rank]]
                before = needs(action)
                if any(each not in done for each, _ in before):
                    break
                # Stages of one rank beside each other send nothing.
                ready = [
                    done[each] + (cost(each.stage).message if other and rank_of[each.stage] != rank else 0.0)
                    for each, other in before
                ]
                seconds = cost(action.stage).of(action.kind)
                now[rank] = max([now[rank], *ready]) + seconds
                busy[rank] += seconds
                done[action] = now[rank]
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            waiting = [row[place] for row, place in zip(table, at, strict=True) if place < len(row)]
            raise ValueError(f"expected a table that ends, found ranks that wait: {', '.join(map(shown, waiting))}")
    return Ran(max(now), tuple(busy))


def one_f_one_b(ranks: int, micros: int) -> tuple[tuple[Action, ...], ...]:
    """The table of 1F1B with one stage on each rank: forwards until the last stage has one, then a backward after each
    forward, then the other backwards. torch runs it so, and has no table of it.

    >>> [" ".join(map(shown, row)) for row in one_f_one_b(2, 2)]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
    """
    table = []
    for rank in range(ranks):
        first = min(ranks - rank, micros)
        row = [Action(FORWARD, rank, micro) for micro in range(first)]
        for micro in range(micros):
            row.append(Action(BACKWARD, rank, micro))
            if micro + first < micros:
                row.append(Action(FORWARD, rank, micro + first))
        table.append(tuple(row))
    return tuple(table)


def shown(action: Action) -> str:
    """
    >>> shown(Action("F", 2, 0))
    '2F0'
    """
    return f"{action.stage}{action.kind}{action.micro}"


def read_table(rows: Sequence[Sequence[str]]) -> tuple[tuple[Action, ...], ...]:
    """A table of torch's words for actions. Empty words are pauses that it draws; reductions of gradients belong to
    data parallelism.

    >>> read_table([["0F0", "", "0B0", "0REDUCE_GRAD"]])
    ((Action(kind='F', stage=0, micro=0), Action(kind='B', stage=0, micro=0)),)
    """
    return tuple(tuple(_read(word) for word in row if word and not word.endswith("REDUCE_GRAD")) for row in rows)


def _read(word: str) -> Action:
    kind = next((kind for kind in (FORWARD, BACKWARD, INPUTS, WEIGHTS) if kind in word), "")
    stage, _, micro = word.partition(kind) if kind else ("", "", "")
    if not (stage.isdigit() and micro.isdigit()):
        raise ValueError(f"expected an action such as 0F0, 1B2, 1I2 or 1W2, found {word!r}")
    return Action(kind, int(stage), int(micro))
