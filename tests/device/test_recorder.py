"""Recording a step on a device waits for nothing: its times are read when the device came to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.see.record import read_run
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup())


def _train(rank: int, folder: str, records: bool) -> tuple[int, list[int]]:
    """How often the host waited for the device; and how many steps were in the file after each step, while the device
    was behind until the third one."""
    import fullshard
    from tests.harness import simulated

    model: Any = on_device.sharded(CASE.build().to("simulated"), Setup())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = fullshard.observe.Recorder(model, folder, in_full=lambda step: step != 2) if records else None
    behind, written = True, []
    with simulated.watched(queries=lambda: not behind) as seen:
        for step in range(1, 5):
            behind = step < 3
            if recorder is not None:
                recorder.begin(step)
            CASE.loss(model, tuple(part.to("simulated") for part in CASE.batch(step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.end(loss=float(step))
                file = Path(folder) / f"from1-rank{rank}.jsonl"
                written.append(file.read_bytes().count(b'{"step"'))
        waits = sum(seen.waits.values())
    if recorder is not None:
        recorder.close()
    return waits, written


@pytest.mark.slow
def test_recording_does_not_wait_for_the_device(tmp_path: Path) -> None:
    plain = pool(2, backend="nccl").run(_train, str(tmp_path), False)
    found = pool(2, backend="nccl").run(_train, str(tmp_path), True)
    for (waits, written), (before, _) in zip(found, plain, strict=True):
        assert waits == before
        assert written == [0, 0, 3, 4]
    for rank in read_run(tmp_path).ranks:
        assert [step.number for step in rank.steps] == [1, 2, 3, 4]
        for step in rank.detailed():
            assert step.detail is not None
            assert all(event.device is not None for event in step.detail.events)
            needed = [message for message in step.detail.messages if message.need is not None]
            assert needed and all(message.device_ready is not None for message in needed)
