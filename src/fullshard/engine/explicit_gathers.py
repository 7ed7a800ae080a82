"""Gathers that a program makes by hand: `full_params`, and `full_tensor()` or `redistribute()` of a sharded parameter.

DTensor sends these over the mesh's own process groups, which wait for ever where a rank does not come. So they are
compared as the messages of a step are (order.py), each before it is sent: a rank that makes one alone is told, and so
are those that continue in a step. And an optimizer's step is told to the order of those whose parameters it has.

Who holds a parameter takes part, whatever became of its model: when Python collects that is no matter of the ranks.

Compared are those in which all ranks take part that share an order. Not so where only the ranks of one replica do (2-D
meshes): each replica may gather as it likes.
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
from .unit import AnyRoot, Unit


class _Formed:
    """What of a root counts as long as one of its parameters is held: the thread that runs it, and its scopes."""

    def __init__(self, thread: int, scopes: Iterable[Scope]) -> None:
        self.thread = thread
        # Kept by the watch of their process group, as long as that is there.
        self.scopes = [weakref.ref(scope) for scope in scopes]


class _Owned(Owner):
    """Of a parameter of a unit, which it does not keep: who holds a parameter does not hold the model."""

    def __init__(self, unit: Unit, position: int, param: ShardedParam) -> None:
        # For what a failed step left in it, of which the other ranks know nothing.
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
    """Let the sharded parameters of `unit` know whose they are."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(unit, position, param)
            claim(param.sharded, param.owner)


def own_by_root(root: AnyRoot, *, compares_order: bool) -> None:
    """`root` formed: from now on its parameters are known by their names in its model, and their optimizer's steps
    count where ranks compare what they are about to send."""
    names = parameter_names(root.units[0].module, root.units)
    formed = _Formed(root.thread, root.scopes)
    for param, name in names.items():
        if isinstance(param.owner, _Owned):
            param.owner.dotted, param.owner.formed = name, formed
    if compares_order:
        tell_each_step(_optimizer_stepped)


def _optimizer_stepped(optimizer: Optimizer) -> None:
    owners = [Owner.of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    thread = threading.get_ident()
    scopes: dict[Scope, None] = {}
    for formed in {owner.formed for owner in owners if isinstance(owner, _Owned)}:
        if formed is not None and formed.thread == thread:
            here = (scope() for scope in formed.scopes)
            scopes |= dict.fromkeys(scope for scope in here if scope is not None and is_current(scope.watch))
    if scopes and changes_parameters(optimizer):
        for scope in scopes:
            note_stepped(scope, thread)


def before_opening(model: nn.Module, units: Iterable[Unit]) -> None:
    """`units`, of `model`, are about to be gathered for `full_params`, on every rank. Raises as `compare`."""
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


def _ranks_over(parameter: DTensor, axes: Sequence[int]) -> set[int]:
    """The ranks with which this one exchanges messages over these axes of the parameter's mesh."""
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return set()
    ranks: Tensor = mesh.mesh[tuple(slice(None) if axis in axes else place[axis] for axis in range(mesh.ndim))]
    return set(ranks.flatten().tolist())


def _compare(unit: Unit | None, scope: Scope, thread: int | None, action: Action) -> None:
    """`thread`: runs the model. `unit`: of the model, if that is still there."""
    # Another thread's messages have no place in the order of those of the one that runs the model.
    if scope.watch.settings.mode == "off" or thread not in (None, threading.get_ident()):
        return
    if current_backward() == -1 and scope.must_meet:
        renewed = scope.resume()
        if unit is not None and unit.root is not None:
            unit.root.met_by_hand(renewed=renewed)
    compare(scope, action)
