"""Where the parts of a tensor are, as ranks describe it: a DTensor on all ranks of its mesh, or a plain tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import cut_dim, local_of, settled
from ..layout import Cut, Held, Parts, Portion, known_dtypes, spread


class Place(NamedTuple):
    """`ranks` of a mesh of sizes `mesh`, and what each axis cuts; without a mesh the tensor is whole on the rank that
    says so. `same_as`: the first of the names that share its memory there."""

    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...] | None
    ranks: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    same_as: str = ""


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch has under `name`."""
    found: torch.dtype = getattr(torch, name)
    return found


def place_of(tensor: Tensor) -> Place | str:
    """Where the parts of `tensor` are, or why it has no such parts. No message."""
    tensor = settled(tensor.detach())
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    if local.layout is not torch.strided or local.is_quantized or local.is_nested or dtype not in known_dtypes():
        return f"expected a dense tensor of whole bytes, found {local.layout} {dtype}"
    if type(local) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"expected a plain tensor or a DTensor, found {type(local).__name__}; unwrap it"
    if not isinstance(tensor, DTensor):
        return Place(shape, dtype, None, (), ())
    cuts: list[Cut | None] = []
    for placement in tensor.placements:
        dim = cut_dim(placement)
        if dim is None and not placement.is_replicate():
            return f"expected Shard and Replicate, found placements {tensor.placements}; redistribute it first"
        cuts.append(None if dim is None else Cut(dim % len(shape), getattr(placement, "split_factor", 1)))
    mesh = tensor.device_mesh
    return Place(shape, dtype, tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(cuts))


def places_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], list[str]]:
    """The places of `tensors`, with ties, and what is wrong with the others."""
    places, problems = dict[str, Place](), list[str]()
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if isinstance(place, str):
            problems.append(f"{name}: {place}")
            continue
        places[name] = place._replace(same_as=first.setdefault(_memory(tensor, place), name))
    return places, problems


def _memory(tensor: Tensor, place: Place) -> object:
    """The key that tied tensors share: they are one object, or the same elements of one memory."""
    local = settled(local_of(tensor) if isinstance(tensor, DTensor) else tensor)
    if isinstance(tensor, nn.Parameter) or not local.numel() or local.is_meta:
        return id(tensor)
    return local.data_ptr(), place.shape, place.dtype, local.stride()


class Layouts:
    """One `Parts` for each different layout and shape."""

    def __init__(self) -> None:
        self._made: dict[object, Parts] = {}

    def parts(self, shape: tuple[int, ...], found: Iterable[tuple[Place, Sequence[int]]]) -> Parts:
        """The parts of a tensor with these places, each with the ranks that gave it."""
        given = tuple((place[2:5], tuple(ranks) if place.mesh is None else ()) for place, ranks in found)
        key = shape, given
        if key not in self._made:
            by_box: dict[Any, dict[int, None]] = {}
            for (mesh, ranks, cuts), plain in given:
                here = spread(shape, (len(plain),), plain, [None]) if mesh is None else spread(shape, mesh, ranks, cuts)
                for part in here:
                    by_box.setdefault(part.box, {}).update(dict.fromkeys(part.ranks))
            self._made[key] = Parts(Portion(box, tuple(sorted(ranks))) for box, ranks in by_box.items())
        return self._made[key]


def as_text(places: Mapping[str, Place]) -> str:
    """`places` for other ranks; a mesh is written once."""
    meshes: dict[object, int] = {}
    rows = []
    for name, place in places.items():
        number = -1 if place.mesh is None else meshes.setdefault((place.mesh, place.ranks), len(meshes))
        rows.append([name, place.shape, place.dtype, number, place.cuts, place.same_as])
    return json.dumps([list(meshes), rows], separators=(",", ":"))


def from_text(text: str) -> dict[str, Place]:
    """The reverse of `as_text`."""
    meshes, rows = json.loads(text)
    found = {}
    for name, shape, dtype, number, cuts, same_as in rows:
        mesh, ranks = (None, ()) if number < 0 else (tuple(meshes[number][0]), tuple(meshes[number][1]))
        found[name] = Place(
            tuple(shape), dtype, mesh, ranks, tuple(None if cut is None else Cut(*cut) for cut in cuts), same_as
        )
    return found


def held_by(
    given: Iterable[tuple[Mapping[str, Place], Sequence[int]]], layouts: Layouts
) -> dict[str, Held] | list[str]:
    """The places of each tensor, from what ranks describe: each description with the ranks that gave it. Or what does
    not fit."""
    found: dict[str, list[tuple[Place, Sequence[int]]]] = {}
    problems = []
    for places, ranks in given:
        for name, place in places.items():
            known = found.setdefault(name, [])
            if known and known[0][0][:2] != place[:2]:
                one, at = known[0]
                problems.append(
                    f"{name}: {one.dtype} {one.shape} on rank {at[0]}, {place.dtype} {place.shape} on rank {ranks[0]}"
                )
                continue
            known.append((place, ranks))
    if problems:
        return problems
    held = {}
    for name, those in found.items():
        first = those[0][0]
        tied = {place.same_as for place, _ in those}
        same_as = tied.pop() if len(tied) == 1 else name
        held[name] = Held(first.shape, first.dtype, layouts.parts(first.shape, those), same_as)
    return held
