"""What surrounds the engine, with compute dtypes of single parameters: checkpoints, DCP, the trace and the recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import MixedPrecisionPolicy, checkpoint, fully_shard
from fullshard.observe import Recorder, record
from fullshard.program import OwnDtype, modules_of
from fullshard.see.page import page
from fullshard.see.record import read_run
from tests.harness.fake import fake_world
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads_only(reason="a sharded model does not pickle")
BF16 = torch.bfloat16


def _made(kept: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A block that is a unit in a root, with norms of odd sizes that compute in float32 or in bfloat16."""

    def build() -> nn.Module:
        block = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.LayerNorm(5))
        return nn.Sequential(block, nn.Linear(5, 3))

    model = seeded(build, seed)
    override = OwnDtype(modules_of(model, ["LayerNorm"])) if kept else None
    policy = MixedPrecisionPolicy(BF16, torch.float32, param_dtype_override_fn=override)
    fully_shard(model[0], mp_policy=policy)  # type: ignore[index]
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: _whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}/{key}"] = _whole(value)
    return found


def _moved(rank: int, folder: str, own: bool, saved: bool, loaded: bool) -> list[str]:
    """Names of what differs after a load into another model, and of what a step does not change then."""
    model, optimizer = _made(saved, 1)
    _step(model, optimizer, rank)
    expected = _state(model, optimizer)
    other, others = _made(loaded, 2)
    _step(other, others, rank)
    save, load = (checkpoint.save, checkpoint.load) if own else (dcp.save, dcp.load)
    parts = checkpoint.get_state_dict(model, optimizer)
    save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
    parts = checkpoint.get_state_dict(other, others)
    load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
    checkpoint.set_state_dict(other, others, model_state_dict=parts[0], optim_state_dict=parts[1])
    found = _state(other, others)
    assert found.keys() == expected.keys() and {p.dtype for p in other.parameters()} == {torch.float32}
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    _step(other, others, rank)
    return wrong + [name for name, p in other.named_parameters() if torch.equal(_whole(p), expected[name])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("own", [True, False], ids=["own", "DCP"])
@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, True)])
def test_checkpoints_go_from_one_choice_of_dtypes_to_another(
    tmp_path: Path, own: bool, saved: bool, loaded: bool
) -> None:
    """Bit by bit: shards and state have the dtype of storage; training continues."""
    assert run_ranks(2, _moved, str(tmp_path / "c"), own, saved, loaded) == [[], []]


def _seen(kept: bool, folder: Path) -> tuple[Any, Any, Any]:
    with fake_world(2):
        model, optimizer = _made(kept, 1)
        with Recorder(model, folder, optimizer, in_full=lambda step: step == 2) as recorder:
            for number in (1, 2):
                recorder.begin(number)
                with record(model) as trace:
                    _step(model, optimizer, 0)
                recorder.end(loss=1.0)
        return read_run(folder).ranks[0], trace, fullshard.report(model)


def test_the_trace_and_the_recorder_see_the_same_commands(tmp_path: Path) -> None:
    """A unit with two compute dtypes is gathered and reduced as one; what it holds has the bytes of both."""
    found = {kept: _seen(kept, tmp_path / str(kept)) for kept in (True, False)}
    gradients = {}
    for kept, (rank, trace, report) in found.items():
        assert trace.commands == found[False][1].commands and trace.lines == found[False][1].lines
        (detail,) = (step.detail for step in rank.detailed())
        assert [(each.kind, rank.name_of(each.unit)) for each in detail.commands] == trace.commands
        row = next(row for row in report.units if row.name == "0")
        assert {*row.compute_dtypes} == ({"float32", "bfloat16"} if kept else {"bfloat16"})
        assert page([read_run(tmp_path / str(kept))]).startswith("<!doctype html>")
        gradients[kept] = max(
            level.nbytes for level in detail.levels if level.kind == "gradients" and rank.name_of(level.unit) == "0"
        )
    # The norms' 24 elements in four bytes each, and not in two.
    assert gradients[True] - gradients[False] == 2 * (7 + 7 + 5 + 5)
