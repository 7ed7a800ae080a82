"""Values of another layout that a state dict brings: DTensors on another mesh become DTensors like the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import local_of
from ..comm import Exchange, OwnParts, ranks_of
from ..layout import Box, Held, TransferPlan, rename
from ..param import Layouts, held_by, place_of

# Of a message, which is what a rank holds besides both shards.
_LIMIT_NBYTES = 64 << 20


def relaid(values: Mapping[str, DTensor], like: Mapping[str, DTensor], what: str) -> dict[str, DTensor]:
    """`values` with mesh and placements of `like`, in their own dtypes. Collective over the ranks of all their meshes,
    which all know both layouts, so nothing but the elements travels.

    Raises `RuntimeError` for placements that have no parts, and for meshes that no known group has together.
    """
    sources, targets = _held(values, what), _held(like, what)
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in (*values.values(), *like.values())))
    group = _group_of(meshes, what)
    first = next(iter(values.values()))
    ranks = ranks_of(group, local_of(first).device)
    targets = {name: held._replace(dtype=sources[name].dtype) for name, held in targets.items()}
    links = rename(None, {name: held.shape for name, held in sources.items()}).links
    plan = TransferPlan(links, sources, targets, ranks.members, _LIMIT_NBYTES)
    made = {
        name: torch.empty(local_of(tensor).shape, dtype=values[name].dtype, device=local_of(values[name]).device)
        for name, tensor in like.items()
    }
    exchange = Exchange(
        plan,
        ranks,
        OwnParts({name: local_of(tensor).detach() for name, tensor in values.items()}, _boxes(sources, ranks.rank)),
        OwnParts(made, _boxes(targets, ranks.rank)),
    )
    with ranks.texts.together(what):
        # As on all ranks, which know the same.
        total = sum(tensor.numel() * tensor.element_size() for tensor in values.values())
        exchange.run(exchange.buffer(), total // _LIMIT_NBYTES + 1)
    return {
        name: DTensor.from_local(
            made[name],
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in like.items()
    }


def _boxes(held: Mapping[str, Held], rank: int):  # type: ignore[no-untyped-def]
    def box(name: str) -> Box | None:
        return held[name].parts.box(rank)

    return box


def _held(tensors: Mapping[str, DTensor], what: str) -> dict[str, Held]:
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    for name, place in places.items():
        if isinstance(place, str):
            raise RuntimeError(f"{what}: {name}: {place}")
    given = {name: place for name, place in places.items() if not isinstance(place, str)}
    found = held_by([(given, ())], Layouts())
    assert isinstance(found, dict)
    return found


def _group_of(meshes: Sequence[DeviceMesh], what: str) -> dist.ProcessGroup:
    """A process group with exactly the ranks of all `meshes`."""
    everyone = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    assert dist.group.WORLD is not None
    if everyone == list(range(dist.get_world_size())):
        return dist.group.WORLD
    for mesh in meshes:
        if mesh.ndim == 1 and sorted(mesh.mesh.tolist()) == everyone and mesh.get_coordinate() is not None:
            return mesh.get_group(0)
    raise RuntimeError(
        f"{what}: expected values on the mesh of the parameters, or meshes with all ranks of the world together, found "
        f"meshes of ranks {everyone}; move them with fullshard.transfer(state_dict, model)"
    )
