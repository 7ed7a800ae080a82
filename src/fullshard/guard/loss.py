"""A lost model: connections were cut on a device while messages were under way. Standard library only.

On a device `Work.wait()` orders streams; the host continues. An abort releases the streams, so what was queued after an
unfinished message, perhaps an optimizer step, ran on memory that never arrived. The rank on which that happened
notes a `Loss` in its scope. In the next meeting each rank reports a mark beside its word, so that all ranks know:

    word!3    lost in epoch 3, and not restored yet
    word?     messages are under way now: lost if the meeting gives their connections up

Nothing of this happens on a CPU, where a wait returns only with its message.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

LOST, PERHAPS = "!", "?"


@dataclass(frozen=True)
class Loss:
    """`epoch`: in which connections were cut; `ranks`: where messages were under way then; `text`: which ones, and
    why."""

    epoch: int
    ranks: tuple[int, ...]
    text: str


def settled(state: str, epoch: int, *, renews: bool) -> str:
    """The word of a rank after it is known whether the meeting that ends `epoch` gives connections up.

    >>> settled("3?", 2, renews=True), settled("3?", 2, renews=False), settled("3!1", 2, renews=True)
    ('3!2', '3', '3!1')
    """
    word, perhaps, _ = state.partition(PERHAPS)
    return f"{word}{LOST}{epoch}" if perhaps and renews else word


def lost_in(state: str) -> int:
    """The epoch of the loss that a word reports, or -1.

    >>> lost_in("3!2"), lost_in("3")
    (2, -1)
    """
    epoch = state.partition(LOST)[2]
    return int(epoch) if epoch else -1


# ---- which scopes ----------------------------------------------------------------------------------------------------

# Scopes that had a loss, by id; also those that were restored, for optimizers with state from before. Usually empty,
# so that a step asks one dict.
had_losses: dict[int, weakref.ref[Lossy]] = {}


class Lossy(Protocol):
    """What a `Scope` knows of its loss."""

    ranks: tuple[int, ...]
    loss: Loss | None


def note_loss(scope: Lossy) -> None:
    """Remember that `scope` had a loss. Thread-safe."""
    key = id(scope)
    had_losses[key] = weakref.ref(scope, lambda _: had_losses.pop(key, None))


def loss_over(ranks: Iterable[int]) -> Loss | None:
    """The loss of a mesh with all of `ranks` that is not restored yet. Thread-safe."""
    wanted = set(ranks)
    for reference in tuple(had_losses.values()):
        scope = reference()
        if scope is not None and scope.loss is not None and wanted <= set(scope.ranks):
            return scope.loss
    return None
