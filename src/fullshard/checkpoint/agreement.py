"""All ranks reach one outcome: a failure on one of them is raised on all.

Each rank has a text. The first rank needs every different text, and the ranks that have it; almost always all have the
same, and it knows it already. So digests travel, along a tree (`Messenger.fold`), and a text only if it differs from
the others, from one of the ranks that have it. What a rank sends does not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeGuard

from ..comm import Messenger
from ..peers import RanksDisagree, shown_ranks, variants
from .errors import (
    CheckpointBusy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIOError,
    CheckpointMismatch,
    CheckpointNotFound,
    io_error,
)
from .plan import MODULUS

Message = dict[str, Any]


class Said(NamedTuple):
    """The contribution of one rank: a message; numbers, which are added up over ranks modulo MODULUS; and records,
    which are put one after another."""

    message: Message
    numbers: tuple[int, ...] = ()
    records: bytes = b""


class Heard(NamedTuple):
    """All contributions, as the first rank gets them: each different message with its ranks, in the order of the first
    of them; the sums; all records."""

    groups: list[tuple[list[int], Message]]
    numbers: list[int]
    records: bytes

    @property
    def messages(self) -> list[Message]:
        """Each different message."""
        return [message for _, message in self.groups]


@contextlib.contextmanager
def with_all_ranks(messenger: Messenger, what: str) -> Iterator[None]:
    """Run `what` together with all ranks. Raises `CheckpointError` if one of them raised, ended, was killed or stopped,
    or did something else."""
    try:
        with messenger.together(what):
            yield
    except CheckpointError:
        raise
    except RanksDisagree as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (RuntimeError, ConnectionError) as error:
        raise CheckpointError(f"{what}: expected all ranks, lost one: {error}") from error


def agree(
    messenger: Messenger, what: str, mine: Callable[[], Message | Said], decide: Callable[[Heard], Message]
) -> Message:
    """One round: the first rank hears what each rank says by `mine()`, and all ranks receive what it `decide`s.

    If `mine` raises an `Exception` on some rank, or `decide` does, all ranks raise it. Equal errors of several ranks
    are raised as one; otherwise the error names its rank.
    """
    own: Exception | None = None
    place = _place(what)
    with with_all_ranks(messenger, what):
        said = Said({})
        try:
            found = mine()
            said = found if isinstance(found, Said) else Said(found)
            message: Message = {"ok": said.message}
        except Exception as error:
            message = {"error": describe(error)}
            own = error
        text = _encode({**message, "at": place})
        outcome = _exchange(messenger, text, said, decide)
    if "error" in outcome:
        ranks = outcome["ranks"]
        raise rebuild(outcome["error"], ranks[0] if len(ranks) == 1 and messenger.world > 1 else None) from own
    found_ok: Message = outcome["ok"]
    return found_ok


def is_loss(error: CheckpointError) -> bool:
    """Whether `agree` raised because a rank was lost: others may have had another outcome. Any other error is that of
    all ranks."""
    cause = error.__cause__
    return isinstance(cause, RanksDisagree | RuntimeError | ConnectionError) and not isinstance(cause, CheckpointError)


def _exchange(messenger: Messenger, text: bytes, said: Said, decide: Callable[[Heard], Message]) -> Message:
    digest = hashlib.sha256(text).hexdigest()[:32]
    arrived = messenger.fold(summary(messenger.rank, digest, said), summed)
    answer = None
    texts = {digest: text}
    if arrived is not None:
        counted = _Counted.of(arrived)
        senders = sorted(ranks[0][0] for ranks in counted.said.values())
        answer = {"ask": senders} if len(senders) > 1 else _decide(counted.heard(texts), decide)
    outcome: Message = json.loads(messenger.share(None if answer is None else _encode(answer)))
    if "ask" not in outcome:
        return outcome
    asked = text if messenger.rank in outcome["ask"] else b""
    arrived_texts = messenger.fold(len(asked).to_bytes(8, "little") + asked if asked else b"", b"".join)
    answer = None
    if arrived_texts is not None:
        while arrived_texts:
            stop = 8 + int.from_bytes(arrived_texts[:8], "little")
            one, arrived_texts = arrived_texts[8:stop], arrived_texts[stop:]
            texts[hashlib.sha256(one).hexdigest()[:32]] = one
        answer = _decide(counted.heard(texts), decide)
    outcome = json.loads(messenger.share(None if answer is None else _encode(answer)))
    return outcome


class _Counted(NamedTuple):
    """The ranks of each digest, as ranges (first, last); the sums; the records."""

    said: dict[str, list[list[int]]]
    numbers: list[int]
    records: bytes

    @classmethod
    def of(cls, data: bytes) -> _Counted:
        head, _, records = data.partition(b"\n")
        said, numbers = json.loads(head)
        return cls(said, numbers, records)

    def to_bytes(self) -> bytes:
        return json.dumps([self.said, self.numbers], separators=(",", ":")).encode() + b"\n" + self.records

    def heard(self, texts: dict[str, bytes]) -> Heard:
        groups = [
            ([rank for first, last in ranges for rank in range(first, last + 1)], json.loads(texts[digest]))
            for digest, ranges in self.said.items()
        ]
        return Heard(sorted(groups, key=lambda group: group[0][0]), self.numbers, self.records)


def summary(rank: int, digest: str, said: Said) -> bytes:
    """The bytes that `rank` sends in a round: the digest of its text, its numbers and records."""
    return _Counted({digest: [[rank, rank]]}, list(said.numbers), said.records).to_bytes()


def summed(summaries: Sequence[bytes]) -> bytes:
    """Several summaries as one; associative."""
    found = [_Counted.of(one) for one in summaries]
    ranges: dict[str, list[list[int]]] = {}
    for one in found:
        for digest, ranks in one.said.items():
            ranges.setdefault(digest, []).extend(ranks)
    for digest, ranks in ranges.items():
        joined: list[list[int]] = []
        for first, last in sorted(ranks):
            if joined and joined[-1][1] + 1 == first:
                joined[-1][1] = last
            else:
                joined.append([first, last])
        ranges[digest] = joined
    numbers = [sum(each) % MODULUS for each in zip_longest(*(one.numbers for one in found), fillvalue=0)]
    return _Counted(ranges, numbers, b"".join(one.records for one in found)).to_bytes()


def _place(what: str) -> str:
    """The text that has to match on all ranks: a directory's path may differ between machines, its name may not."""
    doing, _, path = what.partition(" ")
    return f"{doing} {os.path.basename(path)}"


