"""Collectives against messages from rank to rank, on gloo, by the size of what one rank sends to another.

    python -m benchmarks.pairs                  2 and 4 ranks; a minute on two cores
    python -m benchmarks.pairs --worlds 2

A unit of seven square weights is gathered (all-gather into a staging buffer and copy-out, or each weight straight into
its final memory) and its gradients are reduced (send buffer and all-to-all, or each gradient from where it lies). The
sizes from which `layout.gather` sends from rank to rank come from this table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import ModelShape, on_ranks, paired_ratio, print_json
from fullshard.comm import BufferPool, Dtypes, Links, Outgoing, PlannedGather, ShardGroup, reduce_channel
from fullshard.layout import FlatLayout, GatherPlan, ShardLayout
from fullshard.policy import Controls

WEIGHTS = 7
WIDTHS = (64, 128, 256, 362, 512, 1024)


class Memory:
    """The full parameters, which stay allocated here."""

    def __init__(self, numel: int) -> None:
        self.flat = torch.empty(numel)
        self.live_nbytes = self.flat.nbytes

    def allocate(self) -> None:
        pass

    def release(self) -> None:
        pass


class Unit:
    """Seven weights of width x width on `group`, and the four ways."""

    def __init__(self, group: ShardGroup, width: int) -> None:
        layouts = [ShardLayout((width, width), world=group.world)] * WEIGHTS
        everything = tuple(range(WEIGHTS))
        self.group, self.pool = group, BufferPool(keep=True)
        self.pack = FlatLayout.build(layouts, 4)
        self.flat = torch.randn(self.pack.padded_local_numel)
        self.gradients: list[Tensor | None] = [torch.randn(width, width) for _ in layouts]
        staged, straight = Memory(self.pack.full_numel), Memory(self.pack.full_numel)
        self.ways = {
            "gather": self.gather(GatherPlan((), everything), staged),
            "gather pairs": self.gather(GatherPlan(everything, ()), straight),
            "reduce": self.reduce(()),
            "reduce pairs": self.reduce(everything),
        }
        results = {way: run() for way, run in self.ways.items()}
        ranges = [slice(start, start + width * width) for start in self.pack.full_offsets]
        assert all(torch.equal(staged.flat[r], straight.flat[r]) for r in ranges)
        assert all(map(torch.equal, results["reduce"], results["reduce pairs"]))

    def gather(self, plan: GatherPlan, memory: Memory) -> Callable[[], Any]:
        channel = PlannedGather(self.group, self.pack, plan, self.flat, memory, self.pool)
        return lambda: (channel.issue(), channel.complete())

    def reduce(self, direct: tuple[int, ...]) -> Callable[[], Any]:
        dtypes = Dtypes(torch.float32, torch.float32, torch.float32, torch.float32)
        links, controls = Links(self.group).under("auto"), Controls()
        channel = reduce_channel(links, self.pack, direct, dtypes, self.pool, strategy="auto", controls=controls)
        return lambda: channel.issue(self.gradients, Outgoing(False)).collect()


def measure(rank: int, world: int, widths: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds by width and way: until the slowest rank is done."""
    group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    found: dict[int, dict[str, list[float]]] = {}
    for width in widths:
        ways = Unit(group, width).ways
        times = found[width] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                times[way].append(seconds.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tiny", action="store_true", help="two small sizes, to try the script itself")
    options = parser.parse_args()
    options.widths = [16, 32] if options.tiny else options.widths
    results = []
    for world in options.worlds:
        print(f"\n{WEIGHTS} weights, {world} ranks: median ms, and the ratio of pairs to the collective")
        print(f"  {'KiB to a rank':>14} {'gather':>8} {'pairs':>8} {'':>7} {'reduce':>8} {'pairs':>8}")
        for width, times in on_ranks(world, measure, options.widths, options.rounds)[0].items():
            ms = {way: statistics.median(seconds) * 1e3 for way, seconds in times.items()}
            ratios = [paired_ratio(times[f"{way} pairs"], times[way]) for way in ("gather", "reduce")]
            kib = width * width * 4 / world / 1024
            print(
                f"  {kib:14.0f} {ms['gather']:8.2f} {ms['gather pairs']:8.2f} {ratios[0]:7.2f} "
                f"{ms['reduce']:8.2f} {ms['reduce pairs']:8.2f} {ratios[1]:7.2f}",
                flush=True,
            )
            results.append({"world": world, "kib": kib, "ms": ms, "gather": ratios[0], "reduce": ratios[1]})
    print()
    print_json("pairs", ModelShape(), results)


if __name__ == "__main__":
    main()
