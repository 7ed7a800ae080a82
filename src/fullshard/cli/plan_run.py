"""`fullshard plan --compare` and `--calibrate`: a plan beside a run, and this machine as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.doctor.calibration import Rates
    from fullshard.plan import Plan
    from fullshard.plan.machine import Hardware
    from fullshard.see.record import Detail


def compare(plan: Plan, run: Path, calibrated: Path | None) -> int:
    """Print the plan beside the run, and the machine that would have made it right; write that to `calibrated`."""
    from fullshard.plan.comparison import adjusted, compared, machine_file, measured_by
    from fullshard.train.metrics import read_metrics

    path = run / "metrics.jsonl"
    try:
        records = read_metrics(path)
    except OSError as error:
        problem = f"{error.strerror or error}; expected the folder of a run of fullshard train"
        raise ValueError(f"--compare {path}: cannot read it: {problem}") from None
    except ValueError as error:
        raise ValueError(f"--compare {path}: expected a JSON object a line, found {error}") from None
    try:
        measured = measured_by(records, _begins(run))
    except (ValueError, KeyError) as error:
        raise ValueError(f"--compare {path}: {error}") from None
    _refuse_another(plan, run)
    measured = measured._replace(phases=_phases(run))
    print("\n".join(compared(plan, measured)))
    if not measured.phases:
        print(f"phases were not measured: {run / 'see'} has no step recorded in full after the first")
    machine, said = adjusted(plan, measured)
    text = machine_file(machine, _base(plan.hardware))
    print("\n".join(["", *(f"different: {line}" for line in said or ["nothing"])]))
    print(f"\na machine file that makes the step as long as it was\n\n{text}", end="")
    if calibrated is not None:
        calibrated.write_text(text, encoding="utf-8")
    return 0


def _refuse_another(plan: Plan, run: Path) -> None:
    """Raise `ValueError` for a run on other ranks, or of another model, as far as its manifest says."""
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
        ranks, numel = manifest["world"]["processes"], manifest["parameters"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if ranks != plan.strategy.ranks:
        raise ValueError(
            f"--compare {run}: expected a run on {plan.strategy.ranks} ranks, as planned, found one on {ranks}; plan "
            f"with --ranks {ranks}"
        )
    planned = plan.model.undivided_numel or plan.model.numel
    if numel != planned:
        raise ValueError(
            f"--compare {run}: expected a run of the planned model, of {planned:,} parameters, found one of {numel:,}; "
            f"plan {run / 'config.toml'}"
        )


def _begins(run: Path) -> set[int]:
    """The first step of the run, and those with which it was continued."""
    from fullshard.see.record import parts_of

    begins = {1, *(parts_of(file.name)[0] for file in (run / "see").glob("from*-rank0.jsonl"))}
    try:
        begins.add(json.loads((run / "manifest.json").read_text(encoding="utf-8"))["resumed_after_step"] + 1)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return begins


def _phases(run: Path) -> dict[str, float]:
    """The seconds of the phases of rank 0, medians over the steps that were recorded in full, without those with which
    it began or was continued."""
    from fullshard.plan.comparison import BACKWARD, FORWARD, GATHERS, OTHERS, REDUCTIONS, REST
    from fullshard.see.record import RecordError, read_run
    from fullshard.see.timeline import phases

    names = {"forward": FORWARD, "loss": FORWARD, "backward": BACKWARD, "recomputation": BACKWARD}
    purposes = {"unshard": GATHERS, "reduce": REDUCTIONS}
    begins = _begins(run)
    try:
        steps = [step for step in read_run(run).ranks[0].detailed() if step.number not in begins]
    except RecordError:
        return {}
    rows: list[dict[str, float]] = []
    for step in steps:
        row = dict.fromkeys((FORWARD, BACKWARD, REST, GATHERS, REDUCTIONS, OTHERS), 0.0)
        for phase, nanoseconds in phases(step).items():
            row[names.get(phase, REST)] += nanoseconds / 1e9
        assert step.detail is not None
        late = _late(step.detail) / 1e9
        row[BACKWARD] += late
        row[REST] -= late
        for message in step.detail.messages:
            purpose = next((name for word, name in purposes.items() if message.purpose.startswith(word)), OTHERS)
            row[purpose] += message.exposed / 1e9
        rows.append(row)
    return {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}


def _late(detail: Detail) -> int:
    """Nanoseconds after the last gradient came until the last reductions are over: of the backward, as in a plan."""
    from fullshard.see.timeline import on_device

    device = on_device(detail)
    ends = [event.device if device else event.at for event in detail.events if event.kind == "backward_end"]
    reduced = [m.device_ready if device else m.ready for m in detail.messages if m.purpose.startswith("reduce")]
    over, last = max(filter(None, ends), default=None), max(filter(None, reduced), default=0)
    return 0 if over is None else max(last - over, 0)


def calibrate(hardware: Hardware, path: Path, ranks: int) -> int:
    """Measure this machine with as many processes as `ranks`, and write what differs from the profile."""
    import torch

    from fullshard.doctor.calibration import measure
    from fullshard.plan.comparison import machine_file
    from fullshard.plan.facts import measured_device, physical_nbytes

    base = _base(hardware)
    if hardware.blocking:
        found = _with_rates(hardware, measure(ranks), physical_nbytes() / ranks)
    else:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            raise ValueError(
                f"--calibrate: expected a device to measure as {hardware.name}, found none; --hardware cpu"
            )
        found = measured_device(hardware, device)
    text = machine_file(found, base)
    path.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


def _with_rates(hardware: Hardware, rates: Rates, memory: float) -> Hardware:
    """`hardware`, a CPU, with what its ranks reach; without messages those of the profile."""
    found = replace(
        hardware,
        memory=memory,
        flops2=rates.products[0],
        flops4=rates.products[1],
        matmul=1.0,
        attention=rates.attention[1] / rates.products[1],
        attention2=rates.attention[0] / rates.products[0],
        bandwidth=rates.stream[1],
        stream=1.0,
        stream2=rates.stream[0] / rates.stream[1],
        launch=rates.launch,
        step=rates.step / rates.stream[1],
        step_launch=rates.step_launch,
    )
    sent = rates.messages
    if sent is None:
        return found
    return replace(
        found,
        intra_node=sent.gather,
        inter_node=sent.gather,
        exchanging=sent.exchange / sent.gather,
        scattering=sent.scatter / sent.gather,
        summing=sent.total / sent.gather,
        latency=sent.latency,
        contention=sent.contention,
    )


def _base(hardware: Hardware) -> str:
    """The profile that a machine file of `hardware` begins with."""
    from fullshard.plan.machine import PROFILES

    return hardware.name if hardware.name in PROFILES else "cpu" if hardware.blocking else "h100-80g"
