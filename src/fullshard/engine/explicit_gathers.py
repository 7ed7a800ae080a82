"""What a user does with sharded parameters explicitly, as the ranks compare it: `full_params`, and steps of optimizers.

`full_params` is compared before it is sent, like the messages of a step (order.py): one that a rank enters alone raises
on all ranks. The steps of an optimizer are reported to the order of the ranks that share its parameters, as long as it
holds them, even after their model is gone: garbage collection differs between ranks.

`full_tensor()` and `redistribute()` of a parameter are DTensor's, over the user's process group (ADR 0016): a rank
that is alone in one is named to those that wait for it (guard/diagnosis.py).
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import current_backward
from ..guard import Action, Scope, is_current, scope_of
from ..param import Owner, claim
from .misuse import clean_name, parameter_names
from .optimizer_steps import tell_each_step
from .order import changes_parameters, compare, note_stepped
from .recovery import lost_error
from .unit import AnyRoot, Unit


class _Formed:
    """The thread that runs a root, and its scopes: kept as long as any of its parameters is held."""

    def __init__(self, thread: int, scopes: Iterable[Scope]) -> None:
        self.thread = thread
        # Weak: the watch of their process group keeps them as long as it exists.
        self.scopes = [weakref.ref(scope) for scope in scopes]


class _Owned(Owner):
    """The owner of one parameter. Knows no unit: holding a parameter must not hold the model."""

    formed: _Formed | None = None


def own_parameters(unit: Unit) -> None:
    """Attach an owner to each sharded parameter of `unit`."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(param.name, unit.links[position].everyone)
            claim(param.sharded, param.owner)


def own_by_root(root: AnyRoot, *, compares_order: bool) -> None:
    """`root` formed: name its parameters as its model does. `compares_order`: report their optimizer steps to the
    order of messages."""
    names = parameter_names(root.units[0].module, root.units)
    formed = _Formed(root.thread, root.scopes)
    for param, name in names.items():
        if isinstance(param.owner, _Owned):
            param.owner.name, param.owner.formed = name, formed
    if compares_order:
        tell_each_step(_optimizer_stepped)


def _optimizer_stepped(optimizer: Optimizer) -> None:
    roots: dict[_Formed, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # `Owner.of`, without a call for each parameter in each step.
            owner = getattr(parameter.untyped_storage(), Owner.ATTRIBUTE, None) if type(parameter) is DTensor else None
            if isinstance(owner, _Owned) and owner.formed is not None:
                roots[owner.formed] = None
    thread = threading.get_ident()
    scopes: dict[Scope, None] = {}
    for formed in roots:
        if formed.thread == thread:
            for reference in formed.scopes:
                scope = reference()
                if scope is not None and is_current(scope.watch):
                    scopes[scope] = None
    if scopes and changes_parameters(optimizer):
        for scope in scopes:
            note_stepped(scope, thread)


def before_opening(model: nn.Module, units: Iterable[Unit]) -> None:
    """All ranks are about to gather `units` of `model` for `full_params`. Raises like `compare`, and if it is lost."""
    names = {module: clean_name(name) or "root" for name, module in model.named_modules()}
    opened: dict[Scope, list[Unit]] = {}
    for unit in units:
        for scope in dict.fromkeys(scope_of(links.everyone) for links in unit.links):
            if scope is not None:
                opened.setdefault(scope, []).append(unit)
    for scope, here in opened.items():
        known = [names.get(unit.module, "?") for unit in here]
        digest = hashlib.blake2s("\n".join(known).encode(), digest_size=6).hexdigest()
        thread = None if here[0].root is None else here[0].root.thread
        _compare(here[0], scope, thread, Action("open", 0, 0, known[0], f"{len(here)}*{digest}"))
        if scope.loss is not None:
            raise lost_error(scope)


def _compare(unit: Unit | None, scope: Scope, thread: int | None, action: Action) -> None:
    """`thread`: runs the model. `unit`: of the model, if it still exists."""
    # Messages of other threads are not part of the order of the model's thread.
    if scope.watch.settings.mode == "off" or thread not in (None, threading.get_ident()):
        return
    if current_backward() == -1 and scope.must_meet:
        renewed = scope.resume()
        if unit is not None and unit.root is not None:
            unit.root.met_by_hand(renewed=renewed)
    compare(scope, action)
