"""`fullshard.observe.Recorder` in one process: what it writes, what it leaves behind, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.engine import unit_of
from fullshard.observe import Recorder, first_and_every, record
from fullshard.observe.rows import message_nbytes
from fullshard.see import story
from fullshard.see.record import read_run
from tests.harness.fake import fake_world
from tests.harness.models import BY_NAME


def _model() -> tuple[Any, Any]:
    case = BY_NAME["Transformer"] if "Transformer" in BY_NAME else next(iter(BY_NAME.values()))
    model = case.build()
    for child in model.children():
        if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList):
            fullshard.fully_shard(child)
    fullshard.fully_shard(model)
    return case, model


def _steps(case: Any, model: nn.Module, recorder: Recorder | None, numbers: range, optimizer: Any = None) -> None:
    for number in numbers:
        if recorder is not None:
            recorder.begin(number)
        loss = case.loss(model, case.batch(number))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        if recorder is not None:
            recorder.end(loss=1.0, norm=torch.tensor(2.0))


def test_a_step_has_the_events_and_commands_of_the_trace_and_the_rules_behind_them(tmp_path: Path) -> None:
    with fake_world(2):
        case, model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder(model, tmp_path, optimizer, in_full=lambda step: step == 2) as recorder:
            _steps(case, model, recorder, range(1, 2), optimizer)
            with record(model) as trace:
                _steps(case, model, recorder, range(2, 3), optimizer)
            _steps(case, model, recorder, range(3, 4), optimizer)
            assert f"fullshard see {tmp_path}" in str(fullshard.report(model))
    (rank,) = read_run(tmp_path).ranks
    assert rank.ended and [step.number for step in rank.detailed()] == [2] and len(rank.steps) == 3
    (detail,) = (step.detail for step in rank.detailed())
    assert [(each.kind, rank.name_of(each.unit)) for each in detail.commands] == trace.commands
    told = [line for line in trace.lines if line.startswith(">")]
    assert [" ".join(filter(None, (">", e.kind, rank.name_of(e.unit), e.flags))) for e in detail.events] == told
    assert {command.rule for command in detail.commands} <= story.rule_texts().keys()
    lines = iter(trace.lines)
    position = -1
    for command in detail.commands:  # each follows the event that it names
        while (line := next(lines)).startswith(">"):
            position += 1
        assert command.event == position and line == f"  {command.kind} {rank.name_of(command.unit)}"
    assert rank.steps[0].figures == {"loss": 1.0, "norm": 2.0}
    for step in rank.steps:
        assert step.end > step.begin


def test_bytes_are_those_of_the_layouts(tmp_path: Path) -> None:
    with fake_world(4):
        case, model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder(model, tmp_path, optimizer, in_full=lambda step: step >= 2) as recorder:
            _steps(case, model, recorder, range(1, 4), optimizer)
        units = fullshard.report(model, optimizer).units
    (rank,) = read_run(tmp_path).ranks
    assert rank.steps[1].detail is not None and rank.steps[2].detail is not None
    most: dict[tuple[int, str], int] = {}
    for level in (*rank.steps[1].detail.levels, *rank.steps[2].detail.levels):
        most[level.unit, level.kind] = max(level.nbytes, most.get((level.unit, level.kind), 0))
    for number, (unit, expected) in enumerate(zip(rank.header.units, units, strict=True)):
        assert most.get((number, "full"), 0) == unit.full_nbytes
        assert most.get((number, "shards"), 0) == unit.shard_nbytes == expected.measured.parameters
        assert most.get((number, "optimizer"), 0) == expected.measured.optimizer
        # Every parameter's gradient, unsharded and unpadded, and then its shard.
        assert most.get((number, "gradients"), 0) == unit.numel * 4
        assert most.get((number, "sharded gradients"), 0) == expected.local_numel * 4
    last: dict[tuple[int, str], int] = {}
    for level in rank.steps[2].detail.levels:
        last[level.unit, level.kind] = level.nbytes
    held = {kind for (_, kind), nbytes in last.items() if nbytes}
    assert held <= {"shards", "optimizer", "staging"}  # nothing else is left after zero_grad


def test_nothing_is_left_on_the_model_between_recorded_steps(tmp_path: Path) -> None:
    with fake_world(2):
        case, model = _model()
        with Recorder(model, tmp_path, in_full=lambda step: step == 2) as recorder:
            _steps(case, model, recorder, range(1, 2))
            root: Any = unit_of(model).root  # type: ignore[union-attr]

            def attached() -> list[Any]:
                arrivals = [unit.gradients.on_arrival for unit in root.units]
                groups = [group.observer for scope in root.companion.scopes for group in scope.groups.values()]
                actions = dict(root.executor._actions)
                return [list(root.event_listeners), list(root.executor.listeners), arrivals, groups, actions]

            before = attached()
            recorder.begin(2)
            assert attached()[0] != before[0] and attached()[4] != before[4] and attached()[2] != before[2]
            recorder.end()
            assert attached() == before


def test_a_step_that_fails_is_told_and_the_next_is_recorded(tmp_path: Path) -> None:
    with fake_world(2):
        case, model = _model()
        recorder = Recorder(model, tmp_path)
        recorder.begin(1)
        recorder.begin(2)  # the first one raised, and the program went on
        recorder.end(loss=math.nan)
        with pytest.raises(ArithmeticError), recorder:
            recorder.begin(3)
            raise ArithmeticError("on purpose")
    (rank,) = read_run(tmp_path).ranks
    assert [step.failed for step in rank.steps] == ["it did not end", "", "on purpose (ArithmeticError)"]
    assert rank.steps[1].figures == {"loss": None} and [step.number for step in rank.detailed()] == [2]


class _Failing(nn.Linear):
    """Runs out of memory in its forward, or in its backward, once it is said to."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 20.00 MiB.\n\nSee the documentation")
        if self.fails == "backward":
            y.register_hook(self._raise)
        return y

    def _raise(self, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("fails", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("in_full", [False, True], ids=["figures alone", "in full"])
@pytest.mark.parametrize("closes", [False, True], ids=["with", "finally"])
def test_a_step_out_of_memory_has_the_bytes_of_that_moment(
    fails: str, in_full: bool, closes: bool, tmp_path: Path
) -> None:
    whole, number = 4 * (64 * 64 + 64), 5
    with fake_world(2):
        model: Any = nn.Sequential(*(_Failing(64, 64) for _ in range(4)))
        for module in (*model, model):
            fullshard.fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = Recorder(model, tmp_path, optimizer, in_full=lambda step: in_full and step == number)

        def train() -> None:
            for step in range(1, number + 1):
                recorder.begin(step)
                model[2].fails = fails if step == number else ""
                model(torch.ones(4, 64)).sum().backward()
                if step == number and fails == "optimizer":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
                optimizer.step()
                optimizer.zero_grad()
                recorder.end()

        with pytest.raises(torch.OutOfMemoryError):
            if closes:
                try:
                    train()
                finally:
                    recorder.close()
            else:
                with recorder:
                    train()
    (rank,) = read_run(tmp_path).ranks
    step = rank.steps[-1]
    assert (
        step.failed == "CUDA out of memory. Tried to allocate 20.00 MiB. (OutOfMemoryError)" and step.number == number
    )
    held = {(rank.name_of(each.unit), each.kind): each.nbytes for each in step.held}
    assert {held[name, "shards"] for name in "0123"} == {whole // 2}
    assert {held[name, "optimizer"] for name in "0123"} == {whole + 8}  # two moments of a shard, two counters of a step
    full = {name: nbytes for (name, kind), nbytes in held.items() if kind == "full"}
    if fails == "optimizer":
        assert {held[name, "sharded gradients"] for name in "0123"} == {whole // 2} and full == {}
    else:
        assert ("2", "full") in held if fails == "forward" else held["3", "messages"] >= whole
        assert set(full.values()) <= {whole}
    assert step.memory["resident"] > 1 << 20 and rank.ended
    assert (step.detail is not None) == in_full


def test_sessions_that_are_taken_again_are_forgotten(tmp_path: Path) -> None:
    for name in ("from1-rank0", "from1-rank1", "from5-rank0", "from9-rank0", "from9-rank2", "from5-rank7"):
        (tmp_path / f"{name}.jsonl").write_text("")
    with fake_world(2):
        _, model = _model()
        with Recorder(model, tmp_path, first_step=5) as recorder:
            recorder.begin(5)
            recorder.end()
    left = sorted(path.stem for path in tmp_path.iterdir())
    assert left == ["from1-rank0", "from1-rank1", "from5-rank0"]


def test_what_a_recorder_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none; apply fully_shard first"):
        Recorder(nn.Linear(2, 2), tmp_path)
    with fake_world(2):
        _, model = _model()
        recorder = Recorder(model, tmp_path)
        with pytest.raises(ValueError, match=r"call begin\(step\) before it"):
            recorder.end()
        recorder.close()
        recorder.close()
        with pytest.raises(ValueError, match="expected an open recorder"):
            recorder.begin(1)
        assert fullshard.report(model).record is None
    assert not list(tmp_path.iterdir())


def test_which_steps_are_recorded_by_default() -> None:
    chosen = first_and_every(3, 100)
    assert [step for step in range(1, 401) if chosen(step)] == [1, 2, 3, 100, 200, 300, 400]
    assert [step for step in range(1, 401) if first_and_every(0, 0)(step)] == []


def test_bytes_of_messages() -> None:
    whole, part = torch.empty(16), torch.empty(4)  # of four ranks
    assert message_nbytes("_allgather_base", [whole, part, None], 4) == 48
    assert message_nbytes("allgather_into_tensor_coalesced", [[whole, whole], [part, part], None], 4) == 96
    assert message_nbytes("_reduce_scatter_base", [part, whole, None], 4) == 48
    assert message_nbytes("alltoall_base", [whole, whole, [], [], None], 4) == 48
    assert message_nbytes("allreduce", [[whole], None], 4) == 96
    assert message_nbytes("broadcast", [[whole], None], 4) == 64
    assert message_nbytes("gather_each", [None, [whole, whole], [part, part]], 4) == 96
    assert message_nbytes("exchange_each", [None, {1: [part], 2: [part], 3: [part]}, {}, 7], 4) == 48
