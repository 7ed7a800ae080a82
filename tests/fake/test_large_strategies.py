"""Layout and order of commands at 64 and 1,000 ranks, of every strategy: kept parts, replicas, meshes of several axes,
a mesh per parameter, mixed precision, offload. What is expected is that of two or four ranks, and `torch.chunk`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    report,
)
from fullshard.comm import ShardGroup
from fullshard.engine import unit_of
from fullshard.observe import record
from tests.harness import experts
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.models import BY_NAME, Case
from tests.harness.moved import links, moved

assert moved  # a fixture
SOME = [BY_NAME[name] for name in ("tiny_dims", "transformer", "frozen")]


@dataclass(frozen=True)
class Strategy:
    """How a model is sharded on a mesh (replicate, shard), or (shard,)."""

    name: str
    # The shape of the mesh and the rank, of a small world and of large ones.
    small: tuple[tuple[int, ...], int]
    large: tuple[tuple[tuple[int, ...], int], ...]
    options: Callable[[tuple[int, ...]], dict[str, Any]] = lambda shape: {}


PLACES = (((64,), 0), ((64,), 31), ((1000,), 499), ((1000,), 999))
REPLICATED = (((8, 8), 37), ((125, 8), 999), ((8, 125), 499))
STRATEGIES = (
    Strategy("ZeRO-2", ((2,), 0), PLACES, lambda shape: {"reshard_after_forward": False}),
    Strategy("all freed", ((2,), 0), PLACES, lambda shape: {"reshard_after_forward": True}),
    # Blocks of 2, of 8 and of 8.
    Strategy("kept parts", ((4,), 0), PLACES, lambda shape: {"reshard_after_forward": min(8, shape[-1] // 2)}),
    Strategy("HSDP", ((2, 2), 0), REPLICATED),
    Strategy(
        "HSDP with kept parts",
        ((2, 4), 0),
        (((8, 8), 37), ((125, 8), 999), ((10, 100), 499)),
        lambda shape: {"reshard_after_forward": shape[1] // 2},
    ),
    Strategy("replicas alone", ((2, 1), 0), (((64, 1), 31), ((1000, 1), 999))),
    Strategy(
        "mixed precision",
        ((2,), 0),
        PLACES,
        lambda shape: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
    Strategy("offload", ((2,), 0), PLACES, lambda shape: {"offload_policy": CPUOffloadPolicy()}),
    Strategy("HSDP with offload", ((2, 2), 0), REPLICATED, lambda shape: {"offload_policy": CPUOffloadPolicy()}),
)


def _commands(case: Case, strategy: Strategy, shape: tuple[int, ...], rank: int) -> list[Any]:
    """Of three steps, the last without messages, and of an evaluation; and for how many copies between host and device
    each unit has asked. Shards are compared with `torch.chunk`."""
    plain = case.build()
    with fake_world(torch.Size(shape).numel(), rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model: Any = case.shard(case.build(), fully_shard, mesh=mesh, **strategy.options(shape))
        _assert_chunks(model, plain, shape, rank)
        commands = []
        for step in range(3):
            model.set_requires_gradient_sync(step < 2)
            with record(model) as trace:
                case.loss(_Float32(model), case.batch(step)).backward()
            commands.append(trace.commands)
            if step < 2:
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        assert p.grad.placements == p.placements and p.grad.to_local().shape == p.to_local().shape, name
                model.zero_grad()
        with record(model) as trace, torch.no_grad():
            case.loss(_Float32(model), case.batch(3))
        # What the user keeps full stays so in an evaluation too.
        live = any(info.full_nbytes_live for info in report(model).units if info.name)
        assert live == (strategy.options(shape).get("reshard_after_forward") is False)
        return [*commands, trace.commands, [(link.uploads, link.downloads) for link in links(model)]]


class _Float32(nn.Module):
    """Outputs in float32, as the loss wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).float()


def _assert_chunks(model: nn.Module, plain: nn.Module, shape: tuple[int, ...], rank: int) -> None:
    place = rank % shape[-1]
    for (name, ours), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        chunks = torch.chunk(whole.detach(), shape[-1])
        assert isinstance(ours, DTensor) and ours.placements == (*[Replicate()] * (len(shape) - 1), Shard(0)), name
        assert torch.equal(ours.to_local(), chunks[place] if place < len(chunks) else whole.detach()[:0]), name


