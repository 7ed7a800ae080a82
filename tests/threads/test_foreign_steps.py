"""Optimizers and wrappers of others around shards: an error with names and the call that works, which then does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import fully_shard
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import run_ranks


class Adapted(nn.Module):
    """A linear that is sharded, and a scale that stays plain on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 128)
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) * self.scale
        return found


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 128).view(2, 64)


def _sharded(plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    return fully_shard(model, ignored_params={model.scale})


def _backward(*models: nn.Module) -> None:
    for model in models:
        model(_inputs()).square().mean().backward()


def _compare(model: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert tolerance.close(getattr(mine, "full_tensor", lambda one=mine: one)(), theirs)


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("cure", ["shards", "off"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_one_list_of_plain_and_sharded_parameters(how: str, cure: str, kind: Any) -> None:
    def run(rank: int) -> None:
        plain = seeded(Adapted)
        model = _sharded(plain)
        _backward(model, plain)
        optimizer, reference = kind(model.parameters(), lr=0.1, **{how: True}), kind(plain.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=rf"base.weight, .* beside Adapted.scale, .*step_on_shards.*{how}=False"):
            optimizer.step()
        assert not optimizer.state
        if cure == "shards":
            fullshard.step_on_shards(optimizer)
        else:
            optimizer = kind(model.parameters(), lr=0.1, **{how: False})
        optimizer.step()
        reference.step()
        _compare(model, plain)

    run_ranks(2, run)


def test_what_torch_takes_is_not_refused() -> None:
    """Plain parameters without a gradient, in another dtype, or in no list of the shards'; and no option at all."""

    def run(rank: int) -> None:
        for change in ("frozen", "dtype", "groups", "default"):
            model = _sharded(seeded(Adapted))
            if change == "dtype":
                model.scale.data = model.scale.data.double()
            _backward(model)
            if change == "frozen":
                model.scale.grad = None
            shards = [p for p in model.parameters() if p is not model.scale]
            groups: Any = [{"params": shards}, {"params": [model.scale]}] if change == "groups" else model.parameters()
            torch.optim.AdamW(groups, foreach=None if change == "default" else True).step()

    run_ranks(2, run)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW", "Lion8bit"])
def test_optimizers_of_bitsandbytes(name: str) -> None:
    optimizers = pytest.importorskip("bitsandbytes").optim

    def run(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(64, 128, bias=False)))
        _backward(model)
        before = model.weight.full_tensor().clone()
        optimizer = getattr(optimizers, name)(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"found weight, .*step_on_shards\(optimizer, elementwise=True\)"):
            optimizer.step()
        fullshard.step_on_shards(optimizer, elementwise=True).step()
        # A first step of these moves each element by about the learning rate.
        assert ((model.weight.full_tensor() - before).abs() > 0.05).float().mean() > 0.9

    run_ranks(2, run)


@pytest.mark.parametrize("where", ["root", "part", "inner"])
def test_distributed_data_parallel_around_units(where: str) -> None:
    def run(rank: int) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
        fully_shard({"root": model, "part": model[0], "inner": model[1][0]}[where])
        named = {"root": "0.weight", "part": "0.weight", "inner": "1.0.weight"}[where]
        with pytest.raises(
            RuntimeError, match=rf"DistributedDataParallel: expected .* sharded {named}.*mesh of two axes"
        ):
            DistributedDataParallel(model)

    run_ranks(2, run)


def test_shards_that_ddp_leaves_out_are_no_concern() -> None:
    """The names are on the module before DDP is built, as torch documents."""

    def run(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
        DistributedDataParallel(model, init_sync=False)

    run_ranks(2, run)


def test_a_module_without_shards_is_no_concern() -> None:
    """`module` of another class, and DDP beside a sharded model."""

    class Around(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    def run(rank: int) -> None:
        model = fully_shard(nn.Linear(4, 4))
        assert Around(model).module is model
        DistributedDataParallel(nn.Linear(4, 4))

    run_ranks(2, run)


@pytest.mark.parametrize("kind", ["ASGD", "Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_what_is_refused_torch_cannot_do(kind: str) -> None:
    """The step without our look: a torch that learns it shows here."""

    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=True)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            type(optimizer).step.__wrapped__(optimizer)
        with pytest.raises(RuntimeError, match="step_on_shards"):
            optimizer.step()

    run_ranks(2, run)
