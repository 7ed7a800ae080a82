"""All-gathers the flat local buffers of all ranks into the full parameters of one param group (see `layout.gather`).

    channel          when                                   messages               copies afterwards
    GatherChannel    one rank, compute dtype = storage      none                   none: full parameters are the shards
    CastGather       one rank, another compute dtype        none                   none: one cast, shards to full
    PlannedGather    otherwise                              one per direct         packed parameters only, out of the
                                                            parameter and one      staging buffer
                                                            for the packed ones

Shards in another dtype than the full parameters are cast directly into their place in the all-gather output.

A channel handles buffers, never parameters or phases. Call `issue`, then `complete` or `cancel`. A channel over several
ranks is a `Flight` of its own: one gather at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import allocate_for
from ..layout import FlatLayout, GatherPlan
from ..policy import CustomComm
from .data_group import SUM, Work, Works
from .group import ShardGroup
from .pool import Buffer, BufferPool, Flight

# ---- gather ----------------------------------------------------------------------------------------------------------


class FullMemory(Protocol):
    """The memory of all full parameters of a group (param/swap.py)."""

    @property
    def flat(self) -> Tensor: ...
    @property
    def live_nbytes(self) -> int: ...
    def allocate(self) -> None: ...
    def release(self) -> None: ...


class GatherChannel:
    """All-gathers the full parameters of one group. This one, of one rank and one dtype, moves and allocates nothing:
    they share the memory of the shards."""

    def issue(self) -> None:
        """Send the local shards as they are now. The result may not be used before `complete`."""

    def complete(self) -> None:
        """The full memory is allocated and holds the parameters."""

    def cancel(self) -> None:
        """Wait for the issued messages and discard them; release the full memory."""


class CastGather(GatherChannel):
    """One rank, two dtypes: one kernel casts all shards into the full memory, which has the same offsets."""

    def __init__(self, flat: Tensor, full: FullMemory) -> None:
        self._flat = flat
        self._full = full

    def issue(self, ahead: AbstractContextManager[None] | None = None) -> None:
        """Sends nothing, otherwise as `PlannedGather.issue`."""
        if ahead is not None:
            with ahead:
                pass

    def complete(self) -> None:
        self._full.allocate()
        self._full.flat.copy_(self._flat)


class _CopyOut(NamedTuple):
    """One copy from the staging buffer to the full memory: regions of equal sizes; offsets and strides in elements."""

    sizes: tuple[int, ...]
    staged_offset: int
    staged_strides: tuple[int, ...]
    full_offset: int
    full_strides: tuple[int, ...]


def _copies_out(pack: FlatLayout, plan: GatherPlan) -> list[_CopyOut]:
    """The copies of packed parameters out of the staging buffer; their number does not depend on the world size."""
    span = len(plan.packed_span(pack))
    copies = []
    for i in plan.packed:
        layout, full = pack.segments[i].layout, pack.full_offsets[i]
        if layout.gathers_in_place:
            # One copy with padding: the padded shards, concatenated, are the padded parameter.
            numel = pack.segments[i].padded_numel
            sizes = (pack.world, numel)
            copies.append(_CopyOut(sizes, plan.staged_segment(pack, i, 0), (span, 1), full, (numel, 1)))
            continue
        for piece in layout.pieces:
            copies.append(
                _CopyOut(
                    piece.sizes,
                    plan.staged_segment(pack, i, piece.first_rank),
                    piece.message_strides(span),
                    full + piece.full_start,
                    piece.full_strides,
                )
            )
    return copies


class PlannedGather(Flight, GatherChannel):
    """Several ranks: direct parameters into their final memory, packed ones through a staging buffer."""

    def __init__(
        self,
        group: ShardGroup,
        pack: FlatLayout,
        plan: GatherPlan,
        flat: Tensor,  # (padded_local_numel,) storage dtype
        full: FullMemory,
        pool: BufferPool,
    ) -> None:
        self._group, self._full, self.pool = group, full, pool
        self._casts = flat.dtype is not full.flat.dtype
        # Views need allocated memory. It may be in use: a unit that was unsharded early gets a new root.
        in_use = full.live_nbytes > 0
        full.allocate()
        # The direct parameters: outputs of their all-gathers, this rank's shards, and what leaves. Shards in another
        # dtype are cast into their place in the output and sent from there, without a buffer for the cast.
        self._outs, self._own, self._leaving = [], [], []
        for i in plan.direct:
            segment, start = pack.segments[i], pack.full_offsets[i]
            out = full.flat[start : start + segment.layout.padded_full_numel]
            own = flat[segment.offset : segment.offset + segment.padded_numel]
            self._outs.append(out)
            self._own.append(own)
            self._leaving.append(_place(out, group.rank, segment.padded_numel) if self._casts else own)
        # The packed parameters: this rank's shards; where all shards go, no tensors if no parameter has elements; and
        # the staging buffer that they arrive in (`BufferPool.take`): equal layouts share it, others never get it.
        self._packed: Tensor | None = None
        self._destinations: list[Tensor] = []
        self._staging: tuple[Any, ...] = ()
        if plan.packed:
            span, copies = plan.packed_span(pack), _copies_out(pack, plan)
            self._packed = flat[span.start : span.stop]
            self._destinations = [full.flat.as_strided(c.sizes, c.full_strides, c.full_offset) for c in copies]
            views = partial(_staged, copies, (group.rank, len(span)) if self._casts else None)
            numel, dtype = group.world * len(span), full.flat.dtype
            self._staging = pool.key("staging", pack, plan, dtype), numel, dtype, flat.device, views
        if not in_use:
            full.release()

    def issue(self, ahead: AbstractContextManager[None] | None = None) -> None:
        """Allocate the buffers of the messages on the current stream, and send. `ahead`: entered to send."""
        if self._outs:
            # The messages arrive in it. It must not be read before `complete`.
            self._full.allocate()
        if self._staging:
            self.buffers = (self.pool.take(*self._staging),)
        if ahead is None:
            self.send()
        else:
            with ahead:
                self.send()

    def send(self) -> None:
        """Send the shards as they are now."""
        staging = self.buffers[0] if self.buffers else None
        leaving = packed = self._packed
        if self._casts:
            own, places = self._own, self._leaving
            if packed is not None and staging is not None:
                leaving = staging.views[-1]
                own, places = [*own, packed], [*places, leaving]
            torch._foreach_copy_(places, own)
        outs, pieces = self._outs, self._leaving
        self.works = works = list[Work]()
        if staging is not None and leaving is not None:
            if outs and self._group.one_launch:
                outs, pieces = [*outs, staging.tensor], [*pieces, leaving]
            else:
                works.append(self._group.gather_into(staging.tensor, leaving))
        if outs:
            works += self._group.gather_each(outs, pieces)

    def complete(self) -> None:
        self.arrive()
        if self.buffers:
            (staging,) = self.buffers
            if not self._outs:
                self._full.allocate()
            destinations = self._destinations
            if destinations:
                torch._foreach_copy_(destinations, staging.views[: len(destinations)])
            self.buffers = ()
            self.pool.give(staging)

    def cancel(self) -> None:
        self.abandon()
        self._full.release()


def _staged(copies: Sequence[_CopyOut], own: tuple[int, int] | None, staging: Tensor) -> list[Tensor]:
    """The parts of the `staging` buffer that are copied out; then, if shards are cast into it, this rank's `own` part,
    by its rank and elements."""
    views = [staging.as_strided(copy.sizes, copy.staged_strides, copy.staged_offset) for copy in copies]
    return views if own is None else [*views, _place(staging, *own)]


def _place(gathered: Tensor, rank: int, numel: int) -> Tensor:
    """The `numel` elements of `rank` in the all-gather output."""
    return gathered[rank * numel : (rank + 1) * numel]


# ---- extension -------------------------------------------------------------------------------------------------------
# All-gather of a parameter with an extension: it chooses what is sent and how the full parameter is built
# (`param.extension`).


class Extension(Protocol):
    """The parameter, as its channel sees it."""

    def messages(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Get the parameter's inputs and allocate the outputs: (out, piece), `piece` (n,) of every rank into `out`
        (world * n,). As bytes (uint8), because a backend need not know the dtype. Sizes are equal on every rank.
        """
        ...

    def assemble(self) -> None:
        """Build or fill the full parameter from the received messages."""
        ...

    def release(self) -> None:
        """Free the memory of the full parameter."""
        ...


