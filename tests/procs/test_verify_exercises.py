"""`fullshard verify` beside steps: what is sound is equal in all exercises, and a fault in each is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.program import Program, find_program
from fullshard.verify import page
from fullshard.verify.applicable import Applicable
from fullshard.verify.comparison import Result
from fullshard.verify.exercised import read_exercised
from fullshard.verify.exercises import OF_TORCH
from fullshard.verify.setting import EXERCISES, Setting
from fullshard.verify.strategy import parse_strategy
from tests.harness.exercise_faults import EXERCISED
from tests.harness.seeded_faults import PROVEN
from tests.harness.verified import compare, record

SOUND = [
    ("zero3", 2),
    ("zero2+bf16+micro=2", 2),
    ("zero3+offload+recompute", 2),
    ("zero2+fp16+micro=2", 2),
    ("zero3+bf16+pure", 3),
    ("zero3+hsdp=2", 4),
    ("zero3=2", 4),
    ("zero3", 1),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "world"), SOUND)
def test_sound_exercises_are_equal(strategy: str, world: int, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy, world, exercises=EXERCISES))
    assert result.verdict == "equal", result.difference
    found = read_exercised(tmp_path, 0)
    assert all(value is not None for value in found)
    moments = [(each.when, each.mode) for each in found.evaluated]
    assert len(moments) == len(set(moments)) == 8
    # Each full parameter that a forward uses was looked at in each evaluation.
    assert {
        each.uses for each in map(lambda e: e._replace(uses=(e.uses.looked, len(e.uses.others))), found.evaluated)
    } == {(12, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [("zero3+tp=2", 2), ("zero2+micro=2+tp=2", 4)])
def test_exercises_beside_tensor_parallelism(strategy: str, world: int, tmp_path: Path) -> None:
    setting = record(tmp_path, strategy, world, exercises=EXERCISES, entry="tests.harness.verified:split")
    result = compare(tmp_path, setting)
    assert result.verdict == "equal", result.difference


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISED)
def test_a_fault_is_found_and_named(name: str, tmp_path: Path) -> None:
    case = EXERCISED[name]
    entry = f"tests.harness.verified:{case.program}"
    setting = record(tmp_path, case.strategy, case.world, case.fault, entry=entry, exercises=EXERCISES)
    found = compare(tmp_path, setting).difference
    assert found is not None
    assert (found.phase, found.name) == (case.phase, case.name), found
    assert case.cause in found.cause, found


# ---- buffers and recomputation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", ["zero3+recompute", pytest.param("zero2+bf16+norms+recompute", marks=pytest.mark.slow)]
)
def test_buffers_that_are_updated_again_are_no_fault(strategy: str, tmp_path: Path) -> None:
    """Plain training with recomputation updates them again, too; that is said."""
    result = compare(tmp_path, record(tmp_path, strategy, entry="tests.harness.verified:batch_norms"))
    assert result.verdict == "equal", result.difference
    assert any("updates the buffer blocks.0.norm" in note and "a second time" in note for note in result.notes)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "program"), [("zero2", "program"), ("zero2+recompute", "batch_norms")])
def test_buffers_that_are_not_updated_are_a_fault(strategy: str, program: str, tmp_path: Path) -> None:
    """Also where they are updated again."""
    fault = PROVEN["buffers are put back after a forward"].fault
    setting = record(tmp_path, strategy, fault=fault, entry=f"tests.harness.verified:{program}")
    found = compare(tmp_path, setting).difference
    assert found is not None and found.phase == "buffers" and "norm." in found.name, found


# ---- what cannot be exercised ----------------------------------------------------------------------------------------


def test_what_cannot_be_exercised_is_said(tmp_path: Path) -> None:
    """A loss that needs gradients; units that are not the whole model; too few devices; another library."""
    entry = "tests.harness.sound_programs:program:gradient penalty"
    setting = Setting(entry, "fullshard", parse_strategy("zero3"), 2, 2, "cpu")
    found, why = Applicable(find_program(entry), torch.device("cpu"), None).exercises(setting)
    assert "evaluation" not in found and "another world" not in found and "checkpoint" in found
    assert "the plain model raises under no_grad: RuntimeError" in why["evaluation"]
    setting = setting._replace(exercises=found)
    result = Result(setting, exercised=found, not_exercised=why)
    assert "not exercised: another world: there are no devices" in page.table([result])
    assert json.loads(json.dumps(page.as_json(entry, [result])))["results"][0]["not_exercised"] == why
    assert "Not exercised: evaluation: the plain model raises" in page.page(entry, [result])
    parts = Program(lambda: nn.Sequential(nn.Linear(2, 2)), lambda m, x: m(x).sum(), lambda _: torch.ones(2), _parts)
    _, why = Applicable(parts, torch.device("cpu"), 3).exercises(setting)
    assert why == {"output_dtype": "shard does not call fully_shard with the whole model"}
    found, why = Applicable(parts, torch.device("cpu"), 3).exercises(setting._replace(library="torch"))
    assert found == ("clipping", "evaluation", "state dicts") and set(why.values()) == {"with fullshard alone"}
    assert Applicable(parts, torch.device("cpu"), 3).exercises(setting._replace(library="ddp"))[0] == ()


def _parts(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
    fully_shard(model[0])  # type: ignore[index]


@pytest.mark.slow
def test_torch_is_exercised_too(tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, "zero3", library="torch", exercises=OF_TORCH))
    assert result.verdict == "equal", result.difference
