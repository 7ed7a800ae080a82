"""The other ranks of a root: connections to them that can be cut, and what they are told when a step fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from ..comm import alike
from ..guard import PeerFailed, RanksDisagree, Scope, scope_of, shown_ranks, variants
from .optimizer_facts import refuse_mixed_states
from .optimizer_steps import optimizer_steps
from .unit import Unit, unit_of

# What ranks ask each other where they come together without messages.
_TOGETHER = "what ranks come together for"


class Peers:
    """The scopes of `units`, whose root is run by `thread`. `open` connects them."""

    def __init__(self, units: Iterable[Unit], thread: int) -> None:
        self.scopes: list[Scope] = []
        for links in (links for unit in units for links in unit.links):
            scope = scope_of(links.everyone)
            if scope is not None and scope not in self.scopes:
                scope.step = partial(_steps_since, optimizer_steps(thread), thread)
                self.scopes.append(scope)

    def open(self, unit: Unit) -> None:
        """Connections for the groups of `unit` that have none yet; every rank of each of them makes this call."""
        for links in unit.links:
            scope = scope_of(links.everyone)
            if scope is not None:
                links.open(scope)

    def publish(self, error: BaseException | None, where: str) -> None:
        """Tell that this rank failed: the others raise when they wait for what it has not sent. Nothing is said of what
        only followed from another rank's failure: that one is known."""
        text = f"{where} ended with an exception" if error is None else f"{type(error).__name__}: {error}"
        for scope in self.scopes:
            scope.must_meet = scope.has_raised = True
        if any(scope.failure is not None or scope.causes() for scope in self.scopes) and self._follows(error):
            return
        for scope in self.scopes:
            doing, scope.doing = scope.doing, scope.doing or where
            try:
                scope.publish("raised", text, vague=error is None)
            finally:
                scope.doing = doing

    def _follows(self, error: BaseException | None) -> bool:
        # Those who wait in a scope where nobody was told have to hear of it.
        known = all(scope.causes() for scope in self.scopes)
        return known and (error is None or isinstance(error, PeerFailed | RanksDisagree))

    def disagree_on(self, scope: Scope, error: RanksDisagree) -> None:
        """`error` was raised on the mesh of `scope`. Those of the other meshes have nothing to object to, and wait."""
        for other in self.scopes:
            if other is not scope:
                if not other.must_meet:
                    other.publish("disagree", str(error))
                # Once: they tell this rank the same.
                other.has_raised = True

    def attempt_failed(self, error: BaseException, where: str) -> None:
        """`publish` for a block that all ranks enter equally often."""
        for scope in self.scopes:
            scope.attempts += 1
        self.publish(error, where)

    def come_together(self, what: str) -> None:
        """Wait until all ranks are here. Raises `PeerFailed` when one of them will not come, and `RanksDisagree` when
        one is somewhere else.

        Twice: an exception that reaches a rank while it waits (Ctrl-C) may come when its message has gone, and the
        others have it. They then miss its second one, for which nobody waits long.
        """
        for scope in self.scopes * 2:
            doing, scope.doing = scope.doing, what
            try:
                # By messages where there are connections on the host, else through the store.
                if not alike(scope, what):
                    answers = scope.agree(_TOGETHER, what)
                    if answers is not None:
                        raise RanksDisagree(_elsewhere(what, answers), what=what, by_rank=answers)
            finally:
                scope.doing = doing

    def compare(self, what: str, said: str, weight: Callable[[str], int]) -> dict[int, str]:
        """What every rank says of `what`, by rank. Of ranks in several scopes the rest hears the heaviest. Every rank
        makes this call. Raises `PeerFailed` when one of them will not come."""
        found: dict[int, str] = {}
        # Twice, so that what is said in one scope comes to the ranks of the others.
        for scope in self.scopes * min(len(self.scopes), 2):
            answers = scope.agree(what, said) or dict.fromkeys(scope.ranks, said)
            found |= {rank: answer for rank, answer in answers.items() if weight(answer) >= weight(found.get(rank, ""))}
            said = max(found.values(), key=weight)
        return found

    def meet(self) -> bool:
        """After a failure all ranks come together before anything is sent. Whether they were not equally far."""
        for scope in self.scopes:
            try:
                scope.refuse_failure()
            except RanksDisagree as error:
                self.disagree_on(scope, error)
                raise
        renewed = any([scope.meet() for scope in self.scopes if scope.must_meet])
        refuse_mixed_states(self.scopes)
        return renewed


def _elsewhere(what: str, answers: dict[int, str]) -> str:
    # "what is asked: what it is asked for"; of others, a digest.
    asked = variants({rank: answer.partition(": ")[0] for rank, answer in answers.items()})
    found = " and ".join(f"{shown_ranks(ranks)} at {what if one == _TOGETHER else one}" for one, ranks in asked.items())
    return f"expected all ranks at {what}, found {found}; make all ranks take the same calls in the same order"


def _steps_since(before: int, thread: int) -> int:
    return optimizer_steps(thread) - before


def peers_below(*models: nn.Module) -> Peers:
    """Those of all units of `models`: of roots that formed, and of units that did not run yet.

    Raises `ValueError` for a model without units.
    """
    units = []
    for model in models:
        below = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
        if not below:
            raise ValueError(
                f"expected a model that fully_shard was applied to, found a {type(model).__name__} without a sharded "
                f"module"
            )
        units += below
    roots = dict.fromkeys(unit.root for unit in units if unit.root is not None)
    found = Peers((), threading.get_ident())
    scopes = [scope for root in roots for scope in root.scopes]
    if not scopes:  # nothing ran yet
        scopes = [scope for unit in units for links in unit.links if (scope := scope_of(links.everyone))]
    found.scopes = list(dict.fromkeys(scopes))
    return found
