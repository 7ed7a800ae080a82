"""Host time that sharding adds: fake process group, tiny tensors, so that what is left is Python and dispatch.

    python -m benchmarks.host                     fp32 and mixed precision, world 8; about a minute
    python -m benchmarks.host --profile "+ shards"  where the time of one way goes (cProfile)

A step is forward, backward, optimizer.step() and zero_grad() of a chain of blocks with nine parameters each, as in
Llama. The figure is (step - step of the bare model) / blocks, in milliseconds of CPU time (which is time, on a machine
that does nothing else), medians over interleaved rounds.

    bare         the same blocks, not sharded, torch's optimizer on plain tensors
    fsdp2        torch's fully_shard on every block and on the model
    fullshard    ours, the same optimizer on DTensors
    + shards     ours, with `fullshard.step_on_shards(optimizer)`
    direct       `+ shards`, with the plan that a block of an 8B model gets on NCCL: seven parameters are gathered
                 straight into place, each with a message of its own, and two are packed
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import Block, ModelShape, paired_ratio, print_json

SHAPE = ModelShape(vocabulary=64, width=16, hidden=24, heads=2, depth=8)
WORLD = 8
WAYS = ("bare", "fsdp2", "fullshard", "+ shards", "direct")


class Chain(nn.Module):
    """Blocks and nothing else, so that the difference divides by their number."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def plan_of_a_large_model(width: int) -> Iterator[None]:
    """Matrices are gathered directly, norms are packed: what a block of 218 M parameters gets on NCCL."""
    with (
        mock.patch("fullshard.layout.gather.GROUPING_BACKENDS", frozenset({"fake"})),
        mock.patch("fullshard.api.fully_shard.DIRECT_GATHER_NBYTES", width * width * 2),
    ):
        yield


def build(way: str, shape: ModelShape, mixed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    import torch.distributed.fsdp as torch_fsdp

    import fullshard

    torch.manual_seed(0)
    model: Any = Chain(shape)
    if way != "bare":
        library: Any = torch_fsdp if way == "fsdp2" else fullshard
        policy = library.MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if mixed else (None, None)))

        def shard() -> None:
            for block in model.blocks:
                library.fully_shard(block, mp_policy=policy)
            library.fully_shard(model, mp_policy=policy)

        if way == "direct":
            with plan_of_a_large_model(shape.width):
                shard()
        else:
            shard()
    elif mixed:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way in ("+ shards", "direct"):
        fullshard.step_on_shards(optimizer)
    return model, optimizer


def stepper(way: str, shape: ModelShape, mixed: bool) -> Callable[[], None]:
    model, optimizer = build(way, shape, mixed)
    dtype = torch.bfloat16 if mixed and way == "bare" else torch.float32
    x = torch.randn(1, 4, shape.width, dtype=dtype)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(shape: ModelShape, mixed: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds per step, by way and round; a round takes a few steps of each way in turn."""
    steps = {way: stepper(way, shape, mixed) for way in WAYS}
    for step in steps.values():
        for _ in range(4):
            step()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for way, step in steps.items():
                start = time.process_time()
                for _ in range(3):
                    step()
                times[way].append((time.process_time() - start) / 3)
            gc.collect()
    finally:
        gc.enable()
    return times


def report(mixed: bool, shape: ModelShape, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print one table; return its figures."""
    added = {
        way: [(mine - bare) / shape.depth for mine, bare in zip(times[way], times["bare"], strict=True)]
        for way in WAYS
        if way != "bare"
    }
    precision = "mixed precision" if mixed else "fp32"
    print(f"\n{precision}: {shape.depth} blocks of 9 parameters, world {WORLD}, fake group")
    print(f"  {'':12} {'step ms':>9} {'added ms per block':>20} {'/ fsdp2':>9}")
    rows: dict[str, Any] = {}
    for way in WAYS:
        row: dict[str, Any] = {"step_ms": round(statistics.median(times[way]) * 1e3, 4)}
        if way in added:
            row["added_ms"] = round(statistics.median(added[way]) * 1e3, 4)
            row["ratio"] = round(paired_ratio(added[way], added["fsdp2"]), 4)
        shown = f"{row['added_ms']:20.3f} {row['ratio']:9.3f}" if way in added else f"{'-':>20} {'-':>9}"
        print(f"  {way:12} {row['step_ms']:9.2f} {shown}", flush=True)
        rows[way] = row
    return {"mixed": mixed, "world": WORLD, "rounds": len(times["bare"]), "ways": rows}


def profile(shape: ModelShape, way: str) -> None:
    """Where the time of one way goes."""
    step = stepper(way, shape, mixed=False)
    for _ in range(4):
        step()
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    for _ in range(50):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="measured rounds of three steps each (default: 40)")
    parser.add_argument("--profile", choices=WAYS, help="print where the time of one way goes, and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="two blocks, to try the script itself")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    shape = ModelShape(64, 16, 24, 2, 2) if options.tiny else SHAPE
    if options.profile:
        profile(shape, options.profile)
        return
    results = [report(mixed, shape, measure(shape, mixed, options.rounds)) for mixed in (False, True)]
    print()
    print_json("host", shape, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
