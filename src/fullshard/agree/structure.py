"""Compares the model across ranks before training: raises, and names the difference, if ranks disagree.

    structure    when a root forms, before connections are made; for an early `unshard`, of that unit alone
    values       in the first forward of the root: digests of the full parameters that `fully_shard` noted
                 (param/initial.py), except parameters whose shards any rank has written since
    buffers      in the first forward: floating-point differences raise, integer differences (indices, masks, which may
                 be rank-specific) warn. Later they are statements of the ledger (mesh_ledger.py)

Each comparison sends one digest per mesh (peers/scope.py: three requests to the store). Ranks exchange details only if
the digests differ. All ranks of a mesh get the same answer, so either all of them raise or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import sum_over
from ..engine.names import clean_name, parameter_names
from ..engine.unit import AnyRoot, Unit, unit_of
from ..param import (
    ExtensionGroup,
    ParamGroup,
    ShardedParam,
    are_written,
    can_digest,
    digest,
    full_digests,
    local_data,
    numbers_of,
    written_before,
)
from ..peers import RanksDisagree, Scope, ask, scope_of, shown_ranks, tell, variants
from ..policy.options import shown_cast_inputs
from ..schedule import UnitRecord
from .differences import differences
from .equal_rows import warn_of_equal_rows
from .ledger import OPTIONS, PARAMETER, TENSOR, UNIT, Statement, digest_of, dumps, read, stated
from .recovery import Peers

# ---- describe --------------------------------------------------------------------------------------------------------
# Describes a root as one list per mesh, which its ranks compare before the first message (ledger.py).
#
# Parameters on their own mesh (experts, pipeline stages) are compared among the ranks of that mesh only: other ranks
# legitimately hold other parameters under other names.

# `Options` that decide which messages are sent and in which order: field -> name in errors.
_SETTINGS = {
    "prefetch_depth": "prefetch_depth",
    "reductions_in_flight": "reductions_in_flight",
    "communication": "FULLSHARD_COMMUNICATION",
    "reduce_default": "FULLSHARD_REDUCE_DTYPE",
}


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of `mesh`, lowest first."""
    found: tuple[int, ...] | None = _ranks.get(mesh)
    if found is None:
        found = _ranks[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
    return found


# Cached because torch recomputes `mesh.mesh` on every access. Keyed by identity: equal submeshes may hold other ranks.
_ranks: Any = WeakIdKeyDictionary()


def meshes_of(units: Iterable[Unit]) -> dict[tuple[int, ...], DeviceMesh]:
    """The meshes of several ranks that hold parameters of `units`, by their ranks.

    The order is the same on all ranks, or comparisons would deadlock. Small meshes come first: ranks that disagree
    there may be awaited on a larger mesh.
    """
    found: dict[tuple[int, ...], DeviceMesh] = {}
    for unit in units:
        for group in unit.groups:
            found.setdefault(ranks_of(group.placing.mesh), group.placing.mesh)
    ordered = sorted(found, key=lambda ranks: (len(ranks), ranks))
    return {ranks: found[ranks] for ranks in ordered if len(ranks) > 1}


def mesh_of(unit: Unit) -> DeviceMesh | None:
    """The mesh of `unit`, else that of its first parameter group; None for a unit without parameters."""
    meshes = [group.placing.mesh for group in unit.groups if group.placing.unit_mesh is None]
    meshes += [group.placing.mesh for group in unit.groups]
    return meshes[0] if meshes else None


def describe(root: AnyRoot, ranks: tuple[int, ...], mode: str = "full") -> list[Statement]:
    """Describe the part of `root` on the mesh of `ranks`: settings, units, then parameters in model order. `mode`: what
    ranks compare."""
    units = root.units
    own = [unit for unit in units if (mesh := mesh_of(unit)) is not None and ranks_of(mesh) == ranks]
    names = parameter_names(units[0].module, units)
    statements = [stated(OPTIONS, "", _settings(root, mode))]
    if mode == "off":
        return statements  # compare only the guard mode itself
    statements += [stated(UNIT, unit.record.name, _unit_facts(unit, own)) for unit in own]
    for unit in units:
        for group in unit.groups:
            if ranks_of(group.placing.mesh) == ranks:
                statements += [
                    stated(PARAMETER, names[param], _parameter_facts(unit, group, param, names))
                    for param in group.params
                ]
    return statements


def _settings(root: AnyRoot, mode: str) -> dict[str, str]:
    fields = {} if mode == "off" else _SETTINGS
    return {"FULLSHARD_GUARD": mode, **{name: str(getattr(root.options, field)) for field, name in fields.items()}}


def _unit_facts(unit: Unit, known: Sequence[Unit]) -> dict[str, str]:
    record, controls, policy = unit.record, unit.settings.controls, unit.settings.policy
    block = next((links.block for links in unit.links if links.block is not None), None)
    reshard = unit.settings.reshard_after_forward if block is None else block.group.world
    mesh = mesh_of(unit)
    assert mesh is not None
    facts = {
        "mesh": mesh_text(mesh),
        "reshard_after_forward": str(reshard),
        "mp_policy": ", ".join(
            f"{field}={_dtype_text(getattr(policy, field))}"
            for field in ("param_dtype", "reduce_dtype", "output_dtype")
        )
        + f", cast_forward_inputs={shown_cast_inputs(policy.cast_forward_inputs)}",
        "offload_policy": "CPUOffloadPolicy" if unit.host_link is not None else "none",
        "prefetch_nbytes": str(unit.settings.prefetch_nbytes),
        "gradient_nbytes": str(unit.settings.gradient_nbytes),
        "resident": str(record.plan.resident),
        "reshard_after_backward": str(record.plan.reshard_after_backward),
        "unshard_in_backward": str(record.plan.gathers_in_backward),
        "communication": str(controls.communication),
        "gradient divide factor": str(controls.divide_factor),
        "sums without averages": str(controls.sum_only),
        "reduction of unused parameters": str(controls.zero_unused),
        "custom all-gather": _type_text(controls.gather),
        "custom reduce-scatter": _type_text(controls.reduce_scatter),
        "all-reduce": str(unit.settings.all_reduces),
    }
    if unit.settings.optional:
        facts["optional"] = "True"
    listed = {other.record for other in known}
    facts["forward prefetch"] = _names_text(record.plan.forward_prefetch, listed)
    facts["backward prefetch"] = _names_text(record.plan.backward_prefetch, listed)
    return facts


def _parameter_facts(
    unit: Unit, group: ParamGroup, param: ShardedParam, names: dict[ShardedParam, str]
) -> dict[str, str]:
    spec, own = param.spec, param.own_spec
    facts = {
        "shape": str(tuple(spec.shape)),
        "dtype": _dtype_text(group.precision.storage),
        "compute dtype": _dtype_text(group.precision.compute),
        "reduce dtype": _dtype_text(group.precision.reduce),
        "gradient dtype": _dtype_text(group.precision.gradient),
        "requires_grad": str(param.sharded.requires_grad),
        "unit": unit.record.name,
        "placement": ", ".join(map(str, spec.placements)),
        "mesh": mesh_text(group.placing.mesh),
    }
    if own is not None:
        facts["placement before sharding"] = ", ".join(map(str, own.placements))
    facts["number of modules that share it"] = str(len(param.slots))
    if isinstance(group, ExtensionGroup):
        facts["tensor class"] = f"{type(param.local).__name__} with fsdp_pre_all_gather"
    return facts


# Of larger meshes not all ranks are listed.
_MOST_LISTED = 16


def mesh_text(mesh: DeviceMesh) -> str:
    """`mesh`, its ranks and their order, for an error text."""
    sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    axes = f" {tuple(mesh.mesh_dim_names)}" if mesh.mesh_dim_names and mesh.ndim > 1 else ""
    ranks = mesh.mesh.flatten().tolist()
    listed = str(ranks)
    if len(ranks) > _MOST_LISTED:
        # Each unit and parameter states it, and a value in the store has a limit.
        listed = f"[{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]}] ({len(ranks)}, {digest_of(listed):016x})"
    return f"{mesh.device_type} {sizes}{axes} of ranks {listed}"


def _dtype_text(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _type_text(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _names_text(records: Sequence[UnitRecord], known: set[UnitRecord]) -> str:
    return ", ".join(record.name for record in records if record in known) or "none"


# ---- drift -----------------------------------------------------------------------------------------------------------
# Tensors that should be equal on several ranks and have diverged: buffers, replicas of shards, unsharded parameters.
#
# Training does not repair this: gradients are averaged, running statistics are not.

_SHOWN = 8


class Drift(NamedTuple):
    """One tensor that differs: its dotted name, its kind ("buffer", "replica" or "unsharded parameter"), and the groups
    of ranks with equal values, largest first."""

    name: str
    kind: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.name} ({' unlike '.join(shown_ranks(ranks) for ranks in self.ranks)})"


def buffers_on(top: nn.Module, ranks: tuple[int, ...]) -> dict[str, Tensor]:
    """The buffers below `top` that belong to units on the mesh of `ranks`, by dotted name."""
    return {
        name: buffer for name, module, on in _modules(top) if on == ranks for name, buffer in _buffers(name, module)
    }


def unsharded_on(top: nn.Module, ranks: tuple[int, ...]) -> dict[str, Tensor]:
    """The parameters below `top` that no unit shards (`ignored_params`), on the mesh of `ranks`, by dotted name."""
    found: dict[str, Tensor] = {}
    for prefix, module, on in _modules(top):
        if on == ranks:
            for name, parameter in module.named_parameters(recurse=False):
                if can_digest(parameter):
                    found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def ignored_by(units: Sequence[Unit]) -> frozenset[str]:
    """The dotted names of the user's `ignored_params`, below the module of the first of `units`."""
    prefixes = {module: f"{clean_name(name)}." if name else "" for name, module in units[0].module.named_modules()}
    return frozenset(
        prefixes.get(unit.module, "") + clean_name(name) for unit in units for name in unit.settings.ignored_names
    )


def ignored_names(modules: Sequence[nn.Module], ignored: Iterable[Tensor]) -> tuple[str, ...]:
    """The names of the `ignored` parameters below `modules`."""
    left = {id(parameter) for parameter in ignored}
    if not left:
        return ()
    return tuple(name for module in modules for name, p in module.named_parameters() if id(p) in left)


def _modules(top: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Every module once, with its dotted name and the ranks of the nearest enclosing unit with parameters."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, mesh: DeviceMesh | None) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
        seen.add(module)
        unit = unit_of(module)
        mesh = (mesh_of(unit) if unit is not None else None) or mesh
        yield clean_name(name), module, () if mesh is None else ranks_of(mesh)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk(f"{name}.{child_name}" if name else child_name, child, mesh)

    yield from walk("", top, None)


def _buffers(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if can_digest(buffer):
            yield f"{prefix}.{name}" if prefix else name, buffer


def differing(scope: Scope, kind: str, tensors: Mapping[str, Tensor]) -> list[Drift]:
    """The `tensors` whose values, shapes or dtypes differ between the ranks of `scope`. Collective over `scope`.

    Skips names that some ranks do not have. Asks once if all are equal, twice otherwise.
    """
    by_rank = exchanged(scope, f"{kind}s", [stated(TENSOR, "", digests_of(tensors))])
    found = ((one.fact.name, dict(one.values)) for one in (differences(by_rank) if by_rank else ()))
    return sorted(Drift(name, kind, tuple(values)) for name, values in found if "none" not in values.values())


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A text with digest, shape and dtype of each tensor. Synchronises once per device."""
    numbers = numbers_of(list(map(digest, tensors.values())))
    return {
        name: f"{number & (1 << 64) - 1:x} {tuple(tensor.shape)} {tensor.dtype}"
        for number, (name, tensor) in zip(numbers, tensors.items(), strict=True)
    }


def shown(found: Sequence[Drift]) -> str:
    """The first few of `found`, for an error."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more


def find_drift(units: Sequence[Unit], top: nn.Module) -> list[Drift]:
    """All tensors that drifted. Collective over every mesh of `units`."""
    meshes = meshes_of(units)
    questions = [(ranks, "buffer", buffers_on(top, ranks)) for ranks in meshes]
    questions += [(ranks, "unsharded parameter", unsharded_on(top, ranks)) for ranks in meshes]
    questions += [(ranks, "replica", shards) for ranks, shards in sorted(replicas_of(units, top).items())]
    found: list[Drift] = []
    for ranks, kind, tensors in questions:
        scope = scope_of(ranks)
        if scope is not None:
            scope.resume()
            found += differing(scope, kind, tensors)
    return found


def replicas_of(units: Sequence[Unit], top: nn.Module) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """This rank's replicated shards, by the ranks that hold the replicas."""
    names = parameter_names(top, units)
    found: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for unit in units:
        for group, links in zip(unit.groups, unit.links, strict=True):
            if links.replicate is not None:
                shards = found.setdefault(tuple(sorted(links.replicate.ranks)), {})
                for param in group.params:
                    local = local_data(param.sharded)
                    if can_digest(local):
                        shards[names[param]] = local
    return found


def exchanged(scope: Scope, what: str, statements: Sequence[Statement]) -> dict[int, list[Statement]]:
    """The statements of each rank of `scope`, if not all state the same; else an empty dict. Collective.

    Sends a digest, and only if digests differ the statements, from one rank of each variant.
    """
    text = dumps(statements)
    digests = ask(scope, what, text)
    if not digests:
        return {}
    senders = {ranks[0] for ranks in variants(digests).values()}
    found = tell(scope, f"{what} in full", text if scope.rank in senders else "")
    texts = {digests[rank]: found[rank] for rank in senders}
    return read({rank: texts[digest] for rank, digest in digests.items()})


def refuse_differences(scope: Scope, what: str, statements: Sequence[Statement]) -> None:
    """Raise `RanksDisagree` on all ranks of `scope` if they do not state the same. Collective."""
    by_rank = exchanged(scope, what, statements)
    for difference in differences(by_rank) if by_rank else ():
        raise RanksDisagree(difference.text, what=difference.what, by_rank=difference.by_rank)


# ---- at first use ----------------------------------------------------------------------------------------------------


class _OnMesh(NamedTuple):
    """A mesh of the root, its ranks, and the scope to ask them."""

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    scope: Scope


def _each_mesh(root: AnyRoot) -> Iterator[_OnMesh]:
    """The meshes of `root` that have peers."""
    for ranks, mesh in meshes_of(root.units).items():
        if (scope := scope_of(ranks)) is not None:
            yield _OnMesh(mesh, ranks, scope)


def refuse_other_structure(root: AnyRoot, peers: Peers, mode: str) -> None:
    """Compare the structure, before any connection or message. `mode`: what ranks compare. Raises `RanksDisagree` on
    all ranks of a mesh."""
    peers.meet()
    for on in _each_mesh(root):
        with peers.disagreeing(on.scope):
            refuse_differences(on.scope, "the units and parameters of the model", describe(root, on.ranks, mode))


def refuse_other_values(root: AnyRoot, peers: Peers) -> set[tuple[int, ...]]:
    """Compare initial values and buffers, in the first forward. Raises `RanksDisagree` on all ranks of a mesh. Returns
    the meshes, by their ranks, on which it warned of buffers."""
    for on in _each_mesh(root):
        with peers.disagreeing(on.scope):
            _refuse_other_values(root, on)
    warned = set()
    for on in _each_mesh(root):
        with peers.disagreeing(on.scope):
            if _refuse_other_buffers(root, on):
                warned.add(on.ranks)
    for unit in root.units:
        for param in unit.params:
            param.initial = None
    return warned


def _refuse_other_buffers(root: AnyRoot, on: _OnMesh) -> bool:
    """Returns whether it warned."""
    buffers = buffers_on(root.units[0].module, on.ranks)
    found = differing(on.scope, "buffer", buffers)
    refused = [one for one in found if buffers[one.name].is_floating_point() or buffers[one.name].is_complex()]
    if refused:
        raise RanksDisagree(
            f"{shown(refused)}: expected the same values of a buffer on every rank, found others; call "
            f"torch.manual_seed with the same number on all ranks before the model is built, or "
            f"fullshard.sync_module_states(model, buffers_only=True) (FULLSHARD_GUARD=structure: do not compare "
            f"values)",
            what=f"{refused[0].name} initial values",
        )
    if found:
        warn_of_buffers(found, "from the beginning")
    return bool(found)


def warn_of_buffers(found: Sequence[Drift], when: str) -> None:
    """Warn of buffers that differ between ranks."""
    warnings.warn(
        f"buffers differ between ranks {when}: {shown(found)}. If they should be equal, use SyncBatchNorm instead of "
        f"BatchNorm, or call fullshard.sync_module_states(model, buffers_only=True) before evaluation and before a "
        f"checkpoint; fullshard.find_drift(model) checks again",
        stacklevel=2,
    )


def _refuse_other_values(root: AnyRoot, scope: _OnMesh) -> None:
    params = [
        (param, group.placing.world)
        for unit in root.units
        for group in unit.groups
        if ranks_of(group.placing.mesh) == scope.ranks
        for param in group.params
    ]
    noted = full_digests([param for param, _ in params])
    names = parameter_names(root.units[0].module, root.units)
    # Whether this rank wrote those since of which every rank has rows. A rank without rows cannot see a write.
    whole = [i for i, (param, world) in enumerate(params) if noted[i] is not None and param.layout.rows(world - 1)]
    wrote = [i for i, is_one in zip(whole, are_written([params[i][0] for i in whole]), strict=True) if is_one]
    answer = ask(scope.scope, "the initial values of the model", repr((noted, wrote)), or_distinct=True)
    if answer is None:
        drawn = [entry for i, entry in enumerate(params) if noted[i] is None or i in wrote]
        _look_at_rows(root, scope, drawn, names)
        return
    if not answer and _is_one_random_model(root, scope, [param for param, _ in params]):
        return
    # Skip parameters that any rank has written since.
    mine = torch.tensor(are_written([param for param, _ in params]), dtype=torch.int32)
    written = sum_over(scope.mesh, mine).tolist()
    asked = [i for i, count in enumerate(written) if not count]
    if any(written):
        # Values were loaded. A parameter held by one rank alone may have been loaded with the value it had, unnoticed.
        asked = [i for i in asked if not _is_one_rank_s(*params[i], len(scope.ranks))]
    statements = [stated(TENSOR, names[params[i][0]], {"initial values": str(noted[i])}) for i in asked]
    by_rank = exchanged(scope.scope, "initial values that nobody wrote since", statements)
    if not by_rank:
        _look_at_rows(root, scope, [entry for entry, count in zip(params, written, strict=True) if count], names)
        return
    differ = list(differences(by_rank))
    name, groups = differ[0].statement.name, [ranks for ranks, _ in differ[0].values]
    found = "each rank's are others" if len(groups) == len(scope.ranks) > 2 else _unlike(groups)
    raise RanksDisagree(
        f"{name}: expected the same values on every rank when fully_shard cut it, found that {found} "
        f"({len(differ)} of {len(params)} parameters differ): the shards would come from different models; call "
        f"torch.manual_seed with the same number on all ranks before the model is built (with materialize: before "
        f"each init, which may not depend on the rank), or fullshard.sync_module_states(model) before fully_shard, or "
        f"load a checkpoint before the first forward (FULLSHARD_GUARD=structure: do not compare values)",
        what=differ[0].what,
        by_rank=differ[0].by_rank,
    )


def _look_at_rows(
    root: AnyRoot, on: _OnMesh, drawn: Iterable[tuple[ShardedParam, int]], names: Mapping[ShardedParam, str]
) -> None:
    """Warn of equal rows among the parameters, with the ranks that share each, that may have been drawn as shards."""
    cut = [param for param, world in drawn if world > 1]
    if cut:
        warn_of_equal_rows(on.mesh, root.units[0].record.name, cut, [names[param] for param in cut])


def _is_one_random_model(root: AnyRoot, scope: _OnMesh, params: Sequence[ShardedParam]) -> bool:
    """Whether ranks, of which no two have the same model, never seeded theirs, and warn of it. Collective.

    Where each rank alone holds its rows, these come from one consistent random model, as torch's FSDP2 trains it. Not
    where ranks are replicas, or anything was written that not every rank wrote as often: a load on rank 0, say.
    """
    groups = [(group, links) for unit in root.units for group, links in zip(unit.groups, unit.links, strict=True)]
    cut = all(
        links.replicate is None and group.placing.shards and ranks_of(group.placing.mesh) == scope.ranks
        for group, links in groups
    )
    text = written_before(params) if cut and all(param.own_spec is None for param in params) else ""
    if ask(scope.scope, "how the initial values came about", text) is not None or not text:
        return False
    if scope.scope.rank == scope.ranks[0]:
        warnings.warn(
            f"{root.units[0].record.name}: expected the same initial values on every rank, found that each of the "
            f"{len(scope.ranks)} ranks drew its own: no seed was set. Each parameter is made of the rows of "
            f"{len(scope.ranks)} draws, one consistent random model, and is trained; another run, or another number of "
            f"ranks, starts from other values. Call torch.manual_seed with the same number on all ranks before the "
            f"model is built",
            stacklevel=2,
        )
    return True


def _unlike(groups: Sequence[Sequence[int]]) -> str:
    return f"{shown_ranks(groups[0])} had others than " + ", and these than ".join(map(shown_ranks, groups[1:4]))


def _is_one_rank_s(param: ShardedParam, world: int, ranks: int) -> bool:
    """Whether a single rank of the mesh (`ranks` ranks, `world` of them shard) holds all rows of `param`."""
    return world == ranks and sum(param.layout.rows(rank) > 0 for rank in range(world)) == 1
