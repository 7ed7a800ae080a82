"""One value on all ranks: `sync_module_states` brings it about, `find_drift` says where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import broadcast_over, sum_over, together_over
from ..guard import Item, RanksDisagree, ask, first_difference, scope_of, structure, tell
from ..param import can_digest, local_data
from ..runtime.describe import ranks_of
from ..runtime.drift import Drift as Drift
from ..runtime.drift import find_drift as _find_drift
from ..runtime.forming import module_units
from ..runtime.names import clean_name
from ..runtime.uninitialized import shown
from . import validate

T = TypeVar("T", bound=nn.Module)


def sync_module_states(
    model: T, mesh: DeviceMesh | None = None, from_rank: int = 0, *, buffers_only: bool = False
) -> T:
    """Give every rank the parameters and buffers of one: for ranks that built other values, before `fully_shard`.

        model = Transformer(config)            # or, on all ranks but one, under torch.device("meta")
        fullshard.sync_module_states(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    mesh: among which ranks; None: all of the default process group. With other parallelism around (tensor parallelism,
        a pipeline), the mesh that is given to `fully_shard`.
    from_rank: the position in `mesh` of the rank whose values are taken: of the default group, its rank.
    buffers_only: leave parameters alone. This may be called after `fully_shard`, to bring buffers together that went
        apart in training (`find_drift`).

    Written in place; what a receiving rank has on the meta device gets memory on the device of the mesh, and tied
    parameters stay tied. Takes one buffer of 16 MiB. Collective. Returns `model`.

    Raises `RuntimeError` after `fully_shard`, unless `buffers_only`: each rank has other rows, and none has all values;
    `RanksDisagree` where names, shapes or dtypes differ; `ValueError` for a `from_rank` outside of the mesh, and where
    that rank has something on the meta device; `TypeError` for tensor subclasses other than DTensor. Source: FSDP1's
    argument `sync_module_states`, which did this in its constructor; FSDP2 has nothing in its place.
    """
    if not buffers_only and module_units(model):
        raise RuntimeError(
            "model: expected one before fully_shard, found sharded modules, of whose parameters each rank has other "
            "rows, so that none could give all values; call sync_module_states before the first fully_shard, load a "
            "checkpoint, or pass buffers_only=True"
        )
    mesh = validate.resolve_mesh(None) if mesh is None else mesh
    if not 0 <= from_rank < mesh.size():
        raise ValueError(f"from_rank: expected a position in the mesh, from 0 to {mesh.size() - 1}, found {from_rank}")
    if mesh.size() == 1:
        return model
    with together_over([mesh], "sync_module_states"):
        tensors = dict(_tensors(model, buffers_only=buffers_only))
        _check_kinds(tensors)
        _refuse_other_names(mesh, tensors)
        _refuse_missing(mesh, tensors, from_rank)
        if any(tensor.is_meta for tensor in tensors.values()):
            _allocate(model, validate.device_of(mesh), buffers_only=buffers_only)
            tensors = dict(_tensors(model, buffers_only=buffers_only))
        broadcast_over(mesh, [local_data(tensor) for tensor in tensors.values()], from_rank, "sync_module_states")
    return model


def find_drift(model: nn.Module) -> tuple[Drift, ...]:
    """What ranks should have the same of and have not: buffers, copies of shards, parameters that no unit has.

    Buffers are compared among the ranks of the mesh of the unit that they are in; shards among the ranks that replicate
    them (HSDP); `ignored_params` as buffers. Bit by bit (64 bits of a digest each); no tensor is sent. Tensors of names
    that only some ranks have are left out, and so is what has no data yet.

    Collective: all ranks call it. Each item has `name`, `kind` ("buffer", "replica", "unsharded parameter") and
    `ranks`, in groups of equal values, the largest first. Empty where nothing differs. Raises `ValueError` when nothing
    in `model` is sharded.
    """
    units = module_units(model)
    if not units:
        raise ValueError(
            f"model: expected one with sharded modules in it, found {type(model).__name__} without; "
            f"call fully_shard first"
        )
    return tuple(_find_drift(units, model))


# ---- tensors of a model --------------------------------------------------------------------------------------


def _tensors(model: nn.Module, *, buffers_only: bool) -> Iterator[tuple[str, Tensor]]:
    if not buffers_only:
        yield from ((clean_name(name), parameter) for name, parameter in model.named_parameters())
    yield from ((clean_name(name), buffer) for name, buffer in model.named_buffers())


def _check_kinds(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        local = local_data(tensor)
        if not can_digest(local) and not (local.is_meta and type(local) in (Tensor, nn.Parameter)):
            raise TypeError(
                f"{name}: expected a plain tensor or a DTensor, found {type(local).__name__} ({local.layout}); give "
                f"all ranks the same values yourself"
            )
        if isinstance(tensor, DTensor) and local.is_meta:
            raise TypeError(
                f"{name}: expected a DTensor with data, found one on the meta device; call to_empty and give all ranks "
                f"the same values yourself, or call sync_module_states before the model is made tensor-parallel"
            )


def _refuse_other_names(mesh: DeviceMesh, tensors: dict[str, Tensor]) -> None:
    scope = scope_of(ranks_of(mesh))
    if scope is None:
        return
    items = [
        Item("tensor", name, {"shape": str(tuple(local.shape)), "dtype": str(local.dtype).removeprefix("torch.")})
        for name, tensor in tensors.items()
        for local in (local_data(tensor),)
    ]
    text = structure.dumps(items)
    if ask(scope, "the tensors of sync_module_states", text) is not None:
        told = tell(scope, "these tensors in full", text)
        difference = first_difference({rank: structure.loads(text) for rank, text in told.items()})
        assert difference is not None
        raise RanksDisagree(difference.text, what=difference.item.name)


def _refuse_missing(mesh: DeviceMesh, tensors: dict[str, Tensor], source: int) -> None:
    """The source has to have everything; all ranks raise when it has not."""
    mine = mesh.mesh.flatten()[source].item() == torch.distributed.get_rank()
    lost = torch.tensor([mine and tensor.is_meta for tensor in tensors.values()], dtype=torch.int32)
    missing = [
        name for name, count in zip(tensors, sum_over(mesh, lost, "sync_module_states").tolist(), strict=True) if count
    ]
    if missing:
        raise ValueError(
            f"from_rank: expected a rank with values, found that rank {source} has {shown(missing)} on the meta "
            f"device; name the rank that built or loaded the model"
        )


def _allocate(model: nn.Module, device: torch.device, *, buffers_only: bool) -> None:
    """Memory for what is on the meta device, one for all modules that share it."""
    # The old ones too, so that their ids stay theirs.
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty_like(old, device=device, requires_grad=False)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            made[id(old)] = old, new
        return made[id(old)][1]

    for module in model.modules():
        own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        if not buffers_only:
            own |= module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in own.items():
            if tensor.is_meta:
                setattr(module, name, empty(tensor))
