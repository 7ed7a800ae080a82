"""The steps after a chunk of gradients was summed over the shard ranks.

    1  the partial sums of earlier backwards are added          after `set_requires_all_reduce(False)`
    2  all-reduce over the replicas                             on a mesh with a replicate axis
    3  the hook, in the reduce dtype                            `set_all_reduce_hook`
    4  the last division, and the storage dtype

All messages are asynchronous: `advance` sends the next one, which overlaps with the gradients of the next unit.
Presence is summed with the gradients, so a gradient that only one replica has still counts.

The all-reduce of a shard sums in the sum dtype: it is small, and rounding the partial sum to a narrow dtype would cost
more than the bytes save. If nothing is sharded it is as large as the parameters and sums in the reduce dtype; so does
`communication="torch"`, as in FSDP2. A backend may add in any order, but gives every rank the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..layout import ReduceLayout
from ..policy import Scale
from .comparison import Comparison, HostCopy
from .data_group import drain
from .group import MEAN, SUM, ShardGroup, Work
from .reduction import Dtypes, FirstStage


class Chunks(Protocol):
    """The shapes of a chunk: `comm.message.MessageReduce`."""

    layout: ReduceLayout

    def split(self, mean: Tensor, complete: bool) -> tuple[list[Tensor | None], HostCopy | None]: ...

    def without_absent(
        self, parts: list[Tensor | None], chunk: Tensor
    ) -> tuple[list[Tensor | None], HostCopy | None]: ...


class AfterSum(NamedTuple):
    """Steps 2 to 4 for one group."""

    replicate: ShardGroup | None
    scale: Scale
    dtypes: Dtypes
    hook: Callable[[Tensor], object] | None
    hook_stream: Any
    # The backend reduced the chunk, in the reduce dtype.
    native: bool

    @property
    def averages(self) -> bool:
        """Whether the backend takes the mean, so that nothing is divided here."""
        return self.native and self.scale.averages


class StagedReduction:
    """One reduction with all of its messages. See `comm.reduction.Reduction`."""

    def __init__(
        self,
        chunks: Chunks,
        after: AfterSum,
        first: FirstStage,
        complete: bool,
        partials: Sequence[Tensor | None],
        *,
        keep: bool,
        carried: Comparison | None = None,
    ) -> None:
        self._chunks = chunks
        self._after = after
        self._first = first
        self._complete = complete
        self._partials = partials
        # Without replicas the sum is complete, so there is no partial sum to keep.
        self.keeps = keep and after.replicate is not None
        self._carried = carried
        # See `Reduction.present`.
        self.present: HostCopy | None = None
        self._total: Tensor | None = None
        self._work: Work | None = None
        if first.reuses:
            # The first stage sent nothing.
            self.advance()

    @property
    def is_replicating(self) -> bool:
        return self._work is not None

    @property
    def has_next(self) -> bool:
        return self._total is None and self._after.replicate is not None and not self.keeps

    @property
    def keeps_send_buffer(self) -> bool:
        return self._first.reuses

    @property
    def held_nbytes(self) -> int:
        return self._first.held_nbytes if self._total is None else 0

    @property
    def nbytes(self) -> int:
        return 0 if self._total is None or self._work is None or self._first.reuses else self._total.nbytes

    def advance(self) -> None:
        self._advanced()

    def _advanced(self) -> Tensor:
        if self._total is not None:
            return self._total
        total = self._first.total()
        if self._partials:
            self._add_partials(total)
        self._total = total
        replicate = self._after.replicate
        if replicate is not None and not self.keeps:
            if self._carried is not None:
                self._carried.ask_replicas(replicate)
            self._work = replicate.all_reduce(total, MEAN if self._after.averages else SUM)
        return total

    def collect(self) -> list[Tensor | None]:
        total = self._advanced()
        try:
            if self._work is not None:
                self._work.wait()
            if self._carried is not None:
                self._carried.arrive()
            found = self._kept(total) if self.keeps else self._chunks.split(self._finished(total), self._complete)
            parts, self.present = found
            return parts
        finally:  # a hook may raise
            self._total = self._work = None
            self._first.release()

    def abandon(self) -> None:
        if self._carried is not None:
            self._carried.abandon()
        if self._total is None:
            self._first.abandon()
            return
        if self._work is not None:
            drain(self._work)
        self._first.release()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _add_partials(self, total: Tensor) -> None:
        layout = self._chunks.layout
        for index, partial in enumerate(self._partials):
            if partial is not None:
                offset = layout.pack.segments[index].offset
                total.narrow(0, offset, partial.numel()).add_(partial)
                # All ranks of a parameter have a partial sum, or none has.
                total[layout.grad_present_offset + index].add_(1)

    def _kept(self, total: Tensor) -> tuple[list[Tensor | None], HostCopy | None]:
        kept = total.to(self._after.dtypes.reduce, copy=self._first.reuses)
        segments = self._chunks.layout.pack.segments
        parts: list[Tensor | None] = [kept.narrow(0, s.offset, s.padded_numel) for s in segments]
        return (parts, None) if self._complete else self._chunks.without_absent(parts, kept)

    def _finished(self, total: Tensor) -> Tensor:
        after = self._after
        result = total
        if after.hook is not None:
            result = result.to(after.dtypes.reduce)
            # Without the grad-present flags, which follow the gradients and which the hook must not change.
            _call(after.hook, result[: self._chunks.layout.grad_present_offset], after.hook_stream)
        if after.scale.after != 1:
            result = result / after.scale.after if self._first.reuses else result.div_(after.scale.after)
        return result.to(after.dtypes.storage, copy=self._first.reuses and result is total)


def _call(hook: Callable[[Tensor], object], gradients: Tensor, stream: Any) -> None:
    if stream is None:
        hook(gradients)
        return
    device = torch.get_device_module(gradients.device)
    current = device.current_stream(gradients.device)
    stream.wait_stream(current)
    with device.stream(stream):
        hook(gradients)
    current.wait_stream(stream)
