"""What the CPU benchmarks share: the model, the ways of data parallel training, the processes, and the report.

The model is of its own, so that a benchmark measures the engine and not a trainer. Every way of training is built
here from the same initial values and runs in the same processes on the same batches; a benchmark that would compare
unequal results stops.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelShape:
    """Llama-like, float32, untied. The default has 27.3 M parameters: 3.15 M in each block, 4.2 M in embedding and
    head each.
    """

    vocabulary: int = 8192
    width: int = 512
    hidden: int = 1368
    heads: int = 8
    depth: int = 6


TINY = ModelShape(vocabulary=64, width=16, hidden=24, heads=2, depth=3)


@dataclass(frozen=True)
class Workload:
    """What each rank computes in a step: `sequences` of `length` tokens."""

    name: str
    sequences: int
    length: int


HEAVY = Workload("compute-heavy", 2, 128)
LIGHT = Workload("communication-heavy", 1, 16)
WORKLOADS = {"heavy": HEAVY, "light": LIGHT}


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (f(x).view(n, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Nine parameters, as in Llama."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (n, length) -> (n, length, vocabulary)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- ways of training ----------------------------------------------------------------------------------------


def build_plain(shape: ModelShape) -> nn.Module:
    """Each rank by itself: no communication at all. The bound that overlap can reach."""
    torch.manual_seed(0)
    return Llama(shape)


def build_ddp(shape: ModelShape) -> nn.Module:
    return nn.parallel.DistributedDataParallel(build_plain(shape))


def build_fsdp1(shape: ModelShape) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        build_plain(shape),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def build_sharded(shape: ModelShape, fully_shard: Callable[..., Any], **options: Any) -> nn.Module:
    """Blocks as units and then the root, as torch's own examples do it; `fully_shard` is torch's or ours."""
    model = build_plain(shape)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build_fsdp2(shape: ModelShape) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return build_sharded(shape, fully_shard)


def build_fullshard(shape: ModelShape) -> nn.Module:
    from fullshard import fully_shard

    return build_sharded(shape, fully_shard)


def build_fsdp2_kept(shape: ModelShape) -> nn.Module:
    """Parameters stay full between forward and backward, so that a step sends what DDP's sends."""
    from torch.distributed.fsdp import fully_shard

    return build_sharded(shape, fully_shard, reshard_after_forward=False)


def build_fullshard_kept(shape: ModelShape) -> nn.Module:
    from fullshard import fully_shard

    return build_sharded(shape, fully_shard, reshard_after_forward=False)


BUILDERS: dict[str, Callable[[ModelShape], nn.Module]] = {
    "none": build_plain,
    "ddp": build_ddp,
    "fsdp1": build_fsdp1,
    "fsdp2": build_fsdp2,
    "fullshard": build_fullshard,
    "fsdp2_kept": build_fsdp2_kept,
    "fullshard_kept": build_fullshard_kept,
}


def build_nccl_plan(shape: ModelShape, gradients: float | None) -> nn.Module:
    """Ours with the plan of NCCL, over gloo: large parameters and their gradients travel by themselves, buffers are not
    kept. `gradients`: how much of the gradients of a block these and their messages may take; None: no limit."""
    from benchmarks.counting import nccl_plan

    with nccl_plan(1 << 20):
        model: Any = build_fullshard(shape)
        block = sum(p.numel() * p.element_size() for p in Block(shape).parameters())
        model.set_memory_budget(gradients=1 << 62 if gradients is None else int(gradients * block))
        # Here, because the first step makes the messages.
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        model.zero_grad()
    return model


# The plan of NCCL at settings of the dial that memory.py counts.
PLANS: dict[str, Callable[[ModelShape], nn.Module]] = {
    "plan": partial(build_nccl_plan, gradients=None),
    "plan 1.5gP": partial(build_nccl_plan, gradients=1.5),
    "plan 1gP": partial(build_nccl_plan, gradients=1.0),
}


class Trainee:
    """One model under measurement, with its optimizer if that is part of the step."""

    def __init__(self, name: str, model: nn.Module, *, adamw: bool) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if adamw else None
        # Says that a step is over, where no optimizer does; it finds no gradients. Without it all steps are one growing
        # window of micro-batches, and ranks of fullshard compare each message of one that is longer than the last.
        self._end = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, optimizer step if there is one; gradients are dropped. The loss, 0-dim."""
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        if self.optimizer is None:
            self._end.step()
        return loss.detach()


def batch_of(shape: ModelShape, workload: Workload, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    size = (2, workload.sequences, workload.length)
    tokens, targets = torch.randint(shape.vocabulary, size, generator=generator)
    return tokens, targets


def check_same_training(shape: ModelShape, workload: Workload, rank: int, names: Sequence[str]) -> None:
    """Stop unless every way of training gives the same losses over three SGD steps: a fast wrong result is no result.

    "none" is left out: without communication, each rank trains on its own batches alone.
    """
    tokens, targets = batch_of(shape, workload, rank)
    losses = {}
    for name in names:
        if name == "none":
            continue
        model = (BUILDERS | PLANS)[name](shape)
        trainee = Trainee(name, model, adamw=False)
        trainee.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = [trainee.step(tokens, targets).item() for _ in range(3)]
    reference = next(iter(losses.values()), [])
    for name, found in losses.items():
        for mine, theirs in zip(found, reference, strict=True):
            if not abs(mine - theirs) <= 1e-5 * abs(theirs):
                raise AssertionError(f"rank {rank}: {name} trains differently: losses {found}, others {reference}")


# ---- processes -----------------------------------------------------------------------------------------------


def on_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` fresh gloo processes with one thread each; results in rank order."""
    # One thread per rank; read by the children when they import torch.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world, f"{folder}/rendezvous", pipes[rank][1], fn, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        receivers = [receiver for receiver, _ in pipes]
        answers: list[Any] = [None] * world
        try:
            while waiting := [receiver for receiver in receivers if not receiver.closed]:
                for receiver in wait(waiting):  # the first to answer: on a failure that is the cause, not a consequence
                    answers[receivers.index(receiver)] = _receive(receiver)
                    receiver.close()
            return answers
        finally:
            for process in processes:
                process.kill()  # they have answered, or one failed and the others would wait for it
                process.join()


def _receive(receiver: Connection) -> Any:
    try:
        ok, payload = receiver.recv()
    except EOFError:
        raise SystemExit("a rank ended without an answer; its output is above") from None
    if not ok:
        raise SystemExit(payload)
    return payload


def _rank_main(
    rank: int, world: int, rendezvous: str, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # FSDP1 and others call names that torch itself has renamed since; that is not what is measured.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        answer: tuple[bool, Any] = (True, fn(rank, world, *args))
    except BaseException:
        answer = (False, f"rank {rank} of {world} failed:\n{traceback.format_exc()}")
    sender.send(answer)
    sender.close()


# ---- report --------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What the figures depend on: versions, cores, and how busy the machine was when it started."""
    from fullshard import __version__

    return {
        "fullshard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def paired_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of time / base time of the same round: a slow spell of the machine hits both."""
    return statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))


def print_json(benchmark: str, shape: ModelShape, results: Any) -> None:
    """The last line: everything, for machines to read."""
    sys.stdout.flush()
    print(json.dumps({"benchmark": benchmark, "facts": facts(), "model": asdict(shape), "results": results}))
