"""What roots may share: the buffers of messages, and the reductions that are in flight.

Each root has its own unless `share_comm_ctx` joins them, as the chunks of a model in pipeline parallelism: then stages
with equal layouts use one another's buffers, and `FULLSHARD_REDUCTIONS` limits them together. (torch shares streams;
there are none of ours, because messages are issued in the order of the compute stream.)
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..comm import BufferPool, Hop, Reduction
from ..param import ParamGroup

if TYPE_CHECKING:
    from .executor import Executor
    from .unit import Unit


class InFlight(NamedTuple):
    """One reduction under way, and the parameters whose gradients it brings."""

    owner: Executor
    unit: Unit
    group: ParamGroup
    trainable: tuple[int, ...]
    reduction: Reduction


class Shared:
    """See the module. `keep`: as `BufferPool`."""

    def __init__(self, *, keep: bool) -> None:
        self.pool = BufferPool(keep=keep)
        # Reductions under way, by the message that is (`Hop`): each in the order of their commands, which is that of
        # their messages on every rank.
        self.hops: dict[Hop, deque[InFlight]] = {hop: deque() for hop in Hop}

    @property
    def in_flight(self) -> deque[InFlight]:
        """Those whose first message is under way."""
        return self.hops[Hop.EXCHANGE]
