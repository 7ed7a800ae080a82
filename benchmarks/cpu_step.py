"""One training step on CPU: no communication, DDP, FSDP1, torch's FSDP2 and fullshard, side by side in one run.

    python -m benchmarks.cpu_step                                2 and 4 ranks, both workloads; 3.5 minutes on two cores
    python -m benchmarks.cpu_step --worlds 2 --workloads light   one of them
    python -m benchmarks.cpu_step --adamw                        the optimizer step belongs to the measured step
    python -m benchmarks.cpu_step --implementations fsdp2 plan "plan 1.5gP" "plan 1gP"
                                                                 NCCL's plan over gloo, at limits of memory.py

"cpu" is the CPU time of a step on rank 0, all its threads together, user and system: with no more cores than ranks, a
step can hardly be shorter.

"kept": parameters stay full between forward and backward (`reshard_after_forward=False`). Then sharding sends what DDP
sends, 8 bytes per parameter and step in float32; without, it sends 12.

Rounds are interleaved (each way of training takes one step in turn, then all again), so that a slow spell of the
machine hits all of them; ratios are taken within a round and their median is reported. Absolute times on a shared
machine mean little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    BUILDERS,
    PLANS,
    TINY,
    WORKLOADS,
    ModelShape,
    Trainee,
    Workload,
    batch_of,
    check_same_training,
    on_ranks,
    paired_ratio,
    print_json,
)

BASES = ("fsdp2", "ddp")  # what the ratios are taken to
WARMUP_ROUNDS = 2


def measure(
    rank: int, world: int, shape: ModelShape, workload: Workload, names: list[str], rounds: int, adamw: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By name, seconds per step and round from the moment all ranks start to the moment the last has finished; and
    seconds of CPU time of this rank."""
    check_same_training(shape, workload, rank, names)
    trainees = [Trainee(name, (BUILDERS | PLANS)[name](shape), adamw=adamw) for name in names]
    tokens, targets = batch_of(shape, workload, rank)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for current in range(WARMUP_ROUNDS + rounds):
        for trainee in trainees:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            trainee.step(tokens, targets)
            cpu_seconds = time.process_time() - cpu_start
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if current >= WARMUP_ROUNDS:
                times[trainee.name].append(seconds.item())
                cpu[trainee.name].append(cpu_seconds)
    return times, cpu


def report(
    world: int, workload: Workload, times: dict[str, list[float]], cpu: dict[str, list[float]]
) -> dict[str, Any]:
    """Print one table; return its figures (milliseconds, and the ratios to torch's FSDP2 and to DDP)."""
    print(f"\n{workload.name}: {workload.sequences}x{workload.length} tokens per rank, {world} ranks")
    print(
        f"  {'':14} {'median ms':>10} {'min':>8} {'max':>8} {'cpu ms':>8}"
        + "".join(f" {'/ ' + base:>10}" for base in BASES)
    )
    rows: dict[str, Any] = {}
    for name, seconds in times.items():
        row: dict[str, float | None] = {
            "median_ms": statistics.median(seconds) * 1e3,
            "min_ms": min(seconds) * 1e3,
            "max_ms": max(seconds) * 1e3,
            "cpu_ms": statistics.median(cpu[name]) * 1e3,
        }
        ratios = {base: paired_ratio(seconds, times[base]) if base in times else None for base in BASES}
        row |= {f"of_{base}": ratio for base, ratio in ratios.items()}
        shown = "".join(f" {'-':>10}" if ratio is None else f" {ratio:10.3f}" for ratio in ratios.values())
        columns = f"{row['median_ms']:10.1f} {row['min_ms']:8.1f} {row['max_ms']:8.1f} {row['cpu_ms']:8.1f}"
        print(f"  {name:14} {columns}{shown}", flush=True)
        rows[name] = {key: round(value, 4) if value is not None else None for key, value in row.items()}
    return {"world": world, "workload": workload.name, "rounds": len(next(iter(times.values()))), "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--implementations", nargs="+", choices=BUILDERS | PLANS, default=list(BUILDERS))
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds, after two that are not (default: 7)")
    parser.add_argument("--adamw", action="store_true", help="include AdamW's step in the measured step")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters, to try the script itself"
    )
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    results = []
    for world in options.worlds:
        for key in options.workloads:
            workload = WORKLOADS[key]
            answers = on_ranks(world, measure, shape, workload, options.implementations, options.rounds, options.adamw)
            results.append(report(world, workload, *answers[0]))
    print()
    print_json("cpu_step" + ("_adamw" if options.adamw else ""), shape, results)


if __name__ == "__main__":
    main()
