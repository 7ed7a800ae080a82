"""Retention by all ranks together: one decides, and all get the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fullshard import checkpoint
from tests.harness.threads import run_ranks


def test_all_ranks_get_what_the_first_one_removed(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[Path]:
        for step in (1, 2, 3):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}", metrics={"loss": step + rank})
        return checkpoint.retain(tmp_path, keep_last=1, keep_best=1, metric="loss", no_dist=False)

    assert run_ranks(2, rank_main) == [[tmp_path / "step-2"]] * 2
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    assert [one.metrics for one in checkpoint.list_checkpoints(tmp_path)] == [{"loss": 1.0}, {"loss": 3.0}]


def test_ranks_that_ask_for_different_things_remove_nothing(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        for step in (1, 2, 3):
            checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")
        with pytest.raises(checkpoint.CheckpointMismatch, match=r"(?s)rank 0: .*last=1.*rank 1: .*last=2"):
            checkpoint.retain(tmp_path, keep_last=1 + rank, no_dist=False)

    run_ranks(2, rank_main)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 3


def test_what_the_system_refuses_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    for step in (1, 2):
        checkpoint.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}")
    monkeypatch.setattr(os, "rename", refuse)

    def rank_main(rank: int) -> None:
        with pytest.raises(checkpoint.CheckpointIOError, match="removing .*step-1: Permission denied"):
            checkpoint.retain(tmp_path, keep_last=1, no_dist=False)

    run_ranks(2, rank_main)
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2
