"""Clipping a model whose parts are on ranks of further axes: stages of a pipeline, each with parameters of its own.

The oracle is torch's clipping of the whole model in one process. Real schedules are in tests/procs/test_pipelining.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

WORLD, STAGES = 4, 2


class Stage:
    """As far as it is looked at: a schedule's stage, which holds back a module and reduces it (pipelining/stage.py)."""

    def __init__(self, submod: Any, group: Any) -> None:
        self.submod, self.group = submod, group

    def step(self, x: Tensor) -> None:
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(False)
        self.submod(x).square().sum().backward()
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod._get_fsdp_state()._root_post_backward_final_callback()


class Foreign:
    """Another's stage: nothing of it says what its axis is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def reduce(self) -> None:
        self.model._get_fsdp_state()._root_post_backward_final_callback()


def model_of(stage: int) -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), seed=stage)


def input_of(stage: int, chunk: int = 0) -> Tensor:
    return torch.linspace(-1, 2 + stage, 6).view(2, 3) + chunk


def plain_norm(max_norm: float, p: float, stages: int = STAGES) -> tuple[Tensor, list[list[Tensor]]]:
    models = [model_of(stage) for stage in range(stages)]
    for stage, model in enumerate(models):
        model(input_of(stage % STAGES)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_([q for model in models for q in model.parameters()], max_norm, p)
    return norm, [[q.grad for q in model.parameters()] for model in models]


def on_ranks(job: Callable[[int, Any, Any], None], *, held: bool = False) -> None:
    """`job(stage, mesh, model)`, where the model is that stage, after a backward."""

    def rank_fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (STAGES, WORLD // STAGES), mesh_dim_names=("pipeline", "shard"))
        stage = mesh["pipeline"].get_local_rank()
        model = fully_shard(model_of(stage), mesh=mesh["shard"], reshard_after_forward=False)
        if held:
            Stage(model, mesh["pipeline"].get_group()).step(input_of(stage))
        else:
            model(input_of(stage)).square().sum().backward()
        job(stage, mesh, model)

    run_ranks(WORLD, rank_fn)


def check(stage: int, model: Any, found: Tensor, max_norm: float, p: float) -> None:
    expected, gradients = plain_norm(max_norm, p)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(model.parameters(), gradients[stage], strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs)


@pytest.mark.sample(4)
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("as_mesh", [True, False])
def test_the_norm_is_that_of_all_stages(p: float, as_mesh: bool) -> None:
    def job(stage: int, mesh: Any, model: Any) -> None:
        axis = mesh["pipeline"] if as_mesh else mesh["pipeline"].get_group()
        norm = fullshard.clip_grad_norm_(model.parameters(), 0.5, p, groups=[axis])
        check(stage, model, norm, 0.5, p)

    on_ranks(job)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_stage_s_axis_is_found(p: float) -> None:
    def job(stage: int, mesh: Any, model: Any) -> None:
        check(stage, model, fullshard.clip_grad_norm_(model.parameters(), 0.5, p), 0.5, p)

    on_ranks(job, held=True)


def test_no_further_axis_can_be_asked_for() -> None:
    def job(stage: int, mesh: Any, model: Any) -> None:
        norm = fullshard.clip_grad_norm_(model.parameters(), math.inf, groups=())
        alone = plain_norm(math.inf, 2.0)[1][stage]
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in alone]).norm())

    on_ranks(job, held=True)


def test_a_rank_without_gradients_takes_part() -> None:
    """A frozen stage, and one whose turn it was not."""

    def job(stage: int, mesh: Any, model: Any) -> None:
        if stage == 1:
            model.zero_grad()
        norm = fullshard.clip_grad_norm_(model.parameters(), math.inf, groups=[mesh["pipeline"]])
        alone = plain_norm(math.inf, 2.0)[1][0]
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in alone]).norm())

    on_ranks(job)


def test_what_is_not_finite_in_one_stage_is_an_error_in_all() -> None:
    def job(stage: int, mesh: Any, model: Any) -> None:
        if stage == 0:
            for p in model.parameters():
                p.grad.to_local().fill_(math.nan)
        with pytest.raises(RuntimeError, match="non-finite"):
            fullshard.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, groups=[mesh["pipeline"]])

    on_ranks(job)


def test_two_chunks_of_a_rank_are_one_call() -> None:
    """Four stages, two on each rank; a call with one of them alone says that it lacks the other."""

    def rank_fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (STAGES, WORLD // STAGES), mesh_dim_names=("pipeline", "shard"))
        first = mesh["pipeline"].get_local_rank()
        mine = {
            stage: fully_shard(model_of(stage), mesh=mesh["shard"], reshard_after_forward=False)
            for stage in (first, first + STAGES)
        }
        for model in mine.values():
            Stage(model, mesh["pipeline"].get_group()).step(input_of(first))
        expected, gradients = plain_norm(0.5, 2.0, stages=4)
        fullshard.clip_grad_norm_(mine[first].parameters(), math.inf)  # warns
        norm = fullshard.clip_grad_norm_([p for model in mine.values() for p in model.parameters()], 0.5)
        torch.testing.assert_close(norm, expected)
        for stage, model in mine.items():
            for ours, theirs in zip(model.parameters(), gradients[stage], strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs)

    # Around all ranks: what catches warnings belongs to the process, and ranks are threads of it.
    with pytest.warns(
        UserWarning, match=r"clip_grad_norm_: expected the parameters of all 2 stages .* found 1"
    ) as seen:
        run_ranks(WORLD, rank_fn)
    assert len(seen) == WORLD


def test_a_stage_of_a_schedule_of_another_kind_is_a_warning() -> None:
    def job(stage: int, mesh: Any, model: Any) -> None:
        Foreign(model).reduce()
        fullshard.clip_grad_norm_(model.parameters(), 1.0)  # warns
        fullshard.clip_grad_norm_(model.parameters(), 1.0, groups=[mesh["pipeline"]])  # says nothing
        fullshard.clip_grad_norm_(model.parameters(), 1.0, groups=())

    with pytest.warns(UserWarning, match=r"clip_grad_norm_: .* stage of a pipeline.*groups=") as seen:
        on_ranks(job)
    assert len(seen) == WORLD


@pytest.mark.parametrize("wrong", ["pipeline", [3], 5])
def test_other_groups_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"groups.*: expected"):
        fullshard.clip_grad_norm_([torch.zeros(1)], 1.0, groups=wrong)