class ExtensionGather(Flight, GatherChannel):
    """One message per tensor that the parameter sends; a single rank copies instead."""

    def __init__(self, group: ShardGroup, extension: Extension) -> None:
        self._group = group
        self._extension = extension

    def issue(self) -> None:
        messages = self._extension.messages()
        self.kept = [tensor for message in messages for tensor in message]
        self.works = works = list[Work]()
        for out, piece in messages:
            if self._group.world == 1:
                out.copy_(piece)
            else:
                works.append(self._group.gather_into(out, piece))

    def complete(self) -> None:
        self.arrive()
        self.release()
        self._extension.assemble()

    def cancel(self) -> None:
        self.abandon()
        self._extension.release()


# ---- group memory ----------------------------------------------------------------------------------------------------


class GroupMemory:
    """Messages in memory that the process group allocates: NCCL registers it and avoids internal copies.

    Has the interface of a caller's custom all-gather, and with `op` that of a custom reduce-scatter."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return allocate_for(self._group.process_group, math.prod(size), dtype, device).view(*size)

    def __call__(
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> Work:
        # The group that registered the memory sends, and not the mesh's own, which the call passes.
        sends = ShardGroup(self._group.process_group, output_tensor.device, self._group.backend)
        if op is None:
            return sends.gather_into(output_tensor, input_tensor)
        return sends.reduce_scatter(output_tensor, input_tensor, op)


# ---- custom ----------------------------------------------------------------------------------------------------------
# Messages and buffers of a caller's custom all-gather or reduce-scatter.


class CustomGroup(ShardGroup):
    """The ranks of `group`, with all-gathers and reduce-scatters by `comm`."""

    def __init__(self, group: ShardGroup, comm: CustomComm) -> None:
        super().__init__(group.origin, group.device, group.backend)
        self.use(group.data_group)
        self.one_launch = self.sends_in_pairs = False
        self._comm = comm

    def gather_into(self, out: Tensor, piece: Tensor) -> Work:
        # Send from this rank's place in the output, so that `comm` allocated both buffers.
        own = out.narrow(0, self.rank * piece.numel(), piece.numel())
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        return self.send(self._under_way, out, own, {})

    def reduce_scatter(self, out: Tensor, pieces: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        return self.send(self._under_way, out, pieces, {"op": op})

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._comm.allocate((numel,), dtype=dtype, device=self.device)

    def _under_way(self, out: Tensor, piece: Tensor, more: dict[str, Any]) -> Work:
        # Not the data group: torch's functions, which a caller uses, know only groups that torch made.
        work = self._comm(output_tensor=out, input_tensor=piece, group=self.origin, **more, async_op=True)
        return Works() if work is None else work


class CustomBuffers(BufferPool):
    """Buffers from `comm.allocate`, which also decides about reuse; so none is kept here."""

    def __init__(self, comm: CustomComm) -> None:
        super().__init__(keep=False)
        # The caller's memory may be written again.
        self.reuses = True
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
    ) -> Buffer:
        # Zeros are asked of a pool that keeps its buffers.
        with torch.inference_mode(False):
            buffer = Buffer(key, self._comm.allocate((numel,), dtype=dtype, device=device))
            if make_views is not None:
                buffer.views = make_views(buffer.tensor)
        return buffer
