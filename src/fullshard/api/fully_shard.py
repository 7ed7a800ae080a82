"""`fully_shard`: from a module to a unit. Thin: validate, find parameters, make the unit, swap the class, hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch import TorchFSDPModule, concatenated_mesh, flattened_axes, published_state
from ..comm import attend, block_of, mesh_links
from ..engine import Part, Unit, unit_of
from ..engine.explicit_gathers import own_parameters
from ..engine.hooks import UnitHooks, hooks_of
from ..engine.state_dict import hook_state_dict, note_replaced
from ..engine.step_facts import ignored_names
from ..guard import watch
from ..param import FullMesh, Placing, managed_modules, managed_parameters, move_unsharded
from ..policy import MixedPrecisionPolicy, Offload, OffloadPolicy, Options, resolve_offload
from . import validate
from .module import publish, sharded_class
from .validate import Share, place

# ---- mesh dims -------------------------------------------------------------------------------------------------------
# `dp_mesh_dims`: which axes of a full mesh are those of data parallelism.


class Whole(NamedTuple):
    """A mesh of one axis over which nothing is cut: how `replicate` says so to `fully_shard`."""

    mesh: DeviceMesh


def data_parallel_axes(mesh: DeviceMesh | None, dims: Any) -> tuple[DeviceMesh, FullMesh]:
    """The data-parallel mesh within `mesh`, and how it lies there: 1-D (shard, or replicate when nothing shards) or 2-D
    (replicate, shard).

    Without an axis that shards: 1-D (replicate), and `FullMesh.shard_axis` is None.

    dims: a `DataParallelMeshDims`, ours or torch's: `shard` and `replicate` are a name, several names or None. Several
    names become one axis, in the order of the mesh. Raises torch's types: `ValueError` (no names, an unknown name),
    `KeyError` (names in another order than in the mesh), `RuntimeError` (an axis twice, or axes to shard over that are
    not neighbours).
    """
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            f"mesh: expected the full mesh of the parameters with named axes, because dp_mesh_dims is given, found "
            f"{mesh}; use init_device_mesh(..., mesh_dim_names=(...))"
        )
    shard = _axes(dims.shard, "shard", names)
    replicate = _axes(dims.replicate, "replicate", names)
    if not shard and not replicate:
        raise ValueError("dp_mesh_dims: expected at least one of shard and replicate, found neither; name the axes")
    both = sorted(names[axis] for axis in set(shard) & set(replicate))
    if both:
        raise RuntimeError(f"dp_mesh_dims: expected each axis once, found {both} in shard and replicate; name it once")
    if shard and shard != tuple(range(shard[0], shard[0] + len(shard))):
        raise RuntimeError(
            f"dp_mesh_dims: expected axes to shard over that are neighbours, found {dims.shard!r} of {names}; order "
            f"the axes of the mesh so that they are"
        )
    # Made by slicing the mesh by names, so that every part knows its root.
    parts = [flattened_axes(mesh[tuple(names[axis] for axis in axes)]) for axes in (replicate, shard) if axes]
    data_parallel = concatenated_mesh(parts)
    others = [axis for axis in range(mesh.ndim) if axis not in shard[1:]]
    whole = mesh
    if len(shard) > 1:
        whole = concatenated_mesh([parts[-1] if axis == shard[0] else mesh[names[axis]] for axis in others])
    shard_axis = others.index(shard[0]) if shard else None
    return data_parallel, FullMesh(mesh, whole, tuple(others), shard_axis, (*shard, *replicate))


def _axes(given: str | Iterable[str] | None, field: str, names: tuple[str, ...]) -> tuple[int, ...]:
    wanted = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    for name in wanted:
        if name not in names:
            raise ValueError(
                f"dp_mesh_dims.{field}: expected names of axes of the mesh, {names}, found {name!r}; check its spelling"
            )
    axes = tuple(names.index(name) for name in wanted)
    if list(axes) != sorted(set(axes)):
        raise KeyError(
            f"dp_mesh_dims.{field}: expected each name once and in the order of {names}, found {wanted}; "
            f"name them in that order"
        )
    return axes


# ---- fully shard -----------------------------------------------------------------------------------------------------

T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")

# Full parameters of at least this size are gathered straight into place where the backend groups messages.
DIRECT_GATHER_NBYTES = 1 << 20


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> T:
    """Shard the parameters of `module` that no inner unit has, in place, over the ranks of `mesh`.

    Apply it bottom-up: to each block, then to the whole model. Afterwards every parameter is a DTensor parameter with
    placements `(Shard(0),)` (rows as `torch.chunk` cuts them, so uneven sizes are fine), full only while the module
    computes. The module's class becomes a subclass of `FSDPModule` and of its own class. Build the optimizer
    afterwards: a step of one that holds the parameters from before is a `RuntimeError` that names them. Gradients are
    averaged over the ranks and arrive as DTensors on `.grad` when backward ends.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    module: an `nn.Module`, or a list of them that become one unit: one message gathers the parameters of all, and each
        may run by itself, in any order and any number of times (norm and head under a loss in chunks). They stay full
        from the first that runs to the last; those that did not run are not waited for beyond the outermost forward.
        A list cannot be the root. Its parameters may be on the meta device (then `to_empty` and initialise afterwards).
    mesh: a 1-D `DeviceMesh`; or a 2-D one with named axes (replicate, shard): parameters are sharded over the second
        and equal over the first (HSDP, MiCS; (N, 1) shards nothing), placements `(Replicate(), Shard(0))`, and
        gradients are averaged over both. None: all ranks of the default process group, which is set up when needed.
    reshard_after_forward: True frees the full parameters after forward and gathers them again in backward; False keeps
        them; None: True, except for the root, whose backward follows at once. An int k, a factor of the ranks: keep the
        part of one rank of k (in the compute dtype) and gather backward among k neighbours, as the ranks of a node.
    mp_policy: dtypes of compute, reduction, inputs and outputs (ours or torch's `MixedPrecisionPolicy`).
    ignored_params: parameters to leave as they are on every rank.
    shard_placement_fn: called with each parameter; returns None or `Shard(dim)` (any dim, uneven ones too), or a
        `ShardPlacementResult` with a mesh of that parameter's own, over which its gradients are averaged. It must
        answer alike on every rank.
    dp_mesh_dims: parameters are DTensors on `mesh`, which has axes of other parallelism too: the names of the
        data-parallel ones, over which they are replicated and which are now sharded.
    offload_policy: `CPUOffloadPolicy()`, ours or torch's: shards, gradients and optimizer state on the host.

    Every rank must make the same calls. Returns `module` itself, the list too. Raises `ValueError` (a module without
    forward, a scalar parameter, a parameter tied into another unit, a bad argument), `AssertionError` (applied twice)
    and `RuntimeError` (a part already ran, a module around it was sharded before it, or DistributedDataParallel or
    torch's `replicate` averages its gradients). A call that raises leaves modules and parameters as they were; buffers
    and ignored parameters may be on the mesh's device by then. Source: seeds 000 to 003; torch 2.13 `fully_shard` for
    names and types.
    """
    roots = validate.check_modules(module)
    validate.check_policies(mp_policy, offload_policy, shard_placement_fn, dp_mesh_dims)
    reshard_after_forward = validate.check_reshard(reshard_after_forward)
    ignored = validate.check_ignored(ignored_params)
    name = "+".join(type(root).__name__ for root in roots)
    modules = _managed(roots)
    found = managed_parameters(modules, ignored)
    validate.check_parameters(found, roots)
    validate.check_averaged(found, roots)
    full_mesh, shards = None, True
    if isinstance(mesh, Whole):
        mesh, shards = mesh.mesh, False
    elif dp_mesh_dims is None:
        mesh = validate.resolve_mesh(mesh)
    else:
        mesh, full_mesh = data_parallel_axes(mesh, dp_mesh_dims)
        shards = full_mesh.shard_axis is not None
    shares = place(found, mesh, full_mesh, shard_placement_fn)

    device = validate.device_of(mesh)
    offload = resolve_offload(offload_policy, device.type)
    options = Options.current()
    direct_nbytes = None if options.communication == "torch" else DIRECT_GATHER_NBYTES
    parts = [_part(share, mesh, device, direct_nbytes, offload, shards=shards) for share in shares]
    reshard, degree = validate.degree_of(reshard_after_forward, [part.placing.world for part in parts])
    if degree is not None:
        validate.check_kept(found, degree, dp_mesh_dims)
        parts = [_kept_in_blocks(part, degree) for part in parts]
    move_unsharded(modules, ignored, device)
    guarded = watch()
    with validate.marked_owner(found, name):
        unit = Unit(
            roots,
            parts,
            device=device,
            policy=mp_policy,
            reshard_after_forward=reshard,
            note_values=guarded is not None and guarded.settings.mode == "full",
        )
    unit.settings.ignored_names = ignored_names(roots, ignored)
    own_parameters(unit)
    UnitHooks(unit)
    note_replaced(unit, found)
    hook_state_dict(unit)
    validate.mark_managed(unit, [managed for _, managed in modules])
    publish(unit, [managed for _, managed in modules])
    for root in roots:
        root.__class__ = sharded_class(type(root))
    return module


def _part(
    share: Share,
    unit_mesh: DeviceMesh,
    device: torch.device,
    direct_nbytes: int | None,
    offload: Offload,
    *,
    shards: bool,
) -> Part:
    own = share.mesh
    # `shards` is about the mesh of the unit.
    shards = shards or own != unit_mesh
    links = mesh_links(own, device, shards=shards)
    attend(links)
    placing = Placing(
        own,
        links.shard.rank,
        links.shard.world,
        device,
        links.shard.backend,
        direct_nbytes,
        full_mesh=share.full_mesh,
        unit_mesh=None if own == unit_mesh else unit_mesh,
        offload=offload,
        shards=shards,
    )
    return Part(share.found, placing, links)


def _kept_in_blocks(part: Part, degree: int) -> Part:
    placing, links = part.placing, part.links
    if placing.world == degree:
        return part  # all ranks together keep their shards, as they do anyway
    return part._replace(links=links._replace(block=block_of(placing.mesh, degree, placing.device)))


def _managed(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters are in the unit of `roots`, each once; names begin with the position in a list."""
    managed: dict[nn.Module, str] = {}
    for position, root in enumerate(roots):
        for name, module in managed_modules(root, lambda child: unit_of(child) is not None):
            if len(roots) > 1:
                name = f"{position}.{name}" if name else str(position)
            managed.setdefault(module, name)
    return [(name, module) for module, name in managed.items()]


# Where callers of torch's function look for the state of a module.
fully_shard.state = published_state  # type: ignore[attr-defined]


# ---- replicate -------------------------------------------------------------------------------------------------------
# `replicate`: data parallelism without sharding, by the same engine.

M = TypeVar("M", bound=nn.Module)


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Keep the parameters of `module` whole on every rank of `mesh`, and average their gradients: what DDP does.

    `fully_shard` with nothing cut: units, hooks, precision, accumulation and setters are the same, and the module
    becomes an `FSDPModule`. Parameters are DTensors with placements `(Replicate(),)`. Nothing is gathered; each unit
    sends one flat bucket of gradients when they are ready. `fully_shard` on a mesh (N, 1) is the same, with placements
    `(Replicate(), Shard(0))`.

    mesh: a 1-D `DeviceMesh`; None: all ranks of the default process group. The other arguments are those of
    `fully_shard`; of `dp_mesh_dims` only `replicate`.
    Returns `module` itself. Raises `ValueError` (a mesh of several axes, axes to shard over), `RuntimeError` (a module
    that `fully_shard` cut) and what `fully_shard` raises. Source: torch 2.13
    `torch.distributed._composable.replicate_with_fsdp.replicate` for names and types.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is not None and any(group.placing.shards for group in unit.groups):
        raise RuntimeError(
            f"module: expected one that fully_shard was not applied to, found {type(module).__name__}, which is "
            f"sharded; apply one of the two to it"
        )
    if dp_mesh_dims is not None:
        if dp_mesh_dims.shard is not None:
            raise ValueError(
                f"dp_mesh_dims: expected only axes that replicate, found shard={dp_mesh_dims.shard!r}; "
                f"use fully_shard, which shards over them"
            )
        whole: Any = mesh
    else:
        whole = Whole(_one_axis(mesh))
    return fully_shard(
        module,
        mesh=whole,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )


def _one_axis(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        device_type = validate.resolve_mesh(None).device_type
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(f"mesh: expected one axis, over which to replicate, found {mesh}; slice it by its name")
    return validate.resolve_mesh(mesh)


# ---- forward method --------------------------------------------------------------------------------------------------
# `register_fsdp_forward_method`: a method that gathers and frees parameters as forward does.

_MARK = "_fullshard_forward_of"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` gather and free parameters as `module(...)` does (`generate`, `encode`, ...).

    From now on a call is a use of the module: inputs and outputs are cast by its `mp_policy`, its parameters are full
    while the method runs, also where it calls `forward` or other registered methods in between, and backward finds
    them. Register it on the module whose parameters the method uses. Does nothing for a module that is not sharded, or
    the second time.

    Raises `ValueError` when there is no such method, or when torch sharded the module, and `NotImplementedError` for
    generators and coroutines, whose body runs after the call has returned. Source: torch 2.13.
    """
    unit = unit_of(module)
    if unit is None:
        if isinstance(module, TorchFSDPModule):
            raise ValueError(
                f"module: expected one that fullshard.fully_shard was applied to, found {type(module).__name__}, "
                f"sharded by torch; use torch.distributed.fsdp.register_fsdp_forward_method for it"
            )
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"method_name: expected a method of {type(module).__name__}, found {method_name!r}; check its spelling"
        )
    if any(test(method) for test in _RUN_LATER):
        raise NotImplementedError(
            f"method_name: expected a method that is over when it returns, found {method_name!r}, a generator or "
            f"coroutine; call unshard() before it and reshard() after it, or register what it calls"
        )
    if getattr(method, _MARK, None) is module:
        return
    hooks = hooks_of(unit)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hooks.call(module, method, args, kwargs)

    setattr(call, _MARK, module)
    # On the object: other objects of the class may not be sharded.
    setattr(module, method_name, call)


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
