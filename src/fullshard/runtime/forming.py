"""How a root forms: at the first forward (or `unshard`) of a module, out of that module and every unit below it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..lifecycle import Full
from .names import clean_name, parameter_names
from .root import Root
from .unit import Unit, unit_of


def root_of(unit: Unit) -> Root:
    """The root `unit` belongs to; formed from its module and what is below it when there is none yet.

    Raises `RuntimeError` when parameters are still on the meta device, and `ValueError` when a parameter belongs to
    two units.
    """
    root = unit.root
    if root is not None and not root.provisional:
        return root
    if len(unit.modules) > 1:
        raise RuntimeError(
            f"expected a single module as the root, found the list {[type(m).__name__ for m in unit.modules]} that was "
            f"given to fully_shard; apply fully_shard to the model that contains them, and run that first"
        )
    names: dict[Unit, str] = {}
    for name, module in unit.module.named_modules():
        below = unit_of(module)
        if below is None:
            continue
        if below.root is not None and not below.root.provisional:
            raise RuntimeError(
                f"{name}: expected the outermost sharded module to run first, found that this module already "
                f"ran as a root; call the forward of {type(unit.module).__name__} before that of its "
                f"parts, or do not shard it"
            )
        name = clean_name(name) or "root"
        names[below] = f"{names[below]}+{name}" if below in names else name
    units = list(names)
    _refuse_meta(unit.module, units)
    for below in units:
        _settle(below)
    if unit.reshard_after_forward is None:
        # The root's backward follows its forward at once.
        unit.record.reshard_after_forward = False
    return Root(units, list(names.values()), provisional=False)


def early_root_of(unit: Unit) -> Root:
    """The root of `unit`, or a provisional one of its own: `unshard` may come before the root is known."""
    if unit.root is not None:
        return unit.root
    _refuse_meta(unit.module, [unit])
    return Root([unit], [unit.record.name], provisional=True)


def _settle(unit: Unit) -> None:
    """What was gathered under a provisional root is complete before the buffers change hands."""
    if unit.root is not None and unit.record.full is Full.PENDING:
        unit.root.wait_unshard(unit)


def _refuse_meta(model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.record.full is Full.SHARDED:
            unit.repair()
    if any(param.local.is_meta for unit in units for param in unit.params):
        on_meta = [name for param, name in parameter_names(model, units).items() if param.local.is_meta]
        shown = ", ".join(on_meta[:8]) + (f" and {len(on_meta) - 8} more" if len(on_meta) > 8 else "")
        raise RuntimeError(
            f"expected parameters with data before the first use, found {shown} on the meta device; "
            f"call module.to_empty(device=...) and initialise the parameters "
            f"(reset_parameters, init_weights or a checkpoint)"
        )
    for unit in units:
        refuse_off_host(unit)


def refuse_off_host(unit: Unit) -> None:
    """With offload, shards are on the host: `RuntimeError` (torch's type) when something put them elsewhere."""
    elsewhere = {param.name: param.local.device for param in unit.params if param.local.device.type != "cpu"}
    if unit.host_link is not None and elsewhere:
        raise RuntimeError(
            f"{unit.record.name}: expected parameters on the CPU, because CPUOffloadPolicy is given, found "
            f"{', '.join(f'{name} on {device}' for name, device in elsewhere.items())}; load a CPU state dict, or call "
            f"module.to_empty(device='cpu') and initialise"
        )


def module_units(module: nn.Module) -> list[Unit]:
    """The units of `module` and of everything below it, each once."""
    return list(dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None))
