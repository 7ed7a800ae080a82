"""One process that believes it is one rank of any world: order, counts, bytes and layout, never values.

Every collective of the fake group returns at once and leaves its output as it was (or copies the input), so a test
here may assert which collectives were issued, in which order and with what shapes, and nothing about what is in the
tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import worlds


@contextmanager
def fake_world(world: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Be `rank` of a fake world of `world` ranks; yields the default group. All groups are destroyed at the end."""
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_world({world}) expects that this process has no process group, but one of "
            f"{dist.get_world_size()} ranks is initialised; destroy it first (fake worlds do not nest)"
        )
    worlds.note("fake", world)
    excepthook = sys.excepthook  # every init_process_group puts one more around the last
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():  # the test may have destroyed it, which is its right
            dist.destroy_process_group()
        sys.excepthook = excepthook
