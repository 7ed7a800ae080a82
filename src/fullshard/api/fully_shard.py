"""`fully_shard`: validate, find the parameters, build the unit, swap the class, register hooks."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from .._torch import TorchFSDPModule, concatenated_mesh, flattened_axes, published_state
from ..agree import accompany, loaded
from ..agree.calls import own_parameters
from ..agree.structure import ignored_names
from ..comm import attend, block_of, mesh_links
from ..engine import Part, Unit, unit_of
from ..engine.foreign import note_uncaught
from ..engine.hooks import UnitHooks, hooks_of
from ..engine.state_dict import hook_state_dict, note_replaced
from ..engine.unit import check_memory, note_managed, note_memory, note_owner
from ..param import Found, FullMesh, Placing, check_own_mesh, managed_modules, managed_parameters, move_unsharded
from ..peers import watch
from ..policy import MixedPrecisionPolicy, Offload, OffloadPolicy, Options, resolve_offload
from ..policy.arguments import expect_each, expect_known_fields, expect_module, expect_text
from . import validate
from .classes import sharded_class
from .module import FSDPModule, publish
from .validate import resolve_mesh

# ---- placement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPlacementResult:
    """Result of a `shard_placement_fn` for a parameter with its own mesh, such as an expert's.

    placement: the dim to shard; None means `Shard(0)`.
    mesh: as for `fully_shard(mesh=...)`; None means the mesh of the unit. Gradients are averaged over it.

    >>> from torch.distributed.tensor import Shard
    >>> ShardPlacementResult(Shard(1)).mesh is None
    True

    torch's private class of this name, with its `mesh_info`, is accepted too (torch 2.13).
    """

    placement: Shard | None
    mesh: DeviceMesh | None = None


class Share(NamedTuple):
    """The parameters of a unit on one mesh."""

    mesh: DeviceMesh
    # The mesh with all axes (`dp_mesh_dims`) of parameters that are DTensors on it, if `mesh` is the unit's.
    full_mesh: FullMesh | None
    found: list[Found]


def place(
    found: Sequence[Found],
    mesh: DeviceMesh,
    full_mesh: FullMesh | None,
    fn: Callable[[nn.Parameter], Any] | None,
) -> list[Share]:
    """`found` with the dims that `fn` chooses, grouped by the mesh it chooses, in the order of first parameters.

    `mesh` and `full_mesh` are those of the unit. `fn` is called once per parameter, in the same order on every rank,
    and must return the same on all ranks. Raises `ValueError` for a result other than None, `Shard` or a
    `ShardPlacementResult` with a usable mesh, and if two meshes would share their process groups; `AssertionError`
    (torch's type) for a dim out of range; and the errors of `check_own_mesh` for DTensor parameters.
    """
    # By process groups, not by mesh: parameters with the same process groups share messages.
    shares: dict[tuple[str, ...], Share] = {}
    for item in found:
        dim, own = (item.dim, mesh) if fn is None else _answer(item, mesh, fn(item.parameter))
        full = full_mesh if own == mesh else None
        check_own_mesh(item, own, full)
        share = shares.setdefault(_groups(own), Share(own, full, []))
        if share.mesh != own:
            raise ValueError(
                f"shard_placement_fn: expected parameters that share their process groups to share one mesh, found "
                f"{own} for {item.name} and {share.mesh} for {share.found[0].name}; return the same mesh for both"
            )
        share.found.append(item._replace(dim=dim))
    return list(shares.values())


def _answer(item: Found, default: DeviceMesh, answer: Any) -> tuple[int, DeviceMesh]:
    """(dim, mesh) of one parameter."""
    placement, mesh = answer, default
    if hasattr(answer, "placement"):
        expect_known_fields("shard_placement_fn", answer, ("placement", "mesh", "mesh_info"))
    if isinstance(answer, ShardPlacementResult):
        placement = answer.placement
        mesh = default if answer.mesh is None else _usable(item, answer.mesh, default)
    elif hasattr(answer, "placement") and hasattr(answer, "mesh_info"):
        placement = answer.placement
        mesh = _usable(item, _mesh_of_info(item, answer.mesh_info), default)
    if placement is None:
        return 0, mesh
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn: expected None, Shard(dim) or fullshard.ShardPlacementResult for {item.name}, found "
            f"{answer!r}; put a parameter that should stay unsharded into ignored_params"
        )
    ndim = item.parameter.ndim
    if not -ndim <= placement.dim < ndim:
        raise AssertionError(
            f"shard_placement_fn: expected a dim of {item.name} in [{-ndim}, {ndim - 1}], found {placement}; its shape "
            f"is {tuple(item.parameter.shape)}"
        )
    return placement.dim % ndim, mesh


def _usable(item: Found, mesh: object, default: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"shard_placement_fn: expected a DeviceMesh for {item.name}, found {type(mesh).__name__}; "
            f"use init_device_mesh, or None for the mesh of the unit"
        )
    mesh = resolve_mesh(mesh)
    if mesh.device_type != default.device_type:
        raise ValueError(
            f"shard_placement_fn: expected a mesh on {default.device_type}, as that of the unit, found one on "
            f"{mesh.device_type} for {item.name}; shard parameters on another device by a separate fully_shard call"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"shard_placement_fn: expected a mesh with this rank in it, found {mesh} for {item.name}; give every rank "
            f"that has the parameter a mesh, as the axes of one init_device_mesh do"
        )
    return mesh


def _mesh_of_info(item: Found, info: Any) -> DeviceMesh:
    """The axes that torch's FSDPMeshInfo or HSDPMeshInfo names, as a mesh (replicate, shard) or (shard)."""
    mesh, shard, replicate = info.mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    axes = [axis for axis in (replicate, shard) if axis is not None]
    own: DeviceMesh
    if axes == list(range(mesh.ndim)):
        own = mesh
        return own
    names = mesh.mesh_dim_names
    if shard is None or names is None or axes != sorted(axes):
        raise ValueError(
            f"shard_placement_fn: expected a mesh of the axes (shard) or (replicate, shard) for {item.name}, or named "
            f"ones in that order, found shard {shard} and replicate {replicate} of {mesh}; "
            f"slice the mesh by names: mesh['replicate', 'shard']"
        )
    own = mesh[tuple(names[axis] for axis in axes)]
    return own


def _groups(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))


