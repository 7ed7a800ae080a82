"""All ranks come to one answer: what one of them fails at, all of them raise."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..comm import Messenger
from .errors import CheckpointError, CheckpointMismatch, describe, rebuild

Message = dict[str, Any]


@contextlib.contextmanager
def noticing_lost_ranks(what: str) -> Iterator[None]:
    """What the process group raises inside is a `CheckpointError`: a peer ended, or did not answer in time."""
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, ConnectionError) as error:
        raise CheckpointError(f"{what}: expected all ranks, lost one: {error}") from error


def agree(
    messenger: Messenger, what: str, mine: Callable[[], Message], decide: Callable[[list[Message]], Message]
) -> Message:
    """One round: each rank's `mine()` goes to the first one, and what that one `decide`s comes back to all.

    When `mine` raises an `Exception` on some rank, or `decide` does, then all ranks raise it: those of `mine` that are
    alike as one, with the rank where they are not.
    """
    try:
        message: Message = {"ok": mine()}
    except Exception as error:
        message = {"error": describe(error)}
        own: Exception | None = error
    else:
        own = None
    with noticing_lost_ranks(what):
        arrived = messenger.collect(_encode(message))
    answer = None
    if arrived is not None:
        answer = _encode(_decide([json.loads(one) for one in arrived], decide))
    with noticing_lost_ranks(what):
        outcome: Message = json.loads(messenger.share(answer))
    if "error" in outcome:
        ranks = outcome["ranks"]
        raise rebuild(outcome["error"], ranks[0] if len(ranks) == 1 and messenger.world > 1 else None) from own
    found: Message = outcome["ok"]
    return found


def _decide(messages: list[Message], decide: Callable[[list[Message]], Message]) -> Message:
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
        problems = list(dict.fromkeys(problem for error in errors for problem in error["problems"]))
        return {"error": {**first, "problems": problems}, "ranks": []}
    first = next(error for error in errors if error["kind"] != CheckpointMismatch.__name__)
    alike = [rank for rank, error in zip(failed, errors, strict=True) if error == first]
    return {"error": first, "ranks": alike if len(alike) < len(messages) else []}


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
