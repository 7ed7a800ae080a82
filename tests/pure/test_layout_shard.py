"""Shards of one parameter: what `torch.chunk` cuts, padded so that a gather gives the full parameter."""

import itertools

import pytest
import torch
from hypothesis import given

from fullshard.layout import ShardLayout, contiguous_stride
from tests.harness.strategies import shapes, shard_layouts


def padded_shards(full: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """What each rank keeps: its rows in a buffer of the padded shape; padding is -1."""
    shards = []
    for rank in range(layout.world):
        shard = full.new_full(layout.padded_local_shape, -1)
        own = full.narrow(layout.dim, layout.start(rank), layout.rows(rank))
        shard.narrow(layout.dim, 0, layout.rows(rank)).copy_(own)
        shards.append(shard)
    return shards


def numbered(layout: ShardLayout) -> torch.Tensor:
    """A tensor of the full shape in which every element is different."""
    return torch.arange(layout.numel).view(layout.shape)


def test_brute_force_against_torch_chunk() -> None:
    """Lengths, starts and shapes are torch.chunk's; ranks past its last chunk own nothing."""
    for size, world in itertools.product(range(0, 34), range(1, 13)):
        rows = torch.arange(size)
        chunks = [chunk.tolist() for chunk in rows.chunk(world)] if size else []
        chunks += [[]] * (world - len(chunks))
        layout = ShardLayout((size, 2), world=world)
        for rank in range(world):
            start, stop = layout.start(rank), layout.start(rank) + layout.rows(rank)
            assert list(range(start, stop)) == chunks[rank], (size, world, rank)
            assert layout.local_shape(rank) == (len(chunks[rank]), 2)
        assert layout.padded_rows == len(chunks[0])


@given(shard_layouts())
def test_shard_then_gather_is_identity(layout: ShardLayout) -> None:
    """The padded shards behind each other, without the padding at the end, are the parameter."""
    full = numbered(layout)
    gathered = torch.cat(padded_shards(full, layout), dim=layout.dim)
    assert tuple(gathered.shape) == layout.padded_full_shape
    assert torch.equal(gathered.narrow(layout.dim, 0, layout.shape[layout.dim]), full)


@given(shard_layouts(min_size=1))
def test_gathers_in_place_says_whether_memory_is_already_right(layout: ShardLayout) -> None:
    """The flat gathered buffer, viewed in the padded full shape, is the parameter where it says so."""
    full = numbered(layout)
    flat = torch.cat([shard.flatten() for shard in padded_shards(full, layout)])
    view = flat.view(layout.padded_full_shape).narrow(layout.dim, 0, layout.shape[layout.dim])
    if layout.gathers_in_place:
        assert torch.equal(view, full)
    elif layout.padded_rows < layout.shape[layout.dim]:  # more than one rank owns rows
        assert not torch.equal(view, full)


@given(shard_layouts())
def test_lengths_sum_and_starts_rise(layout: ShardLayout) -> None:
    """Every row has one owner, in rank order, and only the last ranks own fewer rows than the first."""
    rows = [layout.rows(rank) for rank in range(layout.world)]
    starts = [layout.start(rank) for rank in range(layout.world)]
    assert sum(rows) == layout.shape[layout.dim]
    assert starts == [sum(rows[:rank]) for rank in range(layout.world)]
    assert rows == sorted(rows, reverse=True)
    assert sum(layout.local_numel(rank) for rank in range(layout.world)) == layout.numel


@given(shard_layouts(min_size=1))
def test_padding_is_less_than_one_row_per_rank(layout: ShardLayout) -> None:
    """At most world - 1 rows of padding over all ranks."""
    row_numel = layout.numel // layout.shape[layout.dim]
    assert 0 <= layout.padding_numel <= (layout.world - 1) * row_numel
    assert layout.padded_full_numel == layout.world * layout.padded_local_numel
    assert layout.padded_full_shape[layout.dim] % layout.world == 0


def test_padding_bound_is_reached() -> None:
    """One row on W ranks needs W - 1 rows of padding: the bound cannot be smaller."""
    assert ShardLayout((1, 3), world=8).padding_numel == 7 * 3


def test_negative_dim_is_the_same_layout() -> None:
    """Dims are stored from the front, so equal cuts are equal values with equal hashes."""
    assert ShardLayout((4, 6), dim=-1, world=2) == ShardLayout((4, 6), dim=1, world=2)
    assert len({ShardLayout((4, 6), dim=-2), ShardLayout((4, 6), dim=0)}) == 1


def test_shape_may_be_a_torch_size() -> None:
    """A tensor's shape can be given as it is."""
    layout = ShardLayout(torch.empty(5, 3).shape, world=4)
    assert layout == ShardLayout((5, 3), world=4)
    assert type(layout.shape) is tuple


@pytest.mark.parametrize(
    ("shape", "dim", "world", "words"),
    [
        ((), 0, 2, ["shape", "()", "1-dim"]),
        ((3, -1), 0, 2, ["shape[1]", "-1"]),
        ((3, 2.0), 0, 2, ["shape[1]", "2.0"]),
        ((3,), 0, 0, ["world", "0"]),
        ((3,), 0, True, ["world", "True"]),
        ((3, 2), 2, 2, ["dim", "[-2, 1]", "2"]),
        ((3, 2), -3, 2, ["dim", "-3"]),
    ],
)
def test_errors_name_field_value_and_remedy(shape, dim, world, words) -> None:
    """A wrong layout cannot exist; the error says which field and what was found."""
    with pytest.raises(ValueError) as error:
        ShardLayout(shape, dim, world)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_group_is_refused(rank: int) -> None:
    """A global rank given for a rank of the group is an error, not a clamped result."""
    layout = ShardLayout((5, 3), world=4)
    for question in (layout.rows, layout.start, layout.local_shape, layout.local_numel):
        with pytest.raises(ValueError, match="rank"):
            question(rank)


@given(shapes(min_size=1))
def test_contiguous_stride_is_torchs(shape: tuple[int, ...]) -> None:
    """The strides that torch gives a new tensor."""
    assert contiguous_stride(shape) == torch.empty(shape).stride()
