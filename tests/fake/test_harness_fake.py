"""The fake world: any size in one process, cleaned up whatever happens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness.fake import fake_world


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (4, 3), (512, 511)])
def test_one_process_is_one_rank_of_any_world(world: int, rank: int) -> None:
    with fake_world(world, rank) as group:
        assert (dist.get_world_size(), dist.get_rank()) == (world, rank)
        assert group.size() == world
        mesh = init_device_mesh("cpu", (world,))
        shard = distribute_tensor(torch.empty(2 * world, 3), mesh, [Shard(0)], src_data_rank=None).to_local()
        assert shard.shape == (2, 3)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
    assert not dist.is_initialized()


def test_cleaned_up_after_an_error() -> None:
    with pytest.raises(ValueError), fake_world(2):
        dist.new_group([0, 1])
        raise ValueError
    with fake_world(3):
        assert dist.get_world_size() == 3
    assert not dist.is_initialized()


def test_does_not_nest() -> None:
    with fake_world(2), pytest.raises(RuntimeError, match="do not nest"), fake_world(2):
        pass
    assert not dist.is_initialized()


def test_the_test_may_destroy_its_groups_itself() -> None:
    with fake_world(2):
        dist.destroy_process_group()
    with fake_world(2):
        pass
