"""Published runs of pipelines beside their plans.

python -m benchmarks.plan_truth_pipelines --write benchmarks/plan_truth_pipelines_DATE.md
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.as_published import reserved_nbytes
from fullshard.migrate.declared import noted_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.plan import Plan, Planner, Strategy, find_hardware
from fullshard.plan.tape import note
from fullshard.train import shapes
from fullshard.train.planned import described_by, table_of

_GIB = float(1 << 30)
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: schedule, stages of a rank, tokens per second and
# device, GiB reserved. 405B on 512 devices, FSDP 8, TP 8 (asynchronous), PP 8; compiled, float8, whole recomputation;
# 32 sequences of 8,192 tokens for each share. The number of micro-batches is not stated.
RUNS = (("1F1B", 1, 100, 82.5), ("Interleaved1F1B", 2, 128, 72.7))


def planned(schedule: str, stages: int) -> Plan:
    """The plan of a line, with the source's default number of micro-batches: as many as there are stages."""
    declared = Parallelism(
        8,
        enable_loss_parallel=True,
        pipeline_parallel_degree=8,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_stages_per_rank=stages,
    )
    program = replace(shapes.named("llama-405b", 8192), parallelize=noted_by(declared, 64, note))

    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: Any) -> Any:
        return described_by(declared, program, "model", 512, samples=samples, compute=compute, recompute=recompute)

    number = 8 * stages
    strategy = Strategy(
        512,
        tensor=8,
        pipeline=8,
        schedule=schedule,
        stages=stages,
        micro=32 // number,
        accumulate=number,
        reshard=False,
        root_reshard=False,
        compute="bfloat16",
        reduce="float32",
        recompute="whole",
        compiled=True,
        float8=True,
    )
    return Planner(described, find_hardware("h100-96g"), table=table_of).estimate(strategy)


_HEAD = """\
# Published runs of pipelines beside their plans

Written by `python -m benchmarks.plan_truth_pipelines --write`. The source is torchtitan,
`benchmarks/llama3_h100_202412_torchtitan.md`, table 5: Llama 3.1 405B on 512 H100 with 96 GB (FSDP 8, TP 8, PP 8),
compiled, float8, whole recomputation. It does not state the number of micro-batches: they are planned with its default,
as many as there are stages. Its TP is asynchronous, which a plan has not. Nothing was fitted to these lines, and they
were compared once, on 2026-11-27; then reserved memory became that of FSDP2 (`as_published.py`), and in brackets is
what is counted.

| schedule | published, tokens/s per device | predicted | error | memory, GiB | predicted | error | waits for stages |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    lines = []
    for schedule, stages, speed, memory in RUNS:
        plan = planned(schedule, stages)
        reserved, counted = reserved_nbytes(plan) / _GIB, plan.simulated.peak.total / _GIB
        lines.append(
            f"| {schedule} | {speed} | {plan.tokens_per_second:.0f} | {plan.tokens_per_second / speed - 1:+.1%} | "
            f"{memory} | {reserved:.1f} ({counted:.1f}) | {reserved / memory - 1:+.1%} ({counted / memory - 1:+.1%}) | "
            f"{plan.simulated.bubble / plan.seconds:.0%} |"
        )
        print(lines[-1], flush=True)
    if arguments.write:
        arguments.write.write_text(_HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
