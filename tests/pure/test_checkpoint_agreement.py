"""How ranks come to one outcome of a save or a load: what one of them raises is raised by all, as what it is."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fullshard.checkpoint.agreement import _decide, _place, agree, describe, rebuild, with_all_ranks
from fullshard.checkpoint.errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatch,
)
from fullshard.peers import PeerFailed, RanksDisagree


class Messenger:
    """The first rank of several; `others`: what the others send."""

    rank = 0

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.world = others, 1 + len(others)
        self.mine: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        yield

    def collect(self, data: bytes) -> list[bytes]:
        self.mine.append(json.loads(data))
        return [data, *(json.dumps({"at": self.mine[-1]["at"], **other}).encode() for other in self.others)]

    def share(self, answer: bytes | None) -> bytes:
        assert answer is not None
        return answer


def outcome(mine: Callable[[], Any], *others: dict[str, Any], what: str = "saving /a/c") -> Any:
    return agree(Messenger(*others), what, mine, lambda messages: {"sum": len(messages)})  # type: ignore[arg-type]


def fails(error: Exception) -> Callable[[], Any]:
    def mine() -> Any:
        raise error

    return mine


def test_all_ranks_decide_together() -> None:
    assert outcome(dict, {"ok": {}}) == {"sum": 2}
    with pytest.raises(CheckpointError, match=r"^rank 1: no such file"):
        outcome(dict, {"error": describe(CheckpointDamaged("no such file"))}, {"ok": {}})
    # Own errors reach the others before they are raised.
    messenger = Messenger({"ok": {}})
    with pytest.raises(CheckpointError, match="ValueError: not now"):
        agree(messenger, "saving /a/c", fails(ValueError("not now")), lambda _: {})  # type: ignore[arg-type]
    assert "error" in messenger.mine[0]


def test_what_the_first_rank_finds_is_raised_by_all() -> None:
    def decide(messages: list[Any]) -> Any:
        raise CheckpointBusy("another one is writing")

    found = _decide([{"at": "a", "ok": {}}] * 2, decide)
    assert found["ranks"] == [] and isinstance(rebuild(found["error"], None), CheckpointBusy)


def test_ranks_at_other_calls_are_told_which() -> None:
    messages = [{"at": _place(f"{doing} /rank{rank}/{name}"), "ok": {}} for rank, (doing, name) in enumerate(CALLS)]
    error = rebuild(_decide(messages, lambda _: {})["error"], None)
    assert "found ranks 0 and 1 saving step-3 and rank 2 saving step-4 and rank 3 loading step-3" in str(error)


CALLS = [("saving", "step-3"), ("saving", "step-3"), ("saving", "step-4"), ("loading", "step-3")]


def test_a_folder_may_be_mounted_at_another_path() -> None:
    assert _place("saving /mnt/a/step-3") == _place("saving /data/step-3")


def failure(*errors: Exception | None) -> CheckpointError:
    messages = [{"at": "a", **({"ok": {}} if error is None else {"error": describe(error)})} for error in errors]
    found = _decide(messages, lambda _: {})
    ranks = found["ranks"]
    return rebuild(found["error"], ranks[0] if len(ranks) == 1 else None)


def test_problems_of_all_ranks_are_one_error() -> None:
    one, other = (CheckpointMismatch("saving", [problem, "both"], "do that") for problem in ("a", "b"))
    error = failure(one, None, other)
    assert isinstance(error, CheckpointMismatch)
    assert error.problems == ["a (on rank 0)", "both (on ranks 0 and 2)", "b (on rank 2)"]
    assert failure(one, one).problems == ["a", "both"]  # type: ignore[attr-defined]


def test_a_full_disk_is_not_hidden_by_a_mismatch() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    error = failure(CheckpointMismatch("saving", ["a"], ""), full)
    assert isinstance(error, CheckpointIOError) and error.errno == errno.ENOSPC
    assert str(error).count("rank 1: ") == 1
    # Of all ranks alike it is no rank's.
    assert "rank" not in str(failure(full, full))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("a"),
        CheckpointDamaged("a"),
        CheckpointBusy("a"),
        CheckpointMismatch("a", ["b"], "c"),
        CheckpointIOError(errno.EIO, "a"),
    ],
)
def test_errors_travel_as_what_they_are(error: CheckpointError) -> None:
    found = rebuild(json.loads(json.dumps(describe(error))), None)
    assert type(found) is type(error) and str(found) == str(error)
    assert getattr(found, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PeerFailed("rank 1 ended", rank=1), "saving c: expected all ranks, lost one: rank 1 ended"),
        (RanksDisagree("they differ"), "saving c: they differ"),
        (ConnectionError("reset"), "saving c: expected all ranks, lost one: reset"),
        (CheckpointBusy("another one"), "another one"),
    ],
)
def test_who_fails_in_a_save_is_an_error_of_the_save(error: Exception, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        with with_all_ranks(Messenger(), "saving c"):  # type: ignore[arg-type]
            raise error
    assert str(caught.value) == says
    assert isinstance(caught.value, CheckpointBusy) == isinstance(error, CheckpointBusy)
