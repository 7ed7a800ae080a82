"""Compares an unexpected message with the other ranks before it is sent (`Order`, ledger.py)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from .._torch import current_backward
from ..comm import alike
from ..engine.names import clean_name
from ..engine.unit import Unit
from ..peers import RanksDisagree, Scope, scope_of
from .differences import deviation, disagreement, phrase
from .ledger import Action, Order, Program, program_of, read_question
from .recovery import lost_error

_QUESTION = "order"


def order_on(scope: Scope) -> Program:
    """The program of `scope`, whose waits are explained from now on by the order of messages."""
    scope.explained_by[_QUESTION] = _while_waiting
    return program_of(scope)


def _while_waiting(question: str, asking: Sequence[int], here: int, where: str) -> str:
    return deviation(read_question(question), asking, here, where)


def compare_action(
    scope: Scope,
    order: Order,
    action: Action,
    *,
    in_band: bool = True,
    later: Callable[[int, Action], None] | None = None,
) -> None:
    """Compare an unexpected `action` with the other ranks; raises `RanksDisagree` on all if they differ.

    `in_band=False`: use no collective, for programs that count them. `later`: takes actions that are compared when a
    reduction arrives, so that the host need not wait for a device."""
    # What is in doubt is compared by a small message or not at all.
    expected = order.expected(doubts=in_band and later is None)
    if later is not None and expected is None:
        later(order.place, action)
        order.enter(action)
        return
    doing, scope.doing = scope.doing, f"a comparison, about to {phrase(action)}"
    try:
        if in_band and expected is None and alike(scope, f"{order.place}: {action}"):
            order.enter(action)
            return
        answers = scope.agree(_QUESTION, order.question(action).text)
    finally:
        scope.doing = doing
    if answers is None:
        order.enter(action)
        return
    # Some ranks may have sent messages that others did not.
    scope.failures.must_meet = True
    questions = {rank: read_question(text) for rank, text in answers.items()}
    raise RanksDisagree(disagreement(questions), what=_QUESTION, by_rank=answers)


# ---- full params -----------------------------------------------------------------------------------------------------
# `full_params` is compared before it is sent, like the messages of a step: one that a rank enters alone raises on all
# ranks.
#
# `full_tensor()` and `redistribute()` of a parameter are DTensor's, over the user's process group (ADR 0016): a rank
# that is alone in one is named to those that wait for it (peers/diagnosis.py).


def before_opening(model: nn.Module, units: Iterable[Unit]) -> None:
    """All ranks are about to gather `units` of `model` for `full_params`.

    Raises `RanksDisagree` on all ranks of a mesh if one of them is about to send something else, or if the model is
    lost, and `PeerFailed` if a rank failed."""
    names = {module: clean_name(name) or "root" for name, module in model.named_modules()}
    opened: dict[Scope, list[Unit]] = {}
    for unit in units:
        for scope in dict.fromkeys(scope_of(links.everyone) for links in unit.links):
            if scope is not None:
                opened.setdefault(scope, []).append(unit)
    for scope, here in opened.items():
        known = [names.get(unit.module, "?") for unit in here]
        digest = hashlib.blake2s("\n".join(known).encode(), digest_size=6).hexdigest()
        _compare_opening(here[0], scope, Action("open", "0", 0, known[0], f"{len(here)}*{digest}"))
        if scope.losses.current is not None:
            raise lost_error(scope)


def _compare_opening(unit: Unit, scope: Scope, action: Action) -> None:
    # Messages of other threads are not part of the order of the model's thread.
    root = unit.root
    if scope.watch.settings.mode == "off" or (root is not None and root.thread != threading.get_ident()):
        return
    if current_backward() == -1 and scope.failures.must_meet:
        renewed = scope.resume()
        if root is not None:
            root.met_by_hand(renewed=renewed)
    order = order_on(scope).order
    if not order.follows(action):
        compare_action(scope, order, action)
