"""torch's fake process group: one process is one rank of any world, and its collectives do nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Be rank 0 of `world` ranks: layouts and bytes are right, values are not. This process must have no group."""
    store: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    excepthook = sys.excepthook  # init_process_group puts one around it
    dist.init_process_group("fake", rank=0, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
