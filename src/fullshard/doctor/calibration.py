"""Measures what one rank of several on this machine reaches: products, attention, other operations, an optimizer's
step, and messages over gloo.

All ranks measure the same thing at the same time, each with its share of the cores, as in a step. Operations run
forward and backward with new memory for their results. Bytes are counted as a plan counts them: what each operation
reads and writes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard._torch import TorchDispatchMode, is_write
from fullshard.comm.group import ShardGroup, mesh_links

# Tokens and width of what is measured: those of a small model, whose tensors are larger than caches.
_TOKENS, _WIDTH, _HEADS = 1024, 512, 8
_STEPPED = 1 << 22  # elements that an optimizer steps
_LARGE, _SMALL = 1 << 23, 1 << 10  # bytes of messages
_SECONDS = 0.5  # that one measurement takes at least


class Messages(NamedTuple):
    """Bytes per second that a rank receives in an all-gather, an all-to-all and a reduce-scatter, and in each half of
    an all-reduce; `latency`: seconds of a short one after compute, in which ranks also wait for the slowest;
    `contention`: the share of a message's time by which compute beside it takes longer."""

    gather: float
    exchange: float
    scatter: float
    total: float
    latency: float
    contention: float


class Rates(NamedTuple):
    """The slowest rank's. `products`, `attention`: floating-point operations per second, in bfloat16 and in float32;
    `stream`: bytes per second of other operations, likewise; `launch`: seconds of one operation on a few numbers;
    `step`: bytes of parameters, gradients and state per second of AdamW with clipping; `step_launch`: seconds that it
    takes for a parameter of a few numbers; `messages`: None for one rank."""

    products: tuple[float, float]
    attention: tuple[float, float]
    stream: tuple[float, float]
    launch: float
    step: float
    step_launch: float
    messages: Messages | None


def measure(world: int, seconds: float = _SECONDS) -> Rates:
    """The rates of `world` new processes, each with an equal share of the cores; a measurement takes at least
    `seconds`. Raises what ended a process."""
    with tempfile.TemporaryDirectory(prefix="fullshard-calibrate-") as folder:
        mp.spawn(_rank, (world, seconds, folder), nprocs=world)
        found = Rates(*json.loads(Path(folder, "rates.json").read_text()))
        return found._replace(messages=None if found.messages is None else Messages(*found.messages))


