"""Compares a plan with what a run measured, and says which machine would have made the plan right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from .machine import PROFILES, Hardware
from .result import Plan, duration, gigabytes, plan_of

# How far off shares and bandwidths are looked for; and which part of a step is no difference.
_MOST, _SAME = 64.0, 0.003


class Measured(NamedTuple):
    """The figures of a run: seconds of a step, seconds that a checkpoint kept it waiting, bytes between steps; None if
    they were not measured. `steps`: how many. `phases`: seconds by the names that `phases_of` has, of recorded
    steps."""

    seconds: float
    checkpoint: float | None
    memory: float | None
    steps: int
    phases: Mapping[str, float] = MappingProxyType({})


# What a table calls the phases of a step; and the first words of those of a simulation. Waits are parts of phases.
FORWARD, BACKWARD, REST = "forward and loss", "backward", "optimizer and the rest"
GATHERS, REDUCTIONS, OTHERS = "waiting for gathers", "waiting for reductions", "waiting for other messages"
_PHASES = {FORWARD: ("forward", "loss"), BACKWARD: ("backward", "end"), REST: ("optimizer",)}


def measured_by(records: Sequence[dict[str, Any]], begins: Collection[int] = (1,)) -> Measured:
    """The figures of the records of a trainer's run. `begins`: the first steps of the run and of its continuations,
    which are left out if there are others: they allocate, and record the order. Raises `ValueError` for a run without a
    step."""
    if not records:
        raise ValueError("expected a run that recorded steps, found none")
    steady = [record for record in records if record["step"] not in begins] or list(records)
    saved = [record["checkpoint_seconds"] for record in records if record.get("checkpoint_seconds") is not None]
    return Measured(
        median(record["seconds"] for record in steady),
        median(saved) if saved else None,
        max(record["memory_bytes"] for record in records),
        len(steady),
    )


# ---- the machine that makes the plan right ---------------------------------------------------------------------------


class Dial(NamedTuple):
    """Numbers of a machine that a part of the step shows. `change`: makes them faster by a factor; `part`: the seconds
    of that part, from those of the phases."""

    says: str
    change: Callable[[Hardware, float], Hardware]
    part: Callable[[Mapping[str, float]], float]


def adjusted(plan: Plan, run: Measured) -> tuple[Hardware, list[str]]:
    """The hardware of the plan with the numbers under which its step takes as long as that of `run`; and lines, which
    say what is different and why. Of a run with phases each number is that of its own phase; without them shares of
    compute differ, and messages where these alone take longer than the step."""
    hardware, said = plan.hardware, list[str]()
    if run.phases and FORWARD in phases_of(plan):
        hardware, said = _by_phases(plan, run)
    off = _seconds(plan, hardware) / run.seconds - 1
    if abs(off) > 0.01:
        what = f"compute: the step by these is {off:+.1%} off, its phases do not say why" if said else _ALONE
        if plan.strategy.pipeline > 1:
            what = "compute: a plan of a pipeline has no phases, and the step alone does not say what differs"
        hardware = _solved(hardware, _with_compute, lambda found: _seconds(plan, found), run.seconds)
        if abs(_seconds(plan, hardware) / run.seconds - 1) > 0.01:
            what = "messages and compute: messages alone take longer than the step"
            hardware = _solved(hardware, _with_messages, lambda found: _seconds(plan, found), run.seconds)
        said.append(what)
    return hardware, said


_ALONE = "compute: phases were not measured, and the step alone does not say what differs"


def _by_phases(plan: Plan, run: Measured) -> tuple[Hardware, list[str]]:
    # Recorded steps take longer than others.
    scale = run.seconds / sum(run.phases[name] for name in _PHASES)
    target = {name: seconds * scale for name, seconds in run.phases.items()}
    # The optimizer keeps its rate while that of other operations changes.
    begin = replace(plan.hardware, step=plan.hardware.step or plan.hardware.stream)
    dials, factors = _dials(plan), dict[str, float]()
    least = _SAME * run.seconds

    def machine(changed: Mapping[str, float]) -> Hardware:
        found = begin
        for dial in dials:
            if changed.get(dial.says, 1.0) != 1.0:
                found = dial.change(found, changed[dial.says])
        return found

    for _ in range(4):
        before = dict(factors)
        for dial in dials:
            others = {name: factor for name, factor in factors.items() if name != dial.says}
            want = max(dial.part(target), least)

            def part(hardware: Hardware, dial: Dial = dial) -> float:
                return dial.part(phases_of(_again(plan, hardware)))

            if abs(max(part(machine(others)), least) - want) <= max(least, 0.01 * want):
                factors = others
                continue

            def changed(_: Hardware, factor: float, dial: Dial = dial, others: dict[str, float] = others) -> Hardware:
                return machine(others | {dial.says: factor})

            factors = others | {dial.says: _factor(begin, changed, part, want)}
        if all(abs(factors.get(d.says, 1.0) / before.get(d.says, 1.0) - 1) < 0.005 for d in dials):
            break
    found, there = machine(factors), phases_of(plan)
    said = [
        f"{dial.says}: {duration(dial.part(target))} instead of {duration(dial.part(there))}, "
        f"{1 / factors[dial.says]:.2g} times as slow"
        for dial in dials
        if dial.says in factors
    ]
    if not said:
        found = plan.hardware
    elif found.step == found.stream and not plan.hardware.step:
        found = replace(found, step=0.0)
    return found, said


def _dials(plan: Plan) -> list[Dial]:
    """Returns what the phases of a run of `plan` can show. Where launches or latencies are most of a part, they are
    what differs."""
    found, hardware = plan.simulated, plan.hardware
    known = phases_of(plan)
    launches = hardware.blocking and found.host_bound > _computing(known) / 2
    wire = [found.traffic[axis] for axis in ("shard", "replicate", "block") if axis in found.traffic]
    seconds = sum(traffic.seconds for traffic in wire)
    late = sum(traffic.calls for traffic in wire) * hardware.latency > seconds / 2
    dials = [Dial("launches" if launches else "compute", _with_launches if launches else _with_shares, _computing)]
    if seconds:
        change = _with_latency if late else _with_bandwidth
        dials.append(Dial("latency" if late else "bandwidth of messages", change, lambda known: known[GATHERS]))
        if not late:
            dials.append(Dial("reductions", _with_reductions, lambda known: known[REDUCTIONS]))
    if not plan.strategy.offload and known[REST]:
        dials.append(Dial("optimizer's step", _with_step, lambda known: known[REST]))
    return dials


def _computing(known: Mapping[str, float]) -> float:
    """Seconds of forward and backward in which no message of a unit is waited for."""
    return max(known[FORWARD] + known[BACKWARD] - known[GATHERS] - known[REDUCTIONS], 0.0)


def _solved(
    hardware: Hardware,
    change: Callable[[Hardware, float], Hardware],
    seconds: Callable[[Hardware], float],
    wanted: float,
) -> Hardware:
    return change(hardware, _factor(hardware, change, seconds, wanted))


def _factor(
    hardware: Hardware,
    change: Callable[[Hardware, float], Hardware],
    seconds: Callable[[Hardware], float],
    wanted: float,
) -> float:
    low, high = 1 / _MOST, _MOST
    for _ in range(12):  # to a fifth of a percent
        middle = (low * high) ** 0.5
        slower = seconds(change(hardware, middle)) > wanted
        low, high = (middle, high) if slower else (low, middle)
    return float((low * high) ** 0.5)


def _again(plan: Plan, hardware: Hardware) -> Plan:
    if plan.again is not None:
        return plan.again(hardware)
    return plan_of(plan.model, plan.step, plan.strategy, hardware)


def _seconds(plan: Plan, hardware: Hardware) -> float:
    return _again(plan, hardware).seconds


def _with_compute(hardware: Hardware, factor: float) -> Hardware:
    return _with_launches(_with_shares(hardware, factor), factor)


def _with_shares(hardware: Hardware, factor: float) -> Hardware:
    names = ("matmul", "attention", "stream", "attention2", "stream2")
    return replace(hardware, **{name: getattr(hardware, name) * factor for name in names})


def _with_launches(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, launch=hardware.launch / factor)


def _with_step(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, step=hardware.step * factor, step_launch=hardware.step_launch / factor)


def _with_messages(hardware: Hardware, factor: float) -> Hardware:
    return _with_latency(_with_bandwidth(hardware, factor), factor)


def _with_bandwidth(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, intra_node=hardware.intra_node * factor, inter_node=hardware.inter_node * factor)


def _with_latency(hardware: Hardware, factor: float) -> Hardware:
    return replace(hardware, latency=hardware.latency / factor, hop=hardware.hop / factor)


def _with_reductions(hardware: Hardware, factor: float) -> Hardware:
    names = ("exchanging", "scattering", "summing")
    return replace(hardware, **{name: getattr(hardware, name) * factor for name in names})


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
    reductions = sum(wait.seconds for wait in found.exposed if wait.what in ("reduce-scatter", "all-reduce"))
    waits = {GATHERS: gathers, REDUCTIONS: reductions, OTHERS: found.exposed_seconds - gathers - reductions - along}
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
