"""Other people's packages on one rank and on four: the trainings that their own files run on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import tolerance
from tests.harness.models import assert_same_training
from tests.harness.pool import pool
from tests.procs import test_accelerate as accelerate
from tests.procs import test_accelerate_state as accelerate_state
from tests.procs import test_lightning as lightning
from tests.procs import test_lightning_trainer as lightning_trainer
from tests.procs import test_peft as peft
from tests.procs import test_transformers as transformers

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("world", [1, 4])]
TIMEOUT = 110.0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_trains(world: int, tied: bool) -> None:
    for actual, expected, losses, whole, _ in pool(world).run(
        transformers._training, "fullshard", tied, timeout=TIMEOUT
    ):
        assert_same_training(actual, expected)
        assert losses == pytest.approx(whole, rel=tolerance.figure(steps=transformers.STEPS))


def test_peft_trains(world: int) -> None:
    for actual, expected, with_gradient, dtypes in pool(world).run(peft._training, "fullshard", timeout=TIMEOUT):
        assert_same_training(actual, expected)
        assert len(with_gradient) == 8 and (torch.bfloat16, False, True) in dtypes


@pytest.mark.parametrize("lean", [False, True], ids=["from every rank", "from rank 0"])
def test_accelerate_trains(world: int, lean: bool) -> None:
    options = {"cpu_ram_efficient_loading": lean}
    for actual, expected, *_ in pool(world).run(accelerate._prepared, "fullshard", True, options, timeout=TIMEOUT):
        assert_same_training(actual, expected)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_goes_on(world: int, kind: str, tmp_path: Path) -> None:
    expected = accelerate_state.plain_training(world)
    for trained, *_ in pool(world).run(
        accelerate_state._saved_and_loaded, "fullshard", kind, str(tmp_path), timeout=TIMEOUT
    ):
        assert_same_training(trained, expected)


@pytest.mark.parametrize("one_file", [False, True], ids=["shards", "one file"])
def test_fabric_trains_and_saves(world: int, one_file: bool, tmp_path: Path) -> None:
    for before, whole, _, early, after, _ in pool(world).run(
        lightning._training, "fullshard", one_file, str(tmp_path / "checkpoint"), timeout=TIMEOUT
    ):
        assert_same_training(before, whole)
        assert_same_training(after, before, 0)
        assert early == []


@pytest.mark.parametrize("one_file", [False, True], ids=["shards", "one file"])
def test_the_trainer_trains_and_resumes(world: int, one_file: bool, tmp_path: Path) -> None:
    ranks = pool(world).run(lightning_trainer._fit, "fullshard", one_file, str(tmp_path), timeout=TIMEOUT)
    for epochs in (1, 2):
        expected, _ = lightning_trainer.plain(epochs, world)
        for found in ranks:
            assert_same_training(found[epochs - 1][0], expected)
