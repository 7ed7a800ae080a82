"""The plan of a pipeline: a plan of each of its ranks, of which the largest one says whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .description import OUTSIDE, Model, Sent
from .machine import Hardware
from .pipeline import SEND_BACKWARD, SEND_FORWARD, Action, StageStep, Table, simulate_pipeline
from .recomputation import NONE
from .result import Limited, Plan, duration, gigabytes, planned
from .spans import Step, steps_of
from .strategy import Strategy, Unit, units_of

Ways = str | tuple[str, ...]
# The spans of each stage; and with its gradients of weights apart, if a schedule has them so.
Steps = tuple[tuple[Step, Step | None], ...]


def stage_steps(model: Model, recompute: Ways, *, compiled_loss: bool = False) -> Steps:
    """The steps of the stages of `model`. `recompute`: a way for all units but the roots, or one for each unit of the
    whole model, its root first. `compiled_loss`: that of the last stage."""
    if recompute != NONE and any(stage.halves is not None for stage in model.stages):
        raise ValueError(
            f"recompute: expected none beside a schedule that computes gradients of weights apart, found {recompute}: "
            f"torch computes such units twice; take 1F1B or Interleaved1F1B"
        )
    found, place = [], 1
    for stage in model.stages:
        ways: Ways = recompute
        if not isinstance(recompute, str):
            count = len(stage.model.units) - 1
            ways = (recompute[0], *recompute[place : place + count])
            place += count
        compiled = compiled_loss and stage is model.stages[-1]
        halves = None if stage.halves is None else steps_of(stage.halves, ways, compiled_loss=compiled)
        found.append((steps_of(stage.model, ways, compiled_loss=compiled), halves))
    return tuple(found)


def steps_on_ranks(
    model: Model, steps: Steps, strategy: Strategy, units: Sequence[tuple[Unit, ...]] | None = None
) -> list[StageStep]:
    """The stages of `model` under a strategy. `steps`: at its size of the micro-batch; `units`: of each stage, if they
    are there already."""
    share = strategy.micro / model.samples
    units = [units_of(stage.model, strategy) for stage in model.stages] if units is None else units
    return [
        StageStep(
            own,
            step,
            halves,
            stage.given_nbytes * share,
            stage.made_nbytes * share,
            model.tape.batch_nbytes * share,
            stage.model.buffer_nbytes,
        )
        for own, stage, (step, halves) in zip(units, model.stages, steps, strict=True)
    ]


def check_pipeline(model: Model, strategy: Strategy, hardware: Hardware) -> None:
    """Raise `ValueError` for what the hardware or the schedule does not allow."""
    if strategy.float8 and not hardware.float8:
        raise ValueError(f"float8: expected a device with products in float8, found {hardware.name}")
    splits = any(stage.halves is not None for stage in model.stages)
    units_kept = [strategy.reshard, *(unit.reshard for unit in model.units if unit.reshard is not None)]
    if splits and any(kept is not False for kept in units_kept):
        raise ValueError(
            f"reshard: expected never with {strategy.schedule}, which computes gradients of weights apart and needs "
            f"full ones until then, found another setting"
        )


def pipeline_plan(
    model: Model,
    steps: Steps,
    table: Table,
    strategy: Strategy,
    hardware: Hardware,
    limits: Limited | None = None,
    *,
    units: Sequence[tuple[Unit, ...]] | None = None,
    brief: bool = False,
) -> Plan:
    """The plan of the rank with the largest peak, with those of all ranks of the pipeline. `steps`, `units`: as in
    `steps_on_ranks`; `table`: of its schedule and number of micro-batches; `brief`: as of `simulate`."""
    check_pipeline(model, strategy, hardware)
    stages = steps_on_ranks(model, steps, strategy, units)
    ranks = []
    for row, simulated in zip(table, simulate_pipeline(stages, table, strategy, hardware, brief=brief), strict=True):
        own = sorted({action.stage for action in row})
        merged, step = _together(model, stages, own)
        sent = _sent(row, stages)
        there = tuple(unit for number in own for unit in stages[number].units)
        plan = planned(merged, step, strategy, hardware, there, simulated, limits or Limited())
        ranks.append(replace(plan, here=tuple(own), given=sent))
    largest = max(ranks, key=lambda plan: plan.peak_nbytes)

    def again(other: Hardware) -> Plan:
        return pipeline_plan(model, steps, table, strategy, other, limits)

    return replace(largest, ranks=tuple(ranks), again=again)


def _together(model: Model, stages: Sequence[StageStep], own: Sequence[int]) -> tuple[Model, Step]:
    """The model of a rank with these stages, and what they do for a micro-batch."""
    models = [model.stages[number].model for number in own]
    steps = [stages[number].step for number in own]
    held: dict[int, float] = {}
    place = 0
    for one, step in zip(models, steps, strict=True):
        for unit, nbytes in step.held:
            number = OUTSIDE if unit == OUTSIDE else place + unit
            held[number] = held.get(number, 0.0) + nbytes
        place += len(one.units)
    messages: dict[tuple[str, str], Sent] = {}
    for sent in (each for step in steps for each in step.messages):
        key = sent.axis, sent.operation
        known = messages.get(key)
        more = (
            sent if known is None else replace(sent, count=sent.count + known.count, nbytes=sent.nbytes + known.nbytes)
        )
        messages[key] = more
    step = Step(
        tuple(span for step in steps for span in step.spans),
        tuple(sorted(held.items())),
        sum(stages[number].batch_nbytes for number in own[:1]),
        steps[0].samples,
        sum(step.hosted for step in steps),
        tuple(messages.values()),
        tuple(each for step in steps for each in step.brought),
    )
    units = tuple(unit for one in models for unit in one.units)
    tape = replace(model.tape, brought=step.brought)
    buffers = sum(one.buffer_nbytes for one in models)
    return replace(model, units=units, tape=tape, buffer_nbytes=buffers, stages=()), step


def _sent(row: Sequence[Action], stages: Sequence[StageStep]) -> tuple[Sent, ...]:
    """Messages of a step of a rank to other stages, and those in which all ranks of the pipeline take part."""
    found = []
    for kind, name in ((SEND_FORWARD, "send of activations"), (SEND_BACKWARD, "send of gradients")):
        sizes = [
            stages[action.stage].made_nbytes if kind == SEND_FORWARD else stages[action.stage].given_nbytes
            for action in row
            if action.kind == kind
        ]
        if sizes:
            found.append(Sent(name, len(sizes), sum(sizes), "pp"))
    # What the step begins with is compared, and the loss is given to all ranks.
    return (*found, Sent("all_reduce of inputs' digests", 1, 24.0, "pp"), Sent("all_reduce of the loss", 1, 4.0, "pp"))


# ---- text ------------------------------------------------------------------------------------------------------------


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Returns what `fullshard plan --json` says of each rank of a pipeline; empty without one."""
    return [
        {
            "rank": number,
            "stages": list(rank.here),
            "parameters": rank.model.numel,
            "fits": rank.fits,
            "peak_bytes": int(rank.peak_nbytes),
            "peak_moment": rank.simulated.peak.phase,
            "terms": {name: int(nbytes) for name, nbytes in rank.terms},
            "compute_seconds": rank.simulated.compute,
            "bubble_seconds": rank.simulated.bubble,
            "bytes_sent": {axis: int(t.nbytes) for axis, t in rank.simulated.traffic.items() if t.calls},
            "messages": {axis: t.calls for axis, t in rank.simulated.traffic.items() if t.calls},
            "stage_messages": [
                {"operation": each.operation, "messages": each.count, "bytes": int(each.nbytes)} for each in rank.given
            ],
        }
        for number, rank in enumerate(plan.ranks)
    ]


def stage_lines(plan: Plan) -> list[str]:
    """The ranks of a pipeline as a table; empty without one."""
    if not plan.ranks:
        return []
    strategy = plan.strategy
    header = ("rank", "stages", "parameters", "peak", "activations", "stage buffers", "compute", "waits", "sent")
    rows = [header]
    for number, rank in enumerate(plan.ranks):
        terms = dict(rank.terms)
        rows.append(
            (
                str(number),
                ", ".join(map(str, rank.here)),
                f"{rank.model.numel:,}",
                gigabytes(rank.peak_nbytes) + " *" * (rank.simulated is plan.simulated),
                gigabytes(terms.get("activations", 0.0) + terms.get("loss", 0.0)),
                gigabytes(terms.get("stage buffers", 0.0)),
                duration(rank.simulated.compute),
                duration(rank.simulated.bubble),
                gigabytes(sum(each.nbytes for each in rank.given)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    idle = max(rank.simulated.bubble for rank in plan.ranks) / plan.seconds if plan.seconds else 0.0
    return [
        f"pipeline: {strategy.pipeline} ranks, {strategy.schedule}, {strategy.accumulate} micro-batches; the largest "
        f"rank (*) is the plan above; ranks wait for other stages for up to {idle:.0%} of the step",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
