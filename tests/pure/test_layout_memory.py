"""Bytes of one unit, against sums done by hand."""

import dataclasses

import pytest

from fullshard.layout import (
    FlatLayout,
    GatherPlan,
    ReduceLayout,
    ShardLayout,
    Term,
    UnitMemory,
    secondary_layout,
    total,
)
from fullshard.layout.shard import align_up


def unit(
    name: str,
    rows: int,
    *,
    world: int = 4,
    compute: int = 4,
    direct: bool = False,
    exchanges: bool = True,
    degree: int | None = None,
) -> UnitMemory:
    """Two parameters of (rows, 16) and (16,): one message, or both gathered directly."""
    layouts = [ShardLayout((rows, 16), world=world), ShardLayout((16,), world=world)]
    pack = FlatLayout.build(layouts, 8)
    plan = GatherPlan((0, 1), ()) if direct else GatherPlan((), (0, 1))
    kept = None if degree is None else secondary_layout(pack, plan.direct, degree)
    return UnitMemory(name, pack, plan, 4, compute, 4, exchanges, kept=kept)


def test_terms_of_one_unit_by_hand() -> None:
    """8 x 16 and 16 elements on 4 ranks, storage and reduction float32, compute bfloat16."""
    found = unit("block", 8, compute=2)
    local = 2 * 16 + 8  # two rows; four elements aligned to eight
    assert found.shard_nbytes == local * 4
    assert found.full_nbytes == (8 * 16 + 32) * 2  # the bias is aligned to 32 elements
    assert found.staging_nbytes == 4 * local * 2
    assert found.gradient_nbytes == (8 * 16 + 16) * 2
    assert found.send_nbytes == 4 * (local + 16) * 4  # two grad-present flags and eight of facts, aligned to eight
    assert found.receive_nbytes == found.send_nbytes
    assert unit("block", 8, exchanges=False).receive_nbytes == (local + 8) * 4  # one chunk
    assert found.reduced_nbytes == (local + 16) * 4  # views of the reduced chunk, presence and facts after them
    assert found.gather_nbytes == found.full_nbytes + found.staging_nbytes  # shards are cast to their place there
    assert found.arriving_nbytes == 0
    assert unit("block", 8, direct=True).staging_nbytes == 0
    assert unit("block", 8, direct=True).arriving_nbytes == unit("block", 8).full_nbytes


def test_world_of_one_has_no_full_copy_and_no_message() -> None:
    """The shard is the parameter; only another compute dtype needs a copy."""
    assert unit("block", 8, world=1, direct=True).full_nbytes == 0
    assert unit("block", 8, world=1, direct=True).send_nbytes == 0
    cast = unit("block", 8, world=1, compute=2, direct=True)
    assert cast.full_nbytes == cast.pack.full_numel * 2


def test_terms_of_kept_parts_by_hand() -> None:
    """8 x 16 and 16 elements on 8 ranks, compute bfloat16, kept by pairs: 4 x 16 and 8 elements."""
    found = unit("block", 8, world=8, compute=2, degree=2)
    kept = 4 * 16 + 8
    assert found.kept_nbytes == kept * 2
    assert found.secondary_staging_nbytes == 2 * kept * 2
    assert found.staging_nbytes == 8 * (16 + 8) * 2
    direct = unit("block", 8, world=8, direct=True, degree=2)
    assert (direct.secondary_staging_nbytes, direct.kept_nbytes) == (0, kept * 4)
    nothing = unit("block", 8, world=8)
    assert (nothing.kept_nbytes, nothing.secondary_staging_nbytes) == (0, 0)


def test_gradients_that_are_sent_from_where_they_are() -> None:
    """They need no send buffer, live until they are sent, and this rank's own part does not arrive."""
    packed = unit("layers.0", 8)
    pairs = dataclasses.replace(packed, direct_gradients=(0,))
    segment = packed.pack.segments[0]
    chunk = ReduceLayout(packed.pack).chunk_numel
    aligned = align_up(segment.padded_numel, packed.pack.align_numel)
    assert packed.leaving_nbytes == 0
    assert pairs.leaving_nbytes == segment.layout.numel * packed.wire_itemsize
    assert packed.send_nbytes - pairs.send_nbytes == packed.pack.world * aligned * packed.wire_itemsize
    assert packed.receive_nbytes - pairs.receive_nbytes == chunk * packed.wire_itemsize


def test_a_term_has_a_name_and_bytes() -> None:
    assert total([Term("shards of root", 3), Term(name="full root", nbytes=4)]) == 7


def test_sizes_of_elements_are_whole_numbers() -> None:
    found = unit("root", 4)
    with pytest.raises(ValueError, match="wire_itemsize of 'root'"):
        dataclasses.replace(found, wire_itemsize=0)
