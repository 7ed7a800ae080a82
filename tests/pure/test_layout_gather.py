"""Direct or packed: the plan partitions the parameters, and its packed message unpacks exactly."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import FlatLayout, GatherPlan, ShardLayout, direct_gradients, direct_indices, plan_gather
from tests.harness.strategies import layout_lists

backends = st.sampled_from(["gloo", "nccl", "fake"])


@given(layout_lists(), backends, st.integers(0, 400))
def test_plan_partitions_and_packed_is_one_message(layouts: list[ShardLayout], backend: str, threshold: int) -> None:
    """Each parameter is gathered exactly once, and the staging buffer of the packed ones holds them all."""
    options = {"backend": backend, "direct_threshold_nbytes": threshold}
    pack = FlatLayout.build(layouts, 4, first=direct_indices(layouts, 4, **options))
    plan = plan_gather(pack, 4, **options)
    assert sorted((*plan.direct, *plan.packed)) == list(range(len(layouts)))

    span = plan.packed_span(pack)
    assert 0 <= span.start <= span.stop <= pack.padded_local_numel
    for index in plan.packed:
        assert span.start <= pack.segments[index].offset
        assert pack.segments[index].end <= span.stop
    for index in plan.direct:
        segment = pack.segments[index]
        assert segment.end <= span.start or span.stop <= segment.offset or not segment.padded_numel
        # Its gathered output is the padded full parameter, or there is nothing to gather.
        assert segment.layout.gathers_in_place or pack.world == 1

    locals_ = [torch.arange(pack.padded_local_numel) + 10_000 * rank for rank in range(pack.world)]
    staging = torch.cat([local[span.start : span.stop] for local in locals_])
    assert staging.numel() == plan.staging_numel(pack)
    for index in plan.packed:
        for rank in range(pack.world):
            segment = pack.segments[index]
            start = plan.staged_segment(pack, index, rank)
            found = staging[start : start + segment.padded_numel]
            assert torch.equal(found, locals_[rank][segment.offset : segment.end])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_parameter_is_always_direct(backend: str) -> None:
    """Whatever the threshold: its gathered output already is the parameter."""
    pack = FlatLayout.build([ShardLayout((3, 2), world=2)], 4)
    plan = plan_gather(pack, 4, backend=backend, direct_threshold_nbytes=1 << 30)
    assert plan == GatherPlan(direct=(0,), packed=())
    assert plan.packed_span(pack) == range(0) and plan.staging_numel(pack) == 0


def test_one_parameter_whose_chunks_interleave_is_packed() -> None:
    """Cut along dim 1 the gathered chunks are not the parameter's memory."""
    pack = FlatLayout.build([ShardLayout((3, 4), dim=1, world=2)], 4)
    plan = plan_gather(pack, 4, backend="nccl", direct_threshold_nbytes=0)
    assert plan == GatherPlan(direct=(), packed=(0,))
    assert plan.staging_numel(pack) == pack.gathered_numel


def test_gloo_packs_and_nccl_compares_padded_full_bytes() -> None:
    """The threshold counts the bytes that are gathered, in the dtype that travels, and includes its equal."""
    layouts = [ShardLayout((2,), world=2), ShardLayout((63,), world=2)]  # 63 rows are padded to 64
    assert direct_indices(layouts, 2, backend="nccl", direct_threshold_nbytes=128) == (1,)
    assert direct_indices(layouts, 2, backend="nccl", direct_threshold_nbytes=129) == ()
    assert direct_indices(layouts, 4, backend="nccl", direct_threshold_nbytes=129) == (1,)
    assert direct_indices(layouts, 4, backend="gloo", direct_threshold_nbytes=0) == ()


def test_world_of_one_stages_nothing() -> None:
    """No gather, no copy-out."""
    pack = FlatLayout.build([ShardLayout((3, 4), dim=1), ShardLayout((2,))], 4)
    plan = plan_gather(pack, 4, backend="gloo", direct_threshold_nbytes=1 << 30)
    assert plan == GatherPlan(direct=(0, 1), packed=())


