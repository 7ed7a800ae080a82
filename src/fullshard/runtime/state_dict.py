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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensor_like, hand_over_hooks, local_of
from ..param import ShardedParam, Slot, can_digest, local_part, note_loaded
from .replaced import note_assigned
from .steps_taken import units_restored
from .unit import Unit


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
        root = self._unit.root
        if root is not None and not root.provisional:
            names = [self._prefix + place.slot.name for place in self._places]
            root.facts.loaded(self._unit, names, {self._prefix + name: value for name, value in values.items()})
            return
        for place in self._places if self._unit.notes_values else ():
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
