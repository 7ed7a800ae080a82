"""The planner's predictions beside published and measured figures.

    python -m benchmarks.plan_truth              every line of published_runs.toml: speed, and memory where it is stated
    python -m benchmarks.plan_truth --axes       those of sources that divide layers or sequences; the others without it
    python -m benchmarks.plan_truth --fit        and the shares of each hardware that its fitted lines have
    python -m benchmarks.plan_truth --write benchmarks/plan_truth_DATE.md    and the document, with the errors of BEFORE
    python -m benchmarks.plan_truth --measure    and steps of plain models on this CPU, and the time of two plans

fitted       a line that sets the shares of its hardware (`matmul`, `attention`, `stream`, `fused` in plan/machine.py)
held out     a line that did not, by the hash of its name
later        a line that was found after the shares had been fitted
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
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import product
from math import ceil, log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import mpt
from benchmarks.as_published import hidden_seconds, reserved_nbytes, with_sums_in_place
from benchmarks.common import facts
from benchmarks.segments import reserved_by_fsdp1
from fullshard.migrate.declared import noted_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.plan import Plan, Planner, Strategy, find_hardware
from fullshard.plan.facts import describe, measured_cpu
from fullshard.plan.search import Describe
from fullshard.plan.tape import note
from fullshard.program import Program, shard_blocks
from fullshard.train import shapes
from fullshard.train.model import Llama, LlamaShape

FILE = Path(__file__).with_name("published_runs.toml")
# What the documents say before their tables.
TEXTS = Path(__file__).with_name("plan_truth_texts.md")
# The documents of the plans before, with whose errors the new ones are compared.
BEFORE = {axes: FILE.with_name(f"plan_truth{'_axes' * axes}_2026-11-27.md") for axes in (False, True)}
_GIB = float(1 << 30)


class Compared(NamedTuple):
    """A published line, the half that it is in, its plan, and what FSDP2 would reserve, where that was published.
    `by_fsdp1`: what FSDP1 would, if it ran that. `hidden`: seconds of messages of asynchronous TP."""

    run: dict[str, Any]
    half: str
    plan: Plan
    reserved: float = 0.0
    by_fsdp1: float = 0.0
    hidden: float = 0.0

    @property
    def needs_nbytes(self) -> float:
        """The bytes of the device that the program needs."""
        if not self.by_fsdp1:
            return self.plan.peak_nbytes
        others = dict(self.plan.terms)
        return self.by_fsdp1 + others["reserved by the device"] + others.get("communicators", 0.0)

    @property
    def fits(self) -> bool:
        """Whether that fits with the hardware's margin."""
        return self.needs_nbytes * (1 + self.plan.hardware.margin) <= self.plan.budget

    @property
    def speed(self) -> float:
        """Tokens per second of one device."""
        return self.plan.tokens_per_second * self.plan.seconds / (self.plan.seconds - self.hidden)

    @property
    def error(self) -> float:
        """Of the predicted speed."""
        return float(self.speed / self.run["tokens_per_second"] - 1)

    @property
    def memory_gib(self) -> float:
        """What is counted, where active memory is stated; else what FSDP2 would reserve."""
        return (self.reserved or self.plan.simulated.peak.total) / _GIB

    @property
    def memory_error(self) -> float | None:
        stated = self.run.get("active_gib", self.run.get("reserved_gib"))
        return None if stated is None else self.memory_gib / float(stated) - 1


FITTED, HELD_OUT, LATER = "fitted", "held out", "later"


def published() -> list[tuple[dict[str, Any], str]]:
    """The lines of the file, each with the conditions of its source and the half that it is in."""
    found = tomllib.loads(FILE.read_text())
    runs = [found["conditions"].get(run["source"], {}) | run for run in found["run"]]
    return [(run, half_of(run)) for run in runs]


def unasked() -> list[dict[str, str]]:
    """Lines of the file that cannot be planned, each with the reason."""
    found: list[dict[str, str]] = tomllib.loads(FILE.read_text())["unasked"]
    return found


def failed() -> list[dict[str, Any]]:
    """Lines of the file that were published as out of memory."""
    found: list[dict[str, Any]] = tomllib.loads(FILE.read_text())["failed"]
    return found


def half_of(run: dict[str, Any]) -> str:
    if run.get("later"):
        return LATER
    if "half" in run:
        return str(run["half"])
    return FITTED if sha256(name_of(run).encode()).digest()[0] % 2 else HELD_OUT


