"""The planner's predictions beside published and measured figures.

    python -m benchmarks.plan_truth              published training speeds and memory of torchtitan
    python -m benchmarks.plan_truth --measure    and steps of plain models on this CPU, and the time of two plans

fitted       lines that set the two efficiencies of a profile (`matmul`, `stream` in plan/machine.py)
predicted    a line that did not
measured     the best of five forwards and backwards of one process on this CPU, with the profile `here`, which measures
             linear layers, attention, memory and the time of an operation for a second, and no model
time         the best of three runs of the command from the shell, and the part of it after the imports
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.common import facts
from fullshard.plan import Planner, Strategy, find_hardware
from fullshard.plan.facts import describe, measured_cpu
from fullshard.plan.search import Describe
from fullshard.program import Program
from fullshard.train import shapes
from fullshard.train.model import Llama, LlamaShape


class Published(NamedTuple):
    """A line of torchtitan, per GPU on 8 x H100. `speed`: tokens per second, lowest and highest; `active`: gigabytes
    that the allocator held, None where none is given."""

    name: str
    used: str
    source: str
    shape: str
    sequence: int
    micro: int
    recompute: str
    speed: tuple[float, float]
    active: float | None


_GIB = 79.1 * 1.073741824  # a percent of memory there is one of 79.1 GiB
PUBLISHED = (
    Published("Llama-2-7B, recomputed", "fitted", "torchtitan#165", "llama-2-7b", 2048, 8, "whole", (6100, 6300),
    0.2392 * _GIB), Published("Llama-2-7B, selective", "fitted", "torchtitan#165", "llama-2-7b", 2048, 8, "alternate",
    (6600, 6800), 0.5213 * _GIB), Published("Llama-3.1-8B, selective", "predicted", "torchtitan, 2024-12", "llama-8b",
    8192, 2, "alternate", (5762, 5762), None),
)  # fmt: skip


def published() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    hardware = find_hardware("h100-80g")
    for line in PUBLISHED:
        planner = Planner(
            _describe(lambda sequence, n=line.shape: shapes.named(n, sequence)), hardware, sequence=line.sequence
        )
        strategy = Strategy(8, compute="bfloat16", reduce="float32", micro=line.micro, recompute=line.recompute)
        plan = planner.plan(strategy)
        middle = sum(line.speed) / 2
        rows.append(
            {
                "name": line.name,
                "used": line.used,
                "source": line.source,
                "published": line.speed,
                "predicted": plan.tokens_per_second,
                "error": plan.tokens_per_second / middle - 1,
                "active_gb": line.active,
                "counted_gb": plan.simulated.peak.total / 1e9,
            }
        )
    return rows


# Shapes whose time is in matrix products, and one of small operations.
CPU = {
    "wide": (LlamaShape(512, 2, 512, 8, 8, 1536, 256), 4),
    "deep": (LlamaShape(512, 6, 384, 6, 6, 1024, 256), 4),
    "long": (LlamaShape(512, 2, 384, 6, 6, 1024, 1024), 2),
}


def measured(repeats: int = 5) -> list[dict[str, object]]:
    hardware = measured_cpu(find_hardware("cpu"))
    rows: list[dict[str, object]] = []
    for name, (shape, size) in CPU.items():
        program = shapes.language_model(shape, shape.context)
        planner = Planner(_describe(lambda sequence, p=program: p), hardware)
        plan = planner.plan(Strategy(micro=size, optimizer="none", backend="gloo"))
        model = Llama(shape)
        model.init_weights()
        tokens = torch.randint(shape.vocab, (size, shape.context))
        taken = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            program.loss(model, (tokens, tokens)).backward()
            taken.append(time.perf_counter() - start)
            model.zero_grad()
        best = min(taken[1:])
        rows.append({"name": name, "measured": best, "predicted": plan.seconds, "error": plan.seconds / best - 1})
    return rows


COMMANDS = ("llama-70b --ranks 1024", "llama-70b --ranks 10000 --search")
# The command in a new process, its modules first.
TIMED = """
import sys, time
import fullshard.plan.facts, fullshard.plan.page, fullshard.plan.questions, fullshard.train.config
from fullshard.cli import main
begun = time.perf_counter()
main(["plan", *sys.argv[1:]])
print(time.perf_counter() - begun, file=sys.stderr)
"""


def timed(repeats: int = 3) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for command in COMMANDS:
        whole, own = [], []
        for _ in range(repeats):
            begun = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-c", TIMED, *command.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            whole.append(time.perf_counter() - begun)
            own.append(float(run.stderr.splitlines()[-1]))
        rows.append({"command": f"fullshard plan {command}", "seconds": min(whole), "without_imports": min(own)})
    return rows


def _describe(programs: Callable[[int | None], Program]) -> Describe:
    return lambda samples, sequence, compute, alone, recompute: describe(
        programs(sequence), "model", samples=samples, compute=compute, alone=alone, recompute=recompute
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    rows = published()
    print("| line | used | published, tokens/s per GPU | predicted | error | active memory | counted |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        active = f"{row['active_gb']:.1f} GB" if row["active_gb"] else "-"
        low, high = row["published"]  # type: ignore[misc]
        print(
            f"| {row['name']} ({row['source']}) | {row['used']} | {low:.0f} to {high:.0f} | {row['predicted']:.0f} | "
            f"{row['error']:+.1%} | {active} | {row['counted_gb']:.1f} GB |"
        )
    here = measured() if arguments.measure else []
    if here:
        print("\n| model on this CPU | measured | predicted | error |\n|---|---|---|---|")
    for row in here:
        print(f"| {row['name']} | {row['measured']:.3f} s | {row['predicted']:.3f} s | {row['error']:+.1%} |")
    commands = timed() if arguments.measure else []
    if commands:
        print("\n| command | seconds | without imports |\n|---|---|---|")
    for row in commands:
        print(f"| `{row['command']}` | {row['seconds']:.1f} | {row['without_imports']:.1f} |")
    print(
        json.dumps(
            {"benchmark": "plan_truth", "facts": facts(), "published": rows, "measured": here, "commands": commands}
        )
    )


if __name__ == "__main__":
    main()
