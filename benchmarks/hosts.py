"""One training step over two simulated hosts on a link of known rate: DDP, FSDP2, HSDP and fullshard, side by side.

    python -m benchmarks.hosts                          all rates, 2 x 1 and 2 x 2 ranks, float32 and mixed; as root
    python -m benchmarks.hosts --rates 1gbit --ranks 1  one rate, one rank on each host
    python -m benchmarks.hosts --ranks 2 --precisions fp32 --names fullshard fullshard_one_level   some of the rows
    python -m benchmarks.hosts --bytes                  one round: what is sent does not depend on the machine, times do

The hosts are those of tests/harness/hosts.py: network namespaces, a pair of devices and a token bucket in each
direction, MTU 1500, segmentation offload off, so that the interface counts the packets of a wire. "sent" is what the
busier host's interface sent in a step without headers of Ethernet, IP and TCP; "plan" what `fullshard.plan` predicts of
it; "bound" is sent / rate, which no step can go below. Rounds are interleaved as in cpu_step.py.

    ddp                   torch's DDP, gradients as views of buckets
    fsdp2, fullshard      parameters over all ranks; from two ranks on each host fullshard chooses one level or two
    fullshard_one_level, fullshard_two_levels   the same in this way
    fsdp2_hsdp, ..._hsdp  parameters within a host, replicas between them; from two ranks on each host

"mixed" computes and reduces in bfloat16: FSDP2 and fullshard by `MixedPrecisionPolicy`, DDP by autocast
and a hook that sends gradients in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import (
    TINY,
    ModelShape,
    Trainee,
    Workload,
    batch_of,
    build_plain,
    build_sharded,
    paired_ratio,
    print_json,
)
from fullshard.layout import ONE_LEVEL, TWO_LEVELS, Ways

# 23.6 M parameters, nearly all in blocks: the embedding and the head of most models are a small part.
SHAPE = ModelShape(vocabulary=1536, depth=7)
WORKLOADS = {1: Workload("2 x 1 ranks", 2, 128), 2: Workload("2 x 2 ranks", 1, 64)}
RATES = {"100mbit": 100e6 / 8, "1gbit": 1e9 / 8, "unlimited": 0.0}
PRECISIONS = ("fp32", "mixed")
WAYS = {"fullshard_one_level": "one-level", "fullshard_two_levels": "two-levels"}
HOSTS, WARMUP_ROUNDS, CHECKED_STEPS = 2, 2, 3
# Losses of the same training, relative: sums of float32 in another order; and products and gradients with the 8 bits of
# a bfloat16, which are rounded at other places.
TOLERANCES = {"fp32": 1e-5, "mixed": 2.0**-8}


class Case(NamedTuple):
    """What is measured together. local: ranks of each host; rate: of their links, a key of RATES; within: of the
    loopback of a host, as tc writes it, "" for no limit."""

    local: int
    rate: str
    precision: str
    names: tuple[str, ...]
    rounds: int
    shape: ModelShape
    within: str = ""

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.local]

    @property
    def world(self) -> int:
        return HOSTS * self.local


# ---- a rank ----------------------------------------------------------------------------------------------------------


class AutocastDDP(nn.Module):
    """DDP as people train it in mixed precision."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.ddp.register_comm_hook(None, _in_bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.ddp(tokens).float()


def _in_bfloat16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As torch's `bf16_compress_hook`, which DDP refuses on gloo."""
    gradients = bucket.buffer()
    narrow = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


# DDP reads the types themselves.
_in_bfloat16.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def build(case: Case, name: str) -> nn.Module:
    if name == "ddp":
        plain = build_plain(case.shape)
        if case.precision == "mixed":
            return AutocastDDP(plain)
        return nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    apply: Callable[..., Any]
    policy: Any
    if name.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        apply, policy = torch_fully_shard, TorchPolicy
    else:
        from fullshard import MixedPrecisionPolicy, fully_shard

        apply, policy = fully_shard, MixedPrecisionPolicy
    options: dict[str, Any] = {}
    if case.precision == "mixed":
        options["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if name.endswith("_hsdp"):
        options["mesh"] = init_device_mesh("cpu", (HOSTS, case.local), mesh_dim_names=("replicate", "shard"))
    model = build_sharded(case.shape, apply, **options)
    if name in WAYS:
        model.set_communication(WAYS[name])
    return model


def sent() -> tuple[int, int]:
    """(bytes, packets) that this host's interface has sent."""
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text())


