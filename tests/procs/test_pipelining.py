"""torch.distributed.pipelining over stages that are sharded: 2 stages or chunks on each of 2 pipeline ranks, 2 shards.

Schedules switch synchronisation, resharding and reduction by hand for each micro-batch (torch's pipelining/stage.py);
what comes out is compared with plain training of the whole model, and the reductions of a step are counted.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.errors import RanksFailed
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation
from tests.harness.installed import fails_before
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.pool import pool

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "looped_bfs": ScheduleLoopedBFS,
    "zbv": ScheduleZBVZeroBubble,
    "dual_pipe_v": ScheduleDualPipeV,
}
# These split the backward, and one of them only that of some micro-batches.
SPLITS = ("zero_bubble", "zbv", "dual_pipe_v")
# A rank has the first and the last stage, the other one those between.
V_SHAPED = ("zbv", "dual_pipe_v")
SENDS_TO_ITSELF = fails_before(
    (2, 12), "before the first step a rank sends from one stage of its own to the next, which gloo cannot", half="both"
)
TIMEOUT = 120.0
WIDTH, MICRO_BATCHES, STEPS = 5, 4, 3
# What a reduction of a unit is, in the names of torch's dispatcher.
REDUCTIONS = {"c10d::_reduce_scatter_base_", "c10d::alltoall_base_", "c10d::reduce_scatter_single_"}


class Reductions(TorchDispatchMode):
    """Counts them. CommDebugMode hooks modules, too, which the schedules' first step does not allow."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._schema.name in REDUCTIONS
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stage(nn.Module):
    """Some blocks, and a parameter of its own, which is the root's."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def _model(stages: int) -> Any:
    return seeded(lambda: nn.Sequential(*(Stage(4 // stages) for _ in range(stages))))


def _batch(step: int, shard: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + shard)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def _plain(stages: int, calls: int = 1, max_norm: float | None = None) -> list[Trained]:
    """The model in one piece, trained on the batches of both shards; what training left of each stage."""
    model = _model(stages)
    optimizers = [adamw(stage.parameters()) for stage in model]
    for step in range(STEPS):
        for part in range(2 * calls):
            x, target = _batch(calls * step + part // 2, part % 2)
            (F.mse_loss(model(x), target) / 2).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [collect(stage, optimizer) for stage, optimizer in zip(model, optimizers, strict=True)]


def _stages_of(rank: int, schedule: str, chunks: int) -> tuple[int, ...]:
    if schedule in V_SHAPED:
        return (0, 3) if rank == 0 else (1, 2)
    return tuple(range(rank, 2 * chunks, 2))


def _pipelined(
    rank: int,
    impl: str,
    schedule: str,
    chunks: int,
    options: dict[str, Any],
    calls: int = 1,
    how: Any = None,
    max_norm: float | None = None,
) -> tuple[dict[int, Trained], list[int]]:
    """Train by a schedule. What training left of this rank's stages, and how many reductions each step sent.

    `calls` of the schedule in each step, of which the last finalizes gradients; `how`: more of its arguments."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    pipeline, shard = mesh["pipeline"], mesh["shard"].get_local_rank()
    number = 2 * chunks
    mine = {i: _model(number)[i] for i in _stages_of(pipeline.get_local_rank(), schedule, chunks)}
    fully_shard = IMPLEMENTATIONS[impl].fully_shard
    for stage in mine.values():
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["shard"], **options)
        fully_shard(stage, mesh=mesh["shard"], **options)
    stages = [
        PipelineStage(stage, i, number, torch.device("cpu"), group=pipeline.get_group()) for i, stage in mine.items()
    ]
    runner = SCHEDULES[schedule](stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=F.mse_loss, **(how or {}))
    optimizers = {i: adamw(stage.parameters()) for i, stage in mine.items()}
    reductions = []
    for step in range(STEPS):
        with Reductions() as sent:
            for call in range(calls):
                x, target = _batch(calls * step + call, shard)
                losses: list[Tensor] = []
                last: dict[str, Any] = {"target": target, "losses": losses} if number - 1 in mine else {}
                if calls > 1:
                    last["finalize_gradients"] = call == calls - 1
                runner.step(*((x,) if 0 in mine else ()), **last)
        reductions.append(sent.number)
        if max_norm is not None:
            fullshard.clip_grad_norm_([p for stage in mine.values() for p in stage.parameters()], max_norm)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    return {i: collect(mine[i], optimizers[i]) for i in mine}, reductions


