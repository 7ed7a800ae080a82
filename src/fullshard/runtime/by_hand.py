"""Gathers that a program makes by hand: `full_params`, and `full_tensor()` or `redistribute()` of a sharded parameter.

DTensor sends these over the mesh's own process groups, which wait for ever where a rank does not come. So they are
compared as the messages of a step are (order.py), each before it is sent: a rank that makes one alone is told, and so
are those that go on in a step.

Compared are those in which all ranks take part that share an order. Not so where only the ranks of one replica do (2-D
meshes): each replica may gather as it likes.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import current_backward
from ..guard import Action, Scope, scope_of
from ..param import Owner, ShardedParam, claim
from .backward_calls import follow_backwards
from .named_refusals import name_refusals
from .names import clean_name, dotted_name
from .order import compare

if TYPE_CHECKING:
    from .root import Root
    from .unit import Unit


class _Owned(Owner):
    """Of a parameter of a unit, which it does not keep: who holds a parameter does not hold the model."""

    def __init__(self, unit: Unit, position: int, param: ShardedParam) -> None:
        self._unit = weakref.ref(unit)
        # Of its group.
        self._position = position
        self._param_name = param.name
        # Its name in the model of this root: looking for it takes a walk over all modules.
        self._named: tuple[weakref.ref[Root], str] | None = None

    def name(self) -> str:
        unit = self._unit()
        if unit is None:
            return self._param_name
        if self._named is not None and self._named[0]() is unit.root:
            return self._named[1]
        name = dotted_name(unit, self._param_name)
        if unit.root is not None:
            self._named = weakref.ref(unit.root), name
        return name

    def before_messages(self, parameter: DTensor, axes: Sequence[int]) -> None:
        unit = self._unit()
        if unit is None:
            return
        scope = scope_of(unit.links[self._position].everyone)
        if scope is not None and set(scope.ranks) <= _ranks_over(parameter, axes):
            shape = "x".join(map(str, parameter.shape)) or "1"
            _compare(unit, scope, Action("full", 0, 0, self.name(), shape))


def own_parameters(unit: Unit) -> None:
    """Let the sharded parameters of `unit` know whose they are."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(unit, position, param)
            claim(param.sharded, param.owner)
    name_refusals()
    follow_backwards()


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
        _compare(here[0], scope, Action("open", 0, 0, known[0], f"{len(here)}*{digest}"))


def _ranks_over(parameter: DTensor, axes: Sequence[int]) -> set[int]:
    """The ranks with which this one exchanges messages over these axes of the parameter's mesh."""
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return set()
    ranks: Tensor = mesh.mesh[tuple(slice(None) if axis in axes else place[axis] for axis in range(mesh.ndim))]
    return set(ranks.flatten().tolist())


def _compare(unit: Unit, scope: Scope, action: Action) -> None:
    root = unit.root
    # Another thread's messages have no place in the order of those of the one that runs the model.
    if scope.watch.settings.mode == "off" or (root is not None and root.thread != threading.get_ident()):
        return
    if current_backward() == -1:
        if root is not None:
            root.meet_by_hand()
        elif scope.must_meet:
            scope.meet()
    compare(scope, action)
