"""How much of fullshard's communication overlaps with computation: prefetch on against off, in one run.

    python -m benchmarks.overlap                    2 ranks, both workloads; some two minutes on two cores

Two models that differ in `prefetch_depth` alone take steps in turn, beside torch's FSDP2 and a model without any
communication. Reported per step:

    step       from the moment all ranks start to the moment the last has finished
    waiting    the part of it that the main thread spent inside `Work.wait()`, gathers and reductions apart (rank 0;
    ours only) exposed    step minus the step without communication: all that being sharded costs, copies and
    bookkeeping included

A gather that was issued before the compute it overlaps has its result when it is waited for, so prefetch lowers the
waiting for gathers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    BUILDERS,
    TINY,
    WORKLOADS,
    ModelShape,
    Trainee,
    Workload,
    batch_of,
    on_ranks,
    paired_ratio,
    print_json,
)
from fullshard.comm import data_group
from fullshard.comm.group import ShardGroup
from fullshard.policy import use_options

WARMUP_ROUNDS = 3  # the order of execution is recorded in the first, and followed from the second on
VARIANTS = {"prefetch on": 1, "prefetch off": 0}
PEERS = ("none", "fsdp2")
NAMES = (*PEERS, *VARIANTS)


class Clock:
    """Seconds spent waiting for messages, by kind. `install` puts it around every message that fullshard's engine
    sends.
    """

    def __init__(self) -> None:
        self.waited = {"gather": 0.0, "reduce": 0.0}

    def install(self) -> None:
        # The last is what goes from rank to rank; so does what `pairs` gathers.
        kinds = {"gather_into": "gather", "exchange": "reduce", "reduce_scatter": "reduce", "exchange_each": "reduce"}
        for method, kind in kinds.items():
            setattr(ShardGroup, method, self._timed(getattr(ShardGroup, method), kind))
        data_group.gather_each = self._timed(data_group.gather_each, "gather")

    def _timed(self, send: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            sent = send(*args)
            if isinstance(sent, list):
                return [_TimedWork(work, self.waited, kind) for work in sent]
            return _TimedWork(sent, self.waited, kind)

        return timed


class _TimedWork:
    def __init__(self, work: Any, waited: dict[str, float], kind: str) -> None:
        self._work, self._waited, self._kind = work, waited, kind

    def wait(self) -> None:
        start = time.perf_counter()
        self._work.wait()
        self._waited[self._kind] += time.perf_counter() - start


def measure(
    rank: int, world: int, shape: ModelShape, workload: Workload, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """{name: {"step" | "gather" | "reduce": seconds of every round}}."""
    clock = Clock()
    clock.install()
    tokens, targets = batch_of(shape, workload, rank)
    trainees = {name: Trainee(name, BUILDERS[name](shape), adamw=False) for name in PEERS}
    losses: dict[str, float] = {}
    for name, depth in VARIANTS.items():
        trainees[name] = Trainee(name, BUILDERS["fullshard"](shape), adamw=False)
        with use_options(prefetch_depth=depth):  # read when a root first runs
            losses[name] = trainees[name].step(tokens, targets).item()
    if len(set(losses.values())) != 1:
        raise AssertionError(f"rank {rank}: prefetch changes the loss: {losses}")
    seconds: dict[str, dict[str, list[float]]] = {name: {"step": [], "gather": [], "reduce": []} for name in NAMES}
    for current in range(WARMUP_ROUNDS + rounds):
        for name in NAMES:
            clock.waited.update(gather=0.0, reduce=0.0)
            dist.barrier()
            start = time.perf_counter()
            trainees[name].step(tokens, targets)
            step = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            waited = dict(clock.waited)
            dist.all_reduce(step, dist.ReduceOp.MAX)
            if current >= WARMUP_ROUNDS:
                for key, value in {"step": step.item(), **waited}.items():
                    seconds[name][key].append(value)
    return seconds


def report(world: int, workload: Workload, seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Print one table; return its figures (medians in milliseconds)."""
    print(f"\n{workload.name}: {workload.sequences}x{workload.length} tokens per rank, {world} ranks; median ms")
    print(f"  {'':13} {'step':>8} {'exposed':>8} {'waiting: gather':>16} {'reduce':>8}")
    rows: dict[str, dict[str, float]] = {}
    for name, parts in seconds.items():
        exposed = [mine - plain for mine, plain in zip(parts["step"], seconds["none"]["step"], strict=True)]
        row = {key: statistics.median(values) * 1e3 for key, values in {**parts, "exposed": exposed}.items()}
        if name in PEERS:
            row = {key: row[key] for key in ("step", "exposed")}
        cells = {key: f"{row[key]:.1f}" if key in row else "-" for key in ("step", "exposed", "gather", "reduce")}
        print(f"  {name:13} {cells['step']:>8} {cells['exposed']:>8} {cells['gather']:>16} {cells['reduce']:>8}")
        rows[name] = {key: round(value, 3) for key, value in row.items()}
    ratios = {
        key: paired_ratio(seconds["prefetch on"][key], seconds["prefetch off"][key])
        for key in ("step", "gather")
        if all(seconds["prefetch off"][key])
    }
    told = ", ".join(f"{key} {value:.3f}" for key, value in ratios.items())
    print(f"  on / off, within a round: {told}", flush=True)
    return {
        "world": world,
        "workload": workload.name,
        "rounds": len(seconds["none"]["step"]),
        "median_ms": rows,
        "on_over_off": {key: round(value, 4) for key, value in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2], help="numbers of ranks (default: 2)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--rounds", type=int, default=15, help="measured rounds, after three that are not (default: 15)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few thousand parameters, to try the script itself"
    )
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    results = []
    for world in options.worlds:
        for key in options.workloads:
            answers = on_ranks(world, measure, shape, WORKLOADS[key], options.rounds)
            results.append(report(world, WORKLOADS[key], answers[0]))
    print()
    print_json("overlap", shape, results)


if __name__ == "__main__":
    main()
