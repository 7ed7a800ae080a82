"""What the units of a model are and hold: for reports, tests and the user's own loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..runtime import Unit, unit_of
from ..runtime.names import clean_name, parameter_names


@dataclass(frozen=True)
class UnitInfo:
    """One unit as it is now. Counts are elements; `_itemsize` and `_nbytes` are bytes."""

    # Dotted name of the unit's module, with "+" between those of several; "" is the root of the model that was asked
    # about.
    name: str
    # Class of the module before it was sharded.
    module_class: str
    # Dotted names of its parameters.
    param_names: tuple[str, ...]
    num_params: int
    # Elements of the unsharded parameters.
    numel: int
    # Elements this rank owns, without padding.
    local_numel: int
    # Elements of this rank's flat buffers, padding included.
    padded_local_numel: int
    # Bytes per element of the widest dtype among the unit's parameters, stored, computed with and reduced in.
    storage_itemsize: int
    compute_itemsize: int
    reduce_itemsize: int
    # Ranks that share the parameters: the most of any group.
    world: int
    # Bytes of full parameters that are allocated right now.
    full_nbytes_live: int
    # Bytes of the parts that an integer `reshard_after_forward` keeps between forward and backward, right now.
    kept_nbytes_live: int = 0


def inspect_units(model: nn.Module) -> tuple[UnitInfo, ...]:
    """The units of `model`, its own first, in definition order. No communication; empty when nothing is sharded."""
    names: dict[Unit, str] = {}
    for name, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None:
            name = clean_name(name)
            names[unit] = f"{names[unit]}+{name}" if unit in names else name
    dotted = parameter_names(model, list(names))
    infos = []
    for unit, name in names.items():
        precisions = [group.precision for group in unit.groups]
        infos.append(
            UnitInfo(
                name=name,
                module_class="+".join(type(module).__name__.removeprefix("FSDP") for module in unit.modules),
                param_names=tuple(dotted[param] for param in unit.params),
                num_params=len(unit.params),
                numel=sum(group.pack.numel for group in unit.groups),
                local_numel=sum(group.pack.local_numel(group.placing.rank) for group in unit.groups),
                padded_local_numel=sum(group.pack.padded_local_numel for group in unit.groups),
                storage_itemsize=max((p.storage.itemsize for p in precisions), default=0),
                compute_itemsize=max((p.compute.itemsize for p in precisions), default=0),
                reduce_itemsize=max((p.reduce.itemsize for p in precisions), default=0),
                world=max((group.placing.world for group in unit.groups), default=1),
                full_nbytes_live=sum(group.memory.live_nbytes for group in unit.groups),
                kept_nbytes_live=unit.narrowing.live_nbytes,
            )
        )
    return tuple(infos)
