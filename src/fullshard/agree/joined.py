"""`joined`: ranks with different numbers of batches run the same number of turns, so all send the same messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import sum_over
from ..engine import Root, root_of, unit_of
from ..policy.arguments import expect, expect_module
from .companion import about_to_count
from .structure import meshes_of

Batch = TypeVar("Batch")


class Turn(NamedTuple, Generic[Batch]):
    """One turn of `joined`. `own`: whether `batch` is the next one of this rank; otherwise it is a repeated one or the
    filler, whose results must be ignored. `weight`: of this rank's loss in training."""

    batch: Batch
    own: bool
    weight: float


def joined(model: nn.Module, batches: Iterable[Batch], *, filler: Batch | None = None) -> Iterator[Turn[Batch]]:
    """This rank's batches, followed by extra turns up to the number of batches of the rank with the most.

        with torch.no_grad():
            for batch, own, _ in fullshard.joined(model, loader):
                loss = model(batch)
                if own:
                    total += loss

    Every rank has to take part in each forward of a sharded model. A rank without batches left gets its last one again,
    with `own` False. In training, such a rank adds nothing to the gradient:

        for batch, own, weight in fullshard.joined(model, loader):
            (loss_of(model(batch)) * weight).backward()

    model: the root module of `fully_shard`; all ranks of its mesh call this, and use the model in the same way in each
        turn. Leave the loop on all ranks in the same turn.
    batches: any number of them, on any rank; taken one at a time. The last one is kept.
    filler: the batch for a rank that has none at all; of the same kind.
    `weight` is 0.0 where `own` is False, else the number of ranks of the mesh divided by the number of ranks with a
        batch in this turn. So the reduction's mean over all ranks is the mean over the ranks with a batch. A loss that
        is inf or NaN becomes NaN when multiplied by 0.

    Each turn begins with one message of 8 bytes per axis of the mesh, so no rank waits for one that moved on, and the
    loop ends on all ranks together. An exception of `batches` on one rank is a `PeerFailed` on the others.
    Raises `ValueError` for a model that is not a root, and on all ranks if one has neither a batch nor a filler;
    `RanksDisagree` if ranks did something else in a turn.
    """
    expect_module("model", model)
    expect("batches", isinstance(batches, Iterable), "an iterable of batches", batches, "pass the loader")
    return _turns(*all_ranks_of(model, "joined"), iter(batches), filler)


def _turns(
    root: Root, mesh: DeviceMesh | None, batches: Iterator[Batch], filler: Batch | None
) -> Iterator[Turn[Batch]]:
    batch, ended = filler, False
    world = mesh.size() if mesh is not None else 1
    while True:
        own = False
        if not ended:
            try:
                batch, own = next(batches), True
            except StopIteration:
                ended = True
            except BaseException as error:
                root.companion.failed(error, "joined: the next batch")
                raise
        have, without = _counts(root, mesh, own, batch is None)
        if not have:
            return
        if without:
            raise ValueError(
                f"joined: expected a batch or a filler on all {world} ranks, found {without} with neither, while "
                f"{have} have a batch{' (this rank has none)' if batch is None else ''}; pass filler=, a batch of the "
                f"same kind"
            )
        assert batch is not None
        yield Turn(batch, own, world / have if own else 0.0)


def _counts(root: Root, mesh: DeviceMesh | None, own: bool, empty: bool) -> tuple[int, int]:
    """How many ranks have a batch of their own, and how many have nothing to run."""
    if mesh is None:
        return int(own), int(empty)
    about_to_count(root, "int32*2")
    have, without = sum_over(mesh, torch.tensor([own, empty], dtype=torch.int32), "joined: the next turn").tolist()
    return have, without


def all_ranks_of(model: nn.Module, caller: str) -> tuple[Root, DeviceMesh | None]:
    """The root of `model`, and the mesh with all of its ranks (None for a single rank), for `caller`, which counts
    something over them."""
    unit = unit_of(model)
    if unit is None:
        raise ValueError(
            f"{caller}: expected a model that fully_shard was applied to, found a {type(model).__name__}; "
            f"give it the outermost sharded module"
        )
    root = root_of(unit)
    if root.units[0] is not unit:
        raise ValueError(
            f"{caller}: expected the outermost sharded module, found {unit.record.name} below it; give it that one"
        )
    meshes = meshes_of(root.units)
    if not meshes:
        return root, None
    widest = max(meshes, key=len)
    apart = [ranks for ranks in meshes if not set(ranks) <= set(widest)]
    if apart:
        raise NotImplementedError(
            f"{caller}: expected one mesh with the ranks of all others, found {list(widest)} and {list(apart[0])}; "
            f"agree on the number of turns with your own message"
        )
    return root, meshes[widest]
