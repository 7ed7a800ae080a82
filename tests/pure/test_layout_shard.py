"""Shards of one parameter: what `torch.chunk` cuts, padded so that a gather gives the full parameter."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def message_of(full: torch.Tensor, layout: ShardLayout, rank_stride: int) -> torch.Tensor:
    """What the ranks send, one behind the other: torch.chunk's parts, each contiguous; -1 between them."""
    message = torch.full((layout.world, rank_stride), -1)
    chunks = full.chunk(layout.world, dim=layout.dim) if full.shape[layout.dim] else ()
    for rank, chunk in enumerate(chunks):
        message[rank, : chunk.numel()] = chunk.flatten()
    return message.flatten()


def assert_pieces_move(layout: ShardLayout, gap: int) -> None:
    """Along its pieces a message becomes the parameter, and the parameter the message, by at most two copies."""
    full, rank_stride = numbered(layout), layout.padded_local_numel + gap
    message = message_of(full, layout, rank_stride)
    out, back = torch.full_like(full, -2), torch.full_like(message, -1)
    assert len(layout.pieces) <= 2
    for piece in layout.pieces:
        at = (piece.sizes, piece.message_strides(rank_stride), piece.first_rank * rank_stride)
        place = (piece.sizes, piece.full_strides, piece.full_start)
        out.as_strided(*place).copy_(message.as_strided(*at))
        back.as_strided(*at).copy_(full.as_strided(*place))
    assert torch.equal(out, full)
    assert torch.equal(back, message)
    assert sum(piece.ranks * piece.outer * piece.block for piece in layout.pieces) == layout.numel


@given(shard_layouts(), st.integers(0, 5))
def test_pieces_are_what_torch_chunk_cuts(layout: ShardLayout, gap: int) -> None:
    """Uneven, empty, fewer rows than ranks; with and without something between the ranks' parts."""
    assert_pieces_move(layout, gap)


@pytest.mark.parametrize("world", [*range(1, 9), 64, 1000])
def test_layouts_at_any_world_and_dim(world: int) -> None:
    """Shards, pieces and memory, against torch.chunk, where the ranks are more and fewer than the rows."""
    for shape, dim in itertools.product([(2, 130, 3), (65, 7), (3, 64), (1, 9, 2), (4, 1001), (5, 0, 2)], (0, 1, -1)):
        layout = ShardLayout(shape, dim, world)
        assert_pieces_move(layout, gap=3)
        full = numbered(layout)
        chunks = full.chunk(world, dim=dim) if shape[dim] else ()
        for rank in {0, 1, world // 2, world - 1} & set(range(world)):
            own = chunks[rank] if rank < len(chunks) else full.narrow(layout.dim, 0, 0)
            assert layout.local_shape(rank) == tuple(own.shape)
            assert torch.equal(full.narrow(layout.dim, layout.start(rank), layout.rows(rank)), own)
        # A gather may arrive in the memory of a parameter; without that no memory is spent on padding.
        assert layout.full_memory_numel == (layout.padded_full_numel if layout.gathers_in_place else layout.numel)


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
