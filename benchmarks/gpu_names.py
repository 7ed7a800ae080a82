"""Data groups beside a user's group of each name that torch has for NCCL, and what the class of torch 2.15 would do.

Checks of `gpu_ranks --kind "nccl names"`. A name that fails has a row that says why, and the next one is tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.device import has_times, synchronize
from benchmarks.gpu_parts import reason

if TYPE_CHECKING:
    from benchmarks.gpu_checks import Rank, Rows

NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")


def names(at: Rank) -> Rows:
    """A group of each name, over all ranks and over each rank alone: the class that torch makes, the device that it is
    bound to, and fullshard's messages: one, several at once, a cut."""
    for name in NAMES:
        for ranks in (tuple(range(at.world)), (at.rank,)):
            row: dict[str, Any] = {"name": name, "ranks": len(ranks)}
            try:
                row |= _used(at, name, ranks)
            except Exception as error:
                row["could_not"] = reason(error)
            yield row


def _used(at: Rank, name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    from fullshard.comm import ShardGroup
    from fullshard.peers import scope_of

    seconds: dict[str, float] = {}
    begun = time.perf_counter()
    theirs = dist.new_group(list(ranks), backend=f"{at.device.type}:{name}", use_local_synchronization=True)
    assert isinstance(theirs, dist.ProcessGroup)
    seconds["made_s"] = time.perf_counter() - begun
    found: dict[str, Any] = {
        "class": type(theirs._get_backend(at.device)).__name__,
        "bound": str(theirs.bound_device_id),
        "device": str(at.device),
    }
    group = ShardGroup(theirs, at.device)
    data = None
    if len(ranks) > 1:
        scope = scope_of(ranks)
        assert scope is not None
        group.open(scope, f"names {name}")
        data = group.data_group
        assert data is not None, "no data group"
        begun = time.perf_counter()
        data.connect()
        seconds["connect_s"] = time.perf_counter() - begun
        found["data_group"] = type(data.group._get_backend(at.device)).__name__
    begun = time.perf_counter()
    pieces = [torch.full((256 + 8 * i,), at.rank + 1.0, device=at.device) for i in range(3)]
    outs = [torch.empty(len(ranks) * len(piece), device=at.device) for piece in pieces]
    for work in group.gather_each(outs, pieces):
        work.wait()
    for out, piece in zip(outs, pieces, strict=True):
        expected = torch.tensor([rank + 1.0 for rank in ranks]).repeat_interleave(len(piece))
        assert torch.equal(out.cpu(), expected), "gathered something else"
    seconds["gathers_s"] = time.perf_counter() - begun
    if data is not None:
        at.meet(f"cut of {name}")
        begun = time.perf_counter()
        data.cut()
        seconds["cut_s"] = time.perf_counter() - begun
        value = torch.ones(4, device=at.device)
        try:
            data.group.allreduce([value])
            found["after_cut"] = "sent"
        except RuntimeError as error:
            found["after_cut"] = f"refused: {reason(error)}"[:80]
    return found | (seconds if has_times(at.device) else {})


def other_class(at: Rank) -> Rows:
    """Whether private groups could be of torch 2.15's class: when it connects, three gathers, and what an abort does to
    a message that rank 1 never joins. The last check."""
    kind: Any = getattr(distributed_c10d, "ProcessGroupNCCL2", None)
    if kind is None:
        yield {"could_not": "this torch has no ProcessGroupNCCL2"}
        return
    yield from _abort_of(at, kind)


def _abort_of(at: Rank, kind: Any) -> Iterator[dict[str, Any]]:
    from fullshard._torch import default_store

    options = kind.Options()
    options.group_name = "of the other class"
    store = dist.PrefixStore("of the other class", default_store())
    begun = time.perf_counter()
    own = kind(store, at.rank, at.world, options)
    made = time.perf_counter() - begun
    own.eager_connect_single_device(at.device)
    connected = time.perf_counter() - begun
    tensor = torch.full((1024,), at.rank + 1.0, device=at.device)
    # By a group of torch, as fullshard calls it: the class has no such calls in Python.
    group: Any = dist.ProcessGroup(store, at.rank, at.world)
    group.bound_device_id = at.device
    group._register_backend(at.device, dist.ProcessGroup.BackendType.NCCL, own)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._set_group_name("of the other class")
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor[0].item() == at.world * (at.world + 1) / 2
    times = has_times(at.device)
    yield {"made_s": made if times else None, "connected_s": connected if times else None}
    at.meet("the other class aborts")
    if at.rank == 0:
        work = group.allreduce([torch.ones(1024, device=at.device)], dist.AllreduceOptions())
        time.sleep(0.5)
        under_way = not work.is_completed()
        begun = time.perf_counter()
        own.abort()
        synchronize(at.device)
        released = time.perf_counter() - begun
        try:
            work.wait()
            told = "nothing"
        except RuntimeError as error:
            told = reason(error)[:80]
        error_now = str(own.get_error()).rpartition(".")[2]
        yield {
            "was_under_way": under_way,
            "released_s": released if times else None,
            "wait_after_it": told,
            "error": error_now,
        }
    at.meet("the other class has aborted")
