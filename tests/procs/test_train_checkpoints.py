"""The trainer's checkpoints: which ones stay, what they cost a step, and a save in the background that fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fullshard import checkpoint
from fullshard.train.config import Config, load_config
from fullshard.train.console import Console
from fullshard.train.folder import CHECKPOINTS, Checkpoints
from fullshard.train.loop import Outputs
from fullshard.train.metrics import StepRecord
from tests.harness.pool import pool
from tests.procs.test_train_world import TINY, checkpoints_of, trainer_of

STEPS = 7


class Kept(Outputs):
    """Keeps what each step reports."""

    def __init__(self) -> None:
        super().__init__(Console())
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def config_of(*overrides: str) -> Config:
    tiny = [one for one in TINY if not one.startswith("metrics.eval_every")]
    return load_config(None, (*tiny, "metrics.eval_every=100", f"training.steps={STEPS}", *overrides))


def parts_of(rank: int, config: Config, folder: str) -> tuple[Any, Checkpoints]:
    trainer = trainer_of(rank, config)
    return trainer, checkpoints_of(trainer, folder)


def _best(rank: int, config: Config, folder: str) -> list[StepRecord]:
    trainer, checkpoints = parts_of(rank, config, folder)
    kept = Kept()
    trainer.run(kept, checkpoints)
    return kept.records


BEST = ("checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=2", "checkpoint.staging_mib=1")


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_the_best_checkpoints_stay_and_steps_say_what_they_waited(queue: str, tmp_path: Path) -> None:
    config = config_of(*BEST, f"checkpoint.queue={queue}", "optimizer.lr=0.3")
    records = pool(2).run(_best, config, str(tmp_path), timeout=60)[0]
    # It validates at each checkpoint, whatever metrics.eval_every is, and each step after one says what it waited.
    measured = {one.step: one.val_loss for one in records if one.val_loss is not None}
    assert [*measured] == [2, 4, 6, 7]
    assert [one.step for one in records if one.checkpoint_seconds] == [3, 5, 7]
    found = checkpoint.list_checkpoints(tmp_path / CHECKPOINTS)
    best = sorted(measured, key=lambda step: measured[step])[:2]
    assert {one.step for one in found} == {*best, 7} and all(one.whole for one in found)
    assert all(one.metrics["val_loss"] == measured[one.step] for one in found)
    assert all(one.layout == "2 ranks, 1 copy of 2 parts" for one in found)


def _failing(rank: int, config: Config, folder: str) -> tuple[int, str]:
    trainer, checkpoints = parts_of(rank, config, folder)
    kept, original = Kept(), os.write

    def write(fd: int, data: Any) -> int:
        if rank == 1 and threading.current_thread().name == "fullshard-save":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data)

    backward = trainer._backward

    def after_the_failure(starts: list[int]) -> Any:
        # Step 3 begins its sums when the save of step 2 has failed, and only rank 1 looks at the right moment.
        for future in checkpoints._under_way:
            while not future.done():
                threading.Event().wait(0.002)
        return backward(starts)

    trainer._backward = after_the_failure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        if rank == 0:
            patch.setattr(Checkpoints, "failed", False)
        with pytest.raises(checkpoint.CheckpointIOError, match="No space left") as caught:
            trainer.run(kept, checkpoints)
    return kept.records[-1].step, str(caught.value)


def test_a_save_that_failed_in_the_background_ends_the_run_before_the_next_step(tmp_path: Path) -> None:
    config = config_of("checkpoint.every=2")
    for last, text in pool(2).run(_failing, config, str(tmp_path), timeout=60):
        assert last == 3 and text.startswith("[Errno 28] rank 1: ")
