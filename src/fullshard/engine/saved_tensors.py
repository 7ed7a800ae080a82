"""Full parameters between a forward and its backward: read where no gradient of an output announced it, or written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import (
    base_of,
    in_transform,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    top_saved_tensor_hooks,
    version_of,
)
from .._torch.modules import outside_graphs
from ..param import ExtensionGroup, ShardedParam
from .staleness import sum_of_bits
from .unit import Unit

# ---- watch -----------------------------------------------------------------------------------------------------------
# Weights that are read in backward although no gradient of a unit's output announced it.
#
# Usually the first thing a backward does with a unit is to bring a gradient to one of its outputs, and a hook there
# gathers the parameters in time. Valid programs do otherwise: a loss on an intermediate, an output hidden in an object,
# an output edited in place. What every program has in common is that the saved weight is *unpacked*. So during a unit's
# first forwards its saved tensors go through hooks: weights become tokens, and unpacking a token gathers the unit. A
# unit for which this was ever needed stays watched; the others go without, because the hooks cost about ten
# microseconds for each saved tensor, as much as everything else together (ADR 0006).
#
# Someone else's hooks (recomputation, offloading of activations) are never hidden: while they are active, nothing is
# watched. Recomputation runs the unit's forward again, which gathers.


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
        unit.watching.is_on = False
        if unit.watching.left <= 0 or not unit.releases or not saved_tensor_hooks_allowed():
            return False
        if not (unit.watching.is_irregular or self._always):
            unit.watching.left -= 1
        top = top_saved_tensor_hooks()
        if top is not None:
            # Our own of an enclosing unit know the weights of all units; somebody else's are not to be hidden.
            unit.watching.is_on = top[0] is self._hooks[0]
            return False
        unit.watching.is_on = True
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


# ---- writes ----------------------------------------------------------------------------------------------------------
# Writes to full parameters inside a forward: they reach no shard, so they are an error instead of being lost.
#
# Two signs, each parameter by itself:
#
#     versions     count writes through the parameter and its views (`add_`, `clamp_` under no_grad): in every forward
#     sums         of the bits; also writes through `.data`, which no version counts: in the first forward of a unit, in
#                  every one with FULLSHARD_CHECK=1. Not seen: a write that only permutes values, and one through
# `.data`
#                  that begins later.
#
# Nothing is looked at where full parameters are the shards (one rank, one dtype): there a write lasts.

State = tuple[list[int], list[int] | None]


def state_before(unit: Unit, *, sums: bool) -> State | None:
    """How the full parameters are when a forward begins; None where nothing is to be compared."""
    if not unit.releases:
        return None
    return _versions(unit), _sums(unit) if sums and not in_transform() else None


def refuse_writes(unit: Unit, before: State) -> None:
    """Raise `RuntimeError` when the forward that began with `before` wrote to a full parameter."""
    versions, sums = before
    now = _versions(unit)
    written = [a != b for a, b in zip(versions, now, strict=True)] if now != versions else [False] * len(now)
    if sums is not None and not in_transform():
        written = [was or a != b for was, a, b in zip(written, sums, _sums(unit), strict=True)]
    names = [param.name for param, was in zip(_params(unit), written, strict=True) if was]
    if names:
        raise RuntimeError(
            f"{unit.record.name}: expected a forward that only reads its parameters, found {', '.join(names)} written: "
            f"what stands there is a gathered copy, and what is written to it is lost when it is freed; write the "
            f"sharded parameter between steps, or under fullshard.full_params(model, writeback=True), or keep what "
            f"forward changes in a buffer"
        )


def _params(unit: Unit) -> list[ShardedParam]:
    return [param for group in unit.groups if not group.shares_memory for param in group.params]


def _versions(unit: Unit) -> list[int]:
    fulls = [param.full for param in _params(unit)]
    try:
        return list(map(version_of, fulls))
    except RuntimeError:  # some are of inference mode, and count nothing
        return [0 if full.is_inference() else version_of(full) for full in fulls]


def _sums(unit: Unit) -> list[int]:
    extended = {id(p) for group in unit.groups if isinstance(group, ExtensionGroup) for p in group.params}
    with torch.no_grad():
        return [0 if id(param) in extended else sum_of_bits(param.full) for param in _params(unit)]
