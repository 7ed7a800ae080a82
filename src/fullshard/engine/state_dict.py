"""What happens to sharded parameters when a state dict is taken or loaded.

Taking one needs no message and changes nothing: its values are the sharded parameters, which take the place of full
ones, or of parts kept after forward, for just that long. (FSDP2 frees what stood there. A rank that takes a state dict
alone is then one gather behind the others, and the run hangs or crashes.)

Loading keeps the parameter *objects* of the model, also with `assign=True`, so that an optimizer built before goes on
and ties hold; and a plain full tensor is accepted for a sharded parameter: each rank takes its own part of it. What is
cut along another dim of the same mesh is cut anew (a collective, as DTensor's own copy is).

The hooks are on every module that holds a parameter of the unit, so that the state dict of a part is right, too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, hand_over_hooks, local_of
from ..param import Found, ShardedParam, Slot, can_digest, local_part, note_loaded
from .misuse import dotted_name, first_few
from .optimizer_facts import units_restored
from .optimizer_steps import refuses_steps
from .root import formed
from .unit import Unit

# ---- replaced --------------------------------------------------------------------------------------------------------
# Parameters that `fully_shard`, loading or `to_empty` took off their modules, while somebody still holds them.
#
# An optimizer that was built before holds them. No gradient reaches them any more, so its steps would train
# nothing and say nothing: the first one is refused instead. Handing it the new parameters silently would be no better:
# what it already keeps for the old ones (momentum, master weights, groups by shape) is of whole parameters.
#
# Usually nobody holds one. Then there is nothing to remember, and a step costs one look at an empty dict.


class _Replaced(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[Unit]
    # Below the unit, as `ShardedParam` has it.
    name: str
    # The one it had then, of training before it was replaced.
    gradient: weakref.ref[Tensor] | None
    # What replaced it, and by what.
    how: str


_replaced: dict[int, _Replaced] = {}  # by identity; an entry goes with its parameter


def note_replaced(unit: Unit, found: Iterable[Found]) -> None:
    """`found` stood on the modules of `unit` before its shards did."""
    for item in found:
        _note(unit, item.parameter, item.name, "fully_shard replaced by shards")


def note_assigned(unit: Unit, old: Tensor, name: str) -> None:
    """Another parameter was assigned to the place of `old`, which is `name` below `unit`."""
    _note(unit, old, name, "load_state_dict(assign=True) replaced")


@contextmanager
def noting_emptied(unit: Unit | None, module: nn.Module, *, name: str = "", recurse: bool = False) -> Iterator[None]:
    """Inside, what is on the meta device gets memory. Sharded parameters stay the same objects; instead of plain
    ones (ignored, or of no unit) torch makes new ones. `module` is `name` below the module of `unit`."""
    before = [
        (part, own_name, f"{prefix}.{own_name}" if prefix else own_name, parameter)
        for prefix, part in (module.named_modules(prefix=name) if recurse else ((name, module),))
        for own_name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta and not isinstance(parameter, DTensor)
    ]
    yield
    for part, own_name, dotted, parameter in before:
        if unit is not None and getattr(part, own_name) is not parameter:
            _note(unit, parameter, dotted, "to_empty replaced")


def _note(unit: Unit, parameter: Tensor, name: str, how: str) -> None:
    key = id(parameter)

    def forget(_: weakref.ref[Tensor]) -> None:
        _replaced.pop(key, None)

    gradient = parameter.grad
    of_gradient = None if gradient is None else weakref.ref(gradient)
    _replaced[key] = _Replaced(weakref.ref(parameter, forget), weakref.ref(unit), name, of_gradient, how)


@refuses_steps
def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _replaced:
        return
    names, how = [], ""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _replaced.get(id(parameter))
            # With a new gradient it is in use elsewhere: another model shared it. Frozen, no step was wanted.
            if entry is None or not parameter.requires_grad or _has_new_gradient(parameter, entry):
                continue
            unit = entry.unit()
            if unit is not None:
                names.append(dotted_name(unit, entry.name))
                how = how or entry.how
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected parameters that are on the model, found some that {how}: "
            f"{first_few(names)}; no gradient reaches them, so the step would train nothing. Build the optimizer after "
            f"that, from model.parameters()"
        )


def _has_new_gradient(parameter: Tensor, entry: _Replaced) -> bool:
    gradient = parameter.grad
    return gradient is not None and (entry.gradient is None or entry.gradient() is not gradient)


# ---- state dict ------------------------------------------------------------------------------------------------------


def hook_state_dict(unit: Unit) -> None:
    """Register the hooks of one unit."""
    by_module: dict[nn.Module, list[_Place]] = {}
    for group in unit.groups:
        for param in group.params:
            for slot in param.slots:
                by_module.setdefault(slot.module, []).append(_Place(slot, param, group.placing.shard_device))
    for module, places in by_module.items():
        hooks = _ModuleHooks(unit, places)
        module.register_state_dict_pre_hook(hooks.before_saving)
        # torch puts a mark on this hook, which a bound method cannot carry.
        module.register_state_dict_post_hook(partial(hooks.after_saving))
        module.register_load_state_dict_pre_hook(hooks.before_loading)
        module.register_load_state_dict_post_hook(hooks.after_loading)


class _Place(NamedTuple):
    slot: Slot
    param: ShardedParam
    # Where its shards belong.
    device: torch.device


class _ModuleHooks:
    """The hooks of one module; `places` are its parameters that belong to `unit`."""

    def __init__(self, unit: Unit, places: list[_Place]) -> None:
        self._unit = unit
        self._places = places
        # While a state dict is taken: what stood where. While one is loaded: what stood there before.
        self._hidden: list[tuple[Slot, nn.Parameter]] = []
        self._before: list[tuple[Slot, nn.Parameter | None]] = []
        # Of the keys in the dict that is loaded.
        self._prefix = ""
        # Whole values in it.
        self._values: dict[str, Tensor] = {}

    def before_saving(self, *_: object) -> None:
        self._hidden = []
        for place in self._places:
            slot, param = place.slot, place.param
            standing = slot.get()
            if standing is not None and (standing is param.full or standing is param.kept):
                self._hidden.append((slot, standing))
                slot.put(param.sharded)

    def after_saving(self, *_: object) -> None:
        hidden, self._hidden = self._hidden, []
        for slot, standing in hidden:
            slot.put(standing)

    def before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        if self._unit.opened is not None:
            return  # full parameters stand there and are loaded as those of any model
        if self._unit.root is not None:
            self._unit.root.reshard(self._unit)
        self._prefix = prefix
        self._values = {
            place.slot.name: value
            for place in self._places
            if isinstance(value := state_dict.get(prefix + place.slot.name), Tensor) and can_digest(value)
        }
        self._before = [(place.slot, place.slot.get()) for place in self._places]
        for (slot, parameter), place in zip(self._before, self._places, strict=True):
            value = state_dict.get(prefix + slot.name)
            if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue  # another shape is torch's to refuse, by name
            if not isinstance(value, DTensor):
                state_dict[prefix + slot.name] = _sharded_as(parameter, value.detach(), place.device)
            elif value.device_mesh == parameter.device_mesh and value.placements != parameter.placements:
                # Cut along another dim. DTensor's own copy_ refuses some uneven ones, and assigning would not look.
                state_dict[prefix + slot.name] = value.detach().redistribute(placements=parameter.placements)

    def after_loading(self, *_: object) -> None:
        before, self._before = self._before, []
        values, self._values = self._values, {}
        if not before:
            return  # full parameters were loaded
        strangers: dict[str, str] = {}
        for (slot, old), place in zip(before, self._places, strict=True):
            new = slot.get()
            if new is not old and isinstance(old, DTensor) and isinstance(new, DTensor) and new.shape == old.shape:
                held = _adopt(slot, old, new)
                if held is not None:
                    strangers[self._prefix + slot.name] = held
                    note_assigned(self._unit, old, place.param.name)
        self._tell(values)
        units_restored([self._unit])
        if strangers:
            warnings.warn(
                f"load_state_dict(assign=True): expected parameters that nobody else holds, so that they can take "
                f"another dtype or device, found {', '.join(f'{name}: {held}' for name, held in strangers.items())}; "
                f"the model has other parameters there now. An optimizer that holds the old ones would train nothing, "
                f"and its step is refused: build it after this, or end the weak reference or the graph before",
                UserWarning,
                stacklevel=2,
            )

    def _tell(self, values: dict[str, Tensor]) -> None:
        """What was loaded, to those who compare it with other ranks."""
        root = formed(self._unit)
        if root is not None and not root.provisional:
            names = [self._prefix + place.slot.name for place in self._places]
            root.facts.loaded(self._unit, names, {self._prefix + name: value for name, value in values.items()})
            return
        for place in self._places if self._unit.settings.notes_values else ():
            value = values.get(place.slot.name)
            if value is not None and value.shape == place.param.sharded.shape:
                note_loaded(place.param, value)


def _sharded_as(parameter: DTensor, value: Tensor, device: torch.device) -> DTensor:
    part = local_part(value, parameter)
    made = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    # `from_local` brings everything to the device of the mesh, where shards are not when they are offloaded.
    return made if part.is_meta else dtensor_like(made, part.to(device))


def _adopt(slot: Slot, old: nn.Parameter, new: nn.Parameter) -> str | None:
    """Let `old`, which optimizers may hold, have the value (and dtype and device) of `new`, which was assigned.

    Returns what keeps torch from exchanging the two, where something does: then the new one stays, as in torch.
    """
    here, there = local_of(old), local_of(new)
    with torch.inference_mode(False), torch.no_grad():
        if here.dtype is there.dtype and here.device == there.device and here.shape == there.shape:
            here.copy_(there)
        else:
            try:
                torch.utils.swap_tensors(old, new)
            except RuntimeError as error:
                return str(error)
            # What callers left on the parameter stays with it.
            old.__dict__.update(new.__dict__)
            hand_over_hooks(new, old)
    slot.put(old)
    return None