def name_of(run: dict[str, Any]) -> str:
    """What was run, without what came out."""
    again = "" if run["accumulate"] == 1 else f" x {run['accumulate']}"
    also = [f"HSDP {run.get('replicas')}"] * ("replicas" in run and run["replicas"] > 1) + ["bf16 states"] * bool(
        run.get("storage")
    )
    also += [
        f"{name} {run[key]}" for key, name in (("tensor", "TP"), ("context", "CP"), ("experts", "EP")) if key in run
    ]
    also += [name for name in ("compiled", "float8") if run.get(name)] + ["ZeRO-2"] * (not run.get("reshard", True))
    also += ["asynchronous TP"] * run.get("async_tp", False)
    return (
        f"{run['model']}, {run['sequence']:,} tokens, {run['devices']} x {run['hardware']}, micro {run['micro']}"
        f"{again}, recompute {run['recompute']}{''.join(f', {each}' for each in also)} ({run['source']})"
    )


def strategy_of(run: dict[str, Any]) -> Strategy:
    """Gradients of each micro-batch are reduced, as FSDP1 does where nobody asks for less."""
    narrow = "bfloat16" if "storage" in run else "float32"
    return Strategy(
        run["devices"],
        run.get("replicas", 1),
        compute="bfloat16",
        reduce=run.get("reduce", narrow),
        storage=run.get("storage", ""),
        micro=run["micro"],
        accumulate=run["accumulate"],
        send_each=run["accumulate"] > 1 and run.get("send_each", True),
        reshard=run.get("reshard", True),
        recompute=run["recompute"],
        compiled=run.get("compiled", False) or run.get("fused", False),
        compiled_loss=run.get("compiled_loss", False),
        float8=run.get("float8", False),
        tensor=run.get("tensor", 1),
        context=run.get("context", 1),
        experts=run.get("experts", 1),
    )


_planners: dict[tuple[str, int, Parallelism, str], Planner] = {}
# The share of the peak of attention before FlashAttention-2, which the lines of LLM Foundry ran: by --fit.
FLASH_1 = {"h100-80g": 0.20, "a100-80g": 0.34}
# cuDNN's on Hopper is 1.7 to 2.3 times as fast as torch's FlashAttention-2 (huggingface/transformers#48163).
CUDNN = {"h100-80g": 1.7}


def planner_of(run: dict[str, Any]) -> Planner:
    """One for each model and length: a model is described once."""
    model, length = run["model"], run["sequence"]
    plan = parallelism_of(run)
    key = (model, length, plan, run.get("loss", "") + " apart" * run.get("apart", False))
    if key not in _planners:
        part = program_of(model, length // plan.context_parallel_degree)
        if "loss" in run:
            casts = None if "own" in run["loss"] else torch.float32
            part = replace(part, loss=partial(_loss, dtype=casts, held=[] if "held" in run["loss"] else None))
        if run.get("apart"):
            part = replace(part, shard=_with_ends_apart)
        if plan.beyond_data:
            shared = plan.tensor_parallel_degree * plan.context_parallel_degree
            shared = run["devices"] if plan.expert_parallel_degree > 1 else shared
            part = replace(part, parallelize=noted_by(plan, shared, note))
        _planners[key] = Planner(_describe(lambda sequence: part, plan), find_hardware(run["hardware"]))
    planner = _planners[key]
    hardware = find_hardware(run["hardware"])
    attention = hardware.attention
    if run.get("attention") == "flash-1":
        attention = FLASH_1[hardware.name]
    elif run.get("attention") == "cudnn":
        attention *= CUDNN.get(hardware.name, 1.0)
    told = {key: run[key] for key in ("node", "inter_node") if key in run}
    planner.hardware = replace(hardware, attention=attention, **told)
    planner.budget = planner.hardware.memory
    return planner


def parallelism_of(run: dict[str, Any]) -> Parallelism:
    """The declaration of a run. Heads are exchanged along `cp` where the source gathers keys and values: this library
    has no such attention."""
    return Parallelism(
        tensor_parallel_degree=run.get("tensor", 1),
        context_parallel_degree=run.get("context", 1),
        expert_parallel_degree=run.get("experts", 1),
        enable_loss_parallel=run.get("loss_parallel", False),
    )


_DATA = Parallelism()
# Shapes of one source alone: 14.84B and 175.0B parameters, as it says.
_KEMPNER = {
    "llama-13b-gqa": LlamaShape(128256, 40, 5120, 40, 8, 17920, 8192, tie_embeddings=False),
    "llama-175b-gqa": LlamaShape(128256, 96, 12288, 96, 8, 39680, 8192, tie_embeddings=False),
} | {f"experts-{n}": LlamaShape(128256, 24, 2048, 16, 4, 7168, 8192, tie_embeddings=False, experts=n) for n in (8, 16)}


def program_of(model: str, length: int) -> Program:
    if model in mpt.SHAPES:
        return mpt.program(model, length)
    if model in _KEMPNER:
        return shapes.language_model(_KEMPNER[model], length)
    if (told := tomllib.loads(FILE.read_text())["models"].get(model)) is None:
        return shapes.named(model, length)
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(told))
        return shapes.hugging_face(path, length)


