"""Training of a `ModelSpec` beside an oracle that knows nothing of sharding.

The oracle computes each rank's micro-batches with a plain copy of the model in the compute dtype, adds each rank's
gradients in the reduce dtype, adds those of the ranks in rank order in the sum dtype, divides, and takes one AdamW
step. After every step it is set to what ours holds, so that what is compared is one step from equal state and errors do
not pile up over steps.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard.policy import Wanted, resolve_precision
from tests.harness.models import Trained, adamw, assert_close_to_tensor_max, assert_same_training, collect
from tests.harness.random_models import POLICIES, ModelSpec, build, loss, shard, unit_names

# Per step from equal state, relative to each tensor's maximum, on several ranks: either computation of an update, and
# of a sum in the same order, rounds twice at the size of its result (tolerance.py). On one rank: bit by bit.
EPS = 2.0


class Oracle:
    """Plain training of `spec` for `world` ranks."""

    def __init__(self, spec: ModelSpec, world: int, replicas: int = 1, *, by_backend: bool = False) -> None:
        self.spec, self.world = spec, world
        self.model = build(spec)
        self.optimizer = adamw(self.model.parameters(), watched=False)
        # Of the last step, by parameter: the largest element of any rank's gradient of one micro-batch.
        self.largest: dict[str, float] = {}
        policy = POLICIES[spec.policy]
        self.precision = resolve_precision(Wanted(policy.param_dtype, policy.reduce_dtype), spec.storage)
        self.compute = copy.deepcopy(self.model).to(self.precision.compute)
        # In how many eps of the storage dtype gradients may differ because they were accumulated in a narrower dtype:
        # in which order that rounds is not part of the contract.
        reduce, storage = torch.finfo(self.precision.reduce), torch.finfo(self.precision.storage)
        narrow = reduce.eps > storage.eps and (len(spec.sync) > 1 or replicas > 1 or by_backend)
        self.rounding = 4 * reduce.eps / storage.eps if narrow else 0.0
        for name, _ in unit_names(spec):
            self.compute.get_submodule(name).register_forward_pre_hook(self._cast)

    def _cast(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = POLICIES[self.spec.policy].param_dtype
        if dtype is None:
            return args
        return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """The gradients of one step, in the storage dtype, by parameter name."""
        with torch.no_grad():
            for ours, stored in zip(self.compute.parameters(), self.model.parameters(), strict=True):
                ours.copy_(stored)
        total: dict[str, Tensor] = {}
        self.largest = {}
        for window in _windows(self.spec.sync):
            per_rank = [self._of_rank(step, window, rank) for rank in range(self.world)]
            for name, gradient in self._mean(per_rank, accumulated=len(window) > 1).items():
                total[name] = total[name] + gradient if name in total else gradient
        return total

    def _of_rank(self, step: int, window: Sequence[int], rank: int) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for micro in window:
            self.compute.zero_grad()
            loss(self.spec, self.compute, step, micro, rank).backward()
            for name, p in self.compute.named_parameters():
                if p.grad is not None:
                    fresh = p.grad if len(window) == 1 else p.grad.to(self.precision.reduce)
                    if fresh.numel():
                        self.largest[name] = max(self.largest.get(name, 0.0), fresh.abs().amax().item())
                    held[name] = held[name] + fresh if name in held else fresh
        return held

    def _mean(self, per_rank: list[dict[str, Tensor]], *, accumulated: bool) -> dict[str, Tensor]:
        names = dict.fromkeys(name for gradients in per_rank for name in gradients)
        if self.world == 1:
            return {name: per_rank[0][name].to(self.precision.storage) for name in names}
        sent_in = self.precision.reduce if accumulated else self.precision.wire
        means = {}
        for name in names:
            like = next(g[name] for g in per_rank if name in g)
            parts = [g.get(name, torch.zeros_like(like)).to(sent_in).to(self.precision.sum) for g in per_rank]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            means[name] = (total / self.world).to(self.precision.storage)
        return means

    def step(self, gradients: dict[str, Tensor]) -> Trained:
        """One AdamW step with `gradients`; what training left."""
        for name, p in self.model.named_parameters():
            p.grad = gradients.get(name)
        self.optimizer.step()
        return collect(self.model, self.optimizer)

    def load(self, theirs: Trained) -> None:
        """Go on from `theirs`."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(theirs.params[name])
                for key, value in self.optimizer.state.get(p, {}).items():
                    value.copy_(theirs.state[f"{name}.{key}"])


