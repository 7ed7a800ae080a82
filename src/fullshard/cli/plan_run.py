"""`fullshard plan --compare` and `--calibrate`: a plan beside a run, and this machine as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullshard.plan import Plan
    from fullshard.plan.machine import Hardware


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
        measured = measured_by(records)
    except (ValueError, KeyError) as error:
        raise ValueError(f"--compare {path}: {error}") from None
    _refuse_another(plan, run)
    found = _phases(run)
    print("\n".join(compared(plan, measured._replace(phases=found))))
    if not found:
        print(f"phases were not measured: {run / 'see'} has no step recorded in full after the first")
    text = machine_file(adjusted(plan, measured.seconds), _base(plan.hardware))
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


def _phases(run: Path) -> dict[str, float]:
    """The seconds of the phases of rank 0, medians over the steps after the first that were recorded in full."""
    from fullshard.plan.comparison import BACKWARD, FORWARD, GATHERS, OTHERS, REST
    from fullshard.see.record import RecordError, read_run
    from fullshard.see.timeline import phases

    names = {"forward": FORWARD, "loss": FORWARD, "backward": BACKWARD, "recomputation": BACKWARD}
    try:
        steps = [step for step in read_run(run).ranks[0].detailed() if step.number > 1]
    except RecordError:
        return {}
    rows: list[dict[str, float]] = []
    for step in steps:
        row = dict.fromkeys((FORWARD, BACKWARD, REST, GATHERS, OTHERS), 0.0)
        for phase, nanoseconds in phases(step).items():
            row[names.get(phase, REST)] += nanoseconds / 1e9
        for message in step.detail.messages if step.detail is not None else ():
            row[GATHERS if message.purpose.startswith("unshard") else OTHERS] += message.exposed / 1e9
        rows.append(row)
    return {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}


def calibrate(hardware: Hardware, path: Path, ranks: int) -> int:
    """Measure this machine, and write what differs from the profile."""
    import torch

    from fullshard.plan.comparison import machine_file
    from fullshard.plan.facts import measured_cpu, measured_device, physical_nbytes

    base = _base(hardware)
    if hardware.blocking:
        found = replace(measured_cpu(hardware), memory=physical_nbytes() / ranks)
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


def _base(hardware: Hardware) -> str:
    """The profile that a machine file of `hardware` begins with."""
    from fullshard.plan.machine import PROFILES

    return hardware.name if hardware.name in PROFILES else "cpu" if hardware.blocking else "h100-80g"
