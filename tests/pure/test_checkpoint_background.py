"""Saves in the background, of one process: what is copied, which failures are raised, and by whom."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import background
from fullshard.checkpoint.background import Background, SaveFuture, _run
from fullshard.checkpoint.staging import StagingMemory
from fullshard.comm import alone


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    yield
    with contextlib.suppress(Exception):
        checkpoint.close()
    background._forked()


class Fails:
    """A save that does not succeed."""

    staging = None

    def run(self, taken: Any) -> str:
        raise OSError(28, "No space left on device")


def failed() -> SaveFuture:
    future = SaveFuture()
    background._pending.append(future)
    ended: list[bool] = []
    with contextlib.ExitStack() as stack:
        stack.callback(ended.append, True)
        _run(Fails(), None, future, stack.pop_all(), None)  # type: ignore[arg-type]
    assert ended, "its messages are over when it is"
    return future


def test_a_failure_is_raised_once_by_whoever_asks_first() -> None:
    for ask in (SaveFuture.exception, SaveFuture.unseen):
        future = failed()
        assert ask(future) is not None and future.unseen() is None
    future = failed()
    with pytest.raises(OSError, match="No space left"):
        future.result()
    assert future.unseen() is None
    background._pending.clear()


def test_close_raises_the_first_failure_and_forgets_all() -> None:
    failed()
    failed()
    memory = StagingMemory()
    memory.take([torch.ones(1)])
    background._alone._memory.append(memory)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.close()
    assert not background._pending and not background._alone._memory and not memory._held
    checkpoint.close()


def test_the_next_save_waits_and_raises_what_nobody_saw(tmp_path: Path) -> None:
    found = Background()
    future = SaveFuture()
    found._running.append(future)
    background._pending.append(future)
    timer = threading.Timer(0.05, future.set_exception, (OSError(28, "No space left on device"),))
    timer.start()
    with pytest.raises(OSError, match="No space left"):
        found.settle(alone(), f"saving {tmp_path}")
    timer.join()
    assert not background._pending, "it is raised once"
    found.settle(alone(), f"saving {tmp_path}")


def test_no_memory_for_a_copy_is_the_failure_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which all ranks raise: the others would wait for this one."""

    def refuse(self: Any, locals_: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(StagingMemory, "take", refuse)
    future = checkpoint.async_save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointMismatch, match="its copy on the host: no memory"):
        future.result()


def test_the_end_of_a_process_whose_save_failed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(background.os, "_exit", ends.append)
    failed()
    background._at_exit()
    assert ends == [1] and "a checkpoint was not saved" in capsys.readouterr().err
    background._at_exit()
    assert ends == [1]


def test_a_forked_child_waits_for_no_save_of_its_parent() -> None:
    background._pending.append(SaveFuture())
    background._alone._running.append(SaveFuture())
    background._forked()
    assert not background._pending and not background._alone._running
