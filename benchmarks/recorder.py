"""What `fullshard.observe.Recorder` costs: steps with and without it, of one model in the same processes, by turns.

    python -m benchmarks.recorder                      2 ranks over gloo, both workloads of cpu_step; two minutes
    python -m benchmarks.recorder --rounds 10          fewer

A round is one step of each kind, in an order that turns:

    off      no recorder
    figures  a recorder that notes times and figures alone: what 99 of 100 steps are by default
    full     a recorder that records the whole step

    step     the median, in milliseconds, and the median of its ratio to "off" in the same round
    cpu      the same of CPU seconds, which a busy machine disturbs less
    own      milliseconds that the recorder spends in `begin` and `end`, outside of the step, with writing

By default the first three steps and each hundredth are recorded in full: "default" is one part of full and 99 of
figures. A step without a recorder calls nothing of it (tests/fake/test_recorder.py).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import (
    TINY,
    WORKLOADS,
    ModelShape,
    Trainee,
    batch_of,
    build_fullshard,
    on_ranks,
    paired_ratio,
    print_json,
)

KINDS = ("off", "figures", "full")
WARMUP_STEPS = 6


def measure(rank: int, world: int, shape: ModelShape, workload: str, rounds: int, folder: str) -> dict[str, Any]:
    """The figures of one rank: by kind, lists over rounds."""
    from fullshard.observe import Recorder

    tokens, targets = batch_of(shape, WORKLOADS[workload], rank)
    trainee = Trainee("fullshard", build_fullshard(shape), adamw=True)
    for _ in range(WARMUP_STEPS):
        trainee.step(tokens, targets)
    recorders = {
        kind: Recorder(trainee.model, Path(folder) / kind, trainee.optimizer, in_full=lambda _, k=kind: k == "full")
        for kind in KINDS[1:]
    }
    found: dict[str, dict[str, list[float]]] = {kind: {"wall": [], "cpu": [], "own": []} for kind in KINDS}
    for number in range(rounds + 1):
        for place in range(len(KINDS)):
            kind = KINDS[(number + place) % len(KINDS)]
            recorder = recorders.get(kind)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            if recorder is not None:
                recorder.begin(number + 1)
            own = time.perf_counter() - wall
            trainee.step(tokens, targets)
            ended = time.perf_counter()
            if recorder is not None:
                recorder.end(loss=1.0, norm=1.0)
            own += time.perf_counter() - ended
            if number:  # the first round meets the recorder for the first time
                for name, value in (
                    ("wall", time.perf_counter() - wall),
                    ("cpu", time.process_time() - cpu),
                    ("own", own),
                ):
                    found[kind][name].append(value)
    for recorder in recorders.values():
        recorder.close()
    size = (Path(folder) / "full" / f"from1-rank{rank}.jsonl").stat().st_size
    return {"times": found, "bytes": size / (rounds + 1)}


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of all ranks."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {name: [value for a in answers for value in a["times"][kind][name]] for name in ("wall", "cpu", "own")}
        for kind in KINDS
    }
    result: dict[str, Any] = {"bytes_of_a_full_step": round(statistics.mean(a["bytes"] for a in answers))}
    for kind in KINDS:
        result[kind] = {
            "step_ms": statistics.median(times[kind]["wall"]) * 1e3,
            "step_ratio": paired_ratio(times[kind]["wall"], times["off"]["wall"]),
            "cpu_ratio": paired_ratio(times[kind]["cpu"], times["off"]["cpu"]),
            "own_ms": statistics.median(times[kind]["own"]) * 1e3,
        }
    for name in ("step_ratio", "cpu_ratio"):
        result[f"default_{name}"] = 0.99 * result["figures"][name] + 0.01 * result["full"][name]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model: that the script works")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else ModelShape()
    results = {}
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            found = summary(on_ranks(2, measure, shape, workload, arguments.rounds, folder))
        results[workload] = found
        print(f"{WORKLOADS[workload].name}: {found['bytes_of_a_full_step']:,} bytes of a step that is recorded in full")
        print("  recorder   step ms   step / off   cpu / off   own ms")
        for kind in KINDS:
            row = found[kind]
            print(
                f"  {kind:8} {row['step_ms']:9.2f} {row['step_ratio']:12.4f} {row['cpu_ratio']:11.4f} "
                f"{row['own_ms']:8.3f}"
            )
        print(f"  default  {'':9} {found['default_step_ratio']:12.4f} {found['default_cpu_ratio']:11.4f}")
    print_json("recorder", shape, results)


if __name__ == "__main__":
    main()