@pytest.mark.sample(1)
@behaviour(
    "{strategy.name} at 64 and 1,000 ranks: shards of `torch.chunk`, commands in the order of a few ranks",
    area="strategies",
    torch="none",
    reason="run for fullshard alone; small worlds are compared",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_order_of_commands(strategy: Strategy, moved: None) -> None:
    for case in SOME:
        expected = _commands(case, strategy, *strategy.small)
        kinds = {kind for kind, _ in expected[1]}
        assert {"unshard", "wait", "reshard", "reduce", "finish"} <= kinds
        assert {"reshard_secondary", "unshard_secondary"} <= kinds or "kept" not in strategy.name
        assert bool(expected[-1]) == ("offload" in strategy.name)
        for shape, rank in strategy.large:
            assert _commands(case, strategy, shape, rank) == expected, f"{case.name}: rank {rank} of {shape}"


# ---- kept parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rank", "degree"),
    [((64,), 37, 8), ((1000,), 999, 8), ((1000,), 499, 250), ((8, 8), 37, 4), ((125, 8), 998, 2)],
    ids=str,
)
def test_kept_parts_are_chunks_of_a_block(shape: tuple[int, ...], rank: int, degree: int) -> None:
    """Between forward and backward: rows of this rank's place among k neighbours, on the mesh of blocks. Backward
    gathers `degree` parts of the compute dtype, over the block."""
    case = BY_NAME["transformer"]
    plain = case.build()
    world = torch.Size(shape).numel()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sent: list[tuple[int, int, int]] = []
    original = ShardGroup.gather_into

    def note(group: ShardGroup, out: torch.Tensor, piece: torch.Tensor) -> Any:
        sent.append((group.world, out.nbytes, piece.nbytes))
        return original(group, out, piece)

    with fake_world(world, rank), pytest.MonkeyPatch.context() as patch:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model: Any = case.shard(case.build(), fully_shard, mesh=mesh, reshard_after_forward=degree, mp_policy=policy)
        loss = case.loss(_Float32(model), case.batch(0))
        place = rank % degree
        for name, p in model.named_parameters():
            chunks = torch.chunk(plain.get_parameter(name), degree)
            rows = chunks[place].shape[0] if place < len(chunks) else 0
            assert p.placements == (Replicate(), Shard(0)) and p.dtype is torch.bfloat16, name
            assert p.to_local().shape == (rows, *p.shape[1:]) and p.shape == plain.get_parameter(name).shape
            blocks = p.device_mesh.mesh
            assert blocks.shape == (world // degree, degree)
            assert blocks[rank // degree].tolist() == [rank - place + i for i in range(degree)]
        patch.setattr(ShardGroup, "gather_into", note)
        loss.backward()
    expected = []
    for unit in ("", *reversed(case.units)):
        shares = []
        for name, whole in plain.named_parameters():
            if name.startswith(unit + ".") if unit else not name.startswith("layers."):
                rows = -(-whole.shape[0] // degree)
                shares.append(-(-rows * (whole.numel() // whole.shape[0]) // 8) * 8)  # aligned to 16 bytes
        expected.append((degree, 2 * degree * sum(shares), 2 * sum(shares)))
    assert sent == expected


# ---- parameters that are DTensors on a mesh of all axes --------------------------------------------------------


def _on_full_mesh(axes: dict[str, int], rank: int, dims: dict[str, Any]) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Commands of two steps of two layers cut along the axis `tp`; (placements, local shape) of each parameter."""
    with fake_world(torch.Size(tuple(axes.values())).numel(), rank):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        replicated = [Replicate()] * (mesh.ndim - 1)
        model: Any = nn.Sequential(nn.Linear(48, 40, bias=False), nn.Linear(40, 24, bias=False))
        for layer, cut in zip(model, (Shard(0), Shard(1)), strict=True):
            whole = layer.weight.detach()
            part = whole.chunk(axes["tp"], dim=cut.dim)[mesh.get_local_rank("tp")].contiguous()
            layer.weight = nn.Parameter(DTensor.from_local(part, mesh, [*replicated, cut], run_check=False))
        given: Any = DataParallelMeshDims(**dims)
        fully_shard(model[0], mesh=mesh, dp_mesh_dims=given)
        fully_shard(model, mesh=mesh, dp_mesh_dims=given)
        found = {name: (p.placements, tuple(p.to_local().shape)) for name, p in model.named_parameters()}
        commands = []
        for _ in range(2):
            x = DTensor.from_local(torch.ones(2, 48), mesh, [Replicate()] * mesh.ndim, run_check=False)
            with record(model) as trace:
                model(x).redistribute(placements=[Replicate()] * mesh.ndim).to_local().sum().backward()
            commands.append(trace.commands)
            for p in model.parameters():
                assert p.grad.placements == p.placements and p.grad.to_local().shape == p.to_local().shape
            model.zero_grad()
        return commands, found


@pytest.mark.sample(2)
@behaviour(
    "`dp_mesh_dims` at 64 and 1,000 ranks: shards of the data-parallel axes, commands in the order of a few ranks",
    area="placement",
    torch="none",
    reason="run for fullshard alone; small worlds are compared",
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("small", "large", "rank", "dims"),
    [
        ({"dp": 2, "tp": 2}, {"dp": 32, "tp": 2}, 37, {"shard": "dp"}),
        ({"dp": 2, "tp": 2}, {"dp": 125, "tp": 8}, 999, {"shard": "dp"}),
        ({"re": 2, "dp": 2, "tp": 2}, {"re": 25, "dp": 5, "tp": 8}, 123, {"replicate": "re", "shard": "dp"}),
        ({"a": 2, "b": 2, "tp": 2}, {"a": 4, "b": 8, "tp": 2}, 63, {"shard": ("a", "b")}),
        ({"re": 2, "tp": 2}, {"re": 500, "tp": 2}, 501, {"replicate": "re"}),
    ],
    ids=str,
)
def test_full_meshes(small: dict[str, int], large: dict[str, int], rank: int, dims: dict[str, Any]) -> None:
    expected, placements = _on_full_mesh(small, 0, dims)
    commands, found = _on_full_mesh(large, rank, dims)
    assert commands == expected
    sharing = dims.get("shard", ())
    sharing = (sharing,) if isinstance(sharing, str) else sharing
    ranks, place = 1, 0
    strides = torch.empty(tuple(large.values()), device="meta").stride()
    for (name, size), stride in zip(large.items(), strides, strict=True):
        if name in sharing:
            ranks, place = ranks * size, place * size + rank // stride % size
    for (name, rows, columns), cut in (((("0.weight"), 40, 48), 0), ((("1.weight"), 24, 40), 1)):
        own = [rows, columns]
        own[cut] //= large["tp"]
        chunk = -(-own[0] // ranks)
        own[0] = max(0, min(chunk, own[0] - place * chunk))
        assert found[name][1] == tuple(own), name
        assert [type(p) for p in found[name][0]] == [type(p) for p in placements[name][0]], name


# ---- a mesh per parameter --------------------------------------------------------------------------------------


def _with_experts(outer: int, inner: int, rank: int) -> list[Any]:
    with fake_world(outer * inner, rank):
        world = init_device_mesh("cpu", (outer * inner,))
        both = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "expert"))
        model: Any = experts.model_of(0, 6, experts=3)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}

        def place(p: nn.Parameter) -> Any:
            expert = any(p is q for name, q in model.named_parameters() if experts.is_expert(name))
            return ShardPlacementResult(Shard(1), both["expert"]) if expert else None

        for layer in (*list(model.children())[:-1], model):
            fully_shard(layer, mesh=world, shard_placement_fn=place)
        for name, p in model.named_parameters():
            expert = experts.is_expert(name)
            dim, ranks, at = (1, inner, rank % inner) if expert else (0, outer * inner, rank)
            chunks = whole[name].chunk(ranks, dim)
            assert p.placements == (Shard(dim),) and p.device_mesh == (both["expert"] if expert else world), name
            assert p.to_local().numel() == (chunks[at].numel() if at < len(chunks) else 0), name
        commands = []
        for step in range(2):
            with record(model) as trace:
                experts.loss(model, experts.batch(step, 0, 6)).backward()
            commands.append(trace.commands)
            assert all(p.grad.placements == p.placements for p in model.parameters())
            model.zero_grad()
        unit = unit_of(model[0])
        assert unit is not None and sorted(g.placing.world for g in unit.groups) == [inner, outer * inner]
        return commands


@behaviour(
    "a mesh per parameter at 64 and 1,000 ranks: shards of each mesh, commands in the order of a few ranks",
    area="placement",
    torch="none",
    reason="run for fullshard alone; small worlds are compared",
)
def test_a_mesh_per_parameter() -> None:
    expected = _with_experts(2, 2, 0)
    for outer, inner, rank in ((8, 8, 0), (8, 8, 37), (125, 8, 999), (8, 125, 499)):
        assert _with_experts(outer, inner, rank) == expected, f"rank {rank} of {outer} x {inner}"
