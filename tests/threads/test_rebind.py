"""`rebind_optimizer`: an optimizer, and what it learned, go from the whole parameters to their shards."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from fullshard import checkpoint
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import WORLD, run_ranks

BEFORE, AFTER = 2, 3
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW, loop": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
}


class Tied(nn.Module):
    """Uneven dims, one smaller than most worlds, a tied weight, a frozen one, one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.scale = nn.Parameter(torch.empty(1))
        self.unused = nn.Parameter(torch.empty(3))
        self.reset_parameters()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.inner[0].bias.requires_grad_(False)

    def reset_parameters(self) -> None:
        for parameter in (self.scale, self.unused):
            nn.init.ones_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(tokens)) * self.scale)


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _built(kind: str) -> tuple[Tied, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = seeded(Tied)
    params = dict(model.named_parameters())
    decayed = [p for name, p in params.items() if p.ndim > 1]
    others = [p for name, p in params.items() if p.ndim < 2]
    cls, options = KINDS[kind]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "note": "small"}]
    optimizer = cls(groups, **copy.deepcopy(options))  # type: ignore[call-arg]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


def _train(model: Any, optimizer: Any, schedule: Any, steps: range, ranks: range) -> None:
    for step in steps:
        for rank in ranks:
            (_loss(model, _batch(step, rank)) / len(ranks)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _shard(model: Any, way: str) -> None:
    options: dict[str, Any] = {}
    if way == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    elif way == "replicas":
        world = torch.distributed.get_world_size()
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif way == "offload":
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=False)
    fullshard.fully_shard(model.inner, **options)
    fullshard.fully_shard(model, **options)


def _goes_on(rank: int, world: int, kind: str, way: str) -> None:
    model, optimizer, schedule = _built(kind)
    everyone = range(world)
    _train(model, optimizer, schedule, range(BEFORE), everyone)
    plain, whole, its_schedule = _built(kind)
    _train(plain, tolerance.watch(whole), its_schedule, range(BEFORE + AFTER), everyone)
    lists, order = [group["params"] for group in optimizer.param_groups], list(optimizer.state.values())
    old = weakref.ref(model.inner[2].weight)
    _shard(model, way)
    if way == "between":  # full parameters are on the modules
        _loss(model, _batch(0, rank)).backward()
        model.zero_grad()
        _loss(model, _batch(0, rank))
    assert fullshard.rebind_optimizer(optimizer, model) is optimizer
    del order
    assert old() is None, "nothing whole is left"
    assert all(group["params"] is before for group, before in zip(optimizer.param_groups, lists, strict=True))
    for parameter, entries in optimizer.state.items():
        assert isinstance(parameter, DTensor)
        for name, value in entries.items():
            if isinstance(value, DTensor):
                assert value.placements == parameter.placements and value.shape == parameter.shape
                local = value.to_local()
                assert local.untyped_storage().nbytes() == local.nbytes, "a view would hold the whole tensor"
            else:
                assert name in ("step", "mu_product") and value.numel() == 1 or value is None
    again = [list(group["params"]) for group in optimizer.param_groups]
    fullshard.rebind_optimizer(optimizer, model)
    assert all(
        p is q for g, h in zip(optimizer.param_groups, again, strict=True) for p, q in zip(g["params"], h, strict=True)
    )
    if way == "on shards":
        with pytest.raises(ValueError, match="call step_on_shards before the schedule is built"):
            fullshard.step_on_shards(optimizer)
        del optimizer.step
        fullshard.step_on_shards(optimizer)
    for step in range(BEFORE, BEFORE + AFTER):
        _loss(model, _batch(step, rank)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in whole.param_groups]
    assert optimizer.param_groups[1]["note"] == "small" and optimizer.param_groups[0]["weight_decay"] == 0.1
    assert_same_training(collect(model, optimizer), collect(plain, whole))


@pytest.mark.sample(2)
@behaviour(
    "`fullshard.rebind_optimizer`: an optimizer from before `fully_shard` is kept: groups, options, state, schedule",
    area="training",
    torch="none",
    reason="torch has no such function; Accelerate exchanges parameters without their state",
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_training_goes_on_where_it_was(kind: str) -> None:
    run_ranks(WORLD, lambda rank: _goes_on(rank, torch.distributed.get_world_size(), kind, "rows"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["columns", "replicas", "offload", "between", "on shards"])
def test_however_it_is_cut(way: str) -> None:
    run_ranks(4 if way == "replicas" else 3, lambda rank: _goes_on(rank, 4 if way == "replicas" else 3, "SGD", way))


def test_one_rank() -> None:
    run_ranks(1, lambda rank: _goes_on(rank, 1, "AdamW, fused", "rows"))


def test_before_the_first_step_and_from_the_meta_device() -> None:
    def job(rank: int) -> None:
        with torch.device("meta"):
            model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _shard(model, "rows")
        fullshard.materialize(model, seed=0)
        fullshard.rebind_optimizer(optimizer, model)
        before = model.inner[2].weight.full_tensor().clone()
        _loss(model, _batch(0, rank)).backward()
        optimizer.step()
        assert not torch.equal(model.inner[2].weight.full_tensor(), before) and not optimizer.state[model.unused]
        _, state = checkpoint.get_state_dict(model, optimizer)
        assert "inner.2.weight" in state["state"]

    run_ranks(2, job)


def test_parameters_of_others_stay() -> None:
    """A criterion's own weight, and the second of two models, which is bound by a call of its own."""

    def job(rank: int) -> None:
        model, other = seeded(Tied), seeded(Tied)
        outside = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters(), outside], lr=0.1)
        _shard(model, "rows")
        fullshard.rebind_optimizer(optimizer, model)
        _shard(other, "rows")
        (_loss(model, _batch(0, rank)) + outside.sum()).backward()
        with pytest.raises(RuntimeError, match=r"or call fullshard.rebind_optimizer\(optimizer, model\)"):
            optimizer.step()
        fullshard.rebind_optimizer(optimizer, other)
        _loss(other, _batch(0, rank)).backward()
        optimizer.step()
        held = optimizer.param_groups[0]["params"]
        assert held[-1] is outside and outside[0] == 0.9 and all(isinstance(p, DTensor) for p in held[:-1])

    run_ranks(2, job)


