"""Steps of the trainer on this machine beside plans by a machine file that `fullshard plan --calibrate` wrote.

    python -m benchmarks.plan_calibrated FOLDER --calibrate 1 2 4     a machine file for each number of ranks
    python -m benchmarks.plan_calibrated FOLDER --run tiny wide       train these configurations (default: all)
    python -m benchmarks.plan_calibrated FOLDER --table               plan all that were run, and print the table

Nothing else may run on the machine meanwhile. A step is the median of those after the first. Each part is what a user
does: the commands `plan --calibrate`, `train` and `plan`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fullshard import cli

_STEPS = 10
_SMALL = {"model.layers": 6, "model.dim": 256, "training.sequence_length": 256, "training.global_batch": 8}
_LARGE = {"model.layers": 14, "model.dim": 768, "model.heads": 12, "model.kv_heads": 12, "training.global_batch": 2}
_LARGE |= {"training.sequence_length": 128, "training.steps": 6}


class Case(NamedTuple):
    """One configuration: what it is, its ranks, and what differs from the trainer's defaults."""

    says: str
    ranks: int
    keys: dict[str, Any]


CASES = {
    "tiny": Case("0.8 M parameters, the trainer's default", 2, {}),
    "one": Case("4.5 M, 1 rank", 1, _SMALL | {"training.global_batch": 4}),
    "small": Case("4.5 M", 2, _SMALL),
    "bf16": Case("4.5 M, bfloat16", 2, _SMALL | {"sharding.precision.param": "bfloat16"}),
    "recompute": Case("4.5 M, recomputed", 2, _SMALL | {"sharding.activation_checkpointing.at": "units"}),
    "accumulate": Case("4.5 M, 2 micro-batches", 2, _SMALL | {"training.micro_batch": 2}),
    "hsdp": Case("4.5 M, HSDP 2 x 2", 4, _SMALL | {"sharding.data_parallel_replicate_degree": 2}),
    "tp": Case("4.5 M, TP 2", 2, _SMALL | {"sharding.parallelism.tensor_parallel_degree": 2}),
    "large": Case("100 M", 2, _LARGE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calibrate", type=int, nargs="+", metavar="RANKS", default=[])
    parser.add_argument("--run", nargs="*", choices=CASES, metavar="NAME")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    for ranks in options.calibrate:
        _command("plan", "--hardware", "cpu", "--ranks", ranks, "--calibrate", _machine(options.folder, ranks))
    if options.run is not None:
        for name in options.run or CASES:
            _train(options.folder, name)
    if options.table:
        print(table([_row(options.folder, name) for name in CASES if (options.folder / name).is_dir()]))


def _machine(folder: Path, ranks: int) -> Path:
    return folder / f"cpu_{ranks}.toml"


def _command(*arguments: Any) -> str:
    command = [sys.executable, "-m", "fullshard", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _train(folder: Path, name: str) -> None:
    case, run = CASES[name], folder / name
    shutil.rmtree(run, ignore_errors=True)
    keys = {"run.dir": str(run), "training.steps": _STEPS, "metrics.record_first": 4} | case.keys
    given = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    _command("train", "--nproc", case.ranks, *given)


def _row(folder: Path, name: str) -> list[str]:
    case, run = CASES[name], folder / name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    took = median(record["seconds"] for record in records[1:])
    asked = ["plan", run / "config.toml", "--ranks", case.ranks, "--json", "--hardware"]
    plans = [_plan([*asked, hardware]) for hardware in ("cpu", _machine(folder, case.ranks))]
    profile, found = (plan["step_seconds"] for plan in plans)
    return [
        f"{case.says}, {case.ranks} ranks",
        *(f"{1e3 * seconds:,.0f}" for seconds in (took, found)),
        f"{found / took - 1:+.0%}",
        f"{1e3 * profile:,.0f}",
    ]


def _plan(arguments: list[Any]) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main([str(argument) for argument in arguments])
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def table(rows: list[list[str]]) -> str:
    """The rows as Markdown, and the median error."""
    header = ["configuration", "measured ms", "planned ms", "error", "by the profile `cpu`"]
    errors = sorted(abs(int(row[3].rstrip("%"))) for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", f"median {median(errors):g} %, largest {errors[-1]} %"])


if __name__ == "__main__":
    main()
