"""CPU offload: shards on the host, compute on a device, and one copy each way per param group.

    shards (host, flat)  --upload-->   shard memory (device, flat)  --gather-->  full parameters (device)
    .grad  (host, flat)  <--download-- reduced chunk (device, flat)  <--reduce--  gradients (device)

`HostLink` copies; `OffloadedGather` uploads before an all-gather and `OffloadedReduce` downloads after a reduction. On
a CUDA device uploads and downloads run on separate streams and overlap with compute. The host waits for downloads when
the backward ends, before gradients can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import contiguous_stride
from .gather import CastGather, FullMemory, PlannedGather
from .reduction import ReduceChannel, Reduction

Copy = Callable[[Tensor, Tensor], object]


def _copy(out: Tensor, source: Tensor) -> None:
    # Asynchronous if the host memory is page-locked; otherwise torch waits itself.
    out.copy_(source, non_blocking=True)


class HostLink:
    """The copies between the host and `device` of one unit, and their order.

    pin: page-lock host buffers, which asynchronous copies need. `copy(out, source)` copies; tests replace it.
    `uploads` and `downloads` count the copies so far.
    """

    def __init__(self, device: torch.device, *, pin: bool, copy: Copy = _copy) -> None:
        self.device = device
        self.pin = pin and device.type != "cpu"
        self.uploads = 0
        self.downloads = 0
        # How often `finish` ran: downloads of the current round may still be in flight.
        self.round = 0
        self._copy = copy
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._up: Any = self._module and self._module.Stream(device)
        self._down: Any = self._module and self._module.Stream(device)
        # Destination and source of each download in flight.
        self._under_way: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Work issued inside waits for earlier compute, but not for later compute."""
        if self._module is None:
            yield
            return
        self._up.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._up):
            yield

    def upload(self, out: Tensor, host: Tensor) -> None:
        """Copy `host` to `out` on the device; both flat."""
        self.uploads += 1
        self._copy(out, host)

    def arrived(self) -> None:
        """Let later compute wait for the uploads."""
        if self._module is not None:
            self._module.current_stream(self.device).wait_stream(self._up)

    def download(self, source: Tensor) -> Tensor:
        """A host tensor that holds `source`, a flat device tensor, after `finish`."""
        self.downloads += 1
        host = torch.empty(source.numel(), dtype=source.dtype, pin_memory=self.pin)
        if self._module is None:
            self._copy(host, source)
        else:
            self._down.wait_stream(self._module.current_stream(self.device))
            with self._module.stream(self._down):
                self._copy(host, source)
        self._under_way.append((host, source))
        return host

    def finish(self) -> None:
        """Wait until every download is complete."""
        if self._under_way:
            if self._down is not None:
                self._down.synchronize()
            self._under_way.clear()
        self.round += 1


class OffloadedGather:
    """An all-gather of shards on the host. They are first copied to `shard`, flat device memory that is allocated from
    `issue` to `complete`; `inner` all-gathers or casts from it."""

    def __init__(self, inner: PlannedGather | CastGather, host: Tensor, shard: FullMemory, link: HostLink) -> None:
        self._inner = inner
        self._host = host
        self._shard = shard
        self._link = link

    def issue(self) -> None:
        # Allocate on the compute stream: the caching allocator reuses memory in the order of that stream.
        self._shard.allocate()
        self._inner.prepare()
        with self._link.ahead():
            self._link.upload(self._shard.flat, self._host)
            self._inner.send()

    def complete(self) -> None:
        self._link.arrived()
        self._inner.complete()
        self._shard.release()

    def cancel(self) -> None:
        self._link.arrived()
        self._inner.cancel()
        self._shard.release()


class _Channel(Protocol):
    link: HostLink
    landed_in: int


class OffloadedReduce:
    """A reduction whose result goes to the host, in one copy per param group."""

    def __init__(self, inner: ReduceChannel, link: HostLink) -> None:
        self._inner = inner
        self.link = link
        # The round of the link in which a result of this channel was last collected.
        self.landed_in = -1

    @property
    def carries(self) -> bool:
        """See `ReduceChannel.carries`."""
        return self._inner.carries

    def issue(self, *args: Any, **kwargs: Any) -> Reduction:
        """See `ReduceChannel.issue`."""
        return _Landing(self, self._inner.issue(*args, **kwargs))


class _Landing:
    def __init__(self, channel: _Channel, inner: Reduction) -> None:
        self._channel = channel
        self._inner = inner

    @property
    def keeps(self) -> bool:
        return self._inner.keeps

    @property
    def is_replicating(self) -> bool:
        return self._inner.is_replicating

    @property
    def has_next(self) -> bool:
        return self._inner.has_next

    @property
    def keeps_send_buffer(self) -> bool:
        return self._inner.keeps_send_buffer

    @property
    def held_nbytes(self) -> int:
        return self._inner.held_nbytes

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def advance(self) -> None:
        self._inner.advance()

    def collect(self) -> list[Tensor | None]:
        """As `Reduction.collect`, on the host. The result may be read after the link's `finish`. A second collect in
        one round finishes the link, because the two results will be added."""
        parts = self._inner.collect()
        if self._inner.keeps:
            # Partial sums stay on the device, where the next ones are added.
            return parts
        link = self._channel.link
        landed = land(parts, link)
        if self._channel.landed_in == link.round:
            link.finish()
        self._channel.landed_in = link.round
        return landed

    def abandon(self) -> None:
        self._inner.abandon()


def land(parts: Sequence[Tensor | None], link: HostLink) -> list[Tensor | None]:
    """`parts` on the host after one copy; None stays None.

    Parts of one reduction are views of one chunk, which is copied whole. Others (a single rank's gradients) are
    concatenated on the device first.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return list(parts)
    first = present[0]
    one_chunk = len({part.untyped_storage().data_ptr() for part in present if part.numel()}) <= 1
    if one_chunk and all(part.is_contiguous() for part in present):
        start = min(part.storage_offset() for part in present)
        stop = max(part.storage_offset() + part.numel() for part in present)
        host = link.download(first.as_strided((stop - start,), (1,), start))
        offsets = iter([part.storage_offset() - start for part in present])
    else:
        flat = torch.cat([part.reshape(-1) for part in present])
        host = link.download(flat)
        ends = torch.tensor([0, *(part.numel() for part in present)]).cumsum(0).tolist()
        offsets = iter(ends[:-1])
    return [
        None if part is None else host.as_strided(part.shape, contiguous_stride(tuple(part.shape)), next(offsets))
        for part in parts
    ]
