"""The other ranks of a root: connections to them that can be aborted, and failure reports when a step fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from ..comm import alike
from ..guard import PeerFailed, RanksDisagree, Scope, had_losses, scope_of, shown_ranks, variants
from .optimizer_facts import refuse_mixed_states
from .optimizer_steps import optimizer_steps
from .unit import Unit, unit_of

# The question of ranks that synchronise through the store.
_TOGETHER = "what ranks come together for"


class Peers:
    """The scopes of `units`, whose root runs in `thread`. `open` connects them."""

    def __init__(self, units: Iterable[Unit], thread: int) -> None:
        self.scopes: list[Scope] = []
        for links in (links for unit in units for links in unit.links):
            scope = scope_of(links.everyone)
            if scope is not None and scope not in self.scopes:
                scope.step = partial(_steps_since, optimizer_steps(thread), thread)
                self.scopes.append(scope)

    def open(self, unit: Unit) -> None:
        """Open missing connections for the groups of `unit`. Collective over each group."""
        for links in unit.links:
            scope = scope_of(links.everyone)
            if scope is not None:
                links.open(scope)

    def publish(self, error: BaseException | None, where: str) -> None:
        """Report that this rank failed: the others raise when they wait for its messages. An error that only follows
        from another rank's failure is not reported again."""
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
        # If any scope has no report yet, ranks that wait there need one.
        known = all(scope.causes() for scope in self.scopes)
        return known and (error is None or isinstance(error, PeerFailed | RanksDisagree))

    def disagree_on(self, scope: Scope, error: RanksDisagree) -> None:
        """`error` was raised on the mesh of `scope`. Report it on the other meshes, whose ranks would wait forever."""
        for other in self.scopes:
            if other is not scope:
                if not other.must_meet:
                    other.publish("disagree", str(error))
                # Report once: the other ranks of `scope` report the same.
                other.has_raised = True

    def attempt_failed(self, error: BaseException, where: str) -> None:
        """`publish` for a guarded block, which all ranks enter equally often."""
        for scope in self.scopes:
            scope.attempts += 1
        self.publish(error, where)

    def come_together(self, what: str) -> None:
        """Wait until all ranks are here. Raises `PeerFailed` if a rank failed, and `RanksDisagree` if a rank is
        elsewhere.

        Done twice: an exception (Ctrl-C) may interrupt a rank after its first message was sent. The others then notice
        that its second message is missing.
        """
        for scope in self.scopes * 2:
            doing, scope.doing = scope.doing, what
            try:
                # By a collective if there are connections on the host, else through the store.
                if not alike(scope, what):
                    answers = scope.agree(_TOGETHER, what)
                    if answers is not None:
                        raise RanksDisagree(_elsewhere(what, answers), what=what, by_rank=answers)
            finally:
                scope.doing = doing

    def compare(self, what: str, said: str, weight: Callable[[str], int]) -> dict[int, str]:
        """The answers of all ranks to `what`, by rank. With several scopes, the answer of the highest `weight` is
        passed on. Collective. Raises `PeerFailed` if a rank failed."""
        found: dict[int, str] = {}
        # Twice, so that answers from one scope reach the ranks of the others.
        for scope in self.scopes * min(len(self.scopes), 2):
            answers = scope.agree(what, said) or dict.fromkeys(scope.ranks, said)
            found |= {rank: answer for rank, answer in answers.items() if weight(answer) >= weight(found.get(rank, ""))}
            said = max(found.values(), key=weight)
        return found

    def meet(self) -> bool:
        """After a failure, wait for all ranks before anything is sent. Returns whether ranks had diverged."""
        for scope in self.scopes:
            try:
                scope.refuse_failure()
            except RanksDisagree as error:
                self.disagree_on(scope, error)
                raise
        if had_losses and any(scope.loss is not None for scope in self.scopes):
            for scope in self.scopes:
                if scope.must_meet and scope.loss is None:
                    scope.note_under_way("a message of another mesh")
        renewed = any([scope.meet() for scope in self.scopes if scope.must_meet])
        refuse_mixed_states(self.scopes)
        return renewed


def _elsewhere(what: str, answers: dict[int, str]) -> str:
    # An answer reads "question: text"; the text may be a digest.
    asked = variants({rank: answer.partition(": ")[0] for rank, answer in answers.items()})
    found = " and ".join(f"{shown_ranks(ranks)} at {what if one == _TOGETHER else one}" for one, ranks in asked.items())
    return f"expected all ranks at {what}, found {found}; make all ranks take the same calls in the same order"


def _steps_since(before: int, thread: int) -> int:
    return optimizer_steps(thread) - before


def peers_below(*models: nn.Module) -> Peers:
    """The peers of all units of `models`, with or without a root yet. Raises `ValueError` for a model without units."""
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
    if not scopes:  # no root formed yet
        scopes = [scope for unit in units for links in unit.links if (scope := scope_of(links.everyone))]
    found.scopes = list(dict.fromkeys(scopes))
    return found
