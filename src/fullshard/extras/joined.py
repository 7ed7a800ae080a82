"""`joined`: ranks with another number of batches go through as many turns, so that all send the same messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm import sum_over
from ..engine import Root, root_of, unit_of
from ..engine.agreement import meshes_of

Batch = TypeVar("Batch")


class Turn(NamedTuple, Generic[Batch]):
    """One turn of `joined`. `own`: whether `batch` is the next one of this rank; otherwise it was used before, and what
    the model makes of it counts for nothing. `weight`: of this rank's loss in training."""

    batch: Batch
    own: bool
    weight: float


def joined(model: nn.Module, batches: Iterable[Batch], *, filler: Batch | None = None) -> Iterator[Turn[Batch]]:
    """The batches of this rank, and then as many turns more as the rank with the most batches has.

        with torch.no_grad():
            for batch, own, _ in fullshard.joined(model, loader):
                loss = model(batch)
                if own:
                    total += loss

    Every rank has to take part in each forward of a sharded model. A rank that has no batch left gets its last one
    again, with `own` off. The same in training, where such a rank adds nothing to the gradient:

        for batch, own, weight in fullshard.joined(model, loader):
            (loss_of(model(batch)) * weight).backward()

    model: the root of what `fully_shard` was applied to; all ranks of its mesh call this, and use the model in the same
        way in each turn. Leave the loop on all ranks in the same turn.
    batches: any number of them, on any rank; taken one at a time. The last one is kept.
    filler: what a rank gets that has no batch at all; the same kind of thing.
    `weight` is 0.0 where `own` is off, else the ranks of the mesh divided by how many have a batch in this turn: the
        mean of the weighted gradients over all ranks, which a reduction makes, is then that over the ranks with a
        batch. A loss that is inf or NaN stays NaN times 0.

    Each turn begins with one message of 8 bytes for each axis of the mesh, so nobody waits for a rank that went on, and
    the loop ends on all ranks together. An exception of `batches` on one rank is a `PeerFailed` on the others.
    Raises `ValueError` for a model that is no root, and on all ranks where one has neither a batch nor a filler;
    `RanksDisagree` where ranks did something else in a turn.
    """
    unit = unit_of(model)
    if unit is None:
        raise ValueError(
            f"joined: expected a model that fully_shard was applied to, found a {type(model).__name__}; "
            f"give it the outermost sharded module"
        )
    root = root_of(unit)
    if root.units[0] is not unit:
        raise ValueError(
            f"joined: expected the outermost sharded module, found {unit.record.name} below it; give it that one"
        )
    return _turns(root, _mesh(root), iter(batches), filler)


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
                root.peers.publish(error, "joined: the next batch")
                raise
        have, without = _counts(root, mesh, own, batch is None)
        if not have:
            return
        if without:
            raise ValueError(
                f"joined: expected a batch or a filler on all {world} ranks, found {without} with neither, while "
                f"{have} have a batch{' (this rank has none)' if batch is None else ''}; give filler=, a batch of the "
                f"same kind"
            )
        assert batch is not None
        yield Turn(batch, own, world / have if own else 0.0)


def _counts(root: Root, mesh: DeviceMesh | None, own: bool, empty: bool) -> tuple[int, int]:
    """How many ranks have a batch of their own, and how many nothing to take part with."""
    if mesh is None:
        return int(own), int(empty)
    root.peers.meet()
    if root.order is not None:
        root.order.announce("count", "int32*2")
    have, without = sum_over(mesh, torch.tensor([own, empty], dtype=torch.int32), "joined: the next turn").tolist()
    return have, without


def _mesh(root: Root) -> DeviceMesh | None:
    """The one with all ranks; None where there is nobody else."""
    meshes = meshes_of(root.units)
    if not meshes:
        return None
    widest = max(meshes, key=len)
    apart = [ranks for ranks in meshes if not set(ranks) <= set(widest)]
    if apart:
        raise NotImplementedError(
            f"joined: expected one mesh that has the ranks of all others, found {list(widest)} and {list(apart[0])}; "
            f"agree on the number of turns by a message of your own"
        )
    return meshes[widest]
