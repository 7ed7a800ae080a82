"""Training on the device "simulated", and what the watch saw: for tests of streams, late messages, memory, host waits.

    found = run(Setup("transformer", replicas=2), world=4)
    found[rank].check()          no unordered access, no message that ran into changed memory
    found[rank].params           after the steps, whole, on the host; `reference(setup, world)` is plain training

`Setup` is a value, so that it reaches the processes of the pool (tests/harness/pool.py).
"""

from __future__ import annotations

import copy
import functools
import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.harness.models import CASES, Case
from tests.harness.pool import pool


@dataclass(frozen=True)
class Setup:
    """How a model is sharded and trained. `replicas`: how many ranks hold each shard. `dtype`: of computation, with
    shards in float32. `micro`: micro-batches per step, of which the last reduces. `seed`: when messages run."""

    case: str = "residual"
    replicas: int = 1
    reshard: bool | int | None = None
    dtype: str = ""
    reduce_dtype: str = ""
    offload: bool = False
    recompute: bool = False
    micro: int = 1
    # Micro-batches are reduced over the shards, and only the last also over the replicas.
    partial: bool = False
    clip: float = 0.0
    # Calls on the model after it was sharded, such as ("set_communication", "torch"); with "*" on each unit.
    calls: tuple[tuple[Any, ...], ...] = ()
    # An all-reduce hook on a stream of its own; the optimizer on a stream of its own (`set_post_optim_event`).
    hook_stream: bool = False
    optimizer_stream: bool = False
    # After each step an evaluation, and then the host writes the shards.
    evaluate: bool = False
    # The units of these names compute nothing on these ranks: their parameters get no gradients there.
    unused: tuple[str, ...] = ()
    unused_on: tuple[int, ...] = ()
    # What `event.query()` says.
    queries: bool = True
    steps: int = 3
    seed: int = 0


