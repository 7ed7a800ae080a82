"""From every rank's full gradients to this rank's gradient shards: the mean over ranks.

    strategy           messages                     sum                                      when
    LocalReduce        none                         none                                     one rank
    ExchangeReduce     all-to-all of what was        here, in rank order, in the sum dtype:   otherwise
                       computed (wire dtype)        bitwise the same whatever arrives first
    NativeReduce       one reduce-scatter in the    by the backend                           `communication="torch"`
                       reduce dtype

The send buffer is `layout.ReduceLayout`: a chunk per receiving rank with the offsets of the shards, followed by one
presence element per parameter. Missing gradients travel as zeros, so the size of a message never depends on which
gradients a rank has; a parameter ends without gradient only when no rank produced one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..layout import Pack, Piece, ReduceLayout, Segment, contiguous_stride
from .group import Links, ShardGroup, Work
from .pool import BufferPool, Slot


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/precision.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    storage: torch.dtype


class Reduction(Protocol):
    """A reduction under way."""

    def collect(self) -> list[Tensor | None]:
        """Wait; the mean gradient shard of each parameter, unpadded local shape, storage dtype, None where no rank
        produced one. The tensors are new and belong to the caller. Call it once."""
        ...

    def abandon(self) -> None:
        """Wait and throw the result away."""
        ...


class ReduceChannel(Protocol):
    """How the gradients of one group are reduced."""

    def issue(self, gradients: Sequence[Tensor | None], *, accumulated: bool) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the pack or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        """
        ...


class LocalReduce:
    """One rank: its gradients are the result."""

    def __init__(self, storage: torch.dtype) -> None:
        self._storage = storage

    def issue(self, gradients: Sequence[Tensor | None], *, accumulated: bool) -> Reduction:
        return _Local([g if g is None or g.dtype is self._storage else g.to(self._storage) for g in gradients])


class _Local:
    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients = gradients

    def collect(self) -> list[Tensor | None]:
        return self._gradients

    def abandon(self) -> None:
        self._gradients = []


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

    def __init__(self, group: ShardGroup, pack: Pack, dtypes: Dtypes, pool: BufferPool) -> None:
        self.group = group
        self.layout = ReduceLayout(pack)
        self.dtypes = dtypes
        self.pool = pool
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


class ExchangeReduce(MessageReduce):
    """All-to-all in the wire dtype, then a sum in rank order in the sum dtype."""

    def issue(self, gradients: Sequence[Tensor | None], *, accumulated: bool) -> Reduction:
        dtype = self.dtypes.reduce if accumulated else self.dtypes.wire
        send, complete = self.fill(gradients, dtype)
        receive = self.pool.take(self.key("receive", dtype), self.layout.numel, dtype, self.device, self._chunks)
        work = self.group.exchange(receive.tensor, send.tensor)
        return _Exchange(self, work, send, receive, complete)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.group.world, self.layout.chunk_numel).unbind())


class _Exchange:
    def __init__(self, channel: ExchangeReduce, work: Work, send: Slot, receive: Slot, complete: bool) -> None:
        self._channel = channel
        self._work = work
        self._send = send
        self._receive = receive
        self._complete = complete

    def collect(self) -> list[Tensor | None]:
        self._work.wait()
        channel = self._channel
        dtype = channel.dtypes.sum
        chunks = self._receive.views
        if chunks[0].dtype is dtype:
            total = torch.add(chunks[0], chunks[1])
            later = chunks[2:]
        else:
            total = chunks[0].to(dtype)
            later = chunks[1:]
        for chunk in later:
            total.add_(chunk)
        total.div_(len(chunks))
        channel.pool.give(self._send)
        channel.pool.give(self._receive)
        return channel.split(total.to(channel.dtypes.storage), self._complete)

    def abandon(self) -> None:
        self._work.wait()
        self._channel.pool.give(self._send)
        self._channel.pool.give(self._receive)


class NativeReduce(MessageReduce):
    """One reduce-scatter of the backend, in the reduce dtype. The order of its sum is the backend's."""

    def issue(self, gradients: Sequence[Tensor | None], *, accumulated: bool) -> Reduction:
        dtype = self.dtypes.reduce
        send, complete = self.fill(gradients, dtype)
        if dtype is torch.float16:
            # A sum of many float16 gradients overflows before the division; FSDP2 divides before the sum too.
            send.tensor.div_(self.group.world)
        out = torch.empty(self.layout.chunk_numel, dtype=dtype, device=self.device)
        work = self.group.reduce_scatter(out, send.tensor)
        return _Native(self, work, send, out, complete)


class _Native:
    def __init__(self, channel: NativeReduce, work: Work, send: Slot, out: Tensor, complete: bool) -> None:
        self._channel = channel
        self._work = work
        self._send = send
        self._out = out
        self._complete = complete

    def collect(self) -> list[Tensor | None]:
        self._work.wait()
        channel = self._channel
        channel.pool.give(self._send)
        mean = self._out
        if mean.dtype is not torch.float16:
            mean.div_(channel.group.world)
        return channel.split(mean.to(channel.dtypes.storage), self._complete)

    def abandon(self) -> None:
        self._work.wait()
        self._channel.pool.give(self._send)


def reduce_channel(links: Links, pack: Pack, dtypes: Dtypes, pool: BufferPool, *, communication: str) -> ReduceChannel:
    """The strategy for this group: see the table above. Measured in benchmarks/ and ADR 0006."""
    group = links.shard
    if group.world == 1:
        return LocalReduce(dtypes.storage)
    if communication == "torch":
        return NativeReduce(group, pack, dtypes, pool)
    return ExchangeReduce(group, pack, dtypes, pool)
