"""Parameters that are frozen in one run and train in the next, or the reverse; optimizers that number parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointMismatch
from fullshard.checkpoint.formats import load_full, save_full
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def in_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    weights, biases = ([p for p in parameters if p.ndim == ndim] for ndim in (2, 1))
    return torch.optim.AdamW([{"params": weights, "lr": 0.2}, {"params": biases, "weight_decay": 0.0}], lr=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Has state before the first step."""
    return torch.optim.Adagrad(parameters, lr=0.1)


def frozen(*, body: bool, head: bool, sharded: bool = True) -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(not body)
    model[2].requires_grad_(not head)
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def optimizer_of(model: nn.Module, build: Build) -> torch.optim.Optimizer:
    return build([parameter for parameter in model.parameters() if parameter.requires_grad])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def ends(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    whole = {id(p): name for name, p in model.named_parameters()}
    found = {name: p.detach() for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{whole[id(parameter)]}.{key}": t for key, t in state.items() if isinstance(t, Tensor)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def alone(first: dict[str, bool], build: Build) -> dict[str, Tensor]:
    """One process: a step, then a step of an optimizer of all parameters that keeps the state of the first one."""
    model = frozen(**first, sharded=False)
    optimizer = optimizer_of(model, build)
    step(model, optimizer, 0)
    model.requires_grad_(True)
    second = build(list(model.parameters()))
    for parameter, state in optimizer.state.items():
        second.state[parameter] = state
    step(model, second, 1)
    return ends(model, second)


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", [adamw, in_two_groups, sgd, adagrad])
@pytest.mark.parametrize("world", [1, 2])
def test_thawed_parameters_begin_with_fresh_state(world: int, build: Build, tmp_path: Path) -> None:
    expected = alone({"body": True, "head": False}, build)

    def rank_main(rank: int, full: bool) -> dict[str, Tensor]:
        model = frozen(body=True, head=False)
        optimizer = optimizer_of(model, build)
        step(model, optimizer, 0)
        state = dict(zip(("model", "optimizer"), checkpoint.get_state_dict(model, optimizer), strict=True))
        checkpoint.save(state, checkpoint_id=tmp_path / "step-1")
        if full:
            save_full(model, optimizer, tmp_path / "full.pt")

        model = frozen(body=False, head=False)
        optimizer = optimizer_of(model, build)
        if full:
            with pytest.raises(CheckpointMismatch, match=r"missing: 0\.weight[\s\S]*allow_missing"):
                load_full(model, optimizer, tmp_path / "full.pt", allow_torch_save=True)
            load_full(model, optimizer, tmp_path / "full.pt", allow_torch_save=True, allow_missing=["0.*"])
        else:
            names, numbers = checkpoint.get_state_dict(model, optimizer)
            checkpoint.load({"model": names, "optimizer": numbers}, checkpoint_id=tmp_path / "step-1")
            both: dict[str, Any] = {"model_state_dict": names, "optim_state_dict": numbers}
            with pytest.raises(CheckpointMismatch) as caught:
                checkpoint.set_state_dict(model, optimizer, **both, allow_missing=["0.bias"])
            assert caught.value.problems == ["missing: 0.weight, in no stored group of parameters"]
            assert "allow_missing=[...]" in str(caught.value) and "fresh state" in str(caught.value)
            checkpoint.set_state_dict(model, optimizer, **both, allow_missing=["0.*"])
        step(model, optimizer, 1)
        return ends(model, optimizer)

    for full in (False, True):
        for found in run_ranks(world, rank_main, full):
            if world == 1:
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], value) for name, value in expected.items())
            # The same rows on all ranks: the mean is that of one.
            assert all(torch.allclose(found[name], value) for name, value in expected.items())
        (tmp_path / "full.pt").unlink(missing_ok=True)


def test_state_of_parameters_that_are_frozen_now_is_left_out(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        model = frozen(body=False, head=False)
        optimizer = optimizer_of(model, adamw)
        step(model, optimizer, 0)
        before = ends(model, optimizer)
        names, state = checkpoint.get_state_dict(model, optimizer)
        checkpoint.save({"model": names, "optimizer": state}, checkpoint_id=tmp_path / "step-1")
        model = frozen(body=True, head=False)
        second = optimizer_of(model, adamw)
        with pytest.raises(CheckpointMismatch, match=r"unexpected: state of 0\.bias[\s\S]*allow_unexpected=\[...\]"):
            checkpoint.set_state_dict(model, second, optim_state_dict=state)
        checkpoint.set_state_dict(model, second, optim_state_dict=state, allow_unexpected=["0.*"])
        names, target = checkpoint.get_state_dict(model, optimizer_of(model, adamw))
        there: dict[str, Any] = {"model": names, "optimizer": target}
        with pytest.raises(CheckpointMismatch, match=r"unexpected: optimizer\.state\.0\.bias\.exp_avg"):
            checkpoint.load(there, checkpoint_id=tmp_path / "step-1")
        checkpoint.load(there, checkpoint_id=tmp_path / "step-1", allow_unexpected=["optimizer.state.0.*"])
        checkpoint.set_state_dict(model, second, model_state_dict=names, optim_state_dict=target)
        found = ends(model, second)
        assert "0.weight.exp_avg" not in found and all(torch.equal(before[name], t) for name, t in found.items())

    run_ranks(2, rank_main)


@pytest.mark.parametrize("wrap", ["plain", "nested", "two", "load"])
def test_a_numbered_state_is_refused_with_the_function_that_names_it(wrap: str, tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        model = frozen(body=False, head=False)
        optimizer = optimizer_of(model, adamw)
        step(model, optimizer, 0)
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if wrap == "nested":
            state = {"run": {"state": state}}
        if wrap == "two":
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict(), optimizer.state_dict()]}
        match = r"optimizer.*found the result of optimizer\.state_dict\(\).*get_state_dict\(model, optimizer\)"
        with pytest.raises(CheckpointMismatch, match=match) as caught:
            if wrap == "load":
                checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "x")
                checkpoint.load(state, checkpoint_id=tmp_path / "x")
            else:
                checkpoint.save(state, checkpoint_id=tmp_path / "x")
        numbered = [problem for problem in caught.value.problems if "state_dict()" in problem]
        assert len(numbered) == 1 + (wrap == "two") and not any("int" in problem for problem in caught.value.problems)

    run_ranks(2, rank_main)
