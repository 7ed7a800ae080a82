"""`guard`: a part of a step that all ranks come through, or that raises on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..runtime.peers import peers_below


@contextmanager
def guard(*models: nn.Module) -> Iterator[None]:
    """Inside, an exception on one rank is an exception on all ranks of `models`, before anything behind is done.

        with fullshard.guard(model):
            loss = model(tokens).loss
            loss.backward()
        optimizer.step()  # only where every rank came through

    The rank that raises keeps its own exception, of whatever type; the others raise `PeerFailed`, which names it and
    says what it said, at the latest when they come to the end of the block, and within seconds where they wait for
    it. Also for a rank that was killed or stopped. Afterwards all ranks may try again: call `zero_grad` and run the
    block once more; gradients of earlier, good micro-batches that are not reduced yet stay.

    What a forward or a backward raises is told to the peers without it, too; but a rank that does not wait for a
    message of the one that failed goes on to its optimizer's step.

    models: sharded by `fully_shard`; the ranks of their meshes take part, and all of them enter the same blocks.
    Costs one message of eight bytes over each axis of their meshes. In a world of one it does nothing.
    """
    peers = peers_below(*models)
    try:
        yield
        peers.come_together("the end of a guarded block")
    except BaseException as error:
        peers.attempt_failed(error, "a guarded block")
        raise