# ---- all or nothing --------------------------------------------------------------------------------------------------
# A `fully_shard` call that raises leaves modules as they were, however far it had come.

# What torch's registries are: parameters, buffers, hooks, and the states that composable APIs publish.
_REGISTRIES = (dict, OrderedDict)


@contextmanager
def unchanged_on_error(modules: Iterable[nn.Module], moved: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put class, attributes and registries of `modules` back if the block raises, and the data of `moved`.

    Registries keep their identity, because the handles of hooks refer to them.
    """
    before = [(module, type(module), dict(vars(module))) for module in modules]
    registries = [
        (registry, registry.copy())
        for _, _, state in before
        for registry in state.values()
        if type(registry) in _REGISTRIES
    ]
    places = [(parameter, parameter.data) for parameter in moved]
    try:
        yield
    except BaseException:
        for module, cls, state in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for registry, copied in registries:
            registry.clear()
            registry.update(copied)
        for parameter, data in places:
            parameter.data = data
        raise


# ---- mesh dims -------------------------------------------------------------------------------------------------------
# `dp_mesh_dims`: the data-parallel axes of a full mesh.


class Whole(NamedTuple):
    """A 1-D mesh over which `fully_shard` shards nothing; passed by `replicate`."""

    mesh: DeviceMesh


def data_parallel_axes(mesh: DeviceMesh | None, dims: Any) -> tuple[DeviceMesh, FullMesh]:
    """The data-parallel mesh within `mesh`, 1-D (shard) or 2-D (replicate, shard), and its position in `mesh`.

    Without a shard axis: 1-D (replicate), and `FullMesh.shard_axis` is None.

    dims: a `DataParallelMeshDims`, fullshard's or torch's: `shard` and `replicate` are a name, several names or None.
    Several names become one axis, in the order of the mesh. Raises torch's types: `ValueError` (no names, an unknown
    name), `KeyError` (names in another order than in the mesh), `RuntimeError` (an axis twice, or shard axes that are
    not adjacent).
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
            f"dp_mesh_dims: expected adjacent shard axes, found {dims.shard!r} of {names}; reorder the axes of the mesh"
        )
    # Slice the mesh by names, so that every part knows its root mesh.
    parts = [flattened_axes(mesh[tuple(names[axis] for axis in axes)]) for axes in (replicate, shard) if axes]
    data_parallel = concatenated_mesh(parts)
    others = [axis for axis in range(mesh.ndim) if axis not in shard[1:]]
    whole = mesh
    if len(shard) > 1:
        whole = concatenated_mesh([parts[-1] if axis == shard[0] else mesh[names[axis]] for axis in others])
    shard_axis = others.index(shard[0]) if shard else None
    return data_parallel, FullMesh(mesh, whole, tuple(others), shard_axis, (*shard, *replicate))


