"""Everything that needs a GPU, in one call under nine minutes, in the order of its worth. None of it is measured yet.

    PYTHONPATH=src:. python3 -m benchmarks.gpu --out results/gpu_h100     on a machine with a CUDA device; the package
                                                                          need not be installed
    python -m benchmarks.gpu --device simulated --tiny                    the script itself, without hardware

    nccl pair     two ranks of NCCL on one device, each as a host of its own: data groups, lazy communicators, coalesced
                  messages, training, abort; refused by NCCL: a row that says so (gpu_ranks)
    faults        what a rank says of what the other does, over NCCL: exceptions, order, deaths (gpu_faults)
    tests         tests/gpu with warnings shown: each test, and each warning, which would be an error (gpu_tests)
    step 8B, 1B   rank 0 of 8 over messages that take bytes / bandwidth on a stream of their own, beside FSDP2 and the
                  bare model: step, exposed communication, host time, memory, kernels (gpu_step, gpu_messages)
    world 1       one rank of NCCL; gloo pair: two ranks of gloo with tensors of one device: parity, clip, HSDP,
                  checkpoints, offload, hidden synchronisation (gpu_ranks)
    plan          peak beside `report` and `fullshard plan`; shares of the device fitted; `verify`, `doctor` (gpu_plan)
    two devices   bandwidth, overlap and steps beside FSDP2, over NCCL (gpu_ranks)
    sanitizer     a short step under compute-sanitizer, if there is one
    compiled      steps with compiled blocks (gpu_step)

Each part is a process with a limit, which prints rows as it gets them; `gpu_parts` keeps them whatever becomes of it.
The limits, and what ending each part takes, add up to less than `--minutes`; what a part leaves over, the next ones may
use. After each part OUT.md and OUT.json are written anew. The last line of the output is JSON, before it are tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import GRACE_SECONDS, Part, Result, run

SIMULATED = "simulated"
ROOT = Path(__file__).parents[1]
MINUTES = 9.0
# This process's own: imports, looks at the device, files.
OWN_SECONDS = 12.0


def parts(device: str, *, tiny: bool = False) -> list[Part]:
    """In the order of their worth, should the time not suffice."""
    given = ["--device", device, *(["--tiny"] if tiny else [])]
    ranks, step = ["benchmarks.gpu_ranks", *given], ["benchmarks.gpu_step", *given]
    few = ["--rounds", "1"] if tiny else []
    settings = ["--settings", "1"] if tiny else []
    faults = ["--faults", "raises in its step", "swaps two blocks"] if tiny else []
    sanitizer = ["benchmarks.gpu_ranks", *given, "--kind", "sanitized"]
    return [
        Part("nccl pair", [*ranks, "--kind", "nccl pair"], 50),
        Part("faults", ["benchmarks.gpu_faults", *given, *faults], 44),
        Part("tests", ["benchmarks.gpu_tests", *given], 30),
        Part("nccl names", [*ranks, "--kind", "nccl names"], 26),
        Part("step 8B", [*step, "--shape", "8B", *few, *settings], 70),
        Part("step 1B", [*step, "--shape", "1B", *few, *settings], 48),
        Part("world 1", [*ranks, "--kind", "world 1", *few], 58),
        Part("gloo pair", [*ranks, "--kind", "gloo pair"], 38),
        Part("plan", ["benchmarks.gpu_plan", *given, *few], 60),
        Part("two devices", [*ranks, "--kind", "two devices", *few], 20),
        Part("sanitizer", sanitizer, 22),
        Part("compiled", [*step, "--shape", "1B", "--compiled", *few], 38),
    ]


def longest_seconds(found: Sequence[Part]) -> float:
    """What a run of these parts takes at most."""
    return OWN_SECONDS + sum(part.limit_s + GRACE_SECONDS for part in found)


def allowed_seconds(part: Part, later: Sequence[Part], left: float) -> float:
    """The limit of `part` with `left` seconds before the end: what `later` parts do not need, its own limit if they
    would need all, and never more than there is."""
    spare = left - sum(one.limit_s + GRACE_SECONDS for one in later) - GRACE_SECONDS
    return min(max(spare, part.limit_s), left - GRACE_SECONDS)


def cannot(part: Part, device: str) -> str:
    """Why it cannot run here, without starting it; "" if it can."""
    if part.name == "sanitizer" and device != SIMULATED and shutil.which("compute-sanitizer") is None:
        return "no compute-sanitizer on PATH"
    if part.name == "two devices" and device != SIMULATED:
        import torch

        # Asks the driver's library, and makes no context.
        if (count := torch.cuda.device_count() if device == "cuda" else 1) < 2:
            return f"{count} device"
    return ""


# ---- what is written -------------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Result], facts: Mapping[str, Any]) -> str:
    """All of it as tables: the parts, then each part's rows."""
    lines = [
        f"# {facts.get('device', 'A GPU')}, {facts.get('date', '')}",
        "",
        "Written by `python -m benchmarks.gpu` ([what the columns are](gpu.md)).",
        "",
        "; ".join(f"{key} {value}" for key, value in facts.items() if key not in ("device", "date")),
        "",
        *_table([_summary(name, result) for name, result in results.items()]),
    ]
    for name, result in results.items():
        # The machine is above.
        shown_rows = [row for row in result.rows if row["what"] != "machine"]
        if shown_rows:
            lines += ["", f"## {name}", ""]
            # Rows of alike columns make a table.
            for _, rows in _alike(shown_rows):
                lines += [*_table(rows), ""]
        shown = result.warned[-8:] if result.error else []
        if shown:
            lines += ["", "```text", *map(_placeless, shown), "```"]
    return "\n".join(lines).rstrip() + "\n"


