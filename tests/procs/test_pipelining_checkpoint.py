"""A pipeline's checkpoint: each rank saves its stages, and any number of stages loads it, none included, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from fullshard import checkpoint, fully_shard
from tests.harness.errors import RanksFailed
from tests.harness.pool import pool
from tests.procs.test_pipelining import MICRO_BATCHES, _batch, _model

TIMEOUT = 120.0
STAGES = 4


class Run:
    """The model and its optimizers on one rank: `pipeline` ranks with interleaved stages, or 1 and the whole model.
    `apart`: an optimizer for each stage; `tensors`: learning rates are tensors."""

    def __init__(self, pipeline: int, *, apart: bool = False, tensors: bool = False) -> None:
        mesh = init_device_mesh("cpu", (pipeline, 4 // pipeline), mesh_dim_names=("pipeline", "shard"))
        self.mesh = mesh
        place = mesh["pipeline"].get_local_rank()
        whole = _model(STAGES)
        self.mine = {i: whole[i] for i in range(place, STAGES, pipeline)}
        for stage in self.mine.values():
            fully_shard(stage, mesh=mesh["shard"])
        # The names are those of the whole model.
        self.model = nn.ModuleDict({str(i): stage for i, stage in self.mine.items()})
        lr = torch.tensor(1e-2) if tensors else 1e-2
        groups = [self._groups(stage) for stage in self.mine.values()]
        if not apart:
            groups = [
                [
                    {**same[0], "params": [p for one in same for p in one["params"]]}
                    for same in zip(*groups, strict=True)
                ]
            ]
        self.optimizers = [torch.optim.AdamW(one, lr=lr, foreach=False) for one in groups]
        if pipeline == 2:
            axis = mesh["pipeline"].get_group()
            stages: Any = [PipelineStage(m, i, STAGES, torch.device("cpu"), group=axis) for i, m in self.mine.items()]
            self.schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=F.mse_loss)

    @staticmethod
    def _groups(stage: nn.Module) -> list[dict[str, Any]]:
        """Decay for matrices alone."""
        parameters = list(stage.parameters())
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]

    def step(self, number: int) -> None:
        x, target = _batch(number, self.mesh["shard"].get_local_rank())
        if self.mesh["pipeline"].size() > 1:
            last = {"target": target, "losses": []} if STAGES - 1 in self.mine else {}
            self.schedule.step(*((x,) if 0 in self.mine else ()), **last)
        else:
            for i in range(STAGES):
                x = self.mine[i](x)
            F.mse_loss(x, target).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def save(self, folder: str) -> None:
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizers)
        checkpoint.save({"model": model, "optimizer": optimizer, "step": 2}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizers)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        checkpoint.load(state, checkpoint_id=folder)
        assert state["step"] == 2
        checkpoint.set_state_dict(
            self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def values(self) -> dict[str, Any]:
        """Every parameter and state of this rank's stages whole, and the settings of its group."""
        found: dict[str, Any] = {}
        names = {p: name for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    entries = {"value": p.detach(), **optimizer.state[p]}
                    settings = {key: value for key, value in group.items() if key != "params"}
                    found[names[p]] = [{key: _whole(v) for key, v in entries.items()}, settings]
        return found


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _trained(rank: int, pipeline: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values when the checkpoint was saved, and after two more steps."""
    run = Run(pipeline, **options)
    run.step(0)
    run.step(1)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] *= 2  # only the checkpoint has it
    run.save(folder)
    saved = run.values()
    run.step(2)
    run.step(3)
    return saved, run.values()


def _loaded(rank: int, pipeline: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(pipeline, **options)
    run.load(folder)
    loaded = run.values()
    run.step(2)
    run.step(3)
    return loaded, run.values()


def _merged(of_ranks: list[tuple[dict[str, Any], dict[str, Any]]], which: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in of_ranks:
        for name, (entries, settings) in one[which].items():
            known, known_settings = found.setdefault(name, (entries, settings))
            assert entries.keys() == known.keys()
            assert all(torch.equal(entries[key], known[key]) for key in known), name
            assert settings == known_settings
    return found


def _equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, (entries, settings) in one.items():
        assert entries.keys() == other[name][0].keys() >= {"value", "exp_avg", "exp_avg_sq", "step"}
        for key, value in entries.items():
            assert torch.equal(value, other[name][0][key]), (name, key)
        assert settings == other[name][1], name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"tensors": True}, {"apart": True}], ids=["one optimizer", "lr a tensor", "one for each stage"]
)
def test_a_pipeline_s_checkpoint_goes_everywhere(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    trained = pool(4).run(_trained, 2, first, options, timeout=TIMEOUT)
    saved, later = _merged(trained, 0), _merged(trained, 1)
    assert len(saved) == 4 * 5
    again = pool(4).run(_loaded, 2, first, options, timeout=TIMEOUT)
    _equal(_merged(again, 0), saved)
    _equal(_merged(again, 1), later)
    for pipeline in (1, 4):
        _equal(_merged(pool(4).run(_read, pipeline, first, second, options, timeout=TIMEOUT), 0), saved)
        # And back: what these saved.
        _equal(_merged(pool(4).run(_loaded, 2, second, options, timeout=TIMEOUT), 1), later)


def _read(rank: int, pipeline: int, folder: str, second: str, options: dict[str, Any]) -> tuple[dict[str, Any], None]:
    run = Run(pipeline, **options)
    run.load(folder)
    run.save(second)
    return run.values(), None


def _differs(rank: int, folder: str) -> None:
    """Ranks of one stage whose optimizers have other parameters."""
    run = Run(2)
    if rank == 1:
        run.optimizers[0].param_groups[0]["params"].pop()
    run.save(folder)


def _other_settings(rank: int, folder: str) -> None:
    run = Run(2)
    if rank == 1:
        run.optimizers[0].param_groups[0]["weight_decay"] = 0.3
    run.save(folder)


@pytest.mark.parametrize("wrong", [_differs, _other_settings])
def test_ranks_of_one_stage_that_differ_are_still_an_error(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(RanksFailed, match=r"optimizer\.param_groups: one value on rank 0, another on rank 1"):
        pool(4).run(wrong, str(tmp_path / "checkpoint"), timeout=TIMEOUT)