def _axes(given: str | Iterable[str] | None, field: str, names: tuple[str, ...]) -> tuple[int, ...]:
    named = () if given is None else (given,) if isinstance(given, str) else given
    wanted = tuple(expect_each(f"dp_mesh_dims.{field}", named, lambda one: isinstance(one, str), "names of axes"))
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


# Full parameters of at least this size are all-gathered directly into place if the backend groups messages.
DIRECT_GATHER_NBYTES = 1 << 20


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    optional: bool = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    optional: bool = ...,
) -> list[FSDPModule]: ...
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    optional: bool = False,
) -> Any:
    """Shard the parameters of `module` that belong to no inner unit, in place, over the ranks of `mesh`.

    Apply it bottom-up: to each block, then to the whole model. Afterwards every parameter is a DTensor parameter with
    placements `(Shard(0),)` (rows split as by `torch.chunk`, uneven sizes included), unsharded only while the module
    computes. The module's class becomes a subclass of `FSDPModule` and of its own class. Build the optimizer
    afterwards: a step on the old parameters raises a `RuntimeError` that names them. Gradients are averaged over the
    ranks and are on `.grad` as DTensors when backward ends.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    module: an `nn.Module`, or a list of them that forms one unit: one all-gather serves all, and each may run
        separately, in any order and any number of times (norm and head under a chunked loss). They stay unsharded from
        the first that runs to the last; modules that do not run are not awaited after the outermost forward ends. A
        list cannot be the root. Parameters may be on the meta device (then call `to_empty` and initialise afterwards).
    mesh: a 1-D `DeviceMesh`; or a 2-D one with named axes (replicate, shard): parameters are sharded over the second
        and replicated over the first (HSDP, MiCS; (N, 1) shards nothing), placements `(Replicate(), Shard(0))`, and
        gradients are averaged over both. None: all ranks of the default process group, initialised if needed.
    reshard_after_forward: True reshards after forward and all-gathers again in backward; False keeps the full
        parameters; None: True, except for the root, whose backward follows at once. An int k, a factor of the world
        size: reshard to 1/k (in the compute dtype) and all-gather in backward among k adjacent ranks, such as a node.
    mp_policy: dtypes of compute, reduction, inputs and outputs (fullshard's or torch's `MixedPrecisionPolicy`).
    ignored_params: parameters to leave unsharded on every rank.
    shard_placement_fn: called with each parameter; returns None, `Shard(dim)` (any dim, uneven sizes too), or a
        `ShardPlacementResult` with the parameter's own mesh, over which its gradients are averaged. It must return the
        same on every rank.
    dp_mesh_dims: for parameters that are DTensors on a `mesh` with axes of other parallelism: the names of the
        data-parallel axes, over which the parameters are replicated and will be sharded.
    offload_policy: `CPUOffloadPolicy()`, fullshard's or torch's: shards, gradients and optimizer state on the host.
    optional: True for a unit below the model that only some ranks run in a step (an encoder of images without images, a
        dropped layer); not in torch. A rank that leaves it out, and the units inside of it, sends what the others send,
        at its place in the order of modules. Its parameters have a gradient on all ranks if any rank ran it, else None.
        One run in each forward of the unit around it; several, in any order, with `reshard_after_forward=False`.

    Every rank must make the same calls. Returns `module` itself, also for a list. Raises `ValueError` (a module without
    forward, a scalar parameter, a parameter tied into another unit or over the memory of another one, a bad argument),
    `AssertionError` (applied twice) and `RuntimeError` (an inner module already ran or is a ScriptModule, an outer
    module was sharded first, `torch.inference_mode()` is on or made the parameters, or DistributedDataParallel or
    torch's `replicate` averages its gradients). A call that raises leaves the modules as they were. Source: seeds 000
    to 003; torch 2.13 `fully_shard` for names and types.
    """
    roots = validate.check_modules(module)
    validate.check_policies(mp_policy, offload_policy, shard_placement_fn, dp_mesh_dims)
    optional = validate.check_optional(optional, roots)
    reshard_after_forward = validate.check_reshard(reshard_after_forward)
    ignored = validate.check_ignored(ignored_params)
    name = "+".join(type(root).__name__ for root in roots)
    modules = _managed(roots)
    found = managed_parameters(modules, ignored)
    validate.check_parameters(found, roots)
    validate.check_inference(found, roots)
    validate.check_averaged(found, roots)
    validate.check_scripted(modules, found, roots)
    spans = check_memory(found, roots)
    for root in roots:
        validate.check_swap(root, sharded_class)
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
    validate.warn_of_gradients(found)
    guarded = watch()
    inner = [module for _, module in modules]
    with unchanged_on_error(inner, ignored):
        move_unsharded(modules, ignored, device)
        unit = Unit(
            roots,
            parts,
            device=device,
            policy=mp_policy,
            reshard_after_forward=reshard,
            communication=options.communication,
            reduce_default=options.reduce_default,
            note_values=guarded is not None and guarded.settings.mode == "full",
        )
        unit.settings.ignored_names = ignored_names(roots, ignored)
        unit.settings.accompany = accompany
        unit.settings.optional = optional
        own_parameters(unit)
        UnitHooks(unit)
        hook_state_dict(unit, loaded)
        note_managed(unit, inner)
        validate.refuse_parallelism(modules, found, name)
        publish(unit, inner)
        for root in roots:
            root.__class__ = sharded_class(type(root))
    # From here on nothing raises: this is noted of parameters, which an error above leaves on the modules.
    note_memory(unit, spans)
    note_owner(found, name)
    note_replaced(unit, found)
    note_uncaught()
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
    # The argument `shards` describes the unit's mesh only.
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
        return part  # the kept parts are the shards themselves
    return part._replace(links=links._replace(block=block_of(placing.mesh, degree, placing.device)))


