"""Reductions of one unit in one hop and in two, 4 ranks on one machine as 2 nodes of 2, on gloo.

    python -m benchmarks.hops                   a minute on two cores

Seven square weights, as in benchmarks/pairs.py. On one machine both hops cost the same, so this says what the second
one costs where it has nothing to win; a network between nodes is not there to be measured.

    native       the backend's reduce-scatter
    one hop      all-to-all, and a sum here
    pairs        the same, each gradient from where it lies
    two hops     within nodes, then between them
    rounded      the same in bfloat16, with sums of nodes in bfloat16; beside "one hop" in bfloat16
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
from fullshard.comm import BufferPool, Dtypes, Links, NodeLinks, ShardGroup, reduce_channel
from fullshard.layout import NodeGrid, Pack, ShardLayout
from fullshard.policy import Controls

WEIGHTS, GRID = 7, NodeGrid(2, 2)
WIDTHS = (128, 256, 512, 1024)


def _ways(group: ShardGroup, nodes: tuple[ShardGroup, ShardGroup], width: int) -> dict[str, Callable[[], Any]]:
    layouts = [ShardLayout((width, width), world=group.world)] * WEIGHTS
    pack, pool = Pack.build(layouts, 8), BufferPool(keep=True)
    gradients: list[Tensor | None] = [torch.randn(width, width) for _ in layouts]
    narrow = [g.bfloat16() for g in gradients if g is not None]

    def way(strategy: str, *, hops: bool, pairs: bool = False, wire: torch.dtype = torch.float32) -> Callable[[], Any]:
        links = Links(group, nodes=NodeLinks(GRID, *nodes, narrow_partials=True) if hops else None)
        channel = reduce_channel(
            links,
            pack,
            tuple(range(WEIGHTS)) if pairs else (),
            Dtypes(wire, torch.float32, torch.float32, torch.float32),
            pool,
            communication=strategy,
            controls=Controls(),
        )
        sent = gradients if wire is torch.float32 else narrow

        def run() -> Any:
            reduction = channel.issue(sent, accumulated=False)
            while reduction.has_next:
                reduction.advance()
            return reduction.collect()

        return run

    return {
        "native": way("torch", hops=False),
        "one hop": way("all-to-all", hops=False),
        "pairs": way("all-to-all", hops=False, pairs=True),
        "two hops": way("hierarchical", hops=True),
        "one hop, bf16": way("all-to-all", hops=False, wire=torch.bfloat16),
        "two hops, bf16": way("hierarchical", hops=True, wire=torch.bfloat16),
    }


def measure(rank: int, world: int, widths: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds by width and way: until the slowest rank is done."""
    group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    node, place = divmod(rank, GRID.local)
    within = group.some(range(node * GRID.local, (node + 1) * GRID.local), "within")
    across = group.some(range(place, world, GRID.local), "across")
    found: dict[int, dict[str, list[float]]] = {}
    for width in widths:
        ways = _ways(group, (within, across), width)
        results = {way: run() for way, run in ways.items()}
        for way in ("pairs", "two hops"):
            for a, b in zip(results[way], results["native"], strict=True):
                torch.testing.assert_close(a, b)
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
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tiny", action="store_true", help="two small sizes, to try the script itself")
    options = parser.parse_args()
    if options.tiny:
        options.widths, options.rounds = [16, 32], 3
    results = []
    print(f"{WEIGHTS} weights, 4 ranks as {GRID.nodes} nodes of {GRID.local}: median ms, and the ratio to one hop")
    for width, times in on_ranks(GRID.world, measure, options.widths, options.rounds)[0].items():
        ms = {way: statistics.median(seconds) * 1e3 for way, seconds in times.items()}
        one = {way: "one hop, bf16" if "bf16" in way else "one hop" for way in times}
        ratios = {way: paired_ratio(times[way], times[one[way]]) for way in times}
        print(f"  {width:5} wide, {width * width * 4 / GRID.world / 1024:6.0f} KiB to a rank", flush=True)
        for way in times:
            print(f"    {way:16} {ms[way]:8.2f} {ratios[way]:7.2f}")
        results.append({"width": width, "ms": ms, "ratio": ratios})
    print()
    print_json("hops", ModelShape(), results)


if __name__ == "__main__":
    main()
