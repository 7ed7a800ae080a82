"""Integer `reshard_after_forward` (ZeRO++ hpZ): kept parts change where backward gathers from, and nothing else.

Numbers are compared bit by bit with `reshard_after_forward=True` of the same implementation, which other tests compare
with plain training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm import block_of
from fullshard.engine import unit_of
from fullshard.observe import record
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.installed import fails_before
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks
from tests.threads.test_extensions import Master

AREA = "strategies"


class Layer(nn.Module):
    """Uneven rows, a dim smaller than the world, a frozen parameter, and one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.rare = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, rare: bool = True) -> Tensor:
        x = x + torch.tanh(self.down(torch.tanh(self.up(x)))) * self.gain * self.frozen.sum()
        return x * self.rare if rare else x


class Model(nn.Module):
    """Layers whose weights are tied to nothing, one of which runs twice, then a head that is the root's."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.recompute = recompute

    def forward(self, x: Tensor, rare: bool = True) -> Tensor:
        for i in (0, 1, 0, 2):
            x = checkpoint(self.layers[i], x, rare, use_reentrant=False) if self.recompute else self.layers[i](x, rare)
        return self.head(x)


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


def build(reshard: Any, *, shard: Callable[..., Any] = fully_shard, recompute: bool = False, **options: Any) -> Any:
    """The model on the default mesh; equal on every rank."""
    model = seeded(lambda: Model(recompute))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        shard(layer, mesh=mesh, reshard_after_forward=reshard, **options)
    return shard(model, mesh=mesh, reshard_after_forward=reshard, **options)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * rank + step))


# ---- programs: each trains some steps and uses the model between them -----------------------------------------


def plain(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model(batch(rank, step), step != 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluating(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step is taken between a forward and the next: what was kept is stale."""
    for step in range(3):
        model(batch(rank, step)).sum().backward()
        with torch.no_grad():
            model(batch(rank, step))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(rank, step))
        # A forward without backward, left behind by an optimizer step on the old gradients.
    loss = model(batch(rank, 9)).sum()
    loss.backward()
    model(batch(rank, 10))
    optimizer.step()
    optimizer.zero_grad()
    model(batch(rank, 11)).square().sum().backward()
    optimizer.step()