def _managed(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters form the unit of `roots`, each once; for a list, names begin with the position."""
    managed: dict[nn.Module, str] = {}
    for position, root in enumerate(roots):
        for name, module in managed_modules(root, lambda child: unit_of(child) is not None):
            if len(roots) > 1:
                name = f"{position}.{name}" if name else str(position)
            managed.setdefault(module, name)
    return [(name, module) for module, name in managed.items()]


# Callers of torch's function read a module's state here.
fully_shard.state = published_state  # type: ignore[attr-defined]


# ---- replicate -------------------------------------------------------------------------------------------------------
# `replicate`: data parallelism without sharding, on the same engine.


def replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> FSDPModule:
    """Replicate the parameters of `module` on every rank of `mesh`, and average their gradients, as DDP does.

    Units, hooks, precision, accumulation and setters are those of `fully_shard`, and the module becomes an
    `FSDPModule`. Parameters are DTensors with placements `(Replicate(),)`. Nothing is all-gathered; each unit sends one
    flat bucket of gradients when they are ready. `fully_shard` on a mesh (N, 1) does the same, with placements
    `(Replicate(), Shard(0))`.

    mesh: a 1-D `DeviceMesh`; None: all ranks of the default process group. The other arguments are those of
    `fully_shard`; of `dp_mesh_dims` only `replicate`.
    Returns `module` itself. Raises `ValueError` (a mesh of several axes, a shard axis), `RuntimeError` (a module that
    `fully_shard` sharded) and the errors of `fully_shard`. Source: torch 2.13
    `torch.distributed._composable.replicate_with_fsdp.replicate` for names and types.
    """
    validate.check_policies(mp_policy, offload_policy, None, dp_mesh_dims)
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is not None and any(group.placing.shards for group in unit.groups):
        raise RuntimeError(
            f"module: expected one that fully_shard was not applied to, found {type(module).__name__}, which is "
            f"sharded; apply one of the two to it"
        )
    if dp_mesh_dims is not None:
        if dp_mesh_dims.shard is not None:
            raise ValueError(
                f"dp_mesh_dims: expected only replicate axes, found shard={dp_mesh_dims.shard!r}; "
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
# `register_fsdp_forward_method`: a method that unshards and reshards as forward does.

_MARK = "_fullshard_forward_of"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` unshard and reshard parameters as `module(...)` does (`generate`, `encode`, ...).

    Each call then counts as a forward: `mp_policy` casts inputs and outputs, and the parameters stay unsharded while
    the method runs, even if it calls `forward` or other registered methods; backward unshards them again. Register it
    on the module whose parameters the method uses. Does nothing for an unsharded module or a registered method.

    Raises `ValueError` when there is no such method, or when torch sharded the module, and `NotImplementedError` for
    generators and coroutines, whose body runs after the call returns. Source: torch 2.13.
    """
    expect_module("module", module)
    expect_text("method_name", method_name, "the name of a method")
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
            f"method_name: expected a method that completes when it returns, found {method_name!r}, a generator or "
            f"coroutine; call unshard() before it and reshard() after it, or register what it calls"
        )
    if getattr(method, _MARK, None) is module:
        return
    hooks = hooks_of(unit)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hooks.call(module, method, args, kwargs)

    setattr(call, _MARK, module)
    # On the instance: other instances of the class may not be sharded.
    setattr(module, method_name, call)


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
