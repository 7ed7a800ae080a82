"""What one rank of a run with several axes holds and sends, counted; and the plan of the same run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from fullshard import Parallelism, Program, prepare_fully_shard
from fullshard.engine.unit import module_units
from fullshard.extras.experts import Experts
from fullshard.migrate.declared import noted_by
from fullshard.plan import Plan, Strategy, find_hardware
from fullshard.plan.facts import describe
from fullshard.plan.result import plan_of
from fullshard.plan.spans import steps_of
from fullshard.plan.tape import note
from tests.harness.axes import batch
from tests.harness.models import adamw


class AxisCounter:
    """Messages by axis and kind, with the bytes of whole tensors, of the thread that entered it: each one that a rank
    of the threaded group joins. `axes`: the ranks of each axis of this rank."""

    def __init__(self, axes: dict[str, tuple[int, ...]]) -> None:
        self.axes = {ranks: name for name, ranks in axes.items() if len(ranks) > 1}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> AxisCounter:
        _here.counter = self
        return self

    def __exit__(self, *exception: object) -> None:
        del _here.counter

    def note(self, group: Any, kind: str, data: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        axis, nbytes = self.axes[ranks], 0
        if kind == "AllToAllBase" and axis in ("cp", "ep"):
            # What leaves this rank, and where tokens come from, by their places.
            _, pieces, _, leaving = data
            own, each = ranks.index(dist.get_rank()), len(pieces) // len(ranks)
            nbytes = pieces.nbytes - (leaving[own] if leaving else each) * pieces.itemsize
        else:
            whole = data if kind == "AllReduce" else data[0] if kind == "AllGather" else data[1]
            nbytes = sum(tensor.nbytes for tensor in _tensors(whole))
        self.counts[axis, kind] += 1
        self.nbytes[axis, kind] += nbytes


_here = threading.local()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for inner in value:
            yield from _tensors(inner)


@contextmanager
def joins_noted() -> Iterator[None]:
    """Ranks that are threads note what they send, inside of an `AxisCounter`."""
    start, join = threaded.ProcessLocalGroup._start_coll, threaded.Collective.join

    def starting(kind: Any, group: Any) -> Any:
        _here.group = group
        return start(kind, group)

    def noting(collective: Any, rank: int, data: Any) -> Any:
        counter = getattr(_here, "counter", None)
        if counter is not None:
            counter.note(_here.group, type(collective._collective).__name__, data)
        return join(collective, rank, data)

    with (
        mock.patch.object(threaded.ProcessLocalGroup, "_start_coll", starting),
        mock.patch.object(threaded.Collective, "join", noting),
    ):
        yield


class Counted(NamedTuple):
    """Of one rank: bytes of its shards, state, gradients and buffers, and messages of a step by axis and operation."""

    shards: int
    state: int
    gradients: int
    buffers: int
    counts: dict[tuple[str, str], int]
    nbytes: dict[tuple[str, str], int]


def counted(rank: int, make: Callable[[], nn.Module], plan: Any, config: Any = None) -> Counted:
    """Three steps on this rank, of which the third is counted."""
    model = make()
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=plan, show=False)
    axes = prepared.axes
    groups = {name: axes.group(rank, name) for name in ("dp_replicate", "tp", "cp")}
    groups["dp_shard"] = axes.group(rank, "dp_shard", "cp")
    experts = next((m for m in model.modules() if isinstance(m, Experts)), None)
    if experts is not None and isinstance(experts.gate, DTensor):
        mesh = experts.gate.device_mesh
        groups |= {name: tuple(mesh[name].mesh.tolist()) for name in mesh.mesh_dim_names or ()}
    counter = AxisCounter(groups)

    def step(number: int) -> None:
        with prepared.loss_context(), prepared.context() as cp:
            tokens = batch(number, prepared.share[0])
            inputs, targets = cp.split((tokens[:, :-1], tokens[:, 1:]))
            loss_of_parts(model, (inputs, targets)).backward()

    for number in range(2):
        step(number)
        optimizer.step()
        optimizer.zero_grad()
    with counter:
        step(2)
    made = [_local(p.grad).untyped_storage() for p in model.parameters() if p.grad is not None]
    gradients = sum({storage.data_ptr(): storage.nbytes() for storage in made}.values())
    optimizer.step()
    shards = sum(group.flat.nbytes for unit in dict.fromkeys(module_units(model)) for group in unit.groups)
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state = sum(_local(value).nbytes for value in values)
    return Counted(shards, state, gradients, buffers, dict(counter.counts), dict(counter.nbytes))


def loss_of_parts(model: nn.Module, parts: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = parts
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def planned_step(make: Callable[[], nn.Module], plan: Parallelism, world: int, **dials: Any) -> Plan:
    """The plan of that step, on a CPU whose ranks send with the backend "threaded"."""
    axes = plan.on(world)

    def part(index: int) -> tuple[Tensor, Tensor]:
        tokens = batch(index, 0)
        here = (tokens.shape[1] - 1) // axes.cp
        return tokens[:, :here], tokens[:, 1 : here + 1]

    program = Program(make, loss_of_parts, part, parallelize=noted_by(plan, axes.shards * axes.tp, note))
    model = describe(program, "model", tensor=axes.tp, shared=axes.cp > 1 or axes.ep > 1)
    hardware = replace(find_hardware("cpu"), backend="threaded")
    sizes = {"tensor": axes.tp, "context": axes.cp, "experts": axes.ep}
    strategy = Strategy(world, axes.dp_replicate, backend="threaded", **sizes, **dials)
    return plan_of(model, steps_of(model, strategy.recompute), strategy, hardware)
