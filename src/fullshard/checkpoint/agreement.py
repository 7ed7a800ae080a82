"""All ranks reach one outcome: a failure on one of them is raised on all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

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

Message = dict[str, Any]


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
    messenger: Messenger, what: str, mine: Callable[[], Message], decide: Callable[[list[Message]], Message]
) -> Message:
    """One round: each rank sends `mine()` to the first rank, and all ranks receive what that rank `decide`s.

    If `mine` raises an `Exception` on some rank, or `decide` does, all ranks raise it. Equal errors of several ranks
    are raised as one; otherwise the error names its rank.
    """
    own: Exception | None = None
    place = _place(what)
    with with_all_ranks(messenger, what):
        try:
            message: Message = {"ok": mine()}
        except Exception as error:
            message = {"error": describe(error)}
            own = error
        arrived = messenger.collect(_encode({**message, "at": place}))
        answer = None
        if arrived is not None:
            answer = _encode(_decide([json.loads(one) for one in arrived], decide))
        outcome: Message = json.loads(messenger.share(answer))
    if "error" in outcome:
        ranks = outcome["ranks"]
        raise rebuild(outcome["error"], ranks[0] if len(ranks) == 1 and messenger.world > 1 else None) from own
    found: Message = outcome["ok"]
    return found


def _place(what: str) -> str:
    """The text that has to match on all ranks: a directory's path may differ between machines, its name may not."""
    doing, _, path = what.partition(" ")
    return f"{doing} {os.path.basename(path)}"


def _decide(messages: list[Message], decide: Callable[[list[Message]], Message]) -> Message:
    places = variants({rank: message["at"] for rank, message in enumerate(messages)})
    if len(places) > 1:
        found = " and ".join(f"{shown_ranks(ranks)} {place}" for place, ranks in places.items())
        text = (
            f"expected all ranks at the same call, found {found}; make the same calls on all ranks, in the same order"
        )
        return {"error": describe(CheckpointError(text)), "ranks": []}
    failed = [rank for rank, message in enumerate(messages) if "error" in message]
    if failed:
        return _failure(messages, failed)
    try:
        return {"ok": decide([message["ok"] for message in messages])}
    except Exception as error:
        return {"error": describe(error), "ranks": []}


def _failure(messages: list[Message], failed: list[int]) -> Message:
    """The error of the first rank that has one; for mismatches, those of all ranks together."""
    errors = [messages[rank]["error"] for rank in failed]
    first = errors[0]
    if all(error["kind"] == CheckpointMismatch.__name__ for error in errors):
        by_problem: dict[str, list[int]] = {}
        for rank, error in zip(failed, errors, strict=True):
            for problem in dict.fromkeys(error["args"][1]):
                by_problem.setdefault(problem, []).append(rank)
        found = [
            problem if len(ranks) == len(messages) else f"{problem} (on {shown_ranks(ranks)})"
            for problem, ranks in by_problem.items()
        ]
        what, _, remedy = first["args"]
        return {"error": {**first, "args": [what, found, remedy]}, "ranks": []}
    first = next(error for error in errors if error["kind"] != CheckpointMismatch.__name__)
    alike = [rank for rank, error in zip(failed, errors, strict=True) if error == first]
    return {"error": first, "ranks": alike if len(alike) < len(messages) else []}


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
