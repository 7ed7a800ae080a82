"""Many shards in one flat buffer: disjoint, aligned, and every message can be taken apart again."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import FlatLayout, ReduceLayout, Segment, ShardLayout, align_numel, align_up
from tests.harness.strategies import packs


def fill_local(pack: FlatLayout, fulls: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The flat local buffer of `rank`; alignment and padding are -1."""
    flat = torch.full((pack.padded_local_numel,), -1)
    for segment, full in zip(pack.segments, fulls, strict=True):
        layout = segment.layout
        shard = flat[segment.offset : segment.end].view(layout.padded_local_shape)
        own = full.narrow(layout.dim, layout.start(rank), layout.rows(rank))
        shard.narrow(layout.dim, 0, layout.rows(rank)).copy_(own)
    return flat


def numbered_fulls(pack: FlatLayout) -> list[torch.Tensor]:
    """Full parameters in which every element of the unit is different."""
    fulls, first = [], 0
    for segment in pack.segments:
        layout = segment.layout
        fulls.append(torch.arange(first, first + layout.numel).view(layout.shape))
        first += layout.numel
    return fulls


@given(packs())
def test_segments_are_disjoint_aligned_and_in_bounds(pack: FlatLayout) -> None:
    """No element belongs to two parameters, in the local and in the full buffer, and little is wasted."""
    owners: list[int] = []
    for segment in pack.segments:
        assert segment.offset % pack.align_numel == 0
        owners.extend(range(segment.offset, segment.end))
    assert len(set(owners)) == len(owners)
    assert all(0 <= element < pack.padded_local_numel for element in owners)
    assert pack.padded_local_numel % pack.align_numel == 0
    assert pack.padded_local_numel <= len(owners) + len(pack.segments) * (pack.align_numel - 1)
    assert sum(pack.local_numel(rank) for rank in range(pack.world)) == pack.numel

    owners = []
    for segment, offset in zip(pack.segments, pack.full_offsets, strict=True):
        assert offset % pack.full_align_numel == 0
        owners.extend(range(offset, offset + segment.layout.full_memory_numel))
    assert len(set(owners)) == len(owners)
    assert all(0 <= element < pack.full_numel for element in owners)


@given(packs())
def test_pack_gather_unpack_is_identity(pack: FlatLayout) -> None:
    """From the rank-major gathered buffer every parameter can be put together again."""
    fulls = numbered_fulls(pack)
    gathered = torch.cat([fill_local(pack, fulls, rank) for rank in range(pack.world)])
    assert gathered.numel() == pack.gathered_numel
    for segment, full in zip(pack.segments, fulls, strict=True):
        layout = segment.layout
        starts = [pack.gathered_segment(segment.index, rank) for rank in range(pack.world)]
        chunks = [gathered[start : start + segment.padded_numel].view(layout.padded_local_shape) for start in starts]
        padded = torch.cat(chunks, dim=layout.dim)
        assert torch.equal(padded.narrow(layout.dim, 0, layout.shape[layout.dim]), full)


@given(packs(), st.data())
def test_reduction_messages_carry_sums_and_presence(pack: FlatLayout, data: st.DataObject) -> None:
    """Each rank receives the sum of its shards, and a parameter is present where any rank had a gradient."""
    layout = ReduceLayout(pack)
    count = len(pack.segments)
    assert layout.grad_present_offset % pack.align_numel == layout.chunk_numel % pack.align_numel == 0
    assert layout.numel == pack.world * layout.chunk_numel
    fulls = numbered_fulls(pack)
    present = [data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for _ in range(pack.world)]
    sends = []
    for rank in range(pack.world):  # rank scales its gradients by rank + 1, so that the sums differ
        send = torch.zeros(layout.numel, dtype=torch.long)
        written: list[int] = []
        for to in range(pack.world):
            for segment in pack.segments:
                index = segment.index
                if not present[rank][index]:
                    continue
                own = segment.layout
                start = layout.segment(index, to)
                grad = fulls[index].narrow(own.dim, own.start(to), own.rows(to)) * (rank + 1)
                view = send[start : start + segment.padded_numel].view(own.padded_local_shape)
                view.narrow(own.dim, 0, own.rows(to)).copy_(grad)
                send[layout.grad_present(index, to)] = 1
                written += [*range(start, start + segment.padded_numel), layout.grad_present(index, to)]
        assert len(set(written)) == len(written)
        sends.append(send.view(pack.world, layout.chunk_numel))
    for rank in range(pack.world):
        chunk = sum(send[rank] for send in sends)
        for segment in pack.segments:
            index, own = segment.index, segment.layout
            ranks_with_it = [r for r in range(pack.world) if present[r][index]]
            assert chunk[layout.grad_present_offset + index] == len(ranks_with_it)
            shard = chunk[segment.offset : segment.end].view(own.padded_local_shape)
            expected = fulls[index].narrow(own.dim, own.start(rank), own.rows(rank))
            expected = expected * sum(r + 1 for r in ranks_with_it)
            assert torch.equal(shard.narrow(own.dim, 0, own.rows(rank)), expected)


def test_first_comes_first_and_indices_stay() -> None:
    """`first` changes the order in memory and nothing else."""
    layouts = [ShardLayout((size,), world=2) for size in (8, 16, 24)]
    pack = FlatLayout.build(layouts, 4, first=(2,), names=("a", "b", "c"))
    assert pack.order == (2, 0, 1)
    assert [segment.offset for segment in pack.segments] == [12, 16, 0]
    assert [segment.layout for segment in pack.segments] == layouts
    assert [segment.name for segment in pack.segments] == ["a", "b", "c"]
    assert pack.full_offsets == (32, 48, 0)


