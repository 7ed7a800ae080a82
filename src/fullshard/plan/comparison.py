"""Compares a plan with what a run measured, and says which machine would have made the plan right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from .machine import PROFILES, Hardware
from .result import Plan, duration, gigabytes, plan_of

# How far off shares and bandwidths are looked for.
_MOST = 64.0


class Measured(NamedTuple):
    """The figures of a run: seconds of a step, seconds that a checkpoint kept it waiting, bytes between steps; None if
    they were not measured. `steps`: how many. `phases`: seconds by the names of `PHASES`, of a recorded step."""

    seconds: float
    checkpoint: float | None
    memory: float | None
    steps: int
    phases: Mapping[str, float] = MappingProxyType({})


# What a table calls the phases of a step; and the first words of those of a simulation. Waits are parts of phases.
FORWARD, BACKWARD, REST = "forward and loss", "backward", "optimizer and the rest"
GATHERS, OTHERS = "waiting for gathers", "waiting for other messages"
_PHASES = {FORWARD: ("forward", "loss"), BACKWARD: ("backward", "end"), REST: ("optimizer",)}


def measured_by(records: Sequence[dict[str, Any]]) -> Measured:
    """The figures of the records of a trainer's run. The first step is left out if there are others: it allocates, and
    records the order. Raises `ValueError` for a run without a step."""
    if not records:
        raise ValueError("expected a run that recorded steps, found none")
    steady = list(records[1:] or records)
    saved = [record["checkpoint_seconds"] for record in records if record.get("checkpoint_seconds") is not None]
    return Measured(
        median(record["seconds"] for record in steady),
        median(saved) if saved else None,
        max(record["memory_bytes"] for record in records),
        len(steady),
    )


def adjusted(plan: Plan, seconds: float) -> Hardware:
    """The hardware of the plan, with shares of compute under which its step takes `seconds`; where messages alone take
    longer than that, with another bandwidth and latency of messages, too."""
    found = _solved(plan, plan.hardware, _with_compute, seconds)
    if abs(_seconds(plan, found) / seconds - 1) > 0.01:
        found = _solved(plan, found, _with_messages, seconds)
    return found


def _solved(plan: Plan, hardware: Hardware, change: Callable[[Hardware, float], Hardware], seconds: float) -> Hardware:
    low, high = 1 / _MOST, _MOST
    for _ in range(12):  # to a fifth of a percent
        middle = (low * high) ** 0.5
        slower = _seconds(plan, change(hardware, middle)) > seconds
        low, high = (middle, high) if slower else (low, middle)
    return change(hardware, (low * high) ** 0.5)


def _seconds(plan: Plan, hardware: Hardware) -> float:
    if plan.again is not None:
        return plan.again(hardware).seconds
    return plan_of(plan.model, plan.step, plan.strategy, hardware).seconds


def _with_compute(hardware: Hardware, factor: float) -> Hardware:
    return replace(
        hardware,
        matmul=hardware.matmul * factor,
        attention=hardware.attention * factor,
        stream=hardware.stream * factor,
        launch=hardware.launch / factor,
    )


def _with_messages(hardware: Hardware, factor: float) -> Hardware:
    return replace(
        hardware,
        intra_node=hardware.intra_node * factor,
        inter_node=hardware.inter_node * factor,
        latency=hardware.latency / factor,
        hop=hardware.hop / factor,
    )


def machine_file(hardware: Hardware, base: str) -> str:
    """`hardware` as a TOML file for `--hardware`: what differs from the profile `base`."""
    other = PROFILES[base]
    lines = [f'base = "{base}"']
    for field in fields(Hardware):
        value = getattr(hardware, field.name)
        if value != getattr(other, field.name) and field.name != "name":
            shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{field.name} = {shown if not isinstance(value, float) else format(value, '.6g')}")
    return "\n".join(lines) + "\n"


def phases_of(plan: Plan) -> dict[str, float]:
    """The predicted seconds of each phase; of a pipeline its waits alone."""
    found = plan.simulated
    known = {name: sum(found.phases[word] for word in words) for name, words in _PHASES.items()}
    gathers = sum(wait.seconds for wait in found.exposed if wait.what == "all-gather")
    # A run records the messages of its units, not those inside of divided layers.
    along = sum(wait.seconds for wait in found.exposed if wait.what.startswith("messages along"))
    waits = {GATHERS: gathers, OTHERS: found.exposed_seconds - gathers - along}
    waits |= {"waiting for messages of layers": along} if along else {}
    return waits if plan.strategy.pipeline > 1 else known | waits


def compared(plan: Plan, run: Measured) -> list[str]:
    """Lines: each part of a step as it was predicted and as it was measured, and what a machine file has to say."""
    found = plan.simulated
    rows = [("step", duration(plan.seconds), duration(run.seconds), f"{plan.seconds / run.seconds - 1:+.1%}")]
    for phase, predicted in phases_of(plan).items():
        took = run.phases.get(phase)
        error = "" if not took or not predicted else f"{predicted / took - 1:+.1%}"
        rows.append((f"  {phase}", duration(predicted), "" if took is None else duration(took), error))
    rows += [
        ("  in it: compute", duration(found.compute), "", ""),
        ("  waiting for the host", duration(found.host_bound), "", ""),
        (
            "tokens per second and rank",
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.tokens / run.seconds:,.0f}",
            f"{plan.tokens_per_second * run.seconds / plan.tokens - 1:+.1%}",
        ),
    ]
    if run.checkpoint is not None:
        rows.append(("a checkpoint", duration(plan.checkpoints.save), duration(run.checkpoint), ""))
    if run.memory is not None and not plan.hardware.blocking:
        there = sum(nbytes for name, nbytes in plan.terms if name in ("parameters", "optimizer", "buffers"))
        rows.append(("bytes between steps", gigabytes(there), gigabytes(run.memory), f"{there / run.memory - 1:+.1%}"))
    lines = [f"{'':34}{'predicted':>14}{'measured':>14}{'error':>9}   ({run.steps} steps, the median)"]
    return lines + [f"{name:34}{said:>14}{was:>14}{error:>9}" for name, said, was, error in rows]
