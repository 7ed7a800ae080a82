"""The interface of gradient reductions, and the reduction for a single rank.

`reduce` implements the first stages over the shard ranks; `replicate` implements the later steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .comparison import Comparison, HostCopy


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/policies.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    storage: torch.dtype


class FirstStage(ABC):
    """The sum over the shard ranks, in flight."""

    # Whether the sum is in a buffer that will be reused, so that the caller must get a copy.
    reuses = False

    @property
    @abstractmethod
    def held_nbytes(self) -> int:
        """Bytes of the send and receive buffers of messages in flight."""

    @abstractmethod
    def total(self) -> Tensor:
        """Wait; return this rank's chunk (chunk_numel,): the sum, scaled by `Scale.before`; writable. Call it once."""

    def release(self) -> None:  # noqa: B027  (nor those that own their chunk)
        """The chunk is no longer needed."""

    @abstractmethod
    def abandon(self) -> None:
        """Instead of `total`: wait and discard the result."""


class Reduction(Protocol):
    """A reduction in flight."""

    @property
    def keeps(self) -> bool:
        """Whether its result is a partial sum."""
        ...

    @property
    def is_replicating(self) -> bool:
        """Whether the message in flight is the all-reduce over the replicas."""
        ...

    @property
    def has_next(self) -> bool:
        """Whether an all-reduce over the replicas follows."""
        ...

    @property
    def keeps_send_buffer(self) -> bool:
        """Whether the send buffer stays in use to the end, because the last message sums in it."""
        ...

    @property
    def held_nbytes(self) -> int:
        """Bytes of the send and receive buffers of the first messages; 0 once they were received."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the replicas all-reduce, unless it is the send buffer; 0 during the first stage."""
        ...

    @property
    def present(self) -> HostCopy | None:
        """After `collect`: flags of the gradients that some rank produced, one per parameter, if that is not known yet.
        The others are zero and must be dropped."""
        ...

    def advance(self) -> None:
        """Wait for the message in flight and send the next one. Does nothing after the last."""
        ...

    def collect(self) -> list[Tensor | None]:
        """Wait for the result: one tensor per parameter, None if no rank produced a gradient. Call it once.

        The mean gradient shard, unpadded local shape, storage dtype; or, if issued with `keep`, the partial sum:
        (padded_local_numel,), reduce dtype. The tensors are new and belong to the caller.
        """
        ...

    def abandon(self) -> None:
        """Wait and discard the result."""
        ...


class ReduceChannel(Protocol):
    """Reduces the gradients of one param group."""

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
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the flat layout or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        `partials`: results of earlier reductions with `keep`, per parameter; they are added, and stay the caller's.
        `keep`: stop before the all-reduce over the replicas.
        `carried`: sent with the message, if the channel `carries`.
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
        # `contiguous`: an expanded zero for a missing gradient cannot be written.
        return _Local([None if g is None else g.to(self._storage).contiguous() for g in gradients])


class _Local:
    keeps = has_next = keeps_send_buffer = is_replicating = False
    nbytes = held_nbytes = 0
    present = None

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients = gradients

    def advance(self) -> None:
        pass

    def collect(self) -> list[Tensor | None]:
        return self._gradients

    def abandon(self) -> None:
        self._gradients = []
