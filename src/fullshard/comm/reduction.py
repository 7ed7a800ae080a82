"""What a reduction of gradients is to those who order it, and the one that needs no message.

`reduce` makes the others: `first stages` over the ranks that share parameters; `replicate` takes them from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .comparison import Comparison


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/policies.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    storage: torch.dtype


class FirstStage(ABC):
    """The sum over the ranks that share the parameters, under way. Here: what one message brings."""

    # Whether the sum is in a buffer that will be used again, so that what the caller gets has to be a copy.
    reuses = False

    @property
    @abstractmethod
    def held_nbytes(self) -> int:
        """Bytes of both ends of the messages that are under way."""

    @abstractmethod
    def total(self) -> Tensor:
        """Wait; this rank's chunk (chunk_numel,): the sum, scaled by `Scale.before`. May be written. Call it once."""

    def release(self) -> None:  # noqa: B027  (nor those that own their chunk)
        """The chunk is no longer needed."""

    @abstractmethod
    def abandon(self) -> None:
        """In the place of `total`: wait and throw away."""


class Reduction(Protocol):
    """A reduction under way."""

    @property
    def keeps(self) -> bool:
        """Whether a partial sum comes of it."""
        ...

    @property
    def is_replicating(self) -> bool:
        """Whether what is under way goes among the ranks that hold the same shards: the second message, if any."""
        ...

    @property
    def has_next(self) -> bool:
        """Whether another message follows it: where the shards are replicated."""
        ...

    @property
    def keeps_send_buffer(self) -> bool:
        """Whether the send buffer is in use to the end, because the last message sums in it."""
        ...

    @property
    def held_nbytes(self) -> int:
        """Bytes of both ends of the first message, or messages; 0 once it was received."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of a later message that is under way: what replicas sum, when that is no send buffer. 0 while it is the
        first one."""
        ...

    def advance(self) -> None:
        """Wait for the message under way and send the next one, where there is one. Behind the last: nothing."""
        ...

    def collect(self) -> list[Tensor | None]:
        """Wait for all of it; per parameter what it became, None where no rank produced a gradient. Call it once.

        The mean gradient shard, unpadded local shape, storage dtype; or, of a reduction that was issued with `keep`,
        the partial sum: (padded_local_numel,), reduce dtype. The tensors are new and belong to the caller.
        """
        ...

    def abandon(self) -> None:
        """Wait and throw the result away."""
        ...


class ReduceChannel(Protocol):
    """How the gradients of one group are reduced."""

    @property
    def carries(self) -> bool:
        """Whether a reduction can carry a comparison to all ranks of the mesh."""
        ...

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the pack or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        `partials`: what earlier reductions with `keep` left, per parameter; they are added, and stay the caller's.
        `keep`: stop before the ranks that replicate the shards are asked.
        `carried`: travels with the message, where the channel `carries`.
        """
        ...


class LocalReduce:
    """One rank: its gradients are the result."""

    carries = False

    def __init__(self, storage: torch.dtype, divide_factor: float | None) -> None:
        self._storage = storage
        self._factor = divide_factor

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        if self._factor is not None:
            gradients = [None if g is None else g / self._factor for g in gradients]
        # A zero that stands for a missing gradient has no memory to be written to.
        return _Local([None if g is None else g.to(self._storage).contiguous() for g in gradients])


class _Local:
    keeps = has_next = keeps_send_buffer = is_replicating = False
    nbytes = held_nbytes = 0

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients = gradients

    def advance(self) -> None:
        pass

    def collect(self) -> list[Tensor | None]:
        return self._gradients

    def abandon(self) -> None:
        self._gradients = []
