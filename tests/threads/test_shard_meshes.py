"""`shard_placement_fn` with a mesh per parameter: experts on fewer ranks than the rest of their unit.

What is trained, over which ranks, and the oracle are in `tests.harness.experts`.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import ShardPlacementResult, clip_grad_norm_, fully_shard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.experts import WORLD, Oracle, batch, is_expert, loss, meshes, model_of, sharded
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.installed import PLACEMENT_RESULT, needs
from tests.harness.installed import TorchPlacementResult as TorchResult
from tests.harness.models import adamw, full_copy
from tests.harness.parity import environment
from tests.harness.threads import run_ranks

# ---- both implementations ------------------------------------------------------------------------------------


@behaviour("a mesh per parameter: experts average over their own ranks", area="placement")
@for_each_implementation
@needs(PLACEMENT_RESULT, half="torch")
def test_experts_average_over_their_own_mesh(impl: Implementation) -> None:
    oracle = Oracle()
    gradients = oracle.gradients(0)

    def rank_main(rank: int, impl: Implementation) -> None:
        world, both = meshes()
        info = FSDPMeshInfo(both["expert"], shard_mesh_dim=0)
        model = sharded(impl, model_of(rank // 2), world, lambda s: TorchResult(s, info), dim=1)
        plain = model_of(rank // 2)
        for name, p in model.named_parameters():
            expert = is_expert(name)
            assert p.device_mesh == (both["expert"] if expert else world), name
            assert p.placements == (Shard(1 if expert else p.ndim - 1),), name
            assert torch.equal(p.full_tensor(), plain.get_parameter(name)), name
        loss(model, batch(0, rank)).backward()
        for name, p in model.named_parameters():
            assert p.grad.device_mesh == p.device_mesh and p.grad.placements == p.placements
            tolerance.assert_close(p.grad.full_tensor(), gradients[rank // 2][name], what=name)

    run(rank_main, impl, world=WORLD)


class Routed(nn.Module):
    """Experts as DTensors on their own axis, of which a rank has some; a gate that all share."""

    def __init__(self, expert: DeviceMesh) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.gate.weight.data = torch.arange(16.0).view(4, 4) / 16
        self.up = nn.Parameter(distribute_tensor(torch.arange(64.0).view(4, 4, 4) / 64, expert, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,eio->no", self.gate(x), self.up.to_local()).clone()


@behaviour("experts that are DTensors of an expert axis", area="placement")
@for_each_implementation
@needs(PLACEMENT_RESULT, half="torch")
def test_experts_that_are_dtensors_of_an_expert_axis(impl: Implementation) -> None:
    """As trainers do it: experts cut over `expert`, then sharded over `outer` along another dim; the rest over both."""

    def rank_main(rank: int, impl: Implementation) -> None:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "expert"))
        world = both._flatten("world")
        info = FSDPMeshInfo(both["outer"], shard_mesh_dim=0)
        model: Any = Routed(both["expert"])
        up = model.up
        impl.fully_shard(
            model, mesh=world, shard_placement_fn=lambda p: TorchResult(Shard(1), info) if p is up else None
        )
        assert model.up.placements == (Shard(1), Shard(0)) and model.up.device_mesh.ndim == 2
        assert torch.equal(model.up.full_tensor(), torch.arange(64.0).view(4, 4, 4) / 64)
        x = torch.full((1, 4), float(rank + 1))
        model(x).sum().backward()
        # A rank's experts see its own rows and those of the other rank of `outer`: ranks 0 and 2, or 1 and 3.
        gate = torch.arange(16.0).view(4, 4) / 16
        for expert in range(4):
            peers = (1, 3) if expert < 2 else (2, 4)
            want = (
                sum(((torch.full((1, 4), float(i)) @ gate.t()).t().expand(4, 4) for i in peers), torch.zeros(4, 4)) / 2
            )
            assert tolerance.close(model.up.grad.full_tensor()[expert], want)
        assert model.gate.weight.grad.placements == (Shard(0),)
        if impl.name == "fullshard":
            # Both meshes cover all ranks, so each part counts once.
            every = [p.grad.full_tensor() for p in model.parameters()]
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in every]))
            assert tolerance.close(impl.clip(model.parameters(), 1.0), norm)

    run(rank_main, impl, world=WORLD)


@behaviour("parameters of one process group have one mesh", area="placement")
@for_each_implementation
@needs(PLACEMENT_RESULT, half="torch")
def test_one_process_group_one_mesh(impl: Implementation) -> None:
    """Two mesh objects over one process group would part what travels together."""

    def rank_main(rank: int, impl: Implementation) -> None:
        world, both = meshes()
        other = DeviceMesh.from_group(both["expert"].get_group(), "cpu", mesh_dim_names=("other",))
        infos = [FSDPMeshInfo(both["expert"], 0), FSDPMeshInfo(other, 0)]
        model: Any = model_of(0)[0]
        down = model.down
        with pytest.raises(ValueError):
            impl.fully_shard(
                model, mesh=world, shard_placement_fn=lambda p: TorchResult(Shard(0), infos[int(p is down)])
            )

    run(rank_main, impl, world=WORLD)


# ---- ours ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@behaviour(
    "experts train, clip and save as plain models",
    area="placement",
    torch="none",
    reason="run for fullshard alone, against plain models",
)
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_train_clip_and_save(recompute: bool) -> None:
    """Uneven sizes, our own spelling, one norm for all ranks; parameters and AdamW state against plain training."""
    width, steps, max_norm = 5, 3, 0.05
    oracle = Oracle(width, experts=3)
    norms = []
    for step in range(steps):
        norms.append(oracle.step(step, max_norm))

    def rank_main(rank: int) -> None:
        world, both = meshes()
        plain = model_of(rank // 2, width, 3)
        for layer in list(plain.children())[:-1]:
            layer.recompute = recompute
        # Along the experts themselves, of which three go to two ranks.
        model = sharded(fullshard, plain, world, lambda s: ShardPlacementResult(s, both["expert"]), dim=0)
        optimizer = adamw(model.parameters())
        for step in range(steps):
            loss(model, batch(step, rank, width)).backward()
            norm = clip_grad_norm_(model.parameters(), max_norm)
            expected = norms[step]
            assert expected is not None and tolerance.close(norm.double(), expected, dtype=torch.float32), (
                norm,
                expected,
            )
            optimizer.step()
            optimizer.zero_grad()
        oracle.check(model, optimizer, rank // 2, 64)
        # A mesh is no part of what is pickled.
        assert pickle.loads(pickle.dumps(vars(model[0].up)))["_fullshard_norm_mesh"] is None
        # What is loaded is scaled as before.
        again = sharded(
            fullshard, model_of(0, width, 3), world, lambda s: ShardPlacementResult(s, both["expert"]), dim=0
        )
        again.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        again.to_empty(device="cpu")
        again.load_state_dict(model.state_dict())
        for net in (model, again):
            loss(net, batch(9, rank, width)).backward()
        one, two = clip_grad_norm_(model.parameters(), 1e9), clip_grad_norm_(again.parameters(), 1e9)
        assert torch.equal(one, two)
        for p in (float("inf"), 1.0):
            assert torch.equal(clip_grad_norm_(model.parameters(), 1e9, p), clip_grad_norm_(again.parameters(), 1e9, p))

    run_ranks(WORLD, rank_main)


@pytest.mark.parametrize("p", [1.0, 3.0, float("inf")])
def test_norms_of_any_order(p: float) -> None:
    oracle = Oracle()
    expected = oracle.norm(oracle.gradients(0), p)

    def rank_main(rank: int) -> Tensor:
        world, both = meshes()
        model = sharded(fullshard, model_of(rank // 2), world, lambda s: ShardPlacementResult(s, both["expert"]), dim=2)
        loss(model, batch(0, rank)).backward()
        return clip_grad_norm_(model.parameters(), 1e9, p)

    for norm in run_ranks(WORLD, rank_main):
        assert tolerance.close(norm.double(), expected, dtype=torch.float32), (norm, expected)


@behaviour("a mesh per parameter: one that replicates beside one that does not", area="placement")
@for_each_implementation
@pytest.mark.parametrize("unit_replicates", [True, False])
@needs(PLACEMENT_RESULT, half="torch")
def test_meshes_that_replicate(impl: Implementation, unit_replicates: bool) -> None:
    """The unit on (replicate, shard) and its experts on `shard` alone, or the other way round. Both cut over the same
    process group, and are averaged over other ranks."""
    gradients = Oracle().gradients(0)

    def rank_main(rank: int, impl: Implementation) -> None:
        world, both = meshes()
        pair = rank // 2 if unit_replicates else 0
        mesh = both if unit_replicates else world
        info = (
            FSDPMeshInfo(both["expert"], shard_mesh_dim=0)
            if unit_replicates
            else HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
        )
        model = sharded(impl, model_of(pair), mesh, lambda s: TorchResult(s, info), dim=1)
        plain = model_of(pair)
        for name, p in model.named_parameters():
            replicated = is_expert(name) != unit_replicates
            assert p.placements[:-1] == ((Replicate(),) if replicated else ()), name
            assert torch.equal(p.full_tensor(), plain.get_parameter(name)), name
        loss(model, batch(0, rank)).backward()
        want = gradients[pair] if unit_replicates else _mean_of_ranks(0)
        for name, p in model.named_parameters():
            tolerance.assert_close(p.grad.full_tensor(), want[name], what=name)
        if impl.name == "fullshard":
            powers = [
                g.double().pow(2).sum() for i in range(2) for n, g in gradients[i].items() if i == 0 or is_expert(n)
            ]
            if not unit_replicates:
                powers = [g.double().pow(2).sum() for g in want.values()]
            norm = impl.clip(model.parameters(), 1.0)
            assert tolerance.close(norm.double(), sum(powers, torch.zeros(())).sqrt(), dtype=torch.float32)

    run(rank_main, impl, world=WORLD)


def _mean_of_ranks(pair: int) -> dict[str, Tensor]:
    """The gradients of one model over the batches of all ranks."""
    model = model_of(pair)
    torch.stack([loss(model, batch(0, rank)) for rank in range(WORLD)]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@behaviour(
    "clipping where parameters are on several meshes: one norm on all ranks, each expert counted once",
    area="clipping",
    torch="better",
    reason="torch's `clip_grad_norm_` refuses gradients of several meshes",
)
@needs(PLACEMENT_RESULT, half="torch")
def test_copies_of_experts_count_once(impl: Implementation) -> None:
    """Eight ranks, experts on (copies, expert) of four: each is on two ranks of its four, and there are two of each."""

    def rank_main(rank: int, impl: Implementation) -> list[Tensor]:
        three = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "copies", "expert"))
        world = init_device_mesh("cpu", (8,))
        own = HSDPMeshInfo(three["copies", "expert"], shard_mesh_dim=1, replicate_mesh_dim=0)
        model = sharded(impl, model_of(rank // 4), world, lambda s: TorchResult(s, own), dim=1)
        loss(model, batch(0, rank)).backward()
        norms = [impl.clip(model.parameters(), 1e9, p) for p in (2.0, float("inf"))]
        return [*norms, *(p.grad.full_tensor() for name, p in model.named_parameters())]

    results = run(rank_main, impl, world=8)
    names = [name for name, _ in model_of(0).named_parameters()]
    every = [g for i in (0, 4) for n, g in zip(names, results[i][2:], strict=True) if i == 0 or is_expert(n)]
    for two, greatest, *_ in results:
        assert tolerance.close(two, torch.cat([g.flatten() for g in every]).norm())
        assert greatest == max(g.abs().max() for g in every)


def test_experts_that_no_other_rank_has() -> None:
    """A mesh of one rank each: nothing of them travels, and all of them count in the norm."""

    def rank_main(rank: int) -> Tensor:
        world = init_device_mesh("cpu", (WORLD,))
        alone = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("outer", "alone"))["alone"]
        plain, model = model_of(rank), model_of(rank)
        sharded(fullshard, model, world, lambda s: ShardPlacementResult(s, alone), dim=1)
        loss(plain, batch(0, rank)).backward()
        loss(model, batch(0, rank)).backward()
        for name, p in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert isinstance(grad, DTensor)
            if is_expert(name):
                assert torch.equal(grad.to_local(), p.grad), name
        return clip_grad_norm_(model.parameters(), 1.0)

    norms = run_ranks(WORLD, rank_main)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@needs(PLACEMENT_RESULT, half="torch")
def test_accumulation_and_a_step_that_raised() -> None:
    """What travels in two groups is held, sent and thrown away together."""

    def rank_main(rank: int, disturbed: bool) -> list[Tensor]:
        world, both = meshes()
        model = sharded(fullshard, model_of(rank // 2), world, lambda s: ShardPlacementResult(s, both["expert"]), dim=1)
        optimizer = adamw(model.parameters())
        for step in range(3):
            if disturbed and step == 1:
                with pytest.raises(ZeroDivisionError):
                    _raise_in_backward(model, batch(77, rank))
            model.set_requires_gradient_sync(False)
            loss(model, batch(step, rank)).backward()
            model.set_requires_gradient_sync(True)
            loss(model, batch(step + 10, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [full_copy(p) for p in model.parameters()]

    with environment({"FULLSHARD_CHECK": "1"}):
        expected, found = (run_ranks(WORLD, rank_main, disturbed) for disturbed in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _raise_in_backward(model: nn.Module, x: Tensor) -> None:
    """Half of the units have sent their gradients by then."""

    def fail(_gradient: Tensor) -> None:
        raise ZeroDivisionError

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = next(model.children()).register_forward_hook(hook)
    try:
        loss(model, x).backward()
    finally:
        handle.remove()


def _bad_results(world: DeviceMesh, both: DeviceMesh) -> dict[str, tuple[Any, str]]:
    return {
        "no mesh": (ShardPlacementResult(Shard(0), "expert"), "DeviceMesh"),  # type: ignore[arg-type]
        "axes the other way round": (TorchResult(Shard(0), HSDPMeshInfo(both, 0, 1)), "slice the mesh"),
        "two axes without names": (
            TorchResult(Shard(0), FSDPMeshInfo(init_device_mesh("cpu", (2, 2)), shard_mesh_dim=0)),
            "named",
        ),
    }


@needs(PLACEMENT_RESULT)
def test_meshes_that_cannot_be_used_are_refused() -> None:
    def rank_main(rank: int) -> None:
        world, both = meshes()
        elsewhere = DeviceMesh("cpu", [0, 1])
        cases = _bad_results(world, both)
        if rank > 1:
            cases["a mesh of other ranks"] = (ShardPlacementResult(Shard(0), elsewhere), "this rank")
        for what, (result, words) in cases.items():
            model = nn.Linear(4, 4, bias=False)
            with pytest.raises(ValueError, match=words):
                fully_shard(model, mesh=world, shard_placement_fn=lambda p, result=result: result)
            assert type(model) is nn.Linear, what

    run_ranks(WORLD, rank_main)


@behaviour(
    "a mesh per parameter: one axis of a mesh, as a well-formed DTensor",
    area="placement",
    torch="better",
    reason="one placement on a mesh of two axes, a DTensor that cannot be used",
)
@needs(PLACEMENT_RESULT)
def test_one_axis_of_a_mesh_is_that_axis(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        world, both = meshes()
        model: Any = nn.Linear(4, 4, bias=False)
        info = FSDPMeshInfo(both, shard_mesh_dim=1)
        impl.fully_shard(model, mesh=world, shard_placement_fn=lambda p: TorchResult(None, info))
        assert model.weight.device_mesh == both["expert"] and model.weight.placements == (Shard(0),)
        assert model.weight.full_tensor().shape == (4, 4)

    run(rank_main, impl, world=WORLD)
