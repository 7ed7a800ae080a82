"""Optimizer steps that the shards of one mesh took, as every rank counts them: they have to be as many on all ranks.

Nothing compares them in a step that goes well: what follows would not fit. But a rank that raises in its
`optimizer.step()`, where others took theirs, is a step behind for ever once all have caught that and continue. So ranks
tell each other how many they have when they come together after a failure; and whether one of them was left in the
middle, which nobody can put back. Then every forward of the model raises, on all ranks, until they have a state again
that was one: by a load, or because the user says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..guard import RanksDisagree, Scope, scope_of, shown_ranks
from ..param import Owner
from .unit import Unit

_HALF = "+"


class StepsTaken:
    """On one mesh, since a state was loaded there. `half`: the optimizer that was left in the middle of a step.
    `source`: what was loaded, where somebody said so."""

    def __init__(self) -> None:
        self.count = 0
        self.half = self.source = ""

    def word(self) -> str:
        """For `Scope.state`."""
        return f"{self.count}{_HALF}{self.half}" if self.half else str(self.count)

    def forget(self, source: str) -> None:
        """A whole state is there."""
        self.count, self.half, self.source = 0, "", source or self.source


_taken: weakref.WeakKeyDictionary[Scope, StepsTaken] = weakref.WeakKeyDictionary()


def steps_taken(scope: Scope) -> StepsTaken:
    """Those of the mesh of `scope`."""
    found = _taken.get(scope)
    if found is None:
        found = _taken[scope] = StepsTaken()
        scope.state = found.word
    return found


def refuse_mixed_states(scopes: Iterable[Scope]) -> None:
    """Raise `RanksDisagree` on all ranks of a scope that had not all taken the same steps when they met the last time.
    They meet again before the next forward."""
    for scope in scopes:
        if len(scope.states) > 1 or any(_HALF in state for state in scope.states):
            scope.must_meet = True
            raise _error(scope.states)


def _error(states: Mapping[str, list[int]]) -> RanksDisagree:
    told = []
    for state, ranks in states.items():
        count, _, half = state.partition(_HALF)
        middle = f", and the middle of one of {half}," if half else ""
        told.append(f"{count or '0'}{middle} on {shown_ranks(ranks)}")
    return RanksDisagree(
        f"expected all ranks to have taken the same optimizer steps since the last load, found {' and '.join(told)}: a "
        f"rank raised where others took their step, and the parameters are those of several steps; load a checkpoint "
        f"on all ranks (fullshard.checkpoint.load, or load_state_dict of the model), or bring back the state yourself "
        f"and say so with fullshard.mark_restored(model)",
        what="optimizer steps",
        by_rank={rank: state for state, ranks in states.items() for rank in ranks},
    )


def units_restored(units: Iterable[Unit], source: str = "") -> None:
    """The shards of `units` were loaded, or are whole for another reason."""
    _forget((links.everyone for unit in units for links in unit.links), source)


def tensors_restored(tensors: Iterable[Tensor], source: str = "") -> int:
    """Those of `tensors` that are sharded parameters, or values of a state dict of theirs, were loaded; how many."""
    owners = [owner for owner in map(Owner.of, tensors) if owner is not None]
    _forget((owner.ranks for owner in owners), source)
    return len(owners)


def _forget(meshes: Iterable[tuple[int, ...]], source: str) -> None:
    for ranks in dict.fromkeys(meshes):
        scope = scope_of(ranks)
        if scope is not None:
            steps_taken(scope).forget(source)
