"""Cutting a line ends what this rank waits for, whatever its peers did to their ends before (comm/lines.py)."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import domain_of
from fullshard.comm.lines import open_line
from tests.harness.pool import pool


def cut_after(rank: int, first: int) -> float:
    """Rank `first` cuts its end; another one waits for the third, which keeps its end, and then cuts its own."""
    world = dist.get_world_size()
    domain = domain_of(range(world))
    origin = dist.group.WORLD
    assert domain is not None and origin is not None
    line = open_line(domain, origin, torch.device("cpu"), "gloo", "test")
    assert line is not None
    line.issue(line.group.allreduce, [torch.ones(1)]).wait()
    if rank == first:
        line.cut()
        domain.store.set("first/cut", "1")
    waits, seconds = (first - 1) % world, 0.0
    if rank == waits:
        while not domain.store.check(["first/cut"]):
            time.sleep(0.01)
        time.sleep(0.1)  # until it is noticed here
        (silent,) = {0, 1, 2} - {first, waits}
        pending = line.group.recv([torch.empty(1)], silent, 7)
        begun = time.monotonic()
        line.cut()
        with pytest.raises(RuntimeError):
            pending.wait()
        seconds = time.monotonic() - begun
        domain.store.set("second/cut", "1")
    while not domain.store.check(["second/cut"]):
        time.sleep(0.01)
    return seconds


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_cut_ends_waits_for_a_rank_that_did_not_cut(first: int) -> None:
    """A closed connection to one peer must not keep the others open."""
    assert max(pool(3).run(cut_after, first, timeout=20)) < 2
