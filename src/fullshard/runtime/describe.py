"""A root as the list that its ranks compare before its first message (layout/structure.py), one for each mesh.

What is on a mesh of its own (an expert) is compared among the ranks of that mesh alone: the others rightly have
something else there, under other names. Likewise stages of a pipeline, which have meshes and roots of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..guard import Item
from ..guard.structure import PARAMETER, SETTINGS, UNIT
from ..lifecycle import UnitRecord
from ..param import ExtensionGroup, ParamGroup, ShardedParam, full_digests
from .names import parameter_names
from .unit import Unit

if TYPE_CHECKING:
    from .root import Root

# By name, those of `Options` that decide which messages are sent, and in which order.
_SETTINGS = {
    "prefetch_depth": "FULLSHARD_PREFETCH",
    "prefetch_nbytes": "FULLSHARD_PREFETCH_BYTES",
    "gradient_nbytes": "FULLSHARD_GRADIENT_BYTES",
    "reductions_in_flight": "FULLSHARD_REDUCTIONS",
    "communication": "FULLSHARD_COMMUNICATION",
    "partial_sums": "FULLSHARD_PARTIAL_SUMS",
    "eval_root": "FULLSHARD_EVAL_ROOT",
}


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of `mesh` in the default group, lowest first: the scope of what is on it."""
    found: tuple[int, ...] | None = _ranks.get(mesh)
    if found is None:
        found = _ranks[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
    return found


# torch computes the tensor of a mesh anew each time that it is asked for. By identity: equal parts of a mesh may be of
# other ranks.
_ranks: Any = WeakIdKeyDictionary()


def meshes_of(units: Iterable[Unit], *, least: int = 2) -> dict[tuple[int, ...], DeviceMesh]:
    """The meshes, of `least` ranks or more, on which parameters of `units` are, by their ranks.

    In one order on all ranks, so that nobody waits for somebody who waits elsewhere; small ones first, because ranks
    that differ there may be a part of those who wait for them on a larger one.
    """
    found: dict[tuple[int, ...], DeviceMesh] = {}
    for unit in units:
        for group in unit.groups:
            found.setdefault(ranks_of(group.placing.mesh), group.placing.mesh)
    ordered = sorted(found, key=lambda ranks: (len(ranks), ranks))
    return {ranks: found[ranks] for ranks in ordered if len(ranks) >= least}


def mesh_of(unit: Unit) -> DeviceMesh | None:
    """The mesh of the unit itself; of one whose parameters all have their own, that of the first; None without any."""
    meshes = [group.placing.mesh for group in unit.groups if group.placing.unit_mesh is None]
    meshes += [group.placing.mesh for group in unit.groups]
    return meshes[0] if meshes else None


def describe(root: Root, ranks: tuple[int, ...]) -> list[Item]:
    """What of `root` is on the mesh of these ranks: settings, units, then parameters in the order of the model."""
    units = root.units
    own = [unit for unit in units if (mesh := mesh_of(unit)) is not None and ranks_of(mesh) == ranks]
    names = parameter_names(units[0].module, units)
    items = [Item(SETTINGS, "", _settings(root))]
    if root.guard_mode == "off":
        return items  # its own setting is all that is compared
    items += [Item(UNIT, unit.record.name, _unit_facts(unit, own)) for unit in own]
    for unit in units:
        for group in unit.groups:
            if ranks_of(group.placing.mesh) == ranks:
                items += [
                    Item(PARAMETER, names[param], _parameter_facts(unit, group, param, names)) for param in group.params
                ]
    return items


def _settings(root: Root) -> dict[str, str]:
    options = root.options
    facts = {"FULLSHARD_GUARD": root.guard_mode}
    facts |= {variable: str(getattr(options, field)) for field, variable in _SETTINGS.items()}
    if root.guard_mode == "off":
        return {"FULLSHARD_GUARD": "off"}
    # Whether this rank will ask the others how they lie on nodes.
    several = options.local_world is not None and options.local_world < dist.get_world_size()
    return facts | {"answer to 'are there several nodes?' (LOCAL_WORLD_SIZE)": str(several)}


def _unit_facts(unit: Unit, known: Sequence[Unit]) -> dict[str, str]:
    record, controls, policy = unit.record, unit.controls, unit.policy
    block = next((links.block for links in unit.links if links.block is not None), None)
    reshard = unit.reshard_after_forward if block is None else block.group.world
    mesh = mesh_of(unit)
    assert mesh is not None
    facts = {
        "mesh": mesh_text(mesh),
        "reshard_after_forward": str(reshard),
        "mp_policy": ", ".join(
            f"{field}={_dtype_text(getattr(policy, field))}"
            for field in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        ),
        "offload_policy": "CPUOffloadPolicy" if unit.host_link is not None else "none",
        "prefetch_nbytes": str(unit.prefetch_nbytes),
        "gradient_nbytes": str(unit.gradient_nbytes),
        "resident": str(record.resident),
        "reshard_after_backward": str(record.reshard_after_backward),
        "unshard_in_backward": str(record.gathers_in_backward),
        "communication": str(controls.communication),
        "gradient divide factor": str(controls.divide_factor),
        "sums without averages": str(controls.sum_only),
        "reduction of unused parameters": str(controls.zero_unused),
        "custom all-gather": _type_text(controls.gather),
        "custom reduce-scatter": _type_text(controls.reduce_scatter),
        "all-reduce": str(unit.all_reduces),
    }
    listed = {other.record for other in known}
    facts["forward prefetch"] = _names_text(record.forward_prefetch, listed)
    facts["backward prefetch"] = _names_text(record.backward_prefetch, listed)
    return facts


def _parameter_facts(
    unit: Unit, group: ParamGroup, param: ShardedParam, names: dict[ShardedParam, str]
) -> dict[str, str]:
    spec, own = param.spec, param.own_spec
    facts = {
        "shape": str(tuple(spec.shape)),
        "dtype": _dtype_text(group.precision.storage),
        "requires_grad": str(param.sharded.requires_grad),
        "unit": unit.record.name,
        "placement": ", ".join(map(str, spec.placements)),
        "mesh": mesh_text(group.placing.mesh),
    }
    if own is not None:
        facts["placement before sharding"] = ", ".join(map(str, own.placements))
    facts["number of modules that share it"] = str(len(param.slots))
    if isinstance(group, ExtensionGroup):
        facts["tensor class"] = type(param.local).__name__
    return facts


def signature(root: Root) -> tuple[str, str]:
    """What `root` is whatever its meshes are, and its initial values: two digests, by which ranks know the same model
    on another one. The second is "" where the values of some parameter are not known."""
    first, params = root.units[0], [param for unit in root.units for param in unit.params]
    names = parameter_names(first.module, root.units)
    # A teacher that is only evaluated is not the student of the same class.
    modes = f"provisional {root.provisional}, grad {torch.is_grad_enabled()}, training {first.module.training}"
    lines = [type(first.module).__name__, modes]
    for unit in root.units:
        lines.append(unit.record.name)
        for group in unit.groups:
            storage = _dtype_text(group.precision.storage)
            lines += [
                f"{names[param]} {tuple(param.spec.shape)} {storage} {param.sharded.requires_grad}"
                for param in group.params
            ]
    noted = full_digests(params)
    return _digest("\n".join(lines)), "" if None in noted else _digest(repr(noted))


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


def mesh_text(mesh: DeviceMesh, *, names: bool = False) -> str:
    """`mesh` as an error names it; with `names`, those of a single axis, too."""
    sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    axes = f" {tuple(mesh.mesh_dim_names)}" if mesh.mesh_dim_names and (names or mesh.ndim > 1) else ""
    return f"{mesh.device_type} {sizes}{axes} of ranks {mesh.mesh.flatten().tolist()}"


def _dtype_text(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _type_text(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _names_text(records: Sequence[UnitRecord], known: set[UnitRecord]) -> str:
    return ", ".join(record.name for record in records if record in known) or "none"
