"""CPU offload: shards on the host, compute on a device, and one copy each way per param group.

    shards (host, flat)  --upload-->   shard memory (device, flat)  --gather-->  full parameters (device)
    .grad  (host, flat)  <--download-- reduced chunk (device, flat)  <--reduce--  gradients (device)

`HostLink` copies; `OffloadedGather` uploads before an all-gather, and `Landing` downloads after a reduction. On
a device uploads and downloads run on two streams, shared by all units, and overlap with compute. The host waits

    for downloads    when the backward ends, before gradients can be read
    for uploads      before shards are written: at the end of a backward or of a forward without gradients, before an
                     optimizer's step, and before a state dict is loaded (`settle`)

A write at another moment (after a forward with gradients that no backward followed) may reach an upload that is still
queued: call `torch.cuda.synchronize()` before it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch import capturing
from ..layout import contiguous_stride
from .gather import CastGather, FullMemory, GatherChannel, PlannedGather
from .reduce import Parts

Copy = Callable[[Tensor, Tensor], object]


def _copy(out: Tensor, source: Tensor) -> None:
    # Asynchronous if the host memory is page-locked; otherwise torch waits itself.
    out.copy_(source, non_blocking=True)


class _CopyStreams:
    """The two streams of copies of one device. One pair: torch has 32 streams, which units would share by chance.

    `downloading`: event, destination and source of each download that may still run, oldest first."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.up = self.module.Stream(device)
        self.down = self.module.Stream(device)
        self.downloading: deque[tuple[Any, Tensor, Tensor]] = deque()
        # Held by `release`: two threads, each with a model, would both let go of the oldest, and one of the next too.
        self._releasing = threading.Lock()

    def release(self, current: Any, most: int = 0) -> None:
        """Let go of what finished downloads read and wrote, and of all but `most` of the others: `current`, whose
        memory they read, waits for those."""
        with self._releasing:
            while self.downloading:
                event = self.downloading[0][0]
                if not event.query():
                    if len(self.downloading) <= most:
                        return
                    current.wait_event(event)
                self.downloading.popleft()


_streams: dict[torch.device, _CopyStreams] = {}
# Reduced chunks on their way to the host: they are device memory that offload is to save.
_DOWNLOADS_IN_FLIGHT = 2
# Links whose uploads the host has not waited for, by id: `settle_uploads`. No WeakSet, to which no other thread may add
# while this one looks through it.
uploading: dict[int, weakref.ref[HostLink]] = {}


def settle_uploads() -> None:
    """Wait until no upload reads shards: they may be written afterwards."""
    for reference in list(uploading.values()):
        link = reference()
        if link is not None:
            link.settle()


def _forget(key: int, _: object) -> None:
    uploading.pop(key, None)


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
        self._capturing = capturing(device) if device.type != "cpu" else bool
        self._streams: _CopyStreams | None = None
        if device.type != "cpu":
            self._streams = _streams.get(device) or _streams.setdefault(device, _CopyStreams(device))
        # The last upload, with what was issued after it, and the last download of this round.
        self._uploaded: Any = None
        self._downloaded: Any = None

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Work issued inside waits for earlier compute, but not for later compute."""
        streams = self._streams
        if streams is None:
            yield
            return
        self._refuse_capture()
        streams.up.wait_stream(streams.module.current_stream(self.device))
        with streams.module.stream(streams.up):
            yield
        self._uploaded = streams.up.record_event()
        uploading[id(self)] = weakref.ref(self, partial(_forget, id(self)))

    def _refuse_capture(self) -> None:
        if self._capturing():
            raise RuntimeError(
                "offload: expected no graph to be captured where shards and gradients are copied between the host and "
                "the device, found that the current stream captures one, whose replays would not let the host wait "
                "for the copies; run the model outside of the capture, or without CPUOffloadPolicy"
            )

    def upload(self, out: Tensor, host: Tensor) -> None:
        """Copy `host` to `out` on the device; both flat."""
        self.uploads += 1
        self._copy(out, host)

    def arrived(self) -> None:
        """Let later compute wait for the uploads."""
        if self._uploaded is not None and self._streams is not None:
            self._streams.module.current_stream(self.device).wait_event(self._uploaded)

    def settle(self) -> None:
        """Wait, on the host, until no upload reads the shards."""
        uploading.pop(id(self), None)
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def download(self, source: Tensor) -> Tensor:
        """A host tensor that holds `source`, a flat device tensor, after `finish`."""
        self.downloads += 1
        host = torch.empty(source.numel(), dtype=source.dtype, pin_memory=self.pin)
        streams = self._streams
        if streams is None:
            self._copy(host, source)
            return host
        self._refuse_capture()
        current = streams.module.current_stream(self.device)
        streams.release(current, _DOWNLOADS_IN_FLIGHT - 1)
        streams.down.wait_stream(current)
        with streams.module.stream(streams.down):
            self._copy(host, source)
        self._downloaded = streams.down.record_event()
        streams.downloading.append((self._downloaded, host, source))
        return host

    def finish(self) -> None:
        """Wait until every download is complete."""
        if self._downloaded is not None and self._streams is not None:
            self._downloaded.synchronize()
            self._downloaded = None
            self._streams.release(self._streams.module.current_stream(self.device))
        self.round += 1


class OffloadedGather(GatherChannel):
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
        self._inner.issue(self._uploaded())

    @contextmanager
    def _uploaded(self) -> Iterator[None]:
        with self._link.ahead():
            self._link.upload(self._shard.flat, self._host)
            yield

    def complete(self) -> None:
        self._link.arrived()
        self._inner.complete()
        self._shard.release()

    def cancel(self) -> None:
        self._link.arrived()
        self._inner.cancel()
        self._shard.release()


class Landing:
    """Takes the results of one reduction channel to the host, in one copy each."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        # The round of the link in which the last result landed.
        self._landed_in = -1

    def __call__(self, parts: Parts) -> Parts:
        """`parts` on the host, where they may be read after the link's `finish`. A second result in one round finishes
        the link, because the two will be added."""
        landed = land(parts, self._link)
        if self._landed_in == self._link.round:
            self._link.finish()
        self._landed_in = self._link.round
        return landed


def land(parts: Parts, link: HostLink) -> list[Tensor | None]:
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