def _decide(heard: Heard, decide: Callable[[Heard], Message]) -> Message:
    groups = heard.groups
    places = variants({rank: message["at"] for ranks, message in groups for rank in ranks})
    if len(places) > 1:
        found = " and ".join(f"{shown_ranks(ranks)} {place}" for place, ranks in places.items())
        text = (
            f"expected all ranks at the same call, found {found}; make the same calls on all ranks, in the same order"
        )
        return {"error": describe(CheckpointError(text)), "ranks": []}
    failed = [(ranks, message["error"]) for ranks, message in groups if "error" in message]
    if failed:
        return _failure(failed, sum(len(ranks) for ranks, _ in groups))
    try:
        return {"ok": decide(heard._replace(groups=[(ranks, message["ok"]) for ranks, message in groups]))}
    except Exception as error:
        return {"error": describe(error), "ranks": []}


def _failure(failed: Sequence[tuple[list[int], Message]], world: int) -> Message:
    """The error of the first rank that has one; for mismatches, those of all ranks together."""
    first = failed[0][1]
    if all(error["kind"] == CheckpointMismatch.__name__ for _, error in failed):
        by_problem: dict[str, list[int]] = {}
        for ranks, error in failed:
            for problem in dict.fromkeys(error["args"][1]):
                by_problem.setdefault(problem, []).extend(ranks)
        found = [
            problem if len(ranks) == world else f"{problem} (on {shown_ranks(sorted(ranks))})"
            for problem, ranks in by_problem.items()
        ]
        what, _, remedy = first["args"]
        return {"error": {**first, "args": [what, found, remedy]}, "ranks": []}
    first = next(error for _, error in failed if error["kind"] != CheckpointMismatch.__name__)
    alike = [rank for ranks, error in failed if error == first for rank in ranks]
    return {"error": first, "ranks": alike if len(alike) < world else []}


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


# ---- errors as text, from one rank to the others ---------------------------------------------------------------

_CLASSES = {
    kind.__name__: kind
    for kind in (
        *(CheckpointError, CheckpointMismatch, CheckpointDamaged),
        *(CheckpointNotFound, CheckpointIOError, CheckpointBusy),
    )
}


def describe(error: Exception) -> Message:
    """`error` as JSON, for `rebuild` on other ranks."""
    if isinstance(error, OSError) and not isinstance(error, CheckpointError):
        error = io_error(error, "the operating system refused")
    kind = type(error).__name__
    if kind not in _CLASSES:
        return {"kind": CheckpointError.__name__, "args": [f"{kind}: {error}"]}
    if isinstance(error, CheckpointMismatch):
        return {"kind": kind, "args": [error.what, error.problems, error.remedy]}
    return {"kind": kind, "args": [error.errno, error.strerror] if _has_errno(error) else [str(error)]}


def rebuild(described: Message, rank: int | None) -> CheckpointError:
    """The error of another rank (`rank`: its number in the group, shown in the text) or of all of them (None)."""
    args = list(described["args"])
    if rank is not None:
        text = 1 if isinstance(args[0], int) else 0  # after an errno
        args[text] = f"rank {rank}: {args[text]}"
    return _CLASSES[described["kind"]](*args)


def _has_errno(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and bool(error.errno)
