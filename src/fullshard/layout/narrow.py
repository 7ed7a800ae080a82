"""What a rank keeps of full parameters between forward and backward, for an integer `reshard_after_forward`.

Rows of dim 0 as `torch.chunk` cuts them over the k ranks of a block. Shape (5, 3) on 4 ranks in blocks of 2: shards
have 2, 2, 1, 0 rows; ranks 0 and 2 keep rows 0 to 2, ranks 1 and 3 keep rows 3 and 4.

A gather over the block fills the memory that a gather over all ranks fills, so full parameters stay where they are. k
padded parts are never more than the padded shards of all ranks when both are cut along the same dim; so a parameter
that is sharded along another dim is kept along that one where the padded rows of dim 0 do not fit.
"""

from __future__ import annotations

import dataclasses

from .gather import GatherPlan
from .pack import Pack
from .shard import ShardLayout


def narrow_pack(pack: Pack, plan: GatherPlan, world: int) -> Pack:
    """The pack of the kept parts over `world` ranks of a block; its full offsets are those of `pack`.

    >>> pack = Pack.build([ShardLayout((5, 3), world=4)], align_numel=4)
    >>> plan = GatherPlan(direct=(0,), packed=())
    >>> narrow = narrow_pack(pack, plan, 2)
    >>> narrow.segments[0].layout.local_shape(0), narrow.padded_local_numel, narrow.full_offsets == pack.full_offsets
    ((3, 3), 12, True)
    """
    layouts = [_kept(segment.layout, world) for segment in pack.segments]
    kept = Pack.build(layouts, pack.align_numel, first=plan.direct, names=[segment.name for segment in pack.segments])
    return dataclasses.replace(
        kept, full_offsets=pack.full_offsets, full_align_numel=pack.full_align_numel, full_numel=pack.full_numel
    )


def _kept(shards: ShardLayout, world: int) -> ShardLayout:
    rows = ShardLayout(shards.shape, 0, world)
    return rows if rows.full_memory_numel <= shards.full_memory_numel else ShardLayout(shards.shape, shards.dim, world)