def _loss(model: Any, batch: Any, *, dtype: torch.dtype | None, held: list[Any] | None) -> torch.Tensor:
    """The loss of logits in `dtype`; None: in that of the model. `held`: a program's variable, which has them until the
    next ones come."""
    tokens, targets = batch
    found = model(tokens)
    logits = getattr(found, "logits", found)
    logits = logits if dtype is None else logits.to(dtype)
    if held is not None:
        held[:] = [logits]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _with_ends_apart(model: Any, fully_shard: Any) -> None:
    """Embedding and head are units of their own."""
    for module in (model.embedding, model.output):
        fully_shard(module)
    shard_blocks(model, fully_shard)


def has_axes(run: dict[str, Any]) -> bool:
    """Whether a run belongs to a table over degrees of TP, CP or EP."""
    return any(axis in run for axis in ("tensor", "context", "experts"))


def compared(*, axes: bool) -> Iterator[Compared]:
    """Each line that has axes beside data parallelism, or has not, with its plan."""
    for run, half in published():
        if has_axes(run) is axes:
            yield planned(run, half)


def planned(run: dict[str, Any], half: str) -> Compared:
    planner, strategy = planner_of(run), strategy_of(run)
    plan = planner.estimate(strategy)
    if run.get("in_place") and run["accumulate"] > 1:
        plan = with_sums_in_place(plan)
    if not run.keys() & {"reserved_gib", "fsdp1", "async_tp"}:
        return Compared(run, half, plan)
    model = planner.model(strategy.micro, strategy.computed, recompute=strategy.recompute)
    return Compared(
        run,
        half,
        plan,
        reserved_nbytes(plan, model) if "reserved_gib" in run else 0.0,
        reserved_by_fsdp1(plan, model) if run.get("fsdp1") else 0.0,
        hidden_seconds(plan, model) if run.get("async_tp") else 0.0,
    )


def padded(rows: list[Compared]) -> list[str]:
    """Lines whose source pads the tokens of each expert to those of the busiest one: the plan without padding, and that
    in which one expert has every token, so that each has as many."""
    lines = [
        "| line | published, tokens/s per device | predicted without padding | with the most |",
        "|---|---|---|---|",
    ]
    for row in rows:
        shape = _KEMPNER.get(row.run["model"])
        if shape is None or not shape.experts:
            continue
        name = f"{row.run['model']} padded"
        _KEMPNER[name] = replace(shape, experts_per_token=shape.experts)
        most = planned({**row.run, "model": name}, row.half).speed
        lines.append(f"| {name_of(row.run)} | {row.run['tokens_per_second']:,} | {row.speed:,.0f} | {most:,.0f} |")
    return lines


