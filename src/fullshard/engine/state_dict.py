"""State dict hooks: saving and loading sharded parameters.

Saving sends no message and changes nothing, so another thread may do it while a step runs: where a full parameter was
on a module, its value in the dict is replaced by the sharded one. (FSDP2 reshards instead. A rank that takes a state
dict alone then needs an extra all-gather, and the run hangs.)

Loading keeps the parameter *objects*, also with `assign=True`, so existing optimizers and ties stay valid. A sharded
parameter accepts a plain full tensor: each rank takes its part. A DTensor sharded along another dim of the same mesh is
redistributed (a collective, like DTensor's own copy), and one on another mesh goes from rank to rank (relayout.py).

Every module that holds a parameter of the unit has the hooks, so the state dict of a submodule is correct, too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import dtensor_like, hand_over_hooks, local_of, run_first
from ..param import Found, ShardedParam, Slot, can_digest, local_part, note_loaded
from .asleep import refuse_asleep
from .names import dotted_name, first_few
from .optimizer_steps import refuses_steps
from .padding_rows import note_row_loaded
from .relayout import relaid
from .root import formed
from .unit import Unit

# ---- replaced --------------------------------------------------------------------------------------------------------
# Parameters that `fully_shard`, loading or `to_empty` replaced on their modules, while something still holds them.
#
# An optimizer that was built before may hold them. No gradient reaches them, so its steps would silently train nothing:
# the first step raises. They are not exchanged there: only the user knows whether the state that the optimizer holds
# is that of whole parameters, equal on all ranks (`rebind_optimizer`).
#
# Usually nothing holds one, and a step only checks an empty dict.


class _Replaced(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[Unit]
    # Relative to the unit, as in `ShardedParam`.
    name: str
    # The gradient when it was replaced.
    gradient: weakref.ref[Tensor] | None
    # How it was replaced, for the error.
    how: str


_replaced: dict[int, _Replaced] = {}  # by id; removed when the parameter dies


def note_replaced(unit: Unit, found: Iterable[Found]) -> None:
    """The shards of `unit` replaced the parameters `found` on its modules."""
    for item in found:
        _note(unit, item.parameter, item.name, "fully_shard replaced by shards")


def note_assigned(unit: Unit, old: Tensor, name: str) -> None:
    """Note that another parameter was assigned instead of `old`, which is `name` below `unit`."""
    _note(unit, old, name, "load_state_dict(assign=True) replaced")


@contextmanager
def noting_emptied(unit: Unit | None, module: nn.Module, *, name: str = "", recurse: bool = False) -> Iterator[None]:
    """Surrounds `to_empty`: note the plain meta parameters (ignored, or of no unit) that torch replaces by new objects.

    Sharded parameters stay the same objects. `module` is `name` below the module of `unit`."""
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


def replaced_place(parameter: Tensor) -> tuple[Unit, str] | None:
    """The unit and the name below it where `parameter` was replaced; None for one that is not known."""
    entry = _replaced.get(id(parameter))
    unit = None if entry is None else entry.unit()
    return None if entry is None or unit is None else (unit, entry.name)


def standing_parameter(param: ShardedParam) -> nn.Parameter:
    """The sharded parameter that users hold, also while another one computes: the one that they assigned, if any."""
    standing = param.slots[0].get()
    if standing is param.full or standing is param.kept or not isinstance(standing, DTensor):
        return param.sharded
    return standing if standing.shape == param.sharded.shape else param.sharded


@refuses_steps(_replaced)
def refuse_replaced(optimizer: Optimizer, *_: object) -> None:
    """Raise `RuntimeError` if `optimizer` holds parameters that were replaced on their modules."""
    if not _replaced:
        return
    names, how = [], ""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _replaced.get(id(parameter))
            # With a new gradient, another model shares it. Without requires_grad, the optimizer does not step it.
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
            f"that, from model.parameters(), or call fullshard.rebind_optimizer(optimizer, model)"
        )


def _has_new_gradient(parameter: Tensor, entry: _Replaced) -> bool:
    gradient = parameter.grad
    return gradient is not None and (entry.gradient is None or entry.gradient() is not gradient)


# ---- state dict ------------------------------------------------------------------------------------------------------


# Called with a unit of which parameters were loaded, their names, and the values of those loaded from full tensors.
Loaded = Callable[[Unit, Sequence[str], Mapping[str, Tensor]], None]


def hook_state_dict(unit: Unit, loaded: Loaded) -> None:
    """Register the hooks of one unit. `loaded`: called after each load."""
    by_module: dict[nn.Module, list[_SlotOf]] = {}
    for group in unit.groups:
        for param in group.params:
            for slot in param.slots:
                by_module.setdefault(slot.module, []).append(_SlotOf(slot, param, group.placing.shard_device))
    for module, places in by_module.items():
        hooks = _ModuleHooks(unit, places, loaded)
        module.register_state_dict_pre_hook(hooks.before_saving)
        # torch puts a mark on this hook, which a bound method cannot carry.
        saved = module.register_state_dict_post_hook(partial(hooks.after_saving))
        # Hooks that users registered before see the shards, too.
        run_first(module, saved)
        module.register_load_state_dict_pre_hook(hooks.before_loading)
        module.register_load_state_dict_post_hook(hooks.after_loading)


class _SlotOf(NamedTuple):
    slot: Slot
    param: ShardedParam
    # The device of its shards.
    device: torch.device


class _ModuleHooks:
    """The hooks of one module; `places` are its parameters that belong to `unit`."""

    def __init__(self, unit: Unit, places: list[_SlotOf], loaded: Loaded) -> None:
        self._unit = unit
        self._places = places
        self._loaded = loaded
        # While loading: parameters before the load.
        self._before: list[tuple[Slot, nn.Parameter | None]] = []
        # While loading: prefix of the keys, and the full tensors in the dict.
        self._prefix = ""
        self._values: dict[str, Tensor] = {}

    def before_saving(self, *_: object) -> None:
        refuse_asleep(self._unit, "state_dict")
        if self._unit.opened is None:
            for group in self._unit.groups:
                group.refuse_ignored()

    def after_saving(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for place in self._places:
            key, param = prefix + place.slot.name, place.param
            value = state_dict.get(key)
            if not isinstance(value, Tensor):
                continue
            if value is param.full or value is param.kept:  # keep_vars=True
                state_dict[key] = param.sharded
            elif any(_share_memory(value, shown) for shown in (param.full, param.kept) if shown is not None):
                state_dict[key] = param.sharded.detach()

    def before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        refuse_asleep(self._unit, "load_state_dict")
        if self._unit.opened is not None:
            return  # full parameters are on the module; torch loads them as usual
        if self._unit.root is not None:
            self._unit.root.reshard(self._unit)
        if self._unit.host_link is not None:
            self._unit.host_link.settle()
        self._prefix = prefix
        self._values = {
            place.slot.name: value
            for place in self._places
            if isinstance(value := state_dict.get(prefix + place.slot.name), Tensor) and can_digest(value)
        }
        for place in self._places if self._unit.unproven else ():
            if prefix + place.slot.name in state_dict:
                note_row_loaded(place.param.owner)
        self._before = [(place.slot, place.slot.get()) for place in self._places]
        apart: dict[str, tuple[DTensor, DTensor]] = {}
        for (slot, parameter), place in zip(self._before, self._places, strict=True):
            value = state_dict.get(prefix + slot.name)
            if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue  # torch raises for another shape, with the name
            if not isinstance(value, DTensor):
                state_dict[prefix + slot.name] = _sharded_as(parameter, value.detach(), place.device)
            elif value.device_mesh == parameter.device_mesh and value.placements != parameter.placements:
                # Sharded along another dim. DTensor's copy_ refuses some uneven shards; assign would not check at all.
                state_dict[prefix + slot.name] = value.detach().redistribute(placements=parameter.placements)
            elif value.device_mesh != parameter.device_mesh:
                apart[prefix + slot.name] = value, parameter
        if apart:
            values = {name: value for name, (value, _) in apart.items()}
            like = {name: parameter for name, (_, parameter) in apart.items()}
            for name, moved in relaid(values, like, f"load_state_dict of {type(module).__name__}").items():
                device = next(place.device for place in self._places if prefix + place.slot.name == name)
                state_dict[name] = dtensor_like(moved, local_of(moved).to(device))

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
        if strangers:
            warnings.warn(
                f"load_state_dict(assign=True): expected parameters that nobody else holds, so that they can take "
                f"another dtype or device, found {', '.join(f'{name}: {held}' for name, held in strangers.items())}; "
                f"the model has new parameters there now. An optimizer that holds the old ones would train nothing, "
                f"and its step is refused: build it after this call, or drop the weak reference or graph before it",
                UserWarning,
                stacklevel=2,
            )

    def _tell(self, values: dict[str, Tensor]) -> None:
        """Record the loaded values for the comparison with other ranks."""
        root = formed(self._unit)
        if root is None or root.provisional:
            for place in self._places if self._unit.settings.notes_values else ():
                value = values.get(place.slot.name)
                if value is not None and value.shape == place.param.sharded.shape:
                    note_loaded(place.param, value)
        names = [self._prefix + place.slot.name for place in self._places]
        self._loaded(self._unit, names, {self._prefix + name: value for name, value in values.items()})


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether they are plain tensors, or DTensors, on one storage, be it allocated or not."""
    if isinstance(a, DTensor) is not isinstance(b, DTensor):
        return False
    if isinstance(a, DTensor):
        a, b = local_of(a), local_of(b)
    return a.untyped_storage() is b.untyped_storage()


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
    # `from_local` moves the shard to the device of the mesh; offloaded shards belong on the host.
    return made if part.is_meta else dtensor_like(made, part.to(device))


def _adopt(slot: Slot, old: nn.Parameter, new: nn.Parameter) -> str | None:
    """Give `old`, which optimizers may hold, the value, dtype and device of `new`, which was assigned.

    If torch cannot swap the two, returns the reason, and the new parameter stays, as in torch.
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
            # Keep attributes and hooks that callers set on the parameter.
            old.__dict__.update(new.__dict__)
            hand_over_hooks(new, old)
    slot.put(old)
    return None