def test_packed_segments_must_be_neighbours() -> None:
    """A direct parameter between two packed ones is refused by name, and `first` repairs it."""
    layouts = [ShardLayout((2,), world=2), ShardLayout((64,), world=2), ShardLayout((2,), world=2)]
    options = {"backend": "nccl", "direct_threshold_nbytes": 256}
    with pytest.raises(ValueError, match="big in between.*first=direct_indices"):
        plan_gather(FlatLayout.build(layouts, 4, names=("x", "big", "y")), 4, **options)
    pack = FlatLayout.build(layouts, 4, first=direct_indices(layouts, 4, **options))
    plan = plan_gather(pack, 4, **options)
    assert plan == GatherPlan(direct=(1,), packed=(0, 2))
    assert plan.packed_span(pack) == range(32, 40)


def test_wrong_arguments_are_named() -> None:
    """Each refusal says which argument."""
    layouts = [ShardLayout((2,), world=2)] * 2
    with pytest.raises(ValueError, match="backend"):
        direct_indices(layouts, 4, backend="cpu:gloo,cuda:nccl", direct_threshold_nbytes=0)
    with pytest.raises(ValueError, match="itemsize"):
        direct_indices(layouts, 0, backend="gloo", direct_threshold_nbytes=0)
    with pytest.raises(ValueError, match="direct_threshold_nbytes"):
        direct_indices(layouts, 4, backend="gloo", direct_threshold_nbytes=-1)
    with pytest.raises(ValueError, match="each parameter once"):
        GatherPlan(direct=(0,), packed=(0,))
    with pytest.raises(ValueError, match="index"):
        GatherPlan(direct=(0,), packed=(1,)).staged_segment(FlatLayout.build(layouts, 4), 0, 0)


def test_from_which_size_ranks_send_to_each_other() -> None:
    """On gloo what one rank sends decides, whatever the threshold for grouped gathers is; None: one message."""
    small, large = ShardLayout((256, 256), world=4), ShardLayout((512, 256), world=4)
    options = {"backend": "gloo", "direct_threshold_nbytes": 1 << 40}
    assert direct_indices([small, large], 4, **options) == (1,)
    assert direct_indices([small, large], 2, **options) == ()
    assert direct_indices([small, large], 4, backend="gloo", direct_threshold_nbytes=None) == ()
    larger = ShardLayout((1024, 256), world=4)
    assert direct_gradients([large, larger], 4, backend="gloo") == (1,)
    assert direct_gradients([large, larger], 2, backend="gloo") == ()
    assert direct_gradients([large, larger], 4, backend="nccl") == ()
    # Along another dim the parts for the ranks do not lie behind each other.
    assert direct_gradients([ShardLayout((1024, 256), dim=1, world=4)], 4, backend="gloo") == ()
    assert direct_gradients([ShardLayout((1024, 256), world=1)], 4, backend="gloo") == ()


def test_a_device_s_memory_is_not_sent_from_rank_to_rank() -> None:
    """gloo's sends and receives know the host's memory alone; its collectives copy a device's."""
    large = ShardLayout((1024, 1024), world=2)
    small = ShardLayout((8,), world=2)
    for on_host, direct in ((True, (1,)), (False, ())):
        options: dict[str, Any] = {"backend": "gloo", "direct_threshold_nbytes": 0, "on_host": on_host}
        first = direct_indices([small, large], 4, **options)
        assert first == direct
        assert plan_gather(FlatLayout.build([small, large], 4, first=first), 4, **options).direct == direct
        assert direct_gradients([small, large], 4, backend="gloo", on_host=on_host) == direct
    assert direct_indices([small, large], 4, backend="nccl", direct_threshold_nbytes=0, on_host=False) == (0, 1)