def fit(rows: Iterable[Compared]) -> dict[str, tuple[float, ...]]:
    """The shares (matmul, attention, stream) of each hardware under which its fitted lines are the least wrong, by the
    mean absolute logarithm: a few lines with conditions that nobody stated shall not move it. Waits stay as they were
    planned, and so does attention by newer kernels than FlashAttention. Where there are fewer lines than shares, matmul
    alone is fitted. Lines of compiled models fit `fused`, with the other shares as they are."""
    found: dict[str, tuple[float, ...]] = {}
    by_name: defaultdict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        if row.half == FITTED:
            by_name[row.run["hardware"] + " compiled" * row.plan.strategy.compiled].append(row)
    for name, lines in by_name.items():
        hardware = lines[0].plan.hardware
        compiled = lines[0].plan.strategy.compiled
        terms = []
        old = [row for row in lines if row.run.get("attention") == "flash-1"]
        for row in lines:
            work, plan = row.plan.step.work, row.plan
            times = plan.strategy.accumulate
            moved = times * work.nbytes / hardware.bandwidth
            parts = (
                times * work.matmul / hardware.flops2,
                # Newer kernels have the share that was measured of them.
                times * work.attention / hardware.flops2 if row in old else 0.0,
                moved * (hardware.fused if compiled else 1.0) + plan.simulated.optimizer_seconds * hardware.stream,
            )
            known = parts[0] / hardware.matmul + parts[1] / plan.hardware.attention + parts[2] / hardware.stream
            rest = plan.seconds - known
            terms.append((parts, moved, rest, plan.tokens / row.run["tokens_per_second"]))

        def wrong(shares: tuple[float, ...], terms: Any = terms) -> float:
            total = 0.0
            for parts, _, rest, seconds in terms:
                total += abs(log((sum(p / s for p, s in zip(parts, shares, strict=True)) + rest) / seconds))
            return total

        def wrong_fused(fused: float, lines: Any = lines, terms: Any = terms, at: Any = hardware) -> float:
            return sum(
                abs(log((row.plan.seconds + moved * (fused - at.fused) / at.stream) / seconds))
                for row, (_, moved, _, seconds) in zip(lines, terms, strict=True)
            )

        steps = [n / 100 for n in range(10, 92, 2)]
        if compiled:
            found[name] = (min((n / 100 for n in range(5, 101)), key=wrong_fused),)
            continue
        others = (steps if old else [hardware.attention], steps if len(lines) >= 3 else [hardware.stream])
        found[name] = min(product(steps, *others), key=wrong)
    return found


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


