"""Explicit gathers: `full_params`, and `full_tensor()` or `redistribute()` of a sharded parameter.

DTensor sends these over the process groups of the mesh, which hang if a rank does not take part. So each is compared
before it is sent, like the messages of a step (order.py): a gather that one rank makes alone raises on all ranks. The
steps of an optimizer are reported to the order of the ranks that share its parameters.

This works as long as a parameter is held, even after its model is gone: garbage collection differs between ranks.

Only gathers over all ranks of an order are compared. On 2-D meshes each replica may gather independently.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import current_backward
from ..guard import Action, Scope, is_current, scope_of
from ..param import Owner, ShardedParam, claim
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
    """The owner of one parameter of a unit. Holds the unit weakly: holding a parameter must not hold the model."""

    def __init__(self, unit: Unit, position: int, param: ShardedParam) -> None:
        # To clean up after a failed step before the gather.
        self._unit = weakref.ref(unit)
        self.ranks = unit.links[position].everyone
        self.dotted = param.name
        self.formed: _Formed | None = None

    def name(self) -> str:
        return self.dotted

    def around(self) -> str:
        unit = self._unit()
        return "its module" if unit is None else f"{unit.record.name} ({type(unit.module).__name__})"

    def before_messages(self, parameter: DTensor, axes: Sequence[int]) -> None:
        scope = scope_of(self.ranks)
        if scope is not None and set(scope.ranks) <= _ranks_over(parameter, axes):
            shape = "x".join(map(str, parameter.shape)) or "1"
            thread = None if self.formed is None else self.formed.thread
            _compare(self._unit(), scope, thread, Action("full", 0, 0, self.dotted, shape))


def own_parameters(unit: Unit) -> None:
    """Attach an owner to each sharded parameter of `unit`."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(unit, position, param)
            claim(param.sharded, param.owner)


def own_by_root(root: AnyRoot, *, compares_order: bool) -> None:
    """`root` formed: name its parameters as its model does. `compares_order`: report their optimizer steps to the
    order of messages."""
    names = parameter_names(root.units[0].module, root.units)
    formed = _Formed(root.thread, root.scopes)
    for param, name in names.items():
        if isinstance(param.owner, _Owned):
            param.owner.dotted, param.owner.formed = name, formed
    if compares_order:
        tell_each_step(_optimizer_stepped)


def _optimizer_stepped(optimizer: Optimizer) -> None:
    roots: dict[_Formed, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = parameter.__dict__.get(Owner.ATTRIBUTE)
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


def _ranks_over(parameter: DTensor, axes: Sequence[int]) -> set[int]:
    """The ranks with which this one exchanges messages over these axes of the parameter's mesh."""
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return set()
    ranks: Tensor = mesh.mesh[tuple(slice(None) if axis in axes else place[axis] for axis in range(mesh.ndim))]
    return set(ranks.flatten().tolist())


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
