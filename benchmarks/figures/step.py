"""One training step of torch's FSDP2 and of fullshard, recorded with the same instruments on two CPU ranks.

    python -m benchmarks.figures.step          records, and writes benchmarks/figures/step_two-ranks_DATE.json

Both train the same model from the same values in the same processes, in turns. Hooks on modules inside of the units,
which both implementations leave alone, say when a unit computes; torch's profiler says when the process group has a
message under way. Each step ends with an optimizer step, as in training: without one, all steps would be one growing
window of micro-batches, whose messages ranks of fullshard compare. The record has the fastest of the recorded steps of
each implementation, as rank 0 saw it. The profiler costs both some time: `python -m benchmarks.cpu_step` measures
steps without one.
"""

from __future__ import annotations

import argparse
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import BUILDERS, ModelShape, Trainee, Workload, batch_of, facts, on_ranks

HERE = Path(__file__).parent
SHAPE = ModelShape(depth=4)
WORKLOAD = Workload("picture", 2, 128)
IMPLEMENTATIONS = ("fsdp2", "fullshard")


def newest() -> Path:
    """The record that the figure is made from."""
    return max(HERE.glob("step_two-ranks_*.json"))


def _mark(text: str) -> None:
    """Leave a mark of no length in the profile."""
    with record_function(text):
        pass


def _mark_units(model: nn.Module) -> None:
    """Marks at the begin and the end of what each unit computes, forward and backward."""
    blocks: Any = model.blocks
    inner: list[tuple[str, Any, Any]] = [
        (f"block {i}", block.attention_norm, block.down) for i, block in enumerate(blocks)
    ]
    inner.append(("head", model.norm, model.head))
    for name, first, last in inner:
        first.register_forward_pre_hook(partial(_begin, name))
        last.register_forward_hook(partial(_end, name))


def _begin(name: str, module: nn.Module, args: Any) -> None:
    _mark(f"begin forward {name}")
    args[0].register_hook(lambda grad: _mark(f"end backward {name}"))


def _end(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    _mark(f"end forward {name}")
    output.register_hook(lambda grad: _mark(f"begin backward {name}"))


def _recorded(trainee: Trainee, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Spans of one step in milliseconds from its begin."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with record_function("begin step"):
            pass
        trainee.step(tokens, targets)
        with record_function("end step"):
            pass
    marks: dict[str, float] = {}
    messages: list[tuple[str, float, float]] = []
    for event in profiled.events():
        if event.name.startswith(("begin ", "end ")):
            marks.setdefault(event.name, event.time_range.start)
        elif event.name.startswith("gloo:"):
            messages.append((event.name.removeprefix("gloo:"), event.time_range.start, event.time_range.end))
    zero, end = marks.pop("begin step"), marks.pop("end step")

    def at(microseconds: float) -> float:
        return round((microseconds - zero) / 1000, 3)

    units = [name.removeprefix("begin ") for name in marks if name.startswith("begin ")]
    return {
        "milliseconds": at(end),
        "compute": [[unit, at(marks[f"begin {unit}"]), at(marks[f"end {unit}"])] for unit in units],
        "messages": [[name, at(begin), at(stop)] for name, begin, stop in sorted(messages, key=lambda m: m[1])],
    }


def _rank(rank: int, world: int, steps: int) -> dict[str, Any]:
    tokens, targets = batch_of(SHAPE, WORKLOAD, rank)
    trainees = {}
    for name in IMPLEMENTATIONS:
        model = BUILDERS[name](SHAPE)
        _mark_units(model)
        trainees[name] = Trainee(name, model, adamw=False)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in IMPLEMENTATIONS}
    for number in range(steps + 3):
        for name, trainee in trainees.items():
            if number < 3:
                trainee.step(tokens, targets)
            else:
                found[name].append(_recorded(trainee, tokens, targets))
    return {name: min(each, key=lambda step: float(step["milliseconds"])) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="recorded steps of each (default: 20)")
    steps = parser.parse_args().steps
    recorded = on_ranks(2, _rank, steps)[0]
    about = facts() | {"steps": steps, "ranks": 2, "backend": "gloo", "date": f"{datetime.date.today()}"}
    path = HERE / f"step_two-ranks_{about['date']}.json"
    path.write_text(json.dumps({"about": about, "steps": recorded}, indent=1) + "\n")
    for name, step in recorded.items():
        print(f"{name}: {step['milliseconds']} ms, {len(step['messages'])} messages")
    print(path)


if __name__ == "__main__":
    main()
