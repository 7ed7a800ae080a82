"""How ranks come to one outcome of a save or a load: what one of them raises is raised by all, as what it is."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fullshard.checkpoint.agreement import (
    Heard,
    Said,
    _decide,
    _place,
    agree,
    describe,
    rebuild,
    summary,
    summed,
    with_all_ranks,
)
from fullshard.checkpoint.errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatch,
)
from fullshard.checkpoint.plan import MODULUS
from fullshard.comm.messages import FAN_IN, above, below
from fullshard.peers import PeerFailed, RanksDisagree


class Messenger:
    """The first rank of several; `others`: what the others say."""

    rank = 0

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.world = others, 1 + len(others)
        # What this rank sent when it was asked for its text.
        self.mine: list[dict[str, Any]] = []
        self._summaries = True

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        yield

    def fold(self, data: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        texts = [json.dumps({**other, "at": "saving c"}, separators=(",", ":")).encode() for other in self.others]
        summaries, self._summaries = self._summaries, False
        if summaries:
            said = [summary(n + 1, hashlib.sha256(one).hexdigest()[:32], Said({})) for n, one in enumerate(texts)]
            return combine([data, *said])
        self.mine.append(json.loads(data[8:]))
        return combine([data, *(len(one).to_bytes(8, "little") + one for one in texts)])

    def share(self, answer: bytes | None) -> bytes:
        assert answer is not None
        return answer


def outcome(mine: Callable[[], Any], *others: dict[str, Any], what: str = "saving /a/c") -> Any:
    return agree(Messenger(*others), what, mine, lambda heard: {"sum": len(heard.groups)})  # type: ignore[arg-type]


def fails(error: Exception) -> Callable[[], Any]:
    def mine() -> Any:
        raise error

    return mine


def test_all_ranks_decide_together() -> None:
    assert outcome(dict, {"ok": {}}) == {"sum": 1}, "all say the same"
    assert outcome(dict, {"ok": {"n": 1}}, {"ok": {"n": 1}}) == {"sum": 2}
    with pytest.raises(CheckpointError, match=r"^rank 1: no such file"):
        outcome(dict, {"error": describe(CheckpointDamaged("no such file"))}, {"ok": {}})
    # Own errors reach the others before they are raised.
    messenger = Messenger({"ok": {}})
    with pytest.raises(CheckpointError, match="ValueError: not now"):
        agree(messenger, "saving /a/c", fails(ValueError("not now")), lambda _: {})  # type: ignore[arg-type]
    assert "error" in messenger.mine[0]


def heard(messages: list[Any]) -> Heard:
    return Heard([([rank], message) for rank, message in enumerate(messages)], [], b"")


def test_what_the_first_rank_finds_is_raised_by_all() -> None:
    def decide(heard: Heard) -> Any:
        raise CheckpointBusy("another one is writing")

    found = _decide(heard([{"at": "a", "ok": {}}] * 2), decide)
    assert found["ranks"] == [] and isinstance(rebuild(found["error"], None), CheckpointBusy)


def test_ranks_at_other_calls_are_told_which() -> None:
    messages = [{"at": _place(f"{doing} /rank{rank}/{name}"), "ok": {}} for rank, (doing, name) in enumerate(CALLS)]
    error = rebuild(_decide(heard(messages), lambda _: {})["error"], None)
    assert "found ranks 0 and 1 saving step-3 and rank 2 saving step-4 and rank 3 loading step-3" in str(error)


CALLS = [("saving", "step-3"), ("saving", "step-3"), ("saving", "step-4"), ("loading", "step-3")]


def test_a_folder_may_be_mounted_at_another_path() -> None:
    assert _place("saving /mnt/a/step-3") == _place("saving /data/step-3")


def failure(*errors: Exception | None) -> CheckpointError:
    messages = [{"at": "a", **({"ok": {}} if error is None else {"error": describe(error)})} for error in errors]
    found = _decide(heard(messages), lambda _: {})
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


# ---- the tree --------------------------------------------------------------------------------------------------------


def folded(texts: list[bytes], combine: Callable[[list[bytes]], bytes]) -> tuple[bytes, list[int], int]:
    """What the first rank gets, the bytes that each rank sends, and how many messages follow one another."""
    sent, depth = [0] * len(texts), [0] * len(texts)
    made = list(texts)
    for rank in reversed(range(len(texts))):
        made[rank] = combine([texts[rank], *(made[one] for one in below(rank, len(texts)))])
        depth[rank] = max((depth[one] + 1 for one in below(rank, len(texts))), default=0)
        sent[rank] = len(made[rank]) if rank else 0
    return made[0], sent, depth[0]


@pytest.mark.parametrize("world", [1, 2, FAN_IN, FAN_IN + 1, FAN_IN + 2, 300, 10_000])
def test_every_rank_but_the_first_sends_to_one(world: int) -> None:
    senders = [one for rank in range(world) for one in below(rank, world)]
    assert sorted(senders) == list(range(1, world))
    assert all(one in below(above(one, world), world) for one in range(1, world))
    assert max(len(below(rank, world)) for rank in range(world)) <= FAN_IN


@pytest.mark.parametrize("world", [20, 300, 4_096, 10_000])
def test_branches_are_about_equal(world: int) -> None:
    """No rank passes on what most others have; and the tree is no deeper than one of the largest fan-in."""
    _, sent, depth = folded([b"r"] * world, b"".join)
    assert max(sent) <= 2 * world / len(below(0, world))
    reached, levels = 1, 0
    while reached < world:
        levels += 1
        reached += FAN_IN**levels
    assert depth == levels


@pytest.mark.parametrize("world", [1, 7, 40, 300])
def test_sums_and_records_and_ranks_are_those_of_all_at_once(world: int) -> None:
    """In whatever order a tree combines them."""
    said = [summary(r, "ab"[r % 7 == 3], Said({}, (r, MODULUS - 1), bytes([r % 256]))) for r in range(world)]
    found = folded(said, summed)[0]
    head, _, records = found.partition(b"\n")
    (groups, numbers) = json.loads(head)
    ranks = {d: [r for first, last in ranges for r in range(first, last + 1)] for d, ranges in groups.items()}
    assert ranks == {d: those for d in "ab" if (those := [r for r in range(world) if "ab"[r % 7 == 3] == d])}
    assert numbers == [sum(range(world)) % MODULUS, world * (MODULUS - 1) % MODULUS]
    assert sorted(records) == sorted(r % 256 for r in range(world))


def test_what_a_rank_sends_where_all_agree_does_not_grow_with_the_world() -> None:
    most = {}
    for world in (64, 4_096, 10_000):
        said = [summary(rank, "0" * 32, Said({}, (0, MODULUS - 1))) for rank in range(world)]
        _, sent, depth = folded(said, summed)
        # Of a node's ranks the ranges are as many as the levels below it.
        most[world] = max(sent)
        assert depth <= 4 and max(sent) < 400
        assert sorted(sent)[world * 9 // 10] < 100
    assert most[10_000] < 4 * most[64]
