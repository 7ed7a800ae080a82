"""What it costs that ranks compare what they do: FULLSHARD_GUARD=full and structure against off, over gloo.

    python -m benchmarks.guard                     2 ranks, the light workload of cpu_step; two minutes on two cores
    python -m benchmarks.guard --worlds 2 4        more ranks

Each mode runs in processes of its own, because the setting is read once for a process group, and modes follow each
other in turns: the ratio is that of turns side by side.

    step        seconds of a step with AdamW
    cpu         CPU seconds of a step: what a comparison may take, on a machine that is busy too
    calls       Python functions that a step calls, counted: no machine is too busy for that
    question    one comparison of a value through the store, all ranks at once
    in band     one comparison by 16 bytes over the connections of the ranks, as before each message of a first step
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.common import LIGHT, TINY, ModelShape, Trainee, batch_of, build_fullshard, on_ranks, paired_ratio
from benchmarks.common import print_json as print_answer
from benchmarks.host import count_calls
from fullshard.comm import alike
from fullshard.peers import scope_of

MODES = ("off", "structure", "full")
# The first forwards of a model are watched.
WARMUP_STEPS = 10
QUESTIONS = 200


def measure(rank: int, world: int, shape: ModelShape, steps: int, mode: str) -> dict[str, float]:
    """The figures of one rank."""
    os.environ["FULLSHARD_GUARD"] = mode
    tokens, targets = batch_of(shape, LIGHT, rank)
    trainee = Trainee(mode, build_fullshard(shape), adamw=True)
    walls, cpus = [], []
    for current in range(WARMUP_STEPS + steps):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        trainee.step(tokens, targets)
        if current >= WARMUP_STEPS:
            walls.append(time.perf_counter() - start)
            cpus.append(time.process_time() - cpu_start)
    dist.barrier()
    calls = count_calls(lambda: trainee.step(tokens, targets))
    scope = scope_of(range(world))
    assert scope is not None
    return {
        "step_ms": statistics.median(walls) * 1e3,
        "cpu_ms": statistics.median(cpus) * 1e3,
        "calls": calls,
        "question_us": _median_seconds(lambda number: scope.agree("benchmark", str(number))) * 1e6,
        "in_band_us": _median_seconds(lambda number: alike(scope, str(number))) * 1e6,
    }


def _median_seconds(call: Callable[[int], object]) -> float:
    taken = []
    for number in range(QUESTIONS):
        dist.barrier()
        start = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def report(world: int, turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Print one world's figures, and return them."""
    print(f"\n{world} ranks, {LIGHT.sequences}x{LIGHT.length} tokens per rank, {len(turns)} turns")
    print(f"  {'mode':10} {'step ms':>9} {'/ off':>7} {'cpu ms':>9} {'/ off':>7} {'calls':>7}")
    rows: dict[str, Any] = {}
    for mode in MODES:
        known = {name: [turn[mode][name] for turn in turns] for name in turns[0][mode]}
        row = {name: round(statistics.median(values), 4) for name, values in known.items()}
        for name in ("step_ms", "cpu_ms"):
            row[f"{name} / off"] = round(paired_ratio(known[name], [turn["off"][name] for turn in turns]), 4)
        print(
            f"  {mode:10} {row['step_ms']:9.2f} {row['step_ms / off']:7.3f} {row['cpu_ms']:9.2f} "
            f"{row['cpu_ms / off']:7.3f} {row['calls']:7.0f}"
        )
        rows[mode] = row
    print(f"  a question {rows['full']['question_us']:.0f} us, in band {rows['full']['in_band_us']:.0f} us", flush=True)
    return {"world": world, "turns": len(turns), "modes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--turns", type=int, default=5, help="times that each mode runs (default: 5)")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of a turn (default: 30)")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters: nearly all is host time"
    )
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    results = []
    for world in options.worlds:
        turns = []
        for turn in range(options.turns):
            # In turns, so that no mode always follows the same one.
            order = MODES if turn % 2 else MODES[::-1]
            turns.append({mode: on_ranks(world, measure, shape, options.steps, mode)[0] for mode in order})
        results.append(report(world, turns))
    print()
    print_answer("guard", shape, results)


if __name__ == "__main__":
    main()