def _describe(programs: Callable[[int | None], Program], plan: Parallelism = _DATA) -> Describe:
    return lambda samples, sequence, compute, alone, recompute: describe(
        programs(sequence),
        "model",
        samples=samples,
        compute=compute,
        alone=alone,
        recompute=recompute,
        tensor=plan.tensor_parallel_degree,
        shared=plan.context_parallel_degree > 1 or plan.expert_parallel_degree > 1,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def table(rows: list[Compared]) -> list[str]:
    lines = [
        "| line | used | published, tokens/s per device | predicted | error | before | memory, GiB | predicted | "
        "error | before | fits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    earlier = before()
    for row in rows:
        run = row.run
        stated = f"{run['active_gib']} active" if "active_gib" in run else f"{run.get('reserved_gib', '-')}"
        memory = "-" if row.memory_error is None else f"{row.memory_gib:.1f}"
        then, memory_then = earlier.get(name_of(run), ("-", "-"))
        lines.append(
            f"| {name_of(run)} | {row.half} | {run['tokens_per_second']:,} | {row.speed:,.0f} | {row.error:+.1%} | "
            f"{then} | {stated} | {memory} | {_percent(row.memory_error)} | {memory_then} | "
            f"{'yes' if row.fits else 'no'} |"
        )
    return lines


def before() -> dict[str, tuple[str, str]]:
    """The errors of speed and of memory by line, as the documents of the plans before have them."""
    rows = [
        line.split(" | ") for file in BEFORE.values() for line in file.read_text().splitlines() if "tokens," in line
    ]
    return {cells[0].removeprefix("| "): (cells[4], cells[7]) for cells in rows if len(cells) == 9}


def summary(rows: list[Compared]) -> list[str]:
    """Median and largest errors of each half, by hardware and of all, and within what nine of ten lines are."""
    lines = [
        "| hardware | half | lines | median error of speed | nine of ten within | largest |",
        "|---|---|---|---|---|---|",
    ]
    names = [*dict.fromkeys(row.run["hardware"] for row in rows), "all"]
    for name in names:
        for halves in ((FITTED,), (HELD_OUT,), (LATER,), (HELD_OUT, LATER)):
            errors = [abs(r.error) for r in rows if r.half in halves and name in ("all", r.run["hardware"])]
            if errors and (len(halves) == 1 or {r.half for r in rows} >= set(halves)):
                lines.append(f"| {name} | {' and '.join(halves)} | {_spread(errors)} |")
    return lines


def _spread(errors: list[float]) -> str:
    """How many there are, the median, that within which nine of ten are, and the largest."""
    tenth = sorted(errors)[ceil(0.9 * len(errors)) - 1]
    return f"{len(errors)} | {median(errors):.1%} | {tenth:.1%} | {max(errors):.1%}"


def axis_summary(rows: list[Compared]) -> list[str]:
    """Median and largest errors by axis; a degree of 1 is a line of a table over degrees."""
    lines = ["| axis | lines | median error of speed | nine of ten within | largest |", "|---|---|---|---|---|"]
    for key, name in (("tensor", "TP"), ("context", "CP"), ("experts", "EP")):
        errors = [abs(row.error) for row in rows if key in row.run and not row.run.get("async_tp")]
        if errors:
            lines.append(f"| {name} | {_spread(errors)} |")
    asynchronous = [abs(row.error) for row in rows if row.run.get("async_tp")]
    return [*lines, f"| TP, asynchronous | {_spread(asynchronous)} |"] if asynchronous else lines


def memory_summary(rows: list[Compared]) -> list[str]:
    """Median and largest errors of memory, by what was stated; and of active memory without and with micro-batches."""
    lines = ["| memory | lines | median error | nine of ten within | largest |", "|---|---|---|---|---|"]
    kinds: dict[str, Callable[[dict[str, Any]], bool]] = {
        "active, one micro-batch": lambda run: "active_gib" in run and run["accumulate"] == 1,
        "active, micro-batches": lambda run: "active_gib" in run and run["accumulate"] > 1,
        "reserved": lambda run: "reserved_gib" in run,
    }
    for name in dict.fromkeys(row.run["hardware"] for row in rows):
        kinds[name] = lambda run, name=name: run["hardware"] == name  # type: ignore[misc]
    kinds["all"] = lambda run: True
    for name, belongs in kinds.items():
        errors = [abs(row.memory_error) for row in rows if row.memory_error is not None and belongs(row.run)]
        if errors:
            lines.append(f"| {name} | {_spread(errors)} |")
    return lines


def failures() -> list[str]:
    """Runs that had no room, and whether their plans fit."""
    lines = ["| published as out of memory | planned, GB | of | fits |", "|---|---|---|---|"]
    for run in failed():
        plan = planner_of(run).estimate(strategy_of(run))
        has, of = plan.peak_nbytes / 1e9, plan.budget / 1e9
        lines.append(f"| {name_of(run)} | {has:.1f} | {of:.1f} | {'yes' if plan.fits else 'no'} |")
    return lines


def document(rows: list[Compared], *, axes: bool) -> str:
    """The dated document."""
    text = TEXTS.read_text().split("\n---\n")[axes].strip()
    ran = [row for row in rows if not row.fits]
    fitting = [row for row in rows if row.fits]
    if axes:
        parts = [*axis_summary(rows), "", *memory_summary(rows), "", *padded(rows), "", "Not compared:", ""]
        parts += [f"* {each['line']} ({each['source']}): {each['because']}" for each in unasked()]
    else:
        parts = [
            *memory_summary(rows),
            "",
            f"Of {len(rows)} runs that were published, {len(ran)} do not fit by their plan:",
            "",
        ]
        parts += [
            f"* {name_of(row.run)}: {row.needs_nbytes / 1e9:.1f} of {row.plan.budget / 1e9:.1f} GB, {row.error:+.1%}"
            for row in ran
        ]
        parts += ["", "Without them:", "", *summary(fitting), "", *failures()]
    return "\n".join([text, "", *table(rows), "", *summary(rows), "", *parts, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--axes", action="store_true", help="the lines whose ranks share layers or sequences alone")
    parser.add_argument("--write", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    rows = []
    for row in compared(axes=arguments.axes):
        rows.append(row)
        print(table([row])[-1], flush=True)
    print("\n".join(["", *summary(rows)]))
    if arguments.write:
        arguments.write.write_text(document(rows, axes=arguments.axes))
    if arguments.fit:
        print("\n| hardware | matmul, attention, stream; of compiled ones: fused |\n|---|---|")
        for name, shares in fit(rows).items():
            print(f"| {name} | " + ", ".join(f"{share:.2f}" for share in shares) + " |")
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
    lines = [{**row.run, "half": row.half, "predicted": row.speed, "error": row.error} for row in rows]
    print(
        json.dumps(
            {"benchmark": "plan_truth", "facts": facts(), "lines": lines, "measured": here} | {"commands": commands}
        )
    )


if __name__ == "__main__":
    main()