def _windows(sync: Sequence[bool]) -> Iterator[list[int]]:
    """Micro-batches that are reduced together."""
    window: list[int] = []
    for micro, reduces in enumerate(sync):
        window.append(micro)
        if reduces:
            yield window
            window = []
    assert not window, "the last micro-batch of a step is to be reduced"


class Ours:
    """The sharded model of `spec` on this rank, and its AdamW.

    `local`: the optimizer holds this rank's plain tensors instead of DTensors. The arithmetic is the same; it saves
    DTensor's analysis of every operation, which takes far longer than all the rest of so small a model's step.
    `replicas`: how many times there is each shard. Micro-batches that are not reduced are then, by turns, without any
    message and without the one between replicas. `fully_shard`: in the place of ours, with other options.
    """

    def __init__(
        self, spec: ModelSpec, *, local: bool, replicas: int = 1, fully_shard: Callable[..., Any] | None = None
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        fully_shard = fully_shard or fullshard.fully_shard
        self.group: dist.ProcessGroup | None = None
        if replicas > 1:
            shape = (replicas, dist.get_world_size() // replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            self.group = mesh.get_group("shard")
            fully_shard = partial(fully_shard, mesh=mesh)
        self.model: Any = shard(spec, build(spec), fully_shard)
        self.held = {name: nn.Parameter(_local(p)) if local else p for name, p in self.model.named_parameters()}
        self.local = local
        self.optimizer = adamw(self.held.values(), watched=False)

    def micro_batches(self, step: int, rank: int) -> None:
        """All forwards and backwards of one step."""
        for micro, reduces in enumerate(self.spec.sync):
            without_replicas = not reduces and self.replicas > 1 and (micro + step) % 2 == 0
            self.model.set_requires_gradient_sync(reduces or without_replicas)
            self.model.set_requires_all_reduce(not without_replicas)
            loss(self.spec, self.model, step, micro, rank).backward()

    def update(self) -> None:
        if self.local:
            for name, p in self.model.named_parameters():
                self.held[name].grad = None if p.grad is None else _local(p.grad)
        self.optimizer.step()

    def step(self, step: int, rank: int) -> None:
        """A whole step."""
        self.micro_batches(step, rank)
        self.update()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def trained(self) -> tuple[Trained, dict[str, Tensor]]:
        """Parameters and optimizer state, and gradients, full on every rank: one message."""
        params = {name: _local(p) for name, p in self.model.named_parameters()}
        gradients = {name: _local(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        state = {
            f"{name}.{key}": _local(value)
            for name, p in self.held.items()
            for key, value in self.optimizer.state.get(p, {}).items()
        }
        dims = {name: _dim(p) for name, p in self.model.named_parameters()}
        params, state, gradients = _gather((params, state, gradients), dims, self.group)
        return Trained(params, state), gradients


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _dim(tensor: Tensor) -> int:
    return next((p.dim for p in tensor.placements if isinstance(p, Shard)), 0) if isinstance(tensor, DTensor) else 0


def _gather(
    mine: tuple[dict[str, Tensor], ...], dims: dict[str, int], group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], ...]:
    """Full tensors of all ranks' rows, by name; those without a dim are equal everywhere. `dims` by parameter name.

    `group`: the ranks that have them, if not all.
    """
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    for rank, theirs in enumerate(everyones):
        for here, there in zip(mine, theirs, strict=True):
            assert here.keys() == there.keys(), (
                f"rank {rank} alone has, or has not, {sorted(here.keys() ^ there.keys())}"
            )

    def whole(i: int, name: str, dim: int) -> Tensor:
        return torch.cat([theirs[i][name] for theirs in everyones], dim=dim)

    return tuple(
        {
            # Optimizer state is called after its parameter.
            name: t if t.ndim == 0 else whole(i, name, dims.get(name, dims.get(name.rpartition(".")[0], 0)))
            for name, t in part.items()
        }
        for i, part in enumerate(mine)
    )


def train_beside_oracle(
    rank: int,
    spec: ModelSpec,
    world: int,
    steps: int,
    *,
    local: bool = True,
    replicas: int = 1,
    by_backend: bool = False,
    disturb: Callable[[Any, int, int], None] | None = None,
    lasting: bool = False,
    prepare: Callable[[Any, int], None] | None = None,
    fully_shard: Callable[..., Any] | None = None,
) -> Trained:
    """Train on this rank; rank 0 compares with the oracle at every step. What training left, full, on every rank.

    `disturb(model, step, rank)` is called before the micro-batches of a step; `prepare(model, step)` before that, for
    the oracle's models too. `by_backend`: gradients are added by the backend, in the reduce dtype and in any
    order. `lasting`: what is frozen may stay
    full between steps. `fully_shard`: as `Ours` takes it.
    """
    ours = Ours(spec, local=local, replicas=replicas, fully_shard=fully_shard)
    oracle = Oracle(spec, world, replicas, by_backend=by_backend) if rank == 0 else None
    # Where nothing is cut, a rank computes without waiting for others; and recomputation sets the random state of the
    # whole process back, in the middle of drawing the oracle's initial values.
    dist.barrier()
    trained = Trained()
    eps = 0.0 if world == 1 else EPS
    for step in range(steps):
        if prepare is not None:
            for model in (ours.model, *((oracle.model, oracle.compute) if oracle is not None else ())):
                prepare(model, step)
        if disturb is not None:
            disturb(ours.model, step, rank)
        ours.micro_batches(step, rank)
        ours.update()
        trained, gradients = ours.trained()
        if oracle is not None:
            expected = oracle.gradients(step)
            missing = gradients.keys() ^ expected.keys()
            assert not missing, f"step {step}: gradients of {sorted(missing)} on one side only"
            for name, gradient in expected.items():
                allowed = max(eps, oracle.rounding)
                if (replicas > 1 or by_backend or oracle.rounding) and gradient.numel():
                    # Added or rounded in another order than the oracle's: what counts is the size of what is added,
                    # which may be much larger than the sum.
                    allowed *= max(1.0, 2 * oracle.largest[name] / max(gradient.abs().max().item(), 1e-30))
                assert_close_to_tensor_max(gradients[name], gradient, allowed, f"step {step}, gradient of {name}")
            # From our gradients: one that is nothing but rounding has any sign, and AdamW makes a whole step of it.
            assert_same_training(trained, oracle.step(gradients), eps)
            oracle.load(trained)
        ours.zero_grad()
        live = {u.name: u.full_nbytes_live for u in fullshard.report(ours.model).units if u.full_nbytes_live}
        if lasting:
            trainable = {name.rpartition(".")[0] for name, p in ours.model.named_parameters() if p.requires_grad}
            live = {name: nbytes for name, nbytes in live.items() if name in trainable}
        assert not live, f"step {step}: full parameters left in memory: {live}"
    return trained


def train_alone(rank: int, spec: ModelSpec, steps: int) -> Trained:
    """Train on this rank without an oracle."""
    ours = Ours(spec, local=True)
    for step in range(steps):
        ours.step(step, rank)
    return ours.trained()[0]


def assert_same_bits(actual: Trained, expected: Trained) -> None:
    """Parameters and optimizer state are equal, bit by bit."""
    for kind in ("params", "state"):
        found, wanted = getattr(actual, kind), getattr(expected, kind)
        assert found.keys() == wanted.keys(), f"{kind}: {sorted(found.keys() ^ wanted.keys())} on one side only"
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{kind} {name} differs by {(found[name] - value).abs().max():g}"


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the context is open."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def on_nodes(world: int, nodes: int) -> Iterator[None]:
    """The `world` ranks find themselves on so many computers, neighbours together, while the context is open."""
    with mock.patch("fullshard.comm.choice.node", lambda: str(dist.get_rank() * nodes // world)):
        yield
