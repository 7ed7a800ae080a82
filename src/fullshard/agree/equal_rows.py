"""Rows that several ranks drew alike: a random fill of shards, on ranks whose generators are equal.

`nn.init.normal_` on a sharded parameter draws this rank's rows from this rank's generator, unless DTensor offsets it.
It does not on a CPU mesh, for shards in host memory (offload), and through `to_local()`: after `torch.manual_seed(0)`
everywhere each rank draws the same rows, and the parameter is a repetition of them.

Looked for in the first forward, among parameters that were written since they were cut, or had no value then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm import whole_of
from ..param import ShardedParam, can_digest, digest
from ..peers import shown_ranks, variants

# Eight bytes of each parameter and rank travel, at most this many on a rank: at 10,000 ranks those of 13 parameters.
_MOST_NBYTES = 1 << 20
# Elements that are looked at; and the fewest by which ranks are compared.
_LOOKED_AT, _FEWEST = 64, 8
_DRAWN_ANEW = 16
_SHOWN = 3


def warn_of_equal_rows(mesh: DeviceMesh, of: str, params: Sequence[ShardedParam], names: Sequence[str]) -> None:
    """Warn, on the first rank of `mesh`, of parameters that some ranks filled with equal random values.

    `params` on `mesh`, whose last axis shards them, by `names`: the same on all ranks. `of`: the root, for the text.
    Collective; sends nothing without parameters to compare, and otherwise eight bytes for each.
    """
    world, own = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    numels = [_compared(param) if world > 1 else 0 for param in params]
    judged = [i for i, numel in enumerate(numels) if numel]
    # The largest, if not all: which they are depends on shapes alone.
    judged.sort(key=lambda i: -params[i].layout.numel)
    judged = sorted(judged[: max(1, _MOST_NBYTES // (8 * world))])
    if not judged:
        return
    mine = torch.tensor([[_drawn(params[i], own, numels[i]) for i in judged]], device=mesh.device_type)
    axes = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    table = whole_of(DTensor.from_local(mine, mesh, axes, run_check=False), "a look at initial values").tolist()
    found = dict(_alike(table))
    if not found or mesh.mesh.flatten()[0] != torch.distributed.get_rank():
        return
    shown = [names[judged[place]] for place in found]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    ranks = mesh.mesh.view(-1, world)[0].tolist()
    where = shown_ranks([ranks[place] for place in next(iter(found.values()))])
    warnings.warn(
        f"{of}: expected each rank to draw rows of its own, found equal random values on {where} in "
        f"{', '.join(shown[:_SHOWN])}{more}: nn.init or another random fill ran on the shards, with equal generators "
        f"(DTensor does not offset that of a CPU, nor of shards in host memory). Call fullshard.materialize(model, "
        f"seed=...) instead, which draws each parameter whole, load a checkpoint, or call torch.manual_seed(seed + "
        f"rank) before the fill. Ignore this for values that are to repeat, as experts copied from one",
        stacklevel=2,
    )


def _compared(param: ShardedParam) -> int:
    """Returns how many elements of each shard are compared, from its first on; 0 for a parameter that is not judged.

    Whole shards where two ranks have as many rows as the first. Where only one has, those that a shorter fill draws
    alike: torch draws the last 16 of a normal distribution anew.
    """
    layout, local = param.layout, param.local
    if not local.is_floating_point() or local.dtype.itemsize < 2 or not can_digest(local) or not layout.numel:
        return 0
    if layout.rows(1) == layout.padded_rows:
        numel = layout.padded_local_numel
    else:
        numel = 0 if layout.dim else layout.local_numel(1) - _DRAWN_ANEW
    return numel if numel >= _FEWEST else 0


def _drawn(param: ShardedParam, rank: int, numel: int) -> int:
    """The digest of the first `numel` elements of this rank's shard if they look like a random fill, else 0."""
    layout, local = param.layout, param.local
    if local.numel() < numel:
        return 0
    with torch.no_grad():
        # Rows that repeat within a rank are a pattern: constants, and what a library fills row by row, as Mamba's A.
        if layout.rows(rank) > 1 and bool((local == local.narrow(layout.dim, 0, 1)).all()):
            return 0
        first = local.reshape(-1)[:numel]
        return int(digest(first)) if _looks_random(first[:_LOOKED_AT].float()) else 0


def _looks_random(some: Tensor) -> bool:
    """Whether elements are many, and in no order. Identity and steps have few; ramps are in order."""
    if len(some.unique()) * 2 < len(some):
        return False
    steps = some.diff()
    return bool((steps > 0).any()) and bool((steps < 0).any())


def _alike(table: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yields each column of `table` (ranks, parameters) where ranks have an equal number other than 0, with them."""
    for place, column in enumerate(zip(*table, strict=True)):
        groups = variants({rank: value for rank, value in enumerate(column) if value})
        most = max(groups.values(), key=len, default=[])
        if len(most) > 1:
            yield place, most