def train(case: Case) -> dict[str, Any]:
    """By name: seconds and payload of this host in each round; losses of the first steps; and what reports say of
    hosts."""
    import fullshard
    from tests.harness.hosts import Traffic

    rank = dist.get_rank()
    tokens, targets = batch_of(case.shape, case.workload, rank)
    losses, trainees, reports = {}, [], {}
    for name in case.names:
        model = build(case, name)
        # An optimizer of another instance holds what a check trained.
        check = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = [_checked(model, check, tokens, targets) for _ in range(CHECKED_STEPS)]
        if name.startswith("fullshard"):
            reports[name] = json.loads(fullshard.report(model).to_json())["hosts"]
        trainees.append(Trainee(name, model, adamw=False))
    times: dict[str, list[float]] = {name: [] for name in case.names}
    payload: dict[str, list[int]] = {name: [] for name in case.names}
    for current in range(WARMUP_ROUNDS + case.rounds):
        for trainee in trainees:
            dist.barrier()
            before, start = sent(), time.perf_counter()
            trainee.step(tokens, targets)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if current >= WARMUP_ROUNDS:
                times[trainee.name].append(seconds.item())
                after = sent()
                payload[trainee.name].append(Traffic(after[0] - before[0], after[1] - before[1]).payload)
    return {"rank": rank, "times": times, "payload": payload, "losses": losses, "hosts": reports}


def _checked(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def work(text: str) -> None:
    """A rank, started by `measure` with the variables of `env://`."""
    fields = json.loads(text)
    case = Case(**fields | {"names": tuple(fields["names"]), "shape": ModelShape(**fields["shape"])})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps(train(case)), flush=True)
    dist.destroy_process_group()


# ---- all ranks -------------------------------------------------------------------------------------------------------


