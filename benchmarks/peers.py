"""fullshard beside DeepSpeed ZeRO-3 and Megatron-FSDP on CPUs: time of a step, and whether the losses agree.

    python -m benchmarks.peers                             the peers that are installed here
    python -m benchmarks.peers --python PEERS/bin/python   those of another environment, which has torch, too

A peer is measured in processes of its own, because what it does to a process stays there; torch's FSDP2 and fullshard
run in the same processes, on the same batches, in interleaved rounds, so that the ratios are of one spell of the
machine. A step is forward, backward and AdamW. Peers that are not installed are named with the command that installs
them. They are made for GPUs: that one of them is slow here says little about it there.

    deepspeed       ZeRO-3, float32, torch's AdamW, as its documents configure it on a CPU accelerator
    megatron-fsdp   ZeRO-3, float32. It asks for CUDA streams, which are stood in for by objects that do nothing: on a
                    CPU everything is in order. gloo has no scaled sum, so losses are divided instead

Losses are compared with those of FSDP2 over the same steps of SGD, which gives back rounding as rounding, and of AdamW,
which makes of the rounding of a gradient near zero an update of the size of the learning rate. A difference is shown;
ours stops the run.
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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import (
    BUILDERS,
    TINY,
    WORKLOADS,
    Block,
    ModelShape,
    Workload,
    batch_of,
    build_plain,
    facts,
    on_ranks,
    paired_ratio,
    print_json,
)

# One step: tokens and targets to the loss of before it.
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CHECKED_STEPS = 4
# Sums of four float32 steps in another order.
TOLERANCE = 1e-5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


def sharded_step(name: str, shape: ModelShape, kind: str) -> Step:
    """FSDP2 or fullshard."""
    model = BUILDERS[name](shape)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if name == "fullshard":
        import fullshard

        fullshard.step_on_shards(optimizer)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed_step(shape: ModelShape, kind: str) -> Step:
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    model = build_plain(shape)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=OPTIMIZERS[kind](model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            # Its default clips to a norm of 1, which AdamW all but hides.
            "gradient_clipping": 0.0,
            # Otherwise it insists on an optimizer that it has to compile.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


class _InOrder:
    """Instead of a CUDA stream or event, where everything is in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self if name == "record_event" else name == "query"


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def megatron_step(shape: ModelShape, kind: str) -> Step:
    stream = _InOrder()
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _InOrder
    cuda.stream = _nothing
    cuda.current_device, cuda.current_stream = lambda: 0, lambda *_: stream
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    from megatron_fsdp import fully_shard  # type: ignore[import-not-found,unused-ignore]
    from torch.distributed.device_mesh import init_device_mesh

    model = build_plain(shape)
    world = dist.get_world_size()
    sharded, optimizer = fully_shard(
        model,
        OPTIMIZERS[kind](model.parameters()),
        # It asks for an axis of tensor parallelism, if only of one rank.
        device_mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("shard", "tensor")),
        dp_shard_dim="shard",
        tp_dim="tensor",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # gradients are added, not averaged
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(sharded(tokens).flatten(0, 1), targets.flatten())
        (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Peer(NamedTuple):
    module: str
    step: Callable[[ModelShape, str], Step]
    install: str


PEERS = {
    "deepspeed": Peer(
        "deepspeed",
        deepspeed_step,
        "pip install hjson py-cpuinfo msgpack ninja pydantic einops psutil tqdm setuptools; "
        "DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed==0.19.8",
    ),
    "megatron-fsdp": Peer("megatron_fsdp", megatron_step, "pip install packaging; pip install megatron-fsdp==0.6.1"),
}
OURS = ("fsdp2", "fullshard")


def measure(
    rank: int, world: int, shape: ModelShape, workload: Workload, peer: str, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """Losses of the first steps by optimizer and name; seconds per step of AdamW, by name and round. `peer`: a name, or
    "" for none."""
    tokens, targets = batch_of(shape, workload, rank)
    losses: dict[str, dict[str, list[float]]] = {}
    for kind in OPTIMIZERS:  # the last one is measured
        steps = {name: sharded_step(name, shape, kind) for name in OURS}
        if peer:
            steps[peer] = PEERS[peer].step(shape, kind)
        losses[kind] = {
            name: [step(tokens, targets).item() for _ in range(CHECKED_STEPS)] for name, step in steps.items()
        }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens, targets)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(seconds.item())
    return losses, times


def work(options: argparse.Namespace, shape: ModelShape) -> None:
    """In an environment that has the peer: measure, and print one line for the process that asked."""
    results = []
    for key in options.workloads:
        workload = WORKLOADS[key]
        answers = on_ranks(options.world, measure, shape, workload, options.worker, options.rounds)
        results.append({"workload": key, "losses": answers[0][0], "times": answers[0][1]})
    print(json.dumps(results))


def has(python: str, module: str) -> bool:
    """Whether the environment of the interpreter `python` has `module`."""
    found = subprocess.run(
        [python, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"],
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


def ask(python: str, peer: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `work` printed there."""
    command = [python, "-m", "benchmarks.peers", "--worker", peer, "--world", str(options.world)]
    command += ["--rounds", str(options.rounds), "--workloads", *options.workloads] + ["--tiny"] * options.tiny
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{peer or 'fullshard'} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    answer: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return answer


def report(peer: str, world: int, result: dict[str, Any]) -> dict[str, Any]:
    """Print one table; return its figures."""
    workload, times, losses = WORKLOADS[result["workload"]], result["times"], result["losses"]
    print(f"\n{workload.name}: {workload.sequences}x{workload.length} tokens per rank, {world} ranks")
    print(
        f"  {'':14} {'median ms':>10} {'min':>8} {'fullshard / it':>15}   losses of {CHECKED_STEPS} steps, off FSDP2's"
    )
    rows: dict[str, Any] = {}
    for name, seconds in times.items():
        off = {
            kind: max(abs(a / b - 1) for a, b in zip(by_name[name], by_name["fsdp2"], strict=True))
            for kind, by_name in losses.items()
        }
        if name == "fullshard" and not max(off.values()) <= TOLERANCE:
            raise SystemExit(f"fullshard trains differently: losses {losses}")
        row = {
            "median_ms": round(statistics.median(seconds) * 1e3, 3),
            "min_ms": round(min(seconds) * 1e3, 3),
            "fullshard_over_it": round(paired_ratio(times["fullshard"], seconds), 4),
            "losses": {kind: by_name[name] for kind, by_name in losses.items()},
            "losses_off": off,
            "losses_agree": max(off.values()) <= TOLERANCE,
        }
        shown = ", ".join(f"{kind} {most:.0e}" for kind, most in off.items())
        print(
            f"  {name:14} {row['median_ms']:10.1f} {row['min_ms']:8.1f} {row['fullshard_over_it']:15.3f}   {shown}",
            flush=True,
        )
        rows[name] = row
    return {"peer": peer, "world": world, "workload": workload.name, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment with the peers")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters, to try the script")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = TINY if options.tiny else ModelShape()
    if options.worker is not None:
        work(options, shape)
        return
    missing = {name: PEERS[name].install for name in options.peers if not has(options.python, PEERS[name].module)}
    for name, command in missing.items():
        print(f"{name}: not installed for {options.python}; {command}")
    # Without a peer too, torch's FSDP2 is one.
    found = [name for name in options.peers if name not in missing] or [""]
    results = [report(peer, options.world, result) for peer in found for result in ask(options.python, peer, options)]
    print()
    print_json("peers", shape, {"missing": missing, "tables": results, "load_after": facts()["load"]})


if __name__ == "__main__":
    main()
