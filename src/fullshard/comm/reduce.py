"""From every rank's full gradients to this rank's gradient shards: the mean over ranks.

    strategy           messages                     sum                                      when
    LocalReduce        none                         none                                     one rank in all
    FlatReduce         none                         none                                     one rank shares, others
                                                                                             replicate
    ExchangeReduce     all-to-all of what was        here, in rank order, in the sum dtype:   otherwise
                       computed (wire dtype)        bitwise the same whatever arrives first
    NativeReduce       one reduce-scatter in the    by the backend                           `communication="torch"`
                       reduce dtype

What they make is a chunk, the sum over the ranks that share the parameters. Everything after that, an all-reduce over
the ranks that replicate them before all else, is in `replicate`.

The send buffer is `layout.ReduceLayout`: a chunk per receiving rank with the offsets of the shards, followed by one
presence element per parameter. Missing gradients travel as zeros, so the size of a message never depends on which
gradients a rank has; a parameter ends without gradient only when no rank produced one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Pack, Piece, ReduceLayout, Segment, contiguous_stride
from ..policy import Controls, Scale, resolve_scale
from .custom import CustomBuffers, CustomGroup
from .group import MEAN, SUM, Links, ShardGroup, Work
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage, LocalReduce, ReduceChannel, Reduction
from .replicate import AfterSum, StagedReduction


class _Target(NamedTuple):
    """Where one parameter's full gradient goes in the send buffer."""

    pieces: tuple[Piece, ...]
    # (ranks, elements of one rank) where the gradient as it lies in memory is whole ranks behind each other.
    rows: tuple[int, int] | None
    # First element within a chunk.
    offset: int

    @classmethod
    def of(cls, segment: Segment) -> _Target:
        pieces = segment.layout.pieces
        rows = (pieces[0].ranks, pieces[0].block) if len(pieces) == 1 and pieces[0].outer == 1 else None
        return cls(pieces, rows, segment.offset)


class MessageReduce:
    """What the strategies over several ranks share: the send buffer and the shapes of the result."""

    def __init__(
        self, group: ShardGroup, pack: Pack, dtypes: Dtypes, pool: BufferPool, scale: Scale, after: AfterSum
    ) -> None:
        self.group = group
        self.layout = ReduceLayout(pack)
        self.dtypes = dtypes
        self.pool = pool
        self.scale = scale
        self.after = after
        self.device = group.device
        world = group.world
        self._targets = [_Target.of(segment) for segment in pack.segments]
        # (local shape, contiguous stride, offset) of this rank's part of each parameter in one chunk
        self.parts = [
            (shape := segment.layout.local_shape(group.rank), contiguous_stride(shape), segment.offset)
            for segment in pack.segments
        ]
        self._world = world
        self._all_present = len(pack.segments)
        self._keys: dict[tuple[str, torch.dtype], int] = {}

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
    ) -> Reduction:
        dtype = self.send_dtype(accumulated)
        send, complete = self.fill(gradients, dtype)
        return StagedReduction(self, self.after, self.send(send, dtype), complete, partials, keep=keep)

    @abstractmethod
    def send_dtype(self, accumulated: bool) -> torch.dtype:
        """In which dtype gradients are put into the send buffer."""

    @abstractmethod
    def send(self, send: Slot, dtype: torch.dtype) -> FirstStage:
        """Send the buffer, which is given back when it is no longer needed."""

    def key(self, use: str, dtype: torch.dtype) -> int:
        found = self._keys.get((use, dtype))
        if found is None:
            found = self._keys[use, dtype] = self.pool.key(use, self.layout, dtype)
        return found

    def fill(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Slot, bool]:
        """A send buffer with the gradients in it; whether all of them were there."""
        slot = self.pool.take(self.key("send", dtype), self.layout.numel, dtype, self.device, self._send_views)
        presence = slot.views[-1]
        sources, destinations = [], []
        complete = True
        views = iter(slot.views)
        for (pieces, rows, _), gradient in zip(self._targets, gradients, strict=True):
            if gradient is None:
                complete = False
                for _ in pieces:
                    next(views).zero_()
            elif rows is not None:
                destinations.append(next(views))
                sources.append(gradient.reshape(*rows))  # not a tuple: twice the time
            else:
                whole = gradient.contiguous()
                first = whole.storage_offset()
                for piece in pieces:
                    destinations.append(next(views))
                    sources.append(whole.as_strided(piece.sizes, piece.full_strides, first + piece.full_start))
        if sources:
            torch._foreach_copy_(destinations, sources)
        if complete:
            presence.fill_(1)
        else:
            presence.copy_(torch.tensor([float(g is not None) for g in gradients], dtype=dtype, device=self.device))
        return slot, complete

    def _send_views(self, send: Tensor) -> list[Tensor]:
        chunk = self.layout.chunk_numel
        views = []
        for target in self._targets:
            if target.rows is not None:
                views.append(send.as_strided(target.rows, (chunk, 1), target.offset))
                continue
            for piece in target.pieces:
                start = piece.first_rank * chunk + target.offset
                views.append(send.as_strided(piece.sizes, piece.message_strides(chunk), start))
        views.append(send.as_strided((self._world, self._all_present), (chunk, 1), self.layout.presence_offset))
        return views

    def split(self, mean: Tensor, complete: bool) -> list[Tensor | None]:
        """The parameters' parts of the reduced chunk. `complete`: this rank had all gradients, so all are present."""
        parts: list[Tensor | None] = [mean.as_strided(shape, stride, offset) for shape, stride, offset in self.parts]
        if not complete:
            start = self.layout.presence_offset
            present = mean[start : start + self._all_present].tolist()
            parts = [part if there else None for part, there in zip(parts, present, strict=True)]
        return parts


