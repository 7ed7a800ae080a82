"""State of model and optimizer in the middle of a step, where full parameters stand on the modules.

Ours and torch's functions give there what they give when nothing runs, and the step goes on as if nobody had asked.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import FSDPModule, checkpoint
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.models import BY_NAME, assert_same_training, collect
from tests.harness.threads import WORLD, run_ranks

CASE = BY_NAME["tiny_dims"]
MOMENTS = ("behind forward", "in a window", "without all-reduce", "fresh")
LEVELS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "a part": {"reshard_after_forward": 2},
    "replicas": {"reshard_after_forward": False},
}


def _of_checkpoint(model: nn.Module, optimizer: Any) -> Any:
    return checkpoint.get_state_dict(model, optimizer)


def _of_dcp(model: nn.Module, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer)


def _of_dcp_full(model: nn.Module, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def _of_dcp_alone(model: nn.Module, optimizer: Any) -> Any:
    return {}, get_optimizer_state_dict(model, optimizer)


def _plain(state: Any) -> Any:
    """`state` with local tensors as lists, comparable."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    if isinstance(state, DTensor):
        return str(state.placements), _plain(state.to_local())
    return (type(state), state.tolist()) if isinstance(state, torch.Tensor) else state


def _built(level: str, impl: Implementation = FULLSHARD) -> tuple[Any, torch.optim.Optimizer]:
    options = dict(LEVELS[level])
    if level == "replicas":
        half = torch.distributed.get_world_size() // 2
        options["mesh"] = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    model = CASE.shard(CASE.build(), lambda module: impl.fully_shard(module, **options))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(rank: int, model: Any, optimizer: Any, moment: str, see: Callable[[], None]) -> None:
    """A step of two micro-batches; `see` in the middle of it."""
    if moment == "in a window":
        model.set_requires_gradient_sync(False)
    if moment == "without all-reduce":
        model.set_requires_all_reduce(False)
    CASE.loss(model, CASE.batch(0, rank)).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    loss = CASE.loss(model, CASE.batch(1, rank))
    see()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("level", "take"),
    [
        pytest.param(level, take, marks=() if level == "kept" or take is _of_checkpoint else pytest.mark.slow)
        for level in LEVELS
        for take in (_of_checkpoint, _of_dcp, _of_dcp_full, _of_dcp_alone)
    ],
)
def test_the_middle_of_a_step_is_no_moment_of_its_own(level: str, take: Callable[..., Any]) -> None:
    def job(rank: int) -> None:
        for moment in MOMENTS:
            (model, optimizer), (other, its_optimizer) = _built(level), _built(level)
            if moment != "fresh":
                for each, one in ((model, optimizer), (other, its_optimizer)):
                    _step(rank, each, one, "", lambda: None)
            found: list[Any] = []
            # torch makes state of an optimizer that has none, by a step; not in the middle, where gradients are.
            is_made = moment == "fresh" and take is not _of_checkpoint
            wanted = None if is_made else _plain(take(other, its_optimizer))

            def see() -> None:
                standing = [id(p) for p in model.parameters()]  # noqa: B023
                found.append(_plain(take(model, optimizer)))  # noqa: B023
                assert [id(p) for p in model.parameters()] == standing, "and it changes nothing"  # noqa: B023

            _step(rank, model, optimizer, moment, see)
            assert is_made or found == [wanted], moment
            _step(rank, other, its_optimizer, moment, lambda: None)
            assert_same_training(collect(model, optimizer), collect(other, its_optimizer), eps_multiple=0)

    run_ranks(4 if level == "replicas" else 2, job)


@behaviour("torch's `get_state_dict` between forward and backward, and in a window", area="state")
@pytest.mark.parametrize("level", ["default", "kept", "freed"])
def test_torch_s_function_between_forward_and_backward(level: str, impl: Implementation) -> None:
    def job(rank: int) -> None:
        model, optimizer = _built(level, impl)
        _step(rank, model, optimizer, "", lambda: None)
        names = {name for name, _ in model.named_parameters()}

        def see() -> None:
            values, state = get_state_dict(model, optimizer)
            assert all(isinstance(value, DTensor) for value in values.values())
            assert state["state"].keys() == names

        for moment in MOMENTS[:2]:
            _step(rank, model, optimizer, moment, see)

    run_ranks(WORLD, job)


def test_a_part_of_the_model_and_a_load_in_the_middle() -> None:
    def job(rank: int) -> None:
        model, optimizer = _built("kept")
        _step(rank, model, optimizer, "", lambda: None)
        part = next(child for child in model.modules() if child is not model and isinstance(child, FSDPModule))
        assert isinstance(part, nn.Module)
        own = torch.optim.AdamW(part.parameters(), lr=0.1)

        def see() -> None:
            _, state = get_state_dict(part, own)
            assert state["param_groups"][0]["params"] == [name for name, _ in part.named_parameters()]
            assert checkpoint.get_state_dict(part, own)[1]["param_groups"][0]["lr"] == 0.1
            _, ours = checkpoint.get_state_dict(model, optimizer)
            checkpoint.set_state_dict(model, optimizer, optim_state_dict=ours)
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

        _step(rank, model, optimizer, "behind forward", see)

    run_ranks(2, job)


def test_what_stands_on_the_modules_is_shown_to_others() -> None:
    """As in torch: only functions that look up parameters of an optimizer get other ones. The look keeps nothing."""

    def held(model: nn.Module) -> Any:
        """A weak reference to a local of a caller."""
        local = nn.Module()
        list(model.parameters()), list(model.named_parameters())
        return weakref.ref(local)

    def job(rank: int) -> None:
        model, _ = _built("kept")
        gc.disable()
        try:
            assert held(model)() is None
        finally:
            gc.enable()
        sharded = dict(model.named_parameters())
        loss = CASE.loss(model, CASE.batch(0, rank))
        for name, parameter in itertools.chain(model.named_parameters(), model.named_parameters("", True, True)):
            assert parameter is not sharded[name] and not isinstance(parameter, DTensor)
        loss.backward()
        assert all(parameter is sharded[name] for name, parameter in model.named_parameters())

    run_ranks(2, job)
