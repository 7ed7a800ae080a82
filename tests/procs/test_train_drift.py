"""What ranks should have the same of and have not is told at the checkpoints of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fullshard.train.config import Config
from fullshard.train.console import Console
from fullshard.train.loop import Outputs
from fullshard.train.metrics import StepRecord
from tests.harness.pool import pool
from tests.procs.test_train_world import config_of, trainer_of


class _Every:
    """In the place of checkpoints: one after each second step."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def due(self, step: int, last: int) -> bool:
        return step % 2 == 0

    def save(self, step: int, *, wait: bool) -> None:
        self.saved.append(step)


class _Records:
    """In the place of a metrics file and of a console."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, record: StepRecord) -> None:
        self.lines.append(json.loads(record.to_json()))


class _Console(Console):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def _run(rank: int, config: Config) -> tuple[list[dict[str, Any]], list[str], list[int]]:
    trainer = trainer_of(rank, config)
    trainer.run(Outputs(console := _Console(), records := _Records()), checkpoints := _Every(), after=1)  # type: ignore[arg-type]
    # One element of one copy of a shard, as after an error of the memory.
    if rank == 1:
        with torch.no_grad():
            trainer.model.get_parameter("layers.1.ffn.down.weight").to_local().data[0, 0] += 1.0
    del records.lines[:], console.said[:]
    trainer.run(Outputs(console, records), checkpoints, after=1)  # type: ignore[arg-type]
    return records.lines, console.said, checkpoints.saved


@pytest.mark.slow
def test_copies_that_differ_are_told_at_checkpoints() -> None:
    """Not where nothing differs, and not at steps without a checkpoint."""
    shares = ("sharding.data_parallel_shard_degree=1", "sharding.data_parallel_replicate_degree=2")
    config = config_of(*shares, "training.steps=4")
    for lines, said, saved in pool(2).run(_run, config, timeout=60):
        assert saved == [2, 4, 2, 4] and [line["step"] for line in lines] == [2, 3, 4]
        assert ["drift" in line for line in lines] == [True, False, True]
        for line in (lines[0], lines[2]):
            assert "replica layers.1.ffn.down.weight (rank 0 unlike rank 1)" in line["drift"]
        assert [text for text in said if "layers.1.ffn.down.weight" in text and text.startswith("step 2: ranks differ")]


def _agrees(rank: int, config: Config) -> list[dict[str, Any]]:
    trainer = trainer_of(rank, config)
    trainer.run(Outputs(Console(), records := _Records()), _Every())  # type: ignore[arg-type]
    return records.lines


@pytest.mark.slow
def test_a_run_without_differences_says_nothing() -> None:
    for shards in (1, 2):
        shares = f"sharding.data_parallel_shard_degree={shards}"
        copies = f"sharding.data_parallel_replicate_degree={2 // shards}"
        for lines in pool(2).run(_agrees, config_of(shares, copies, "training.steps=2"), timeout=60):
            assert len(lines) == 2 and not any("drift" in line for line in lines)
