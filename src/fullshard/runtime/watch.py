"""Weights that are read in backward although no gradient of a unit's output announced it.

Usually the first thing a backward does with a unit is to bring a gradient to one of its outputs, and a hook there
gathers the parameters in time. Valid programs do otherwise: a loss on an intermediate, an output hidden in an object,
an output edited in place. What every program has in common is that the saved weight is *unpacked*. So during a unit's
first forwards its saved tensors go through hooks: weights become tokens, and unpacking a token gathers the unit. A
unit for which this was ever needed stays watched; the others go without, because the hooks cost about ten microseconds
for each saved tensor, as much as everything else together (ADR 0007).

Someone else's hooks (recomputation, offloading of activations) are never hidden: while they are active, nothing is
watched. Recomputation runs the unit's forward again, which gathers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .._torch_compat import (
    base_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    top_saved_tensor_hooks,
    version_of,
)
from .outside import outside_graphs
from .unit import Unit


class _Weight(NamedTuple):
    """A saved full parameter, or a view of one."""

    unit: Unit
    tensor: Tensor


class _Activation(NamedTuple):
    """Any other saved tensor. Hooks switch off autograd's check for later edits, so the version is kept here."""

    tensor: Tensor
    version: int


class Watch:
    """The saved-tensor hooks of one root. `needed(unit)`, a method, is called when a token of `unit` is unpacked.

    Keeps neither the root nor its units: a message that is issued while hooks are active keeps them, as gloo has it,
    and what keeps the message would never be collected.
    """

    def __init__(self, needed: Callable[[Unit], None], *, always: bool) -> None:
        self._needed = weakref.WeakMethod(needed)
        self._always = always
        # One pair of objects, so that it can be recognised on torch's stack of hooks.
        self._hooks = (outside_graphs(self._pack), outside_graphs(self._unpack))
        self._owner: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._active = 0

    def learn(self, unit: Unit) -> None:
        """`unit`'s full parameters may be new objects."""
        for key in [key for key, owner in self._owner.items() if owner is unit]:
            del self._owner[key]
        for group in unit.groups:
            for key in group.full_ids:
                self._owner[key] = unit

    def begin(self, unit: Unit) -> bool:
        """A forward of `unit` with gradients begins; whether `end` has to be called after it."""
        unit.is_watched = False
        if unit.watched <= 0 or not unit.releases or not saved_tensor_hooks_allowed():
            return False
        if not (unit.irregular or self._always):
            unit.watched -= 1
        top = top_saved_tensor_hooks()
        if top is not None:
            # Our own of an enclosing unit know the weights of all units; somebody else's are not to be hidden.
            unit.is_watched = top[0] is self._hooks[0]
            return False
        unit.is_watched = True
        push_saved_tensor_hooks(*self._hooks)
        self._active += 1
        return True

    def end(self) -> None:
        """The forward is over, also when it raised."""
        pop_saved_tensor_hooks()
        self._active -= 1

    def reset(self) -> None:
        """A forward ended without its hooks (KeyboardInterrupt): take back what it left."""
        while self._active:
            self.end()

    def _pack(self, tensor: Tensor) -> object:
        # A view made without gradients, as functions with a backward of their own and compiled ones do, is a leaf too.
        base = base_of(tensor)
        unit = self._owner.get(id(tensor if base is None else base))
        if unit is not None:
            return _Weight(unit, tensor if tensor.is_leaf else tensor.detach())
        if tensor.is_leaf:
            return _Activation(tensor, version_of(tensor))
        # Detached, or an output saved by its own node would keep that node and all before it alive.
        return _Activation(tensor.detach(), version_of(tensor))

    def _unpack(self, saved: object) -> Tensor:
        if isinstance(saved, _Weight):
            needed = self._needed()
            assert needed is not None  # the unit of the token keeps its root
            needed(saved.unit)
            return saved.tensor
        assert isinstance(saved, _Activation)
        if version_of(saved.tensor) != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"expected version {saved.version} of a tensor of shape {tuple(saved.tensor.shape)} and dtype "
                f"{saved.tensor.dtype}, found version {version_of(saved.tensor)}; clone it before the edit, or enable "
                f"torch.autograd.set_detect_anomaly(True) to see where it was used"
            )
        return saved.tensor
