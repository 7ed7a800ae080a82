"""Time of a whole training step, and peak memory of the whole process: fullshard, torch's FSDP2 and DDP, two CPU ranks.

    python -m benchmarks.steps_and_peaks            three shapes, float32 and mixed; half an hour or more
    python -m benchmarks.steps_and_peaks --peaks    memory alone, in a minute or two, on a busy machine too
    python -m benchmarks.steps_and_peaks --write    also into a dated file beside this one

A step is forward, backward and AdamW's step. Each way of training runs in processes of its own, because a peak is that
of a process; rounds are interleaved (each way once, then all again), and ratios are taken within a round. The peak is
the kernel's high-water mark of resident memory (VmHWM) of rank 0, Python and torch included. DDP computes in float32.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import (
    TINY,
    ModelShape,
    Trainee,
    Workload,
    batch_of,
    build_ddp,
    build_sharded,
    facts,
    on_ranks,
    paired_ratio,
    print_json,
)

WORLD = 2
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A model and what each rank computes in a step."""

    name: str
    shape: ModelShape
    workload: Workload


CASES = {
    "blocks": Case("12 blocks of width 1,024", ModelShape(8192, 1024, 2736, 16, 12), Workload("1x64", 1, 64)),
    "tokens": Case("12 blocks of width 512", ModelShape(8192, 512, 1368, 8, 12), Workload("4x256", 4, 256)),
    "wide": Case("4 blocks of width 2,048", ModelShape(8192, 2048, 5472, 16, 4), Workload("1x64", 1, 64)),
}
SMALL = {"tiny": Case("3 blocks of width 16", TINY, Workload("1x16", 1, 16))}


def _fsdp2(shape: ModelShape, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if options.pop("mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return build_sharded(shape, fully_shard, **options)


def _fullshard(shape: ModelShape, **options: Any) -> nn.Module:
    from fullshard import MixedPrecisionPolicy, fully_shard

    if options.pop("mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return build_sharded(shape, fully_shard, **options)


WAYS: dict[str, tuple[str, Callable[[ModelShape], nn.Module]]] = {
    "fullshard": ("float32", lambda shape: _fullshard(shape, mixed=False)),
    "FSDP2": ("float32", lambda shape: _fsdp2(shape, mixed=False)),
    "DDP": ("float32", build_ddp),
    "fullshard, mixed": ("mixed", lambda shape: _fullshard(shape, mixed=True)),
    "FSDP2, mixed": ("mixed", lambda shape: _fsdp2(shape, mixed=True)),
}


def measure(rank: int, world: int, case: Case, way: str, steps: int) -> tuple[list[float], int, float]:
    """Seconds of each measured step, from the moment all ranks start to that at which the last has finished; the peak
    of this process in bytes; and the last loss."""
    _, build = WAYS[way]
    trainee = Trainee(way, build(case.shape), adamw=True)
    tokens, targets = batch_of(case.shape, case.workload, rank)
    seconds: list[float] = []
    for step in range(WARMUP_STEPS + steps):
        dist.barrier()
        start = time.perf_counter()
        loss = trainee.step(tokens, targets)
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if step >= WARMUP_STEPS:
            seconds.append(took.item())
    return seconds, high_water(), loss.item()


def high_water() -> int:
    """The most resident memory that this process had, in bytes."""
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.M)
    return int(kib) * 1024


def run(case: Case, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """By way of training: the median step of each round, and the peaks. Stops where losses differ."""
    found: dict[str, dict[str, Any]] = {way: {"seconds": [], "peak": []} for way in WAYS}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for way in WAYS:
            seconds, peak, losses[way] = on_ranks(WORLD, measure, case, way, steps)[0]
            found[way]["seconds"].append(statistics.median(seconds))
            found[way]["peak"].append(peak)
    for way, (precision, _) in WAYS.items():
        other = losses["FSDP2" if precision == "float32" else "FSDP2, mixed"]
        # In mixed precision sums round in another order; a step that trained nothing differs by far more.
        if not abs(losses[way] - other) <= (1e-4 if precision == "float32" else 5e-2) * abs(other):
            raise SystemExit(f"{case.name}: {way} trains differently: the last losses are {losses}")
    return found


def table(results: dict[str, dict[str, dict[str, Any]]], *, times: bool) -> str:
    """As Markdown, a row for each way of training."""
    lines = ["| model | tokens a rank | | peak of a process |" + (" step | / FSDP2 |" if times else "")]
    lines.append("|" + "---|" * (6 if times else 4))
    cases = CASES | SMALL
    for key, found in results.items():
        for way, figures in found.items():
            base = "FSDP2" if WAYS[way][0] == "float32" else "FSDP2, mixed"
            low, high = (f"{1e-6 * value:,.0f}" for value in (min(figures["peak"]), max(figures["peak"])))
            row = f"| {cases[key].name} | {cases[key].workload.name} | {way} | {low} to {high} MB |"
            if times:
                seconds = figures["seconds"]
                ratio = paired_ratio(seconds, found[base]["seconds"])
                row += f" {1e3 * min(seconds):,.0f} to {1e3 * max(seconds):,.0f} ms | {ratio:.2f} |"
            lines.append(row)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a round, after two that are not")
    parser.add_argument("--peaks", action="store_true", help="memory alone: one round of two steps, no times")
    parser.add_argument("--write", action="store_true", help="into steps_and_peaks_DATE.md beside this file")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    options = parser.parse_args()
    chosen = SMALL if options.tiny else {key: CASES[key] for key in options.cases}
    rounds, steps = (1, 2) if options.peaks or options.tiny else (options.rounds, options.steps)
    load = facts()["load"]
    results = {key: run(case, rounds, steps) for key, case in chosen.items()}
    shown = table(results, times=not options.peaks)
    print(shown)
    if options.write:
        date = datetime.date.today().isoformat()
        command = "python -m benchmarks.steps_and_peaks" + (" --peaks" if options.peaks else "")
        about = {key: value for key, value in facts().items() if key != "load"}
        how = (__doc__ or "").rpartition("\n\n")[2].strip()
        said = (
            f"# steps_and_peaks, {date}\n\n`{command}`: {rounds} round(s) of {steps} steps after two, AdamW, two gloo "
        )
        said += f"ranks of one thread, {about}, load {load} when it began.\n\n{how}\n\n{shown}\n"
        Path(__file__).with_name(f"steps_and_peaks_{date}.md").write_text(said)
    print_json("steps_and_peaks", next(iter(chosen.values())).shape, results)


if __name__ == "__main__":
    main()
