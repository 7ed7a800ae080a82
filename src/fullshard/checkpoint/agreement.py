"""All ranks come to one answer: what one of them fails at, all of them raise."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from ..comm import Messenger
from ..guard import RanksDisagree, shown_ranks, variants
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
    """Inside all ranks do `what`. That one of them does not is a `CheckpointError`: it raised, ended, was killed or
    stopped, or did something else."""
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
    """One round: each rank's `mine()` goes to the first one, and what that one `decide`s comes back to all.

    When `mine` raises an `Exception` on some rank, or `decide` does, then all ranks raise it: those of `mine` that are
    alike as one, with the rank where they are not.
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
    """What all ranks have to do alike: a directory may have another path on another machine, and has the same name."""
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
    """The error of the first rank that has one; of mismatches, what all ranks found together."""
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
    """The error of another rank (`rank`: its number in the group, to be named) or of all of them (None)."""
    args = list(described["args"])
    if rank is not None:
        text = 1 if isinstance(args[0], int) else 0  # after an errno
        args[text] = f"rank {rank}: {args[text]}"
    return _CLASSES[described["kind"]](*args)


def _has_errno(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and bool(error.errno)
