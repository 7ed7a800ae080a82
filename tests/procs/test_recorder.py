"""A recorded run of two processes over gloo: its messages, and the trainer's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.see import causes, page, timeline
from fullshard.see.record import read_run
from tests.harness.pool import pool


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _recorded(rank: int, folder: str) -> dict[str, int]:
    import fullshard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(_Block() for _ in range(3)))
    for module in (*model, model):
        fullshard.fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    with fullshard.observe.Recorder(model, folder, optimizer, in_full=lambda step: step == 3) as recorder:
        for step in range(1, 5):
            recorder.begin(step)
            loss = model(torch.ones(8, 64)).square().mean()
            loss.backward()
            norm = fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.end(loss=loss.item(), norm=float(norm))
        recorder.note("checkpoint", "step-4", seconds=0.5)
    units = fullshard.report(model).units
    return {unit.name or "root": unit.padded_local_numel * 4 for unit in units}


def test_messages_have_their_times_bytes_and_numbers_on_all_ranks(tmp_path: Path) -> None:
    padded, _ = pool(2).run(_recorded, str(tmp_path))
    run = read_run(tmp_path)
    seen = []
    for rank in run.ranks:
        (step,) = rank.detailed()
        assert step.number == 3 and step.detail is not None
        took = step.nanoseconds
        for message in step.detail.messages:
            assert message.need is not None and message.ready is not None, message
            assert 0 <= message.issue <= message.need <= message.ready <= took
            assert message.arrival is None or message.issue <= message.arrival
        seen.append([(m.group, m.number, m.unit, m.purpose, m.nbytes) for m in step.detail.messages])
        received = {name: 0 for name in padded}
        for message in step.detail.messages:
            if message.purpose == "unshard":
                received[rank.name_of(message.unit)] += message.nbytes
        # The shards of the other rank: in forward and in backward, but for the last unit, which a backward needs first
        # and finds freed all the same.
        assert received == {name: 2 * nbytes for name, nbytes in padded.items()}
        assert {m.purpose for m in step.detail.messages} >= {"unshard", "reduce"}
        assert any(m.unit < 0 for m in step.detail.messages)  # the norm
        assert timeline.shares(step).total == took
    assert seen[0] == seen[1] and len(seen[0]) == len(set(seen[0]))
    assert [note.what for note in run.ranks[0].notes] == ["checkpoint"]
    assert run.ranks[0].header.host == run.ranks[1].header.host
    # Both ranks issue a message before either has it: clocks of one machine agree.
    arrived = {(m.group, m.number): m.arrival for m in run.ranks[0].detailed()[0].detail.messages}  # type: ignore[union-attr]
    shift = causes.offsets(run, 3)[1]
    for message in run.ranks[1].detailed()[0].detail.messages:  # type: ignore[union-attr]
        there = arrived[message.group, message.number]
        assert there is None or message.issue + shift <= there
    assert "Ranks in step 3" in page.page([run])


def _with_a_straggler(rank: int, folder: str) -> None:
    """Rank 1 sleeps before each block, and both ranks sleep now and then."""
    import random
    import time

    import fullshard

    class Slow(_Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.04 * rank + noise.uniform(0, 0.02))
            return super().forward(x)

    noise = random.Random(rank)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Slow() for _ in range(3)))
    for module in (*model, model):
        fullshard.fully_shard(module)
    with fullshard.observe.Recorder(model, folder, in_full=lambda step: True) as recorder:
        for step in range(1, 17):
            recorder.begin(step)
            model(torch.ones(8, 64)).square().mean().backward()
            model.zero_grad()
            recorder.end()


@pytest.mark.slow
def test_a_rank_that_sleeps_is_the_straggler_of_a_recorded_run(tmp_path: Path) -> None:
    pool(2).run(_with_a_straggler, str(tmp_path))
    run = read_run(tmp_path)
    (found,) = causes.stragglers(run)
    assert found.rank == 1 and found.is_sure and found.steps == 15
    # Its record alone does not know what the other waited for.
    (tmp_path / "from1-rank1.jsonl").unlink()
    run = read_run(tmp_path)
    assert causes.stragglers(run) == []
    assert {item.cause for item in causes.exposures(run, run.ranks[0], 16)} <= {"unknown", "here"}