def test_tensor_parallel_parameters() -> None:
    """DTensors before: their state is cut once more. What `parallelize_module` replaced is named."""

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def make() -> nn.Sequential:
            return seeded(lambda: nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 3)))  # type: ignore[return-value]

        model = make()
        early = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.ones(2, 5)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        expected = [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in expected]
        fullshard.fully_shard(model, mesh=mesh["dp"])
        fullshard.rebind_optimizer(optimizer, model)
        for parameter, value in zip(model.parameters(), expected, strict=True):
            state = optimizer.state[parameter]["momentum_buffer"]
            assert state.placements == parameter.placements and torch.equal(state.full_tensor(), value)
        with pytest.raises(ValueError, match=r"SGD: .*tensors instead of 0\.weight that are not known.*parallelize"):
            fullshard.rebind_optimizer(early, model)
        assert not isinstance(early.param_groups[0]["params"][1], DTensor), "and nothing was changed"

    run_ranks(4, job)


def test_what_cannot_be_bound_is_named_and_left() -> None:
    def job(rank: int) -> None:
        def refused(optimizer: Any, model: Any, error: type[Exception], match: str) -> None:
            before = [list(group["params"]) for group in optimizer.param_groups]
            state = dict(optimizer.state)
            with pytest.raises(error, match=match):
                fullshard.rebind_optimizer(optimizer, model)
            now = [group["params"] for group in optimizer.param_groups]
            assert all(p is q for g, h in zip(before, now, strict=True) for p, q in zip(g, h, strict=True))
            assert all(optimizer.state[p] is entries for p, entries in state.items())

        model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
        factors = torch.optim.Adafactor(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        factors.step()
        factors.zero_grad()
        odd = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("list", "wrapped")}
        odd["list"].state[model[0].weight] = {"history": [torch.ones(6, 4)]}
        odd["wrapped"].state[model[0].weight] = {
            "code": torch.ones(6, 4).as_subclass(type("Code", (torch.Tensor,), {}))
        }
        twice = torch.optim.SGD(model.parameters(), lr=0.1)
        refused(
            twice, model, ValueError, "model: expected a module that fully_shard was applied to, found a Sequential"
        )
        fullshard.fully_shard(model)
        refused(factors, model, ValueError, r"Adafactor: .*'row_var' of 0\.weight, a Tensor of shape \(6, 1\), where")
        refused(odd["list"], model, ValueError, r"'history' of 0\.weight, a list with tensors")
        refused(odd["wrapped"], model, ValueError, r"'code' of 0\.weight, a Code of shape \(6, 4\)")
        twice.add_param_group({"params": [model[1].bias]})
        refused(twice, model, ValueError, r"each parameter once, found 1\.bias both as it was")
        stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
        refused(stranger, model, ValueError, "SGD: .*found 2 tensors and none of them")
        copied = torch.optim.SGD(nn.Linear(4, 6).parameters(), lr=0.1)
        refused(copied, model, ValueError, r"found tensors instead of 0\.weight, 0\.bias that are not known")
        with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, found FSDPSequential"):
            fullshard.rebind_optimizer(model, model)  # type: ignore[type-var]

    run_ranks(2, job)


def test_a_scaler_refuses_it_too() -> None:
    """torch's own scaler says that it recorded no checks for this optimizer."""

    def job(rank: int) -> None:
        model = seeded(lambda: nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fullshard.fully_shard(model)
        scaler = fullshard.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(RuntimeError, match="found some that fully_shard replaced by shards: weight, bias"):
            scaler.step(optimizer)
        fullshard.rebind_optimizer(optimizer, model)
        before = model.weight.full_tensor().clone()
        scaler.step(optimizer)
        assert not torch.equal(model.weight.full_tensor(), before)

    run_ranks(2, job)


def test_state_that_was_distributed_by_hand() -> None:
    """An optimizer of the sharded parameters whose state somebody made by hand is left as it is."""

    def job(rank: int) -> None:
        model = seeded(lambda: nn.Linear(5, 3))
        fullshard.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        weight = model.weight
        buffer = distribute_tensor(torch.ones(3, 5), weight.device_mesh, weight.placements)
        optimizer.state[weight]["momentum_buffer"] = buffer
        fullshard.rebind_optimizer(optimizer, model)
        assert optimizer.state[weight]["momentum_buffer"] is buffer

    run_ranks(2, job)
