"""Training by torch's pipeline schedules, for cases of reported programs: two stages on each of two ranks of a
pipeline, each of them sharded over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim import AdamW

import fullshard
from fullshard import checkpoint
from tests.faults.deeds.checkpoints import where
from tests.faults.program import Run
from tests.harness.models import seeded

MICROS, STAGES, WIDTH, LIMIT = 4, 4, 5, 0.05


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def stages() -> nn.Module:
    """The whole model."""
    return nn.Sequential(*(Stage() for _ in range(STAGES)))


def _part(step: int, shard: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + shard)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def trains(schedule: str, *, reshard: bool = True, clip: Callable[[Run], None] | None = None) -> Callable[[Run], None]:
    """A program: train by this pipeline schedule, and collect the whole model. `clip(run)`: before each update."""

    def program(run: Run) -> None:
        run.at("start")
        if run.plain:
            _in_one_piece(run, clip is not None)
            return
        run.kept["mesh"] = mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
        pipeline, shard = mesh["pipeline"], mesh["shard"].get_local_rank()
        rank = pipeline.get_local_rank()
        is_v = schedule in ("ScheduleDualPipeV", "ScheduleZBVZeroBubble")
        places = ((0, 3), (1, 2))[rank] if is_v else (rank, rank + 2)
        whole: Any = seeded(run.setup.model)
        run.model = nn.ModuleDict({str(i): whole[i] for i in places})
        assert run.impl is not None
        for stage in run.model.values():
            run.impl.fully_shard(stage, mesh=mesh["shard"], reshard_after_forward=reshard)
        axis = pipeline.get_group()
        mine = [PipelineStage(run.model[str(i)], i, STAGES, torch.device("cpu"), group=axis) for i in places]
        runner = getattr(schedules, schedule)(mine, MICROS, loss_fn=F.mse_loss)
        run.optimizer = AdamW(run.model.parameters(), lr=1e-2)
        for step in range(run.setup.steps):
            run.step = step
            run.at("step")
            x, target = _part(run.step, shard)
            last = {"target": target, "losses": []} if STAGES - 1 in places else {}
            runner.step(*((x,) if 0 in places else ()), **last)
            if clip is not None:
                clip(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.at("trained")
        if "loaded" not in run.kept:
            _collect(run)

    return program


def _in_one_piece(run: Run, clips: bool) -> None:
    run.model = seeded(run.setup.model)
    run.optimizer = AdamW(run.model.parameters(), lr=1e-2)
    for step in range(run.setup.steps):
        for shard in range(2):
            x, target = _part(step, shard)
            (F.mse_loss(run.model(x), target) / 2).backward()
        if clips:
            nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)
        run.optimizer.step()
        run.optimizer.zero_grad()


class _Held:
    """The state of stages that other ranks have."""

    def __init__(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        self.state = state


def _collect(run: Run) -> None:
    """Whole parameters and optimizer state of all stages, as the model and optimizer of this rank."""
    mine = {
        name: (_whole(p), {key: _whole(value) for key, value in run.optimizer.state[p].items()})
        for name, p in run.model.named_parameters()
    }
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    found = {name: entry for one in said for name, entry in one.items()}
    run.model = seeded(run.setup.model)
    run.model.load_state_dict({name: value for name, (value, _) in found.items()})
    run.optimizer = _Held({p: found[name][1] for name, p in run.model.named_parameters()})


def _whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


# ---- clipping --------------------------------------------------------------------------------------------------------


def clip(run: Run) -> None:
    assert run.impl is not None
    run.impl.clip(run.model.parameters(), LIMIT)


def clip_over_the_axis(run: Run) -> None:
    """As for a schedule that nothing knows: the axis is named."""
    if run.ours:
        fullshard.clip_grad_norm_(run.model.parameters(), LIMIT, groups=[run.kept["mesh"]["pipeline"]])
    else:
        clip(run)


def clip_each_stage(run: Run) -> None:
    """A call for each stage that this rank has."""
    for stage in run.model.values():
        assert run.impl is not None
        run.impl.clip(stage.parameters(), LIMIT)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def load_in_one_piece(run: Run) -> None:
    """Save by the pipeline, and load into the whole model, sharded over all four ranks; state by other names than its
    own could not be loaded."""
    state = dict(zip(("model", "optimizer"), checkpoint.get_state_dict(run.model, run.optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=where(run))
    run.model = fullshard.fully_shard(seeded(run.setup.model, seed=7))
    run.optimizer = AdamW(run.model.parameters(), lr=3e-2)
    state = dict(zip(("model", "optimizer"), checkpoint.get_state_dict(run.model, run.optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=where(run))
    checkpoint.set_state_dict(
        run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    run.kept["loaded"] = True