@dataclass
class Found:
    """What one rank found."""

    params: dict[str, Tensor]
    losses: list[float]
    races: list[str]
    messages: list[str]
    # How often the host waited in the last step, by what it called and the innermost place in fullshard or the test.
    waits: Counter[str]
    # Bytes on the device: before the last step, and its peak.
    rest_nbytes: int
    peak_nbytes: int
    operators: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Raise `AssertionError` if the watch found anything."""
        assert not self.races, f"{len(self.races)} unordered accesses; the first:\n{self.races[0]}"
        assert not self.messages, f"{len(self.messages)} messages went wrong; the first:\n{self.messages[0]}"


class _Block(nn.Module):
    """x + MLP(norm(x)): what it computes is small beside its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Wide(nn.Module):
    """Four blocks, between two weights of the root. For bytes: activations are a hundredth of the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(4))
        self.last = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


_BLOCKS = tuple(f"blocks.{i}" for i in range(4))
# Weights that travel by themselves, and weights that are packed into one message (layout/gather.py).
WIDE = (
    Case("wide", lambda: _Wide(768), _BLOCKS, (8,), (8,)),
    Case("packed", lambda: _Wide(192), _BLOCKS, (8,), (8,)),
)

# Parameters that are alone in their units: they are sent from where they are.
ALONE = Case(
    "alone",
    lambda: nn.Sequential(*(nn.Linear(160, 160, bias=False) for _ in range(3))),
    ("0", "1", "2"),
    (160,),
    (160,),
)

# Those of test files, which add them.
OTHERS: list[Case] = []


def case_of(setup: Setup) -> Case:
    """The model of `setup`."""
    return next(case for case in (*CASES, *WIDE, ALONE, *OTHERS) if case.name == setup.case)


def run(setup: Setup, *, world: int = 2) -> list[Found]:
    """Train on `world` processes with the device; what each found."""
    return pool(world, backend="nccl").run(train, setup, seed=setup.seed)


def train(rank: int, setup: Setup) -> Found:
    """The job of one rank."""
    from tests.harness import nccl, simulated

    device = torch.device("simulated", 0)
    case = case_of(setup)
    with simulated.watched(queries=lambda: setup.queries) as seen:
        model = sharded(case.build().to(device), setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[Tensor] = []
        for step in range(setup.steps):
            if step == setup.steps - 1:
                gc.collect()
                seen.waits.clear()
                rest = torch.simulated.memory_allocated()  # type: ignore[attr-defined]
                torch.simulated.reset_peak_memory_stats()  # type: ignore[attr-defined]
            for micro in range(setup.micro):
                is_last = micro == setup.micro - 1
                (model.set_requires_all_reduce if setup.partial else model.set_requires_gradient_sync)(is_last)
                batch = case.batch(step * setup.micro + micro, rank)
                inputs = tuple(part.to(device, non_blocking=True) for part in batch)
                loss = case.loss(model, inputs) / setup.micro
                loss.backward()
                losses.append(loss.detach())
            if setup.clip:
                import fullshard

                fullshard.clip_grad_norm_(model.parameters(), setup.clip)
            step_of(model, optimizer, setup)
            if setup.evaluate:
                evaluate(model, case, rank, device)
        waits = Counter[str]()
        for (what, stack), times in seen.waits.items():
            waits[f"{what} at {stack[-1] if stack else '?'}"] += times
        peak = torch.simulated.max_memory_allocated()  # type: ignore[attr-defined]
        torch.accelerator.synchronize()
        params = {name: whole(p).cpu() for name, p in model.named_parameters()}
        del model, optimizer
        gc.collect()
    return Found(
        params,
        [loss.item() for loss in losses],
        [race.explain() for race in seen.races],
        nccl.failures(),
        waits,
        rest,
        peak,
        seen.operators,
    )


def sharded(model: nn.Module, setup: Setup, library: str = "fullshard") -> Any:
    """`model`, sharded over all ranks as `setup` says, by fullshard or by "torch"."""
    import fullshard

    made: Any = fullshard if library == "fullshard" else torch.distributed.fsdp
    case, world = case_of(setup), dist.get_world_size()
    leave_out(model, setup, dist.get_rank())
    if setup.recompute:
        for name in case.units:
            recompute(model.get_submodule(name))
    shape, names = (world,), ("shard",)
    if setup.replicas > 1:
        shape, names = (setup.replicas, world // setup.replicas), ("replicate", "shard")  # type: ignore[assignment]
    options: dict[str, Any] = {"mesh": init_device_mesh("simulated", shape, mesh_dim_names=names)}
    if setup.reshard is not None:
        options["reshard_after_forward"] = setup.reshard
    if setup.dtype:
        reduce = getattr(torch, setup.reduce_dtype) if setup.reduce_dtype else None
        options["mp_policy"] = made.MixedPrecisionPolicy(getattr(torch, setup.dtype), reduce)
    if setup.offload:
        options["offload_policy"] = made.CPUOffloadPolicy()
    case.shard(model, made.fully_shard, **options)
    if setup.hook_stream:
        stream = torch.Stream(device="simulated")
        for module in (model, *(model.get_submodule(name) for name in case.units)):
            module.set_all_reduce_hook(_halve_and_double, stream=stream)  # type: ignore[operator]
    for name, *args in setup.calls:
        if name.startswith("*"):
            for unit in case.units:
                getattr(model.get_submodule(unit), name[1:])(*args)
        else:
            getattr(model, name)(*args)
    return model


def _halve_and_double(gradients: Tensor) -> None:
    gradients.mul_(0.5).mul_(2.0)


def step_of(model: Any, optimizer: torch.optim.Optimizer, setup: Setup) -> None:
    """One step of the optimizer, on a stream of its own if `setup` says so."""
    stream = torch.Stream(device="simulated") if setup.optimizer_stream else None
    if stream is None:
        optimizer.step()
        optimizer.zero_grad()
        return
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        optimizer.step()
        # Their memory goes back to the stream of the backward: it is kept.
        optimizer.zero_grad(set_to_none=False)
    model.set_post_optim_event(stream.record_event())


def evaluate(model: Any, case: Case, rank: int, device: torch.device) -> None:
    """A forward without gradients; then every shard is written as it is."""
    with torch.no_grad():
        model(case.batch(0, rank)[0].to(device))
        for parameter in model.parameters():
            parameter.to_local().mul_(1.0)


def leave_out(model: nn.Module, setup: Setup, rank: int) -> None:
    """Let `setup.unused` compute nothing, if this is one of its ranks."""
    for name in setup.unused if rank in setup.unused_on else ():
        model.get_submodule(name).forward = lambda x: x  # type: ignore[method-assign]


def recompute(module: nn.Module) -> None:
    """`module` computes its forward again in backward."""
    forward = module.forward
    module.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@functools.cache
def reference(setup: Setup, world: int) -> dict[str, Tensor]:
    """Parameters after plain training of all ranks' batches, in float32."""
    case = case_of(setup)
    model = copy.deepcopy(case.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(setup.steps):
        for micro in range(setup.micro):
            for rank in range(world):
                batch = case.batch(step * setup.micro + micro, rank)
                leave_out(model, setup, rank)
                (case.loss(model, batch) / setup.micro / world).backward()
                for name in setup.unused:
                    vars(model.get_submodule(name)).pop("forward", None)
        if setup.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