def two_forwards(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        (model(batch(rank, step)).sum() + model(batch(rank, step + 10)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulating(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model.set_requires_gradient_sync(False)
        model(batch(rank, step)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(batch(rank, step + 10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reading_between(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """`reshard()` and `state_dict()` between forward and backward; the sharded parameters are what they return."""
    for step in range(2):
        loss = model(batch(rank, step)).sum()
        (model if step else model.layers[1]).reshard()
        values = model.state_dict()
        assert all(p.device_mesh.ndim == 1 for p in values.values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def switching(rank: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """`set_reshard_after_forward` takes the place of the integer, also between forward and backward."""
    for step, value in enumerate((True, False, True)):
        loss = model(batch(rank, step)).sum()
        model.set_reshard_after_forward(value)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = {f.__name__: f for f in (plain, evaluating, two_forwards, accumulating, reading_between, switching)}


def train(rank: int, reshard: Any, program: str, **options: Any) -> Any:
    model = build(reshard, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    PROGRAMS[program](rank, model, optimizer)
    model.reshard()
    for layer in model.layers:
        layer.reshard()
    return collect(model, optimizer)


@pytest.mark.sample(1)
@behaviour("integer `reshard_after_forward`: trains as `True`, bit by bit", area=AREA)
@for_each_implementation
@pytest.mark.parametrize("program", ["plain", "two_forwards", "accumulating", "reading_between"])
def test_numbers_are_those_of_true(program: str, impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        kept, freed = (train(rank, value, program, shard=impl.fully_shard) for value in (2, True))
        assert_same_training(kept, freed, 0.0)

    run(rank_main, impl, world=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, degree", [(4, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (6, 2), (6, 3)))]
)
def test_every_program_in_several_worlds(world: int, degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every command checked; some with recomputation, mixed precision, or columns as shards."""
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = [{}, {"recompute": True}, {"mp_policy": policy}, {"mp_policy": policy, "shard_placement_fn": columns}]

    def rank_main(rank: int) -> None:
        for i, program in enumerate(PROGRAMS):
            option = options[i % 4]
            assert_same_training(train(rank, degree, program, **option), train(rank, True, program, **option), 0.0)

    run_ranks(world, rank_main)


# ---- what stands on the modules -------------------------------------------------------------------------------


def standing(layer: nn.Module) -> set[object]:
    """Placements of a layer's parameters, or "full"."""
    return {p.placements if isinstance(p, DTensor) else "full" for p in layer.parameters()}


CANONICAL, KEPT = {(Shard(0),)}, {(Replicate(), Shard(0))}


@behaviour("integer `reshard_after_forward`: DTensors over (blocks, k) between forward and backward", area=AREA)
@for_each_implementation
@fails_before((2, 12), "FSDP2's kept parts of frozen parameters require a gradient")
def test_kept_parts_are_dtensors_on_the_mesh_of_blocks(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = build(2, shard=impl.fully_shard)
        loss = model(batch(rank, 0)).sum()
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
            assert p.placements == (Replicate(), Shard(0)) and p.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert p.requires_grad is ("frozen" not in name)
        loss.backward()
        assert all(standing(layer) == CANONICAL for layer in model.layers)
        model(batch(rank, 1))
        model.layers[0].reshard()
        assert [standing(layer) for layer in model.layers] == [CANONICAL, KEPT, KEPT]

    run(rank_main, impl, world=4)


@behaviour(
    "integer `reshard_after_forward`: kept parts have the values of the parameters, also where rows are not divisible",
    area=AREA,
    torch="better",
    reason="rows as torch.chunk cuts them over the block; torch slices the padded buffer, and full_tensor() is wrong",
)
def test_kept_parts_have_the_values_of_the_parameters(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = build(2, shard=impl.fully_shard)
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        model(batch(rank, 0))
        for name, p in model.named_parameters():
            expected = torch.chunk(whole[name], 2)
            assert torch.equal(p.to_local(), expected[rank % 2] if rank % 2 < len(expected) else whole[name][:0])
            assert torch.equal(p.full_tensor(), whole[name])

    run(rank_main, impl, world=4)


def test_a_state_dict_between_forward_and_backward_changes_nothing() -> None:
    """It holds the sharded parameters; the kept parts stand there again."""

    def rank_main(rank: int) -> None:
        model = build(2)
        before = model.state_dict()
        loss = model(batch(rank, 0)).sum()
        assert all(p is before[name] or torch.equal(p.to_local(), before[name].to_local())
                   for name, p in model.state_dict().items())  # fmt: skip
        assert {p.placements for p in model.layers[1].state_dict().values()} == CANONICAL
        assert all(standing(layer) == KEPT for layer in model.layers)
        loss.backward()

    run_ranks(4, rank_main)


@behaviour(
    "integer `reshard_after_forward`: what is on the modules after an evaluation",
    area=AREA,
    torch="different",
    reason="the sharded parameters, so that an optimizer may be built; the parts are kept aside for the next forward",
)
@for_each_implementation
def test_after_an_evaluation(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = build(2, shard=impl.fully_shard)
        with torch.no_grad():
            model(batch(rank, 0))
        assert standing(model.layers[0]) == (KEPT if impl.name == "torch" else CANONICAL)
        if impl.name == "torch":
            return
        root = unit_of(model).root
        with record(model) as trace, torch.no_grad():
            model(batch(rank, 0))
        kinds = {kind for kind, _ in trace.commands}
        assert "unshard_secondary" in kinds and "unshard" not in kinds, (
            "the next evaluation gathers from the block alone"
        )
        assert all(u.channels.secondary.parts[0].memory.live_nbytes for u in root.units)

    run(rank_main, impl, world=4)


def test_a_part_is_there_only_while_it_is_kept() -> None:
    """From `reshard_secondary` to the end of the all-gather over the block; bytes of the compute dtype."""

    def rank_main(rank: int) -> None:
        model = build(2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        unit = unit_of(model.layers[1])

        def kept_nbytes() -> int:
            return sum(part.memory.live_nbytes for part in unit.channels.secondary.parts)

        loss = model(batch(rank, 0)).float().sum()
        assert unit.groups[0].memory.live_nbytes == 0
        assert kept_nbytes() == unit.channels.secondary.parts[0].pack.padded_local_numel * 2
        assert {p.dtype for p in model.layers[1].parameters()} == {torch.bfloat16}
        at: dict[str, int] = {}
        unit.root.executor.listeners.append(
            lambda command: at.setdefault(command.kind, kept_nbytes()) if command.unit is unit.record else None
        )
        loss.backward()
        assert (
            at["wait"] == unit.channels.secondary.parts[0].pack.padded_local_numel * 2
            and at["reshard"] == 0
            and kept_nbytes() == 0
        )

    run_ranks(4, rank_main)


def test_kept_parts_whose_gather_was_given_up_have_no_memory() -> None:
    def rank_main(rank: int) -> None:
        model = build(2)
        units = [unit_of(layer) for layer in model.layers]
        dropped: list[str] = []
        model.layers[1].register_forward_hook(lambda m, a, out: out.register_hook(lambda grad: 1 / 0) and None)
        loss = model(batch(rank, 0)).sum()
        units[1].root.executor.listeners.append(
            lambda command: dropped.append(command.unit.name) if command.kind == "cancel" else None
        )
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model.reset_iter_state()
        assert dropped and all(unit.channels.secondary.live_nbytes == 0 for unit in units)

    run_ranks(4, rank_main)


# ---- arguments and groups -------------------------------------------------------------------------------------


@behaviour("integer `reshard_after_forward`: ValueError for no factor of the ranks; all of them are `True`", area=AREA)
@for_each_implementation
def test_degrees(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        for degree in (3, 8, 0, -2):
            with pytest.raises(ValueError, match=f"should be a factor of 4.*not {degree}"):
                impl.fully_shard(seeded(lambda: nn.Linear(4, 4)), reshard_after_forward=degree)
        all_of_them = impl.fully_shard(seeded(lambda: nn.Linear(4, 4)), reshard_after_forward=4)
        alone = impl.fully_shard(seeded(lambda: nn.Linear(4, 4)), reshard_after_forward=1)
        all_of_them(torch.ones(1, 4)), alone(torch.ones(1, 4))
        assert standing(all_of_them) == CANONICAL and standing(alone) == {"full"}

    run(rank_main, impl, world=4)


@pytest.mark.threads_only(reason="a fork's log is not this process's")
def test_a_degree_of_one_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A log record as torch's, not a Python warning: programs that make those errors go on."""
    with caplog.at_level(logging.WARNING):
        run_ranks(2, lambda rank: fully_shard(nn.Linear(2, 2), reshard_after_forward=1))
    assert "reshard_after_forward=1 keeps the full parameters" in caplog.text


def test_groups_are_made_once_for_a_mesh_and_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each rank, whatever the number of units; FSDP2 makes them for each module."""
    calls: list[int] = []
    real = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(dist.get_rank())
        return real(*args, **kwargs)

    monkeypatch.setattr(dist, "new_group", counting)

    def rank_main(rank: int) -> int:
        before = calls.count(rank)
        model, other = build(2), build(2)
        meshes = {id(link.block.mesh) for m in (model, other) for u in m.layers for link in unit_of(u).links}
        assert len(meshes) == 1
        return calls.count(rank) - before

    # In a new world the groups of the old one are gone.
    for _ in range(2):
        assert run_ranks(4, rank_main) == [2] * 4


def test_blocks_of_a_mesh_over_some_ranks() -> None:
    """A pipeline stage, and an axis that replicates: consecutive ranks of the axis that shards."""

    def rank_main(rank: int) -> list[list[int]]:
        everyone = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "shard"))
        stage = block_of(everyone["shard"], 2, torch.device("cpu"))
        hybrid = block_of(everyone, 2, torch.device("cpu"))
        assert hybrid.group.world == stage.group.world == 2 and hybrid.group.rank == stage.group.rank == rank % 2
        assert hybrid.mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        total = torch.tensor([float(rank)])
        stage.group.all_reduce(total).wait()
        assert total.item() == 2 * (rank // 2 * 2) + 1
        return stage.mesh.mesh.tolist()

    results = run_ranks(8, rank_main)
    assert results[0] == [[0, 1], [2, 3]] and results[7] == [[4, 5], [6, 7]]


@behaviour(
    "integer `reshard_after_forward`: NotImplementedError for DTensors of tensor parallelism",
    area=AREA,
    torch="different",
    reason="refused by the call; torch refuses in the first forward",
)
@for_each_implementation
def test_tensor_parallel_parameters_are_refused(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh["tp"], [Shard(0)]))
        if impl.name == "torch":
            impl.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=2)
        with pytest.raises(NotImplementedError):
            if impl.name == "torch":
                layer(DTensor.from_local(torch.ones(1, 4), mesh["tp"], [Replicate()]))
            else:
                impl.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=2)

    run(rank_main, impl, world=4)


@behaviour(
    "integer `reshard_after_forward`: NotImplementedError with `dp_mesh_dims`, and with fsdp_pre_all_gather",
    area="strategies",
    torch="different",
    reason="refused by the call; torch accepts it and fails in the first step",
)
def test_what_is_not_kept_in_parts_is_refused() -> None:
    def rank_main(rank: int) -> None:
        layer: Any = nn.Linear(3, 4, bias=False)
        layer.weight = nn.Parameter(Master(torch.ones(4, 3)))
        with pytest.raises(NotImplementedError, match="weight is a Master with fsdp_pre_all_gather; use True or False"):
            fully_shard(layer, reshard_after_forward=2)
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        plain: Any = nn.Linear(4, 4, bias=False)
        plain.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, [Replicate(), Shard(0)]))
        dims = fullshard.DataParallelMeshDims(shard="dp")
        with pytest.raises(NotImplementedError, match="found dp_mesh_dims; use True or False"):
            fully_shard(plain, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)

    run_ranks(4, rank_main)
