"""Every strategy, in any number of ranks: one test for each line of what a user may choose, beside plain training.

They ask for `WORLD` ranks, two without `--world`; tests/procs/test_data_groups_over_gloo.py runs them over gloo with
one, two and four. Other files say more of each strategy, in the world that shows it best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, run
from tests.harness.installed import MESH_DIMS, PLACEMENT_RESULT, DataParallelMeshDims, needs
from tests.harness.installed import TorchPlacementResult as TorchResult
from tests.harness.models import (
    BY_NAME,
    Trained,
    adamw,
    assert_same_training,
    collect,
    seeded,
)
from tests.harness.threads import WORLD
from tests.threads import test_tensor_parallel as tensor_parallel
from tests.threads.test_full_mesh import Plain

CASE = BY_NAME["tied"]
STEPS = 2
# Of the ranks, those that hold replicas in a mesh of two axes, and those of tensor parallelism.
TWO = min(2, WORLD)
CLIP = 0.5


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


# Of an implementation, the arguments of `fully_shard`.
STRATEGIES: dict[str, Callable[[Implementation], dict[str, Any]]] = {
    "ZeRO-3": lambda impl: {"reshard_after_forward": True},
    "ZeRO-2": lambda impl: {"reshard_after_forward": False},
    "hpZ": lambda impl: {"reshard_after_forward": max(1, WORLD // 2)},
    "HSDP": lambda impl: {"mesh": _mesh(TWO, WORLD // TWO)},
    "HSDP, sharded over all": lambda impl: {"mesh": _mesh(1, WORLD)},
    "NO_SHARD": lambda impl: {"mesh": _mesh(WORLD, 1)},
    "CPU offload": lambda impl: {"offload_policy": impl.namespace.CPUOffloadPolicy(pin_memory=False)},
    "a gradient reduction in float32": lambda impl: {"mp_policy": impl.MixedPrecisionPolicy(None, torch.float32)},
}


def plain_training() -> Trained:
    """Of the batches of all ranks, accumulated over two micro-batches and clipped."""
    model = CASE.build()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(WORLD):
                (CASE.loss(model, CASE.batch(2 * step + micro, rank)) / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.sample(2)
@behaviour("trains as the plain model in worlds of 1, 2 and 4: {strategy}", area="strategies")
@pytest.mark.parametrize("strategy", STRATEGIES)
@for_each_implementation
def test_strategies(impl: Implementation, strategy: str) -> None:
    """Tied weights, accumulation without messages, clipping, AdamW; parameters and its state. Ours report the bytes
    that are expected, and ranks hold the same bits."""
    expected = plain_training()
    models = [CASE.build() for _ in range(WORLD)]

    def rank_main(rank: int, impl: Implementation) -> Trained:
        model: Any = CASE.shard(models[rank], impl.fully_shard, **STRATEGIES[strategy](impl))
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                CASE.loss(model, CASE.batch(2 * step + micro, rank)).backward()
            impl.clip(model.parameters(), CLIP)
            optimizer.step()
        if impl is FULLSHARD:
            report = fullshard.report(model, optimizer)
            assert report.measured == report.expected and not report.notes
            assert not any(unit.full_nbytes_live or unit.kept_nbytes_live for unit in report.units)
        return collect(model, optimizer)

    trained = run(rank_main, impl)
    assert_same_training(trained[0], expected)
    for other in trained[1:]:
        assert_same_training(other, trained[0], 0)


@behaviour("beside tensor parallelism, and with `dp_mesh_dims` on one mesh, in worlds of 1, 2 and 4", area="strategies")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("full_mesh", [False, pytest.param(True, marks=needs(MESH_DIMS, half="torch"))])
@for_each_implementation
def test_tensor_parallelism(impl: Implementation, full_mesh: bool) -> None:
    data = WORLD // TWO
    build = (lambda: seeded(Plain)) if full_mesh else tensor_parallel.blocks
    models = [build() for _ in range(WORLD)]
    reference = build()
    for rank in range(data):
        (reference(tensor_parallel.batch(0, rank)).square().mean() / data).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (data, TWO), mesh_dim_names=("dp", "tp"))
        model: Any = models[rank]
        x: Tensor = tensor_parallel.batch(0, mesh.get_local_rank("dp"))
        replicated = [Replicate(), Replicate()]
        options: dict[str, Any] = {"mesh": mesh["dp"]}
        if full_mesh:
            options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
            for layer, cut in ((model.up, Shard(0)), (model.down, Shard(1))):
                for name, p in list(layer.named_parameters()):
                    own = cut if p.ndim > 1 or cut == Shard(0) else Replicate()
                    setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), own])))
            x = DTensor.from_local(x, mesh, replicated, run_check=False)
        else:
            tensor_parallel.plan_tp(model, mesh["tp"], sequence=True)
        for child in model.children():
            impl.fully_shard(child, **options)
        impl.fully_shard(model, **options)
        out = model(x)
        if isinstance(out, DTensor):
            out = out.redistribute(placements=replicated).to_local()
        out.square().mean().backward()
        for (name, p), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad.placements == p.placements
            tolerance.assert_close(p.grad.full_tensor(), plain.grad, what=name)
        if impl is FULLSHARD:
            norm = fullshard.clip_grad_norm_(model.parameters(), 1e9)
            norms = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None])
            tolerance.assert_close(norm, norms.norm())

    run(rank_main, impl)


class Experts(nn.Module):
    """A shared linear and two experts of three dims in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("ni,eio->no", torch.tanh(self.shared(x)), self.experts))


@behaviour("a mesh per parameter in worlds of 1, 2 and 4: averages over its own ranks", area="placement")
@for_each_implementation
@needs(PLACEMENT_RESULT, half="torch")
def test_a_mesh_per_parameter(impl: Implementation) -> None:
    """Experts on a mesh of half of the ranks."""
    inner = WORLD // TWO
    models = [seeded(Experts) for _ in range(WORLD)]
    gradients = []
    for rank in range(WORLD):
        plain: Any = seeded(Experts)
        plain(_sample(rank)).square().sum().backward()
        gradients.append({name: p.grad for name, p in plain.named_parameters()})

    def rank_main(rank: int, impl: Implementation) -> None:
        both = init_device_mesh("cpu", (TWO, inner), mesh_dim_names=("outer", "expert"))
        world = init_device_mesh("cpu", (WORLD,))
        # With one rank both are one process group, which has one mesh.
        info = None if inner == WORLD else FSDPMeshInfo(both["expert"], shard_mesh_dim=0)
        model: Any = models[rank]
        experts = model.experts
        own_mesh = Shard(1) if info is None else TorchResult(Shard(1), info)
        impl.fully_shard(model, mesh=world, shard_placement_fn=lambda p: own_mesh if p is experts else Shard(0))
        model(_sample(rank)).square().sum().backward()
        own = range(rank // inner * inner, rank // inner * inner + inner)
        for name, p in model.named_parameters():
            ranks = own if name == "experts" else range(WORLD)
            assert p.device_mesh.size() == len(ranks), name
            expected = sum(gradients[r][name] for r in ranks) / len(ranks)
            tolerance.assert_close(p.grad.full_tensor(), expected, what=name)

    run(rank_main, impl)


def _sample(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