def measure(case: Case) -> list[dict[str, Any]]:
    """The answers of all ranks, in their order. Raises `SystemExit` with the output of a rank that failed."""
    from tests.harness.hosts import Hosts

    rate = case.rate if RATES[case.rate] else None
    text = json.dumps(case._asdict() | {"shape": vars(case.shape)})
    own = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500", "WORLD_SIZE": str(case.world), "OMP_NUM_THREADS": "1"}
    with Hosts(HOSTS, rate=rate, within=case.within or None) as hosts, contextlib.ExitStack() as running:
        runs: list[subprocess.Popen[str]] = []
        for rank in range(case.world):
            environment = own | {"RANK": str(rank), "LOCAL_RANK": str(rank % case.local)}
            command = (sys.executable, "-m", "benchmarks.hosts", "--worker", text)
            runs.append(running.enter_context(hosts[rank // case.local].start(*command, environment=environment)))
        said = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        raise SystemExit("\n".join(said))
    answers = [json.loads(next(line for line in one.splitlines() if line.startswith('{"rank"'))) for one in said]
    for answer in answers:
        check_losses(case, answer)
    return answers


def check_losses(case: Case, answer: dict[str, Any]) -> None:
    """Stop unless all trained alike: a fast wrong result is no result."""
    losses = answer["losses"]
    reference = losses[case.names[0]]
    for name, found in losses.items():
        for mine, theirs in zip(found, reference, strict=True):
            if not abs(mine - theirs) <= TOLERANCES[case.precision] * abs(theirs):
                raise SystemExit(f"rank {answer['rank']}: {name} trains differently: {found}, others {reference}")


def predicted(case: Case, name: str, chosen: str = "") -> float | None:
    """Bytes that a host sends in a step by `fullshard.plan`; None for peers. `chosen`: the ways, as a report says them,
    where there is a choice."""
    from fullshard.plan import Planner, Strategy, find_hardware
    from fullshard.plan.facts import describe
    from fullshard.program import Program

    hsdp = name == "fullshard_hsdp"
    if not name.startswith("fullshard"):
        return None

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    program = Program(partial(build_plain, case.shape), loss, lambda index: batch_of(case.shape, case.workload, index))
    planner = Planner(
        lambda samples, sequence, compute, alone, recompute: describe(
            program, "step", samples=samples, compute=compute, alone=alone, recompute=recompute
        ),
        find_hardware("cpu"),
    )
    compute = "bfloat16" if case.precision == "mixed" else ""
    replicas = HOSTS if hsdp else 1
    plan = planner.plan(
        Strategy(
            ranks=case.world,
            replicas=replicas,
            compute=compute,
            reduce=compute,
            micro=case.workload.sequences,
            optimizer="none",
            backend="gloo",
            hosts=HOSTS,
            ways=next((ways for ways in _ALL_WAYS if str(ways) == chosen), None),
        )
    )
    return next(iter(plan.sent_by_host.values()))


_ALL_WAYS = (ONE_LEVEL, TWO_LEVELS, Ways("ring", "pairs"), Ways("ring", "levels"))


def report(case: Case, answers: Sequence[dict[str, Any]], *, times: bool) -> dict[str, Any]:
    """Print one table; return its figures."""
    rate = RATES[case.rate]
    sizes = f"{case.workload.sequences}x{case.workload.length} tokens per rank"
    print(f"\n{HOSTS} x {case.local} ranks, {case.rate}, {case.precision}, {sizes}")
    print(f"  {'':20} {'sent MB':>8} {'plan MB':>8} {'bound ms':>9} {'median ms':>10} {'/ bound':>8} {'/ fsdp2':>8}")
    rows: dict[str, Any] = {}
    for name in case.names:
        # Of the host that sends more; each round sends the same, but for packets that TCP sends again.
        payload = max(statistics.median(answers[i * case.local]["payload"][name]) for i in range(HOSTS))
        said = answers[0]["hosts"].get(name) or {}
        plan = predicted(case, name, said.get("ways", ""))
        seconds = answers[0]["times"][name]
        row: dict[str, float | None] = {
            "sent_mb": payload / 1e6,
            "plan_mb": None if plan is None else plan / 1e6,
            "bound_ms": payload / rate * 1e3 if rate else None,
            "median_ms": statistics.median(seconds) * 1e3 if times else None,
        }
        bound, median = row["bound_ms"], row["median_ms"]
        row["of_bound"] = median / bound if times and median is not None and bound else None
        row["of_fsdp2"] = paired_ratio(seconds, answers[0]["times"]["fsdp2"]) if times and "fsdp2" in rows else None
        widths = (8, 8, 9, 10, 8, 8)
        digits = (1, 1, 0, 0, 2, 2)
        shown = " ".join(
            f"{'-':>{width}}" if value is None else f"{value:{width}.{digit}f}"
            for value, width, digit in zip(row.values(), widths, digits, strict=True)
        )
        print(f"  {name:20} {shown}  {said.get('ways', '')}", flush=True)
        rows[name] = {key: None if value is None else round(value, 4) for key, value in row.items()}
    return {
        "ranks": f"{HOSTS}x{case.local}",
        "rate": case.rate,
        "precision": case.precision,
        "rounds": case.rounds,
        "steps": rows,
    }


def names_of(local: int) -> tuple[str, ...]:
    several = (*WAYS, "fsdp2_hsdp", "fullshard_hsdp") if local > 1 else ()
    return ("fsdp2", "fullshard", *several, "ddp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="on each host")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--names", nargs="+", choices=names_of(2), help="rows (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after two that are not (default: 5)")
    parser.add_argument("--bytes", action="store_true", help="one round, no times, no rate")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    from tests.harness import hosts

    if lacks := hosts.lacking():
        raise SystemExit(lacks)
    os.environ["OMP_NUM_THREADS"] = "1"
    shape = TINY if options.tiny else SHAPE
    rates, rounds = (["unlimited"], 1) if options.bytes else (options.rates, options.rounds)
    results = []
    for local in options.ranks:
        for rate in rates:
            for precision in options.precisions:
                names = tuple(name for name in names_of(local) if name in (options.names or names_of(local)))
                if not names:
                    continue
                case = Case(local, rate, precision, names, rounds, shape)
                results.append(report(case, measure(case), times=not options.bytes))
    print()
    print_json("hosts", shape, results)


if __name__ == "__main__":
    main()
