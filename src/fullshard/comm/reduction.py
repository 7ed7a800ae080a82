"""The reduction of gradients, as the engine sees it, and that of one rank. `reduce.py` has those that send messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .comparison import Comparison, HostCopy
from .pool import Flight

# One tensor per parameter, None if there is no gradient.
Parts = Sequence[Tensor | None]


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/policies.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    gradient: torch.dtype


class Reduction(Flight):
    """A reduction in flight; this one, of a single rank, has arrived."""

    # Whether its result is a partial sum.
    keeps = False
    # Whether the message in flight is the all-reduce over the replicas, and whether that follows.
    is_replicating = has_next = False
    # Whether the send buffer stays in use to the end, because the last message sums in it.
    keeps_send_buffer = False
    # After `collect`: flags of the gradients that some rank produced, one per parameter, if that is not known yet. The
    # others are zero and must be dropped.
    present: HostCopy | None = None

    def __init__(self, channel: ReduceChannel, parts: Parts = ()) -> None:
        self._channel, self._parts = channel, parts

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the replicas all-reduce, unless it is the send buffer; 0 during the first stage."""
        return 0

    def advance(self) -> None:
        """Wait for the message in flight and send the next one. Does nothing after the last."""

    def collect(self) -> Parts:
        """Wait for the result: one tensor per parameter, None if no rank produced a gradient. Call it once.

        The mean gradient shard, unpadded local shape, gradient dtype; or, if issued with `keep`, the partial sum:
        (padded_local_numel,), reduce dtype. The tensors are new and belong to the caller.
        """
        land = self._channel.land
        return self._parts if land is None else land(self._parts)


class ReduceChannel(ABC):
    """Reduces the gradients of one param group."""

    # Whether a reduction can carry a comparison to all ranks of the mesh.
    carries = False
    # Takes results that are no partial sums to where the shards are, if not on the device.
    land: Callable[[Parts], Parts] | None = None

    @abstractmethod
    def issue(
        self,
        gradients: Parts,
        *,
        accumulated: bool,
        partials: Parts = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the flat layout or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        `partials`: results of earlier reductions with `keep`, per parameter; they are added, and stay the caller's.
        `keep`: stop before the all-reduce over the replicas.
        `carried`: sent with the message, if the channel `carries`.
        """


class LocalReduce(ReduceChannel):
    """One rank: its gradients are the result."""

    def __init__(self, gradient: torch.dtype, divide_factor: float | None) -> None:
        self._dtype = gradient
        self._factor = divide_factor

    def issue(self, gradients: Parts, **_: Any) -> Reduction:
        found = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in found}
        if not found or (self._factor is None and dtypes == {self._dtype}):
            # `contiguous`: an expanded zero for a missing gradient cannot be written.
            return Reduction(self, [None if gradient is None else gradient.contiguous() for gradient in gradients])
        factor = self._factor
        if factor is not None and len(dtypes) > 1:
            found, factor = [gradient / factor for gradient in found], None
        # One buffer, so that an operation is one kernel and not one for each gradient. Divided before the cast.
        dtype = self._dtype if factor is None else found[0].dtype
        flat = torch.empty(sum(map(Tensor.numel, found)), dtype=dtype, device=found[0].device)
        torch._foreach_copy_(_pieces(flat, found), found)
        if factor is not None:
            flat = flat.div_(factor).to(self._dtype)
        parts = iter(_pieces(flat, found))
        return Reduction(self, [None if gradient is None else next(parts) for gradient in gradients])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`, cut into contiguous tensors of the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
