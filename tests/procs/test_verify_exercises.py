"""`fullshard verify` beside steps: what is sound is equal in all exercises, and a fault in each is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.verify.exercised import read_exercised
from fullshard.verify.setting import EXERCISES
from tests.harness.exercise_faults import EXERCISED
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


@pytest.mark.quick(4)
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


@pytest.mark.quick(4)
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