def _summary(name: str, result: Result) -> dict[str, Any]:
    failed = [row for row in result.rows if "could_not" in row]
    return {
        "part": name,
        "result": "ok" if result.ok else "not all of it" if result.rows else "nothing",
        "seconds": round(result.seconds, 1),
        "rows": len(result.rows),
        "could not": len(failed),
        "ended": result.error or "well",
    }


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], list[Mapping[str, Any]]]]:
    """Neighbours of the same columns together; a row that could not goes with those before it."""
    found: list[tuple[list[str], list[Mapping[str, Any]]]] = []
    for row in rows:
        if not found or (list(row) != found[-1][0] and "could_not" not in row):
            found.append((list(row), []))
        found[-1][1].append(row)
    return found


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|"]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_cell, value))
    return _placeless(str(value)).replace("|", "\\|").replace("\n", " ")


def _placeless(text: str) -> str:
    """Without the folders in which this repository and packages lie here."""
    return re.sub(r"[^\s\"']*/(?:site-packages|dist-packages)/", "", text.replace(f"{ROOT}/", ""))


def as_json(results: Mapping[str, Result], facts: Mapping[str, Any]) -> str:
    """All of it on one line."""
    found = {
        name: {"ok": one.ok, "seconds": round(one.seconds, 1), "error": one.error, "rows": one.rows}
        | ({"warned": one.warned} if one.warned else {})
        | ({"text": one.text[-200:]} if one.text else {})
        for name, one in results.items()
    }
    return json.dumps({"benchmark": "gpu", "facts": dict(facts), "results": found})


def write(out: Path | None, results: Mapping[str, Result], facts: Mapping[str, Any]) -> None:
    """The two files, each replaced in one step."""
    for suffix, text in ((".md", markdown(results, facts)), (".json", as_json(results, facts) + "\n")):
        if out is not None:
            new = out.with_name(out.name + suffix + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(out.with_name(out.name + suffix))


# ---- the run ---------------------------------------------------------------------------------------------------------


def run_all(
    found: Sequence[Part], device: str, minutes: float, out: Path | None, facts: dict[str, Any]
) -> dict[str, Result]:
    """Run them in order. A signal that ends this process ends the part, and what is there is written."""
    end = time.monotonic() + 60 * minutes - OWN_SECONDS
    results: dict[str, Result] = {}
    for place, part in enumerate(found):
        print(f"\n==== {part.name} ====", flush=True)
        # What cannot run leaves its time to the others.
        later = [one for one in found[place + 1 :] if not cannot(one, device)]
        seconds = allowed_seconds(part, later, end - time.monotonic())
        why = cannot(part, device)
        if not why and seconds < min(part.limit_s, 10.0):
            why = f"{max(seconds, 0):.0f} s left"
        if why:
            results[part.name] = Result(rows=[{"what": part.name, "could_not": why}])
            print(f"could not: {why}", flush=True)
        else:
            one = results[part.name] = Result()
            try:
                run(part, seconds, _show, one)
            finally:
                write(out, results, facts)
            print(f"==== {part.name}: {'ok' if one.ok else one.error or 'not all of it'}, {one.seconds:.0f} s ====")
            if one.error:
                print("\n".join(one.warned), flush=True)
            for row in one.rows:
                if row.get("what") == "machine":
                    facts |= {key: value for key, value in row.items() if key != "what"}
        write(out, results, facts)
    return results


def _show(line: str) -> None:
    print(line[:2000], flush=True)


def _ends(number: int, _: object) -> None:
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these; default: all of them")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json, after each part")
    options = parser.parse_args()
    found = parts(options.device, tiny=options.tiny)
    names = [part.name for part in found]
    if unknown := set(options.parts or ()).difference(names):
        parser.error(f"--parts: expected some of {', '.join(map(repr, names))}, found {sorted(unknown)}")
    if options.device == SIMULATED:
        print("no hardware: this tries the script; times on this device mean nothing and are left out")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _ends)
    # Parts import from here, wherever the package is.
    root = Path(__file__).parents[1]
    paths = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    facts: dict[str, Any] = {"device": options.device, "date": date.today().isoformat()}
    chosen = [part for part in found if not options.parts or part.name in options.parts]
    results = run_all(chosen, options.device, options.minutes, options.out, facts)
    print("\n" + markdown(results, facts))
    print(as_json(results, facts))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
