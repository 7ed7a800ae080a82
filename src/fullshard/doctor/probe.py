"""Messages between processes of this machine, measured on each axis of the mesh."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm.group import ShardGroup, mesh_links

from .facts import Axis

_REPEATS = 5
_LEAST, _MOST = 1 << 20, 1 << 25  # bytes of a message


def measure(world: int, replicas: int, nbytes: int) -> tuple[Axis, ...]:
    """The bandwidth of the mesh (replicas, world / replicas) between `world` new processes, with gloo, in messages of
    `nbytes`, at least 1 MiB and at most 32 MiB. Raises what ended a process."""
    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as folder:
        mp.spawn(_rank, (world, replicas, min(max(nbytes, _LEAST), _MOST), folder), nprocs=world)
        return tuple(Axis(*found) for found in json.loads(Path(folder, "axes.json").read_text()))


def _rank(rank: int, world: int, replicas: int, nbytes: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    links = mesh_links(mesh, torch.device("cpu"))
    groups = (("shard", links.shard), ("replicate", links.replicate))
    axes = [(name, g.world, *_bandwidth(g, nbytes)) for name, g in groups if g is not None and g.world > 1]
    if rank == 0:
        Path(folder, "axes.json").write_text(json.dumps(axes))
    dist.destroy_process_group()


def _bandwidth(group: ShardGroup, nbytes: int) -> tuple[float, float]:
    """Bytes per second that this rank receives in an all-gather and in a reduce-scatter, as the engine sends them on
    gloo: an exchange, added up on the host."""
    numel = nbytes // 4 // group.world
    full, piece, out = (torch.zeros(n) for n in (numel * group.world, numel, numel * group.world))

    def reduce_scatter() -> None:
        group.exchange(out, full).wait()
        out.view(group.world, numel).sum(0)

    received = numel * 4 * (group.world - 1)
    return (
        received / _seconds(lambda: group.gather_into(full, piece).wait()),
        received / _seconds(reduce_scatter),
    )


def _seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])  # the first one connects
