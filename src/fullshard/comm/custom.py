"""Messages and their buffers by a caller's own all-gather or reduce-scatter object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..policy import CustomComm
from .data_group import DataGroup
from .group import SUM, ShardGroup, Work
from .pool import BufferPool, Slot


class CustomGroup(ShardGroup):
    """The ranks of `group`, whose gathers and reduce-scatters are `comm`'s."""

    def __init__(self, group: ShardGroup, comm: CustomComm) -> None:
        self.origin, self._inner = group.origin, group
        self.device = group.device
        self.world, self.rank, self.backend = group.world, group.rank, group.backend
        self.one_launch = self.sends_in_pairs = False
        self._comm = comm

    @property
    def data_group(self) -> DataGroup | None:  # type: ignore[override]
        """That of the same ranks."""
        return self._inner.data_group

    def gather_into(self, out: Tensor, piece: Tensor) -> Work:
        # From this rank's place in the output: both ends of the message are memory that `comm` allocated.
        own = out.narrow(0, self.rank * piece.numel(), piece.numel())
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        return self._send(self._under_way, out, own, {})

    def reduce_scatter(self, out: Tensor, pieces: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        return self._send(self._under_way, out, pieces, {"op": op})

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._comm.allocate((numel,), dtype=dtype, device=self.device)

    def _under_way(self, out: Tensor, piece: Tensor, more: dict[str, Any]) -> Work:
        group = self.process_group
        work = self._comm(output_tensor=out, input_tensor=piece, group=group, **more, async_op=True)
        return _FINISHED if work is None else work


class _Finished:
    """The work of a call that had already finished when it returned."""

    def wait(self) -> None:
        pass


_FINISHED = _Finished()


class CustomBuffers(BufferPool):
    """Buffers from `comm.allocate`: who allocates also decides what is reused, so none is kept here."""

    def __init__(self, comm: CustomComm) -> None:
        super().__init__(keep=False)
        self._comm = comm

    def take(
        self,
        key: int,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        make_views: Callable[[Tensor], list[Tensor]] | None = None,
        *,
        zeroed: bool = False,
    ) -> Slot:
        with torch.inference_mode(False):
            slot = Slot(key, self._comm.allocate((numel,), dtype=dtype, device=device))
            if zeroed:
                slot.tensor.zero_()
            if make_views is not None:
                slot.views = make_views(slot.tensor)
        return slot