@pytest.mark.slow
@behaviour("pipeline schedules over sharded stages (GPipe, 1F1B, interleaved): one reduction per unit and step",
           area="communication")  # fmt: skip
@for_each_implementation
def test_schedules_train_as_the_whole_model(impl: Implementation) -> None:
    for schedule, chunks, options in (
        ("gpipe", 1, {}),
        ("1f1b", 1, {"reshard_after_forward": False}),
        ("interleaved", 2, {}),
    ):
        expected = _plain(2 * chunks)
        units = 2 + chunks  # the blocks of a rank, and a root for each chunk
        results = pool(4).run(_pipelined, impl.name, schedule, chunks, options, timeout=TIMEOUT)
        for trained, reductions in results:
            for i, found in trained.items():
                assert_same_training(found, expected[i])
            # In the first step schedules run one micro-batch more, to learn shapes.
            assert reductions[1:] == [units] * (STEPS - 1), schedule


@pytest.mark.slow
@behaviour("a schedule that splits backward (zero bubble), over stages that stay full", area="communication")
@for_each_implementation
def test_a_split_backward_trains_stages_that_stay_full(impl: Implementation) -> None:
    """Gradients of weights are put on full parameters by hand, without a hook that tells of it."""
    expected = _plain(4)
    options = {"reshard_after_forward": False}
    for trained, reductions in pool(4).run(_pipelined, impl.name, "zero_bubble", 2, options, timeout=TIMEOUT):
        for i, found in trained.items():
            assert_same_training(found, expected[i])
        assert reductions[1:] == [4] * (STEPS - 1)


@pytest.mark.slow
@behaviour(
    "a schedule that splits backward, over stages that are freed after forward, is refused",
    area="communication",
    torch="better",
    reason="torch trains without the gradients of most weights and says nothing",
)
def test_a_split_backward_of_stages_that_are_freed_says_what_it_needs(impl: Implementation) -> None:
    with pytest.raises(RanksFailed, match=r"splits the backward .*\n?.*reshard_after_forward=False"):
        pool(4).run(_pipelined, impl.name, "zero_bubble", 2, {}, timeout=TIMEOUT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize(
    "schedule",
    [
        *(pytest.param(name, marks=SENDS_TO_ITSELF) for name in ("dual_pipe_v", "zbv")),
        *("zero_bubble", "looped_bfs", "interleaved", "gpipe", "1f1b"),
    ],
)
def test_every_schedule_trains_as_the_whole_model_or_is_refused(schedule: str, reshard: bool | None) -> None:
    """torch's seven public schedules, with weights freed after forward, kept, and freed below the root."""
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    options = {"reshard_after_forward": reshard}
    if schedule in SPLITS and reshard is not False:
        with pytest.raises(RanksFailed, match=r"splits the backward .*\n?.*reshard_after_forward=False"):
            pool(4).run(_pipelined, "fullshard", schedule, chunks, options, timeout=TIMEOUT)
        return
    expected = _plain(2 * chunks)
    for trained, _ in pool(4).run(_pipelined, "fullshard", schedule, chunks, options, timeout=TIMEOUT):
        for i, found in trained.items():
            assert_same_training(found, expected[i])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("1f1b", 1)])
def test_a_pipeline_is_clipped_by_the_norm_of_all_its_stages(schedule: str, chunks: int) -> None:
    """Nothing names the pipeline's axis: the stages are known."""
    expected = _plain(2 * chunks, max_norm=0.05)
    options = {"reshard_after_forward": False}
    for trained, _ in pool(4).run(_pipelined, "fullshard", schedule, chunks, options, 1, None, 0.05, timeout=TIMEOUT):
        for i, found in trained.items():
            assert_same_training(found, expected[i])


# torch has both from 2.15 on.
if "defer_reduce_grad_wait" in inspect.signature(ScheduleInterleaved1F1B).parameters:

    @pytest.mark.slow
    @for_each_implementation
    @pytest.mark.parametrize(("calls", "how"), [(1, {"defer_reduce_grad_wait": True}), (2, {})])
    def test_reductions_that_are_actions_of_their_own(impl: Implementation, calls: int, how: dict[str, bool]) -> None:
        """Waited for before the next one; and left to the last of several calls of the schedule."""
        expected = _plain(4, calls)
        job = (_pipelined, impl.name, "interleaved", 2, {}, calls, how)
        for trained, reductions in pool(4).run(*job, timeout=TIMEOUT):
            for i, found in trained.items():
                assert_same_training(found, expected[i])
            assert reductions[1:] == [4] * (STEPS - 1)
