"""`dp_mesh_dims`: parameters that are DTensors on one mesh with all axes; and what is refused of DTensor parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from fullshard import DataParallelMeshDims as Dims
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation, run
from tests.harness.installed import MESH_DIMS, DataParallelMeshDims, fails_before, needs
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.test_tensor_parallel import R, batch, blocks, both, collect, plan_tp, train_plain


def on_mesh(mesh: DeviceMesh, *placements: Any) -> nn.Linear:
    model = nn.Linear(3, 7)
    model.weight = nn.Parameter(distribute_tensor(torch.arange(21.0).view(7, 3), mesh, placements))
    model.bias = nn.Parameter(distribute_tensor(torch.arange(7.0), mesh, placements))
    return model


# fullshard flattens them with every torch.
_NOT_FLATTENED = fails_before((2, 13), "FSDP2 shards over two axes without flattening them", half="both")


@pytest.mark.sample(2)
@behaviour("`dp_mesh_dims` on a full mesh: placements and values", area="placement", torch="equal")
@pytest.mark.parametrize(
    ("names", "placements", "dims"),
    [
        (("dp", "tp"), (R, Shard(0)), {"shard": "dp"}),
        (("tp", "dp"), (Shard(0), R), {"shard": "dp"}),
        pytest.param(("a", "b"), (R, R), {"shard": ("a", "b")}, marks=_NOT_FLATTENED),
        pytest.param(("a", "b", "tp"), (R, R, Shard(0)), {"shard": ("a", "b")}, marks=_NOT_FLATTENED),
        pytest.param(("pp", "a", "b"), (R, R, R), {"shard": ["a", "b"]}, marks=_NOT_FLATTENED),
        (("pp", "dp", "tp"), (Shard(0), R, Shard(0)), {"shard": "dp"}),
        (("re", "dp", "tp"), (R, R, Shard(0)), {"shard": "dp", "replicate": "re"}),
        (("dp", "re", "tp"), (R, R, Shard(0)), {"shard": "dp", "replicate": "re"}),
        (("a", "b", "tp"), (R, R, Shard(0)), {"replicate": ("a", "b")}),
        (("a", "b", "dp"), (R, R, R), {"replicate": ("a", "b"), "shard": "dp"}),
    ],
    ids=str,
)
@needs(MESH_DIMS)
def test_dp_mesh_dims_give_torch_s_placements(names: tuple[str, ...], placements: Any, dims: Any) -> None:
    def build(fully_shard: Callable[..., Any]) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        model = on_mesh(mesh, *placements)
        kind: Any = Dims if fully_shard is FULLSHARD.fully_shard else DataParallelMeshDims
        fully_shard(model, mesh=mesh, dp_mesh_dims=kind(**dims))
        return model

    both(2 ** len(names), build)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


# Axes, and which of them are those of data parallelism: every rank of these has a batch of its own.
FULL = [
    ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    ({"re": 2, "tp": 2}, {"replicate": "re"}),
    pytest.param({"re": 2, "dp": 2, "tp": 2}, {"shard": "dp", "replicate": "re"}, marks=pytest.mark.slow),
    pytest.param({"a": 2, "b": 2, "tp": 2}, {"shard": ("a", "b")}, marks=pytest.mark.slow),
]


@behaviour("training with dp_mesh_dims on a mesh with all axes", area="placement")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("axes", "dims"), FULL, ids=lambda value: "-".join(value))
@for_each_implementation
@needs(MESH_DIMS, half="torch")
def test_training_on_a_full_mesh(axes: dict[str, int], dims: dict[str, Any], impl: Implementation) -> None:
    """Parameters and activations are DTensors on all axes; two micro-batches, of which the second reduces."""
    world = math.prod(axes.values())
    data = world // 2
    reference = seeded(Plain)
    for micro in range(2):
        for rank in range(data):
            (reference(batch(micro, rank)).square().sum() / data).backward()
    models = [seeded(Plain) for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        replicated = [R] * (mesh.ndim - 1)
        model: Any = models[rank]
        for layer, own in ((model.up, Shard(0)), (model.down, Shard(1))):
            for name, p in list(layer.named_parameters()):
                cut = own if p.ndim > 1 or own == Shard(0) else R
                setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [*replicated, cut])))
        given: Any = DataParallelMeshDims(**dims)
        impl.fully_shard(model.up, mesh=mesh, dp_mesh_dims=given)
        impl.fully_shard(model, mesh=mesh, dp_mesh_dims=given)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = DTensor.from_local(batch(micro, rank // 2), mesh, [R] * mesh.ndim, run_check=False)
            model(x).redistribute(placements=[R] * mesh.ndim).to_local().square().sum().backward()
        for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad.placements == p.placements
            tolerance.assert_close(p.grad.full_tensor(), expected.grad, what=name)

    run(rank_main, impl, world=world)


@pytest.mark.slow
@behaviour("hybrid sharding beside tensor parallelism: (replicate, shard) and tp", area="strategies")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@for_each_implementation
@needs(MESH_DIMS, half="torch")
def test_hybrid_sharding_and_tensor_parallelism(impl: Implementation) -> None:
    """2 x 2 x 2 ranks: placements on three axes, two steps of AdamW with clipping by our function."""
    expected = train_plain(blocks(), 4, 2, 0.05 if impl is FULLSHARD else None)
    models = [blocks() for _ in range(8)]

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("re", "dp", "tp"))
        model: Any = models[rank]
        plan_tp(model, mesh["tp"], sequence=True)
        for block in model:
            impl.fully_shard(block, mesh=mesh["re", "dp"])
        impl.fully_shard(model, mesh=mesh["re", "dp"])
        placements = model[0].up.weight.placements
        assert placements[0] == R and placements[2] == Shard(0) and len(placements) == 3
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step, rank // 2)).square().mean().backward()
            if impl is FULLSHARD:
                impl.clip(model.parameters(), 0.05)
            optimizer.step()
            for name, value in collect(model, optimizer).items():
                tolerance.assert_close(value, expected[step][name], what=f"step {step} {name}")

    run(rank_main, impl, world=8)


# ---- what is refused -----------------------------------------------------------------------------------------

Case = tuple[str, type[Exception] | None, Callable[[Callable[..., Any], DeviceMesh], Any]]


def tp_linear(mesh: DeviceMesh, *placements: Any) -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
    return model


# What is refused, and with what by torch; None where torch accepts it, for the reason in the name.
REFUSED: list[Case] = [
    ("the same axis twice", RuntimeError, lambda fs, m: fs(tp_linear(m["tp"], Shard(0)), mesh=m["tp"])),
    ("an axis of another mesh", TypeError, lambda fs, m: fs(tp_linear(m["tp"], Shard(0)))),
    (
        "a partial parameter: an optimizer step on a summand means nothing",
        None,
        lambda fs, m: fs(tp_linear(m["tp"], Partial()), mesh=m["dp"]),
    ),
    ("plain", ValueError, lambda fs, m: fs(nn.Linear(2, 2), mesh=m, dp_mesh_dims=Dims("dp"))),
    (
        "not replicated",
        ValueError,
        lambda fs, m: fs(on_mesh(m, Shard(0), R), mesh=m, dp_mesh_dims=Dims("dp")),
    ),
    (
        "unknown",
        ValueError,
        lambda fs, m: fs(on_mesh(m, R, R), mesh=m, dp_mesh_dims=Dims("x")),
    ),
    ("no axis", ValueError, lambda fs, m: fs(on_mesh(m, R, R), mesh=m, dp_mesh_dims=Dims())),
    ("no mesh", ValueError, lambda fs, m: fs(on_mesh(m, R, R), dp_mesh_dims=Dims("dp"))),
    (
        "a part of it",
        ValueError,
        lambda fs, m: fs(on_mesh(m, R, R), mesh=m["dp"], dp_mesh_dims=Dims("dp")),
    ),
    (
        "shard and replicate",
        RuntimeError,
        lambda fs, m: fs(on_mesh(m, R, R), mesh=m, dp_mesh_dims=Dims("dp", "dp")),
    ),
    (
        "another order",
        KeyError,
        lambda fs, m: fs(on_mesh(m, R, R), mesh=m, dp_mesh_dims=Dims(("tp", "dp"))),
    ),
]


@behaviour("what `dp_mesh_dims` refuses, by the same type of error", area="errors")
@for_each_implementation
@needs(MESH_DIMS, half="torch")
def test_refusals(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def shard(model: nn.Module, *, dp_mesh_dims: Any = None, **options: Any) -> Any:
            if dp_mesh_dims is not None and impl is TORCH:
                dp_mesh_dims = DataParallelMeshDims(dp_mesh_dims.shard, dp_mesh_dims.replicate)
            return impl.fully_shard(model, dp_mesh_dims=dp_mesh_dims, **options)

        for what, error, attempt in REFUSED:
            if error is None and impl is TORCH:
                attempt(shard, mesh)
                continue
            with pytest.raises(error or ValueError) as raised:
                attempt(shard, mesh)
            assert type(raised.value) is (error or ValueError), what
            if impl is FULLSHARD:
                text = str(raised.value)
                assert "expected" in text and ", found " in text and ";" in text, text

    run(rank_main, impl, world=4)


@behaviour("more axes of its own than a parameter may have", area="errors", torch="equal")
def test_more_than_two_own_axes_are_refused() -> None:
    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=("dp", "a", "b", "c"))
        for impl in (TORCH, FULLSHARD):
            with pytest.raises(NotImplementedError):
                impl.fully_shard(tp_linear(mesh["a", "b", "c"], R, Shard(0), Shard(1)), mesh=mesh["dp"])

    run_ranks(4, rank_main)
