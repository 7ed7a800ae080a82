"""What `check_invariants` adds to a step, when it checks and when it does not.

    python -m benchmarks.invariants            2 ranks over gloo, two minutes on two cores

Three sharded models of the same shape train in turns, in the same processes: without checks, with `every=1`, and with
`every` so large that no round is checked. Medians over rounds of the time of a step over that of the model without
checks in the same round; `again` is a second model without checks, which is what a ratio may be off by.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    HEAVY,
    LIGHT,
    TINY,
    ModelShape,
    Workload,
    build_fullshard,
    on_ranks,
    paired_ratio,
    print_json,
)

WAYS = {"none": 0, "checked": 1, "between": 1 << 30, "again": 0}


def measure(rank: int, world: int, shape: ModelShape, workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's step, by way."""
    import fullshard

    models: dict[str, Any] = {}
    for way, every in WAYS.items():
        models[way] = build_fullshard(shape)
        if every:
            fullshard.check_invariants(models[way], every=every)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, shape.vocabulary, (workload.sequences, workload.length), generator=generator)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way, model in models.items():
            dist.barrier()
            begun = time.perf_counter()
            model(tokens).float().logsumexp(-1).mean().backward()
            if number > 1:  # the first step of "between" is checked, the second has caches
                times[way].append(time.perf_counter() - begun)
            model.zero_grad()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    results = {}
    print(f"{'workload':16} {'step, ms':>9} {'checked':>8} {'between':>8} {'again':>6}")
    for workload in (HEAVY, LIGHT):
        times = on_ranks(2, measure, shape, workload, options.rounds)[0]
        ratios = {way: round(paired_ratio(times[way], times["none"]), 3) for way in WAYS if way != "none"}
        step = sorted(times["none"])[len(times["none"]) // 2] * 1000
        results[workload.name] = {"step_ms": round(step, 1), **ratios}
        print(f"{workload.name:16} {step:9.1f} " + " ".join(f"{value:>8}" for value in ratios.values()))
    print_json("invariants", shape, results)


if __name__ == "__main__":
    main()
