"""Hypothesis strategies shared by the property tests, so that what is a typical input is said in one place.

Small on purpose: dims of 0 to 9 with up to 6 ranks contain every case of the arithmetic (even, uneven,
fewer rows than ranks, ranks past the end, empty), and small examples shrink to something one can draw.
"""

from __future__ import annotations

from hypothesis import strategies as st

from fullshard.layout import FlatLayout, ShardLayout, align_numel

worlds = st.integers(1, 6)
itemsizes = st.sampled_from([1, 2, 4, 8])


def shapes(*, min_size: int = 0, max_size: int = 9, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of one to `max_dims` dimensions."""
    return st.lists(st.integers(min_size, max_size), min_size=1, max_size=max_dims).map(tuple)


@st.composite
def shard_layouts(draw: st.DrawFn, *, world: int | None = None, min_size: int = 0) -> ShardLayout:
    """Any layout: every dim, negative ones too."""
    shape = draw(shapes(min_size=min_size))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return ShardLayout(shape, dim=dim, world=draw(worlds) if world is None else world)


@st.composite
def layout_lists(draw: st.DrawFn, *, max_params: int = 4) -> list[ShardLayout]:
    """The parameters of one unit: layouts of one world."""
    world = draw(worlds)
    return draw(st.lists(shard_layouts(world=world), min_size=1, max_size=max_params))


@st.composite
def packs(draw: st.DrawFn) -> FlatLayout:
    """A pack of any alignment and any choice of which parameters come first."""
    layouts = draw(layout_lists())
    alignment = align_numel(draw(st.lists(itemsizes, min_size=1, max_size=3)))
    first = draw(st.lists(st.sampled_from(range(len(layouts))), unique=True, max_size=len(layouts)))
    return FlatLayout.build(layouts, alignment, first=first)