class FlatReduce(MessageReduce):
    """The gradients in one buffer, which is all there is to sum on this axis; scaled as DDP does it, before."""

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        # The other axis sums in this buffer, which is as large as the parameters: in the dtype that was asked for.
        return self.dtypes.reduce

    def send(self, send: Slot, dtype: torch.dtype) -> FirstStage:
        if not self.after.averages and self.scale.before != 1:
            send.tensor.div_(self.scale.before)
        return _Flat(self.pool, send)


class _Flat:
    reuses = True

    def __init__(self, pool: BufferPool, send: Slot) -> None:
        self._pool = pool
        self._send = send

    def total(self) -> Tensor:
        return self._send.tensor

    def release(self) -> None:
        self._pool.give(self._send)

    def abandon(self) -> None:
        self.release()


class ExchangeReduce(MessageReduce):
    """All-to-all in the wire dtype, then a sum in rank order in the sum dtype."""

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        return self.dtypes.reduce if accumulated else self.dtypes.wire

    def send(self, send: Slot, dtype: torch.dtype) -> FirstStage:
        receive = self.pool.take(self.key("receive", dtype), self.layout.numel, dtype, self.device, self._chunks)
        return _Exchange(self, self.group.exchange(receive.tensor, send.tensor), send, receive)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.group.world, self.layout.chunk_numel).unbind())


class _Exchange:
    reuses = False

    def __init__(self, channel: ExchangeReduce, work: Work, send: Slot, receive: Slot) -> None:
        self._channel = channel
        self._work = work
        self._send = send
        self._receive = receive

    def total(self) -> Tensor:
        self._work.wait()
        dtype = self._channel.dtypes.sum
        chunks = self._receive.views
        if chunks[0].dtype is dtype:
            total = torch.add(chunks[0], chunks[1])
            later = chunks[2:]
        else:
            total = chunks[0].to(dtype)
            later = chunks[1:]
        for chunk in later:
            total.add_(chunk)
        if self._channel.scale.before != 1:
            total.div_(self._channel.scale.before)
        self._give_back()
        return total

    def release(self) -> None:
        pass

    def abandon(self) -> None:
        self._work.wait()
        self._give_back()

    def _give_back(self) -> None:
        self._channel.pool.give(self._send)
        self._channel.pool.give(self._receive)


class NativeReduce(MessageReduce):
    """One reduce-scatter of the backend, in the reduce dtype. The order of its sum is the backend's."""

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        return self.dtypes.reduce

    def send(self, send: Slot, dtype: torch.dtype) -> FirstStage:
        if self.scale.overflows and self.scale.before != 1:
            # A sum of many float16 gradients overflows before the division; FSDP2 divides before the sum too.
            send.tensor.div_(self.scale.before)
        out = self.group.empty(self.layout.chunk_numel, dtype)
        work = self.group.reduce_scatter(out, send.tensor, MEAN if self.scale.averages else SUM)
        return _Native(self, work, send, out)


class _Native:
    reuses = False

    def __init__(self, channel: NativeReduce, work: Work, send: Slot, out: Tensor) -> None:
        self._channel = channel
        self._work = work
        self._send = send
        self._out = out

    def total(self) -> Tensor:
        self._work.wait()
        self._channel.pool.give(self._send)
        scale = self._channel.scale
        if not scale.averages and not scale.overflows and scale.before != 1:
            self._out.div_(scale.before)
        return self._out

    def release(self) -> None:
        pass

    def abandon(self) -> None:
        self._work.wait()
        self._channel.pool.give(self._send)


def reduce_channel(
    links: Links, pack: Pack, dtypes: Dtypes, pool: BufferPool, *, communication: str, controls: Controls
) -> ReduceChannel:
    """The strategy for this group: see the table above. Measured in benchmarks/ and ADR 0006.

    `communication`: what holds where `controls` do not say.
    """
    group = links.reducing
    native = controls.strategy(communication) == "torch"
    replicate = links.replicate
    if replicate is not None and replicate.world == 1 and not native:
        replicate = None
    if group.world == 1 and replicate is None and controls.hook is None:
        return LocalReduce(dtypes.storage, controls.divide_factor)
    scale = resolve_scale(dtypes.reduce, links.ranks, controls.divide_factor, sum_only=controls.sum_only)
    after = AfterSum(replicate, scale, dtypes, controls.hook, controls.hook_stream, native=native)
    if controls.reduce_scatter is not None:
        group = CustomGroup(group, controls.reduce_scatter) if group.world > 1 else group
        pool = CustomBuffers(controls.reduce_scatter, zeroed=True)
    if group.world == 1:
        return FlatReduce(group, pack, dtypes, pool, scale, after)
    if native:
        return NativeReduce(group, pack, dtypes, pool, scale, after)
    return ExchangeReduce(group, pack, dtypes, pool, scale, after)