def _rank(rank: int, world: int, seconds: float, folder: str) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(cores // world, 1))
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    try:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        found = _measured(mesh_links(mesh, torch.device("cpu")).shard, seconds)
        if rank == 0:
            Path(folder, "rates.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def _measured(group: ShardGroup, seconds: float) -> Rates:
    def taken(call: Callable[[], object]) -> float:
        return _seconds(group, call, seconds)

    # The launches of a few operations are small beside what the others take, but not nothing.
    few, count = _others(8, 8, torch.float32), _Counted()
    with count:
        few()
    launch = taken(few) / count.kernels
    products, attention, stream = [], [], []
    for dtype in (torch.bfloat16, torch.float32):
        product = _product(dtype)
        products.append(3 * 2 * _TOKENS * _WIDTH * 4 * _WIDTH / taken(product))
        attention.append(7 * _TOKENS**2 * _WIDTH / taken(_attention(dtype)))
        others = _others(_TOKENS, 4 * _WIDTH, dtype)
        with _Counted() as count:
            others()
        stream.append(count.nbytes / max(taken(others) - count.kernels * launch, 1e-9))
    step_launch = taken(_step([8] * 100)) / 100
    # Parameters and two numbers of state are read and written, gradients read.
    step = 28 * _STEPPED / max(taken(_step([_STEPPED // 4] * 4)) - 4 * step_launch, 1e-9)
    return Rates(
        (products[0], products[1]),
        (attention[0], attention[1]),
        (stream[0], stream[1]),
        launch,
        step,
        step_launch,
        _messages(group, seconds) if group.world > 1 else None,
    )


def _messages(group: ShardGroup, seconds: float) -> Messages:
    numel = _LARGE // 4 // group.world
    full, piece, out = (torch.zeros(n) for n in (numel * group.world, numel, numel * group.world))
    tiny, part = torch.zeros(_SMALL // 4 * group.world), torch.zeros(_SMALL // 4)
    received = numel * 4 * (group.world - 1)

    def gather() -> None:
        group.gather_into(full, piece).wait()

    latency = _seconds(group, lambda: group.gather_into(tiny, part).wait(), seconds)
    calls: tuple[Callable[[], object], ...] = (
        gather,
        lambda: group.exchange(out, full).wait(),
        lambda: group.reduce_scatter(piece, full).wait(),
        lambda: group.all_reduce(full).wait(),
    )
    taken = [max(_seconds(group, call, seconds), 2 * latency) for call in calls]
    product = _product(torch.float32)

    def after() -> None:
        product()
        group.gather_into(tiny, part).wait()

    def both() -> None:
        work = group.gather_into(full, piece)
        product()
        work.wait()

    alone, computed, beside = taken[0], _seconds(group, product, seconds), _seconds(group, both, seconds)
    # Beside compute as long as this, the message takes so much of its time.
    contention = max(beside - max(computed, alone), 0.0) / min(computed, alone)
    late = max(_seconds(group, after, seconds) - computed, latency)
    gathered, exchanged, scattered = (received / (each - latency) for each in taken[:3])
    return Messages(gathered, exchanged, scattered, 2 * received / (taken[3] - latency), late, contention)


# ---- what is measured ------------------------------------------------------------------------------------------------


def _product(dtype: torch.dtype) -> Callable[[], object]:
    """A linear layer, four times as wide as its inputs: three products."""
    x = torch.randn(_TOKENS, _WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(4 * _WIDTH, _WIDTH, dtype=dtype, requires_grad=True)
    given = torch.randn(_TOKENS, 4 * _WIDTH, dtype=dtype)
    return lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), given)


def _attention(dtype: torch.dtype) -> Callable[[], object]:
    """Two products forward and five backward of half of a square."""
    size = (1, _HEADS, _TOKENS, _WIDTH // _HEADS)
    q, k, v = (torch.randn(size, dtype=dtype, requires_grad=True) for _ in range(3))
    given = torch.randn(size, dtype=dtype)
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), given)


def _others(rows: int, width: int, dtype: torch.dtype) -> Callable[[], object]:
    """A norm, a gate, a sum, and a loss over logits in float32."""
    norm = nn.RMSNorm(width).to(dtype)
    gate, up = (torch.randn(rows, width, dtype=dtype, requires_grad=True) for _ in range(2))
    target = torch.randint(width, (rows,))

    def run() -> object:
        loss = F.cross_entropy((norm(up + F.silu(gate) * up) + gate).float(), target)
        return torch.autograd.grad(loss, (gate, up, norm.weight))

    return run


def _step(sizes: list[int]) -> Callable[[], object]:
    """AdamW on parameters of these sizes, all in one call, after their gradients were clipped."""
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def run() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run


class _Counted(TorchDispatchMode):
    """Counts operations that make or write something, and bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = _tensors([args, list((kwargs or {}).values())])
        there = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in there]
        if made or is_write(func):
            self.kernels += 1
            self.nbytes += sum(tensor.numel() * tensor.itemsize for tensor in (*inputs, *made))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _seconds(group: ShardGroup, call: Callable[[], object], least: float) -> float:
    """The median time of `call` while all ranks do the same, for at least `least` seconds; that of the slowest rank."""
    taken = []
    for _ in range(3):
        call()  # the first one connects, allocates and chooses kernels
    begun = time.perf_counter()
    call()
    often = torch.tensor([least / max(time.perf_counter() - begun, 1e-7)])
    group.all_reduce(often, dist.ReduceOp.MIN).wait()
    # A call that takes little is measured with others, so that the clock does not count.
    together = max(int(often.item() / 50), 1)
    for _ in range(max(int(often.item() / together), 5)):
        start = time.perf_counter()
        for _ in range(together):
            call()
        taken.append((time.perf_counter() - start) / together)
    slowest = torch.tensor([median(taken)], dtype=torch.float64)
    group.all_reduce(slowest, dist.ReduceOp.MAX).wait()
    return float(slowest.item())
