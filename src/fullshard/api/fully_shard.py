"""`fully_shard`: from a module to a unit. Thin: validate, find parameters, make the unit, swap the class, hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import published_state
from ..comm import attend, block_of, mesh_links
from ..guard import watch
from ..param import Placing, managed_modules, managed_parameters, move_unsharded
from ..policy import MixedPrecisionPolicy, Offload, OffloadPolicy, Options, resolve_offload
from ..runtime import Part, Unit, unit_of
from ..runtime.by_hand import own_parameters
from ..runtime.hooks import UnitHooks
from ..runtime.replaced import note_replaced
from ..runtime.state_dict import hook_state_dict
from ..runtime.step_facts import ignored_names
from . import validate
from .mesh_dims import Whole, data_parallel_axes
from .module import sharded_class
from .placement import Share, place
from .torch_state import publish

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
    options = Options.from_environment()
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
    unit.ignored_names = ignored_names(roots, ignored)
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