@pytest.mark.parametrize(("itemsizes", "expected"), [([4], 4), ([4, 2, 4], 8), ([1, 8], 16), ([8], 2), ([16], 1)])
def test_align_numel_is_16_bytes_of_the_smallest(itemsizes: list[int], expected: int) -> None:
    """16 bytes in the smallest dtype are a multiple of 16 bytes in every other."""
    assert align_numel(itemsizes) == expected
    assert all(expected * itemsize % 16 == 0 for itemsize in itemsizes)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_align_up(numel: int, alignment: int) -> None:
    """The least multiple that is not below."""
    up = align_up(numel, alignment)
    assert up % alignment == 0 and numel <= up < numel + alignment


def two_parameters() -> FlatLayout:
    """a [0, 6), b [8, 10) in 12 elements."""
    return FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], 4, names=("a", "b"))


def moved(pack: FlatLayout, index: int, offset: int) -> tuple[Segment, ...]:
    """The segments with one at another offset."""
    return tuple(
        dataclasses.replace(segment, offset=offset) if segment.index == index else segment for segment in pack.segments
    )


def test_a_pack_proves_itself() -> None:
    """Every broken invariant is refused, naming the tensor and its range where there is one."""
    pack = two_parameters()
    broken = {
        "b [4, 6)": {"segments": moved(pack, 1, 4)},  # overlaps a
        "b [10, 12)": {"segments": moved(pack, 1, 10)},  # not aligned
        "b [12, 14)": {"segments": moved(pack, 1, 12)},  # out of bounds
        "a [12, 18)": {"segments": moved(pack, 0, 12)},  # not in the order that it claims
        "padded_local_numel": {"padded_local_numel": 13},
        "order": {"order": (0, 0)},
        "full a [4, 16)": {"full_offsets": (4, 16)},  # not aligned
        "full b [0, 4)": {"full_offsets": (0, 0)},  # overlaps a
        "full_numel": {"full_numel": 31},
        "segments[0]": {"segments": pack.segments[::-1]},
        "world": {"world": 3},
        "align_numel": {"align_numel": 0},
    }
    for words, change in broken.items():
        with pytest.raises(ValueError) as error:
            dataclasses.replace(pack, **change)
        assert words in str(error.value)


def test_build_refuses_what_cannot_be_packed() -> None:
    """Wrong arguments are named."""
    layout = ShardLayout((4,), world=2)
    with pytest.raises(ValueError, match="layouts"):
        FlatLayout.build([], 4)
    with pytest.raises(ValueError, match="world 2.*found 3"):
        FlatLayout.build([layout, ShardLayout((4,), world=3)], 4)
    with pytest.raises(ValueError, match="first"):
        FlatLayout.build([layout], 4, first=(1,))
    with pytest.raises(ValueError, match="first"):
        FlatLayout.build([layout, layout], 4, first=(1, 1))
    with pytest.raises(ValueError, match="names"):
        FlatLayout.build([layout], 4, names=("a", "b"))
    with pytest.raises(ValueError, match="itemsizes"):
        align_numel([])
    with pytest.raises(ValueError, match="itemsizes"):
        align_numel([3])
    with pytest.raises(ValueError, match="rank"):
        two_parameters().gathered_segment(0, 2)
    with pytest.raises(ValueError, match="rank"):
        ReduceLayout(two_parameters()).segment(0, -1)
    with pytest.raises(ValueError, match="index"):
        ReduceLayout(two_parameters()).grad_present(2, 0)


@given(packs(), st.data())
def test_direct_gradients_and_the_message_make_up_the_chunk(pack: FlatLayout, data: st.DataObject) -> None:
    """For each rank: direct gradients, the message and `unwritten` cover the whole chunk, each element once."""
    layouts = [segment.layout for segment in pack.segments]
    front = [i for i, layout in enumerate(layouts) if layout.gathers_in_place]
    front = data.draw(st.lists(st.sampled_from(front), unique=True)) if front else []
    pack = FlatLayout.build(layouts, pack.align_numel, first=front)
    whole, layout = ReduceLayout(pack), ReduceLayout(pack, tuple(front))
    assert (layout.chunk_numel, layout.grad_present_offset) == (whole.chunk_numel, whole.grad_present_offset)
    assert layout.numel == pack.world * layout.message_numel
    for rank in range(pack.world):
        covered = [*range(layout.message_start, layout.chunk_numel)]
        for index in front:
            offset = pack.segments[index].offset
            covered += range(offset, offset + layouts[index].local_numel(rank))
        for start, stop in layout.unwritten(rank):
            covered += range(start, stop)
        assert sorted(covered) == [*range(layout.chunk_numel)]
        for index in layout.packed:
            assert layout.segment(index, rank) == rank * layout.message_numel + (
                pack.segments[index].offset - layout.message_start
            )


def test_direct_gradients_are_runs_of_memory_at_the_front() -> None:
    """Others are refused by name."""
    pack = two_parameters()
    with pytest.raises(ValueError, match=r"first indices.*found \(1,\)"):
        ReduceLayout(pack, direct=(1,))
    with pytest.raises(ValueError, match="packed parameters"):
        ReduceLayout(pack, direct=(0,)).segment(0, 0)
    columns = FlatLayout.build([ShardLayout((4, 3), dim=1, world=2)], 4, names=["wide"])
    with pytest.raises(ValueError, match=r"wide, cut along dim 1 of \(4, 3\)"):
        ReduceLayout(columns, direct=(0,))
