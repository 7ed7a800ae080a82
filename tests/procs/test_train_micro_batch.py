"""`training.micro_batch = "auto"`: the largest that fits, remembered, told, and known to the run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fullshard.train.config import Config
from fullshard.train.loop import Outputs
from fullshard.train.metrics import StepRecord
from tests.harness.pool import pool
from tests.procs.test_train_resume import _figures, _Records
from tests.procs.test_train_world import assert_equal, checkpoints_of, config_of, full, state_of, trainer_of
from tests.threads.test_micro_batches import Memory, allocator_raises, really


class Ran(NamedTuple):
    records: list[StepRecord]
    tensors: dict[str, torch.Tensor]  # parameters and moments, full
    failures: int


def ran(rank: int, config: Config, folder: str, limit: int, steps: int) -> Ran:
    """A run on ranks that have memory for `limit` sequences: in the forward of the last block from the first step on,
    and for one less in its backward from the third step on."""
    trainer = trainer_of(rank, config)
    memories = [
        Memory(trainer.model.layers[1], limit, "forward", really),
        Memory(trainer.model.layers[1], limit // 2, "backward", allocator_raises, after=2 * 4 + 2),
    ]
    checkpoints = checkpoints_of(trainer, folder, trainer.micro)
    after, _ = checkpoints.resume()
    outputs: Any = _Records(0, Path(folder))
    assert isinstance(outputs, Outputs)
    for step in range(after + 1, steps + 1):
        outputs.step(trainer.step(step))
    checkpoints.save(steps, wait=True)
    return Ran(outputs.records, state_of(trainer), sum(memory.failures for memory in memories))


AUTO = ("training.micro_batch=auto", "training.global_batch=16", "training.steps=6", "metrics.eval_every=2")


@pytest.mark.slow
def test_it_finds_remembers_and_tells_the_size(tmp_path: Path) -> None:
    """Eight sequences of a rank: 8 and 4 do not fit, later 2 does not. Bitwise the run that is told the sizes."""
    auto = config_of(*AUTO)
    found = pool(2).run(ran, auto, str(tmp_path / "auto"), 2, 6, timeout=60)
    told = pool(2).run(_told, config_of(*AUTO, "training.micro_batch=2"), timeout=60)
    for rank, (records, tensors, failures) in enumerate(found):
        assert [record.micro_batch for record in records] == [2, 2, 1, 1, 1, 1]
        assert failures == 3
        assert [_figures(record) for record in records] == [_figures(record) for record in told[rank][0]]
        assert_equal(tensors, told[rank][1])
    # A run that goes on begins with what was found; so does one on other processes.
    for world, steps in ((2, 7), (1, 8)):
        (record,), _, failures = pool(world).run(ran, auto, str(tmp_path / "auto"), 8, steps, timeout=60)[0]
        assert (record.micro_batch, failures) == (1, 0)
    # And one that was told a size goes on with that one, and does not pass it on.
    fixed = config_of(*AUTO, "training.micro_batch=4")
    (record,), _, _ = pool(2).run(ran, fixed, str(tmp_path / "auto"), 8, 9, timeout=60)[0]
    assert record.micro_batch == 4
    (record,), _, _ = pool(2).run(ran, auto, str(tmp_path / "auto"), 8, 10, timeout=60)[0]
    assert record.micro_batch == 8


def _told(rank: int, config: Config) -> tuple[list[StepRecord], dict[str, torch.Tensor]]:
    trainer = trainer_of(rank, config)
    records = []
    for step in range(1, 7):
        if step == 3:
            trainer.micro.load_state_dict({"size": 1, "fits": 0, "fails": 0})
        records.append(trainer.step(step))
    tensors = {name: full(p).clone() for name, p in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        tensors |= {f"{name}.{key}": full(value).clone() for key, value in trainer.optimizer.state[parameter].items()}
    return records, tensors
