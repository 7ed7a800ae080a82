"""Staging: copies of the state on the host, within a bound of bytes, so that a save can continue while training does.

Parts that fit into the bound are copied. The others are read where they are, while the caller waits (`Live`). They are
the first ones that the writer reads, and the copied ones the last. Memory of copies is kept for the next save, because
a fresh page costs more than the copy into it, and pinned memory much more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .companions import ROOM
from .errors import CheckpointError
from .plan import KeyPath
from .state import Part, dtype_name, staging

Named = tuple[KeyPath, Part]

# torch's allocator of pinned memory rounds each request up to a power of two, so requests are that already.
_SLAB_NBYTES = 256 << 20
_ALIGNMENT = 64


class Live:
    """The parts that a save reads where they are, and the end of that: for the thread that saves, and for the caller,
    who waits."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._abandoned = False

    def begin(self, indices: Iterable[int]) -> None:
        """These are read where they are."""
        self._left = set(indices)
        if not self._left:
            self._over.set()

    def read(self, index: int) -> None:
        """Part `index` was read for the last time, whether it was copied or not."""
        with self._lock:
            self._left.discard(index)
            if not self._left and not self._abandoned:
                self._over.set()

    def check(self) -> None:
        """Raise `CheckpointError` if the caller left before the last part was read: it may have changed meanwhile."""
        if self._abandoned:
            raise CheckpointError(
                "expected the caller of async_save to wait until its state was read, found that it was interrupted"
            )

    @property
    def is_over(self) -> bool:
        """Whether nothing is read any more where it is."""
        return self._over.is_set()

    def end(self) -> None:
        """The save ended, in whatever way: nothing is read any more."""
        self._over.set()

    def wait(self) -> None:
        """Wait for the last `read`, or for `end`. An exception here (Ctrl-C) makes the save fail."""
        try:
            self._over.wait()
        except BaseException:
            with self._lock:
                self._abandoned = not self._over.is_set()
            raise


class StagingMemory:
    """Host memory for the copies of one save at a time."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], list[Tensor]] = {}

    def take(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """A contiguous tensor on the host for each of `locals_`, of its shape and dtype; pinned for one on a device.
        Raises `OSError`, `RuntimeError` or `MemoryError` if no memory is left."""
        wanted = tuple((each.dtype, tuple(each.shape), each.device.type != "cpu") for each in locals_)
        if wanted not in self._held:
            self._held.clear()  # before the new memory is taken
            made: list[Tensor] = [torch.empty(0)] * len(locals_)
            for pinned in (False, True):
                which = [i for i, (_, _, on_device) in enumerate(wanted) if on_device is pinned]
                memory = _pinned if pinned else staging
                found = memory([(dtype_name(wanted[i][0]), wanted[i][1]) for i in which]) if which else []
                for i, tensor in zip(which, found, strict=True):
                    made[i] = tensor
            self._held[wanted] = made
        return self._held[wanted]

    def free(self) -> None:
        """Give the memory back; copies that are in use keep theirs."""
        self._held.clear()


class Staging:
    """The copies of one save. `bound`: the most bytes that are copied; None for all."""

    def __init__(self, memory: StagingMemory, bound: int | None = None) -> None:
        self.memory, self.bound, self.live = memory, bound, Live()
        self.copied_nbytes = 0

    def before(self, parts: Sequence[Named]) -> list[Named]:
        """Copy all parts if they fit, on the thread of the caller. Otherwise wait for the devices that have them, and
        leave them to `after_plan`."""
        movable = _movable(parts, range(len(parts)))
        if self.bound is None or sum(parts[i][1].nbytes for i in movable) <= self.bound:
            made = self._copied(parts, movable)
            self.live.begin(())
            return made
        self._wait_for_devices(parts, movable)
        return list(parts)

    def after_plan(self, parts: Sequence[Named], order: Sequence[int]) -> list[Named]:
        """Copy as many parts from the end of `order`, in which they are read, as fit; the caller waits for the rest.

        Without effect if all were copied. On any thread: the caller waits.
        """
        if self.live.is_over:
            return list(parts)
        movable, total = _movable(parts, order), 0
        first = len(movable)
        while first and total + parts[movable[first - 1]][1].nbytes <= (self.bound or 0):
            first -= 1
            total += parts[movable[first]][1].nbytes
        made = self._copied(parts, movable[first:])
        self.live.begin(movable[:first])
        return made

    def _copied(self, parts: Sequence[Named], indices: Sequence[int]) -> list[Named]:
        made, locals_ = list(parts), [_local(parts[i][1]) for i in indices]
        with torch.inference_mode(False), torch.no_grad():
            for i, held, local in zip(indices, self.memory.take(locals_), locals_, strict=True):
                held.copy_(local, non_blocking=local.device.type != "cpu")
                made[i] = (parts[i][0], parts[i][1]._replace(local=held))
                self.copied_nbytes += parts[i][1].nbytes
        self._wait_for_devices(parts, indices)
        return made

    @staticmethod
    def _wait_for_devices(parts: Sequence[Named], indices: Sequence[int]) -> None:
        for device in {_local(parts[i][1]).device for i in indices}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()


def _movable(parts: Sequence[Named], order: Iterable[int]) -> list[int]:
    """The ones of `order` with bytes; without companions, which were made for this save and have no other user."""
    return [i for i in order if parts[i][1].nbytes and parts[i][0][0] != ROOM]


def _local(part: Part) -> Tensor:
    assert part.local is not None
    return part.local


def _pinned(wanted: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Pinned memory, otherwise as `staging`."""
    shapes = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in wanted]
    nbytes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes]
    sizes, places = slabs(nbytes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    return [
        memory[slab][start : start + size].view(dtype).view(shape)
        for (slab, start), size, (dtype, shape) in zip(places, nbytes, shapes, strict=True)
    ]


def slabs(nbytes: Sequence[int], slab_nbytes: int = _SLAB_NBYTES) -> tuple[list[int], list[tuple[int, int]]]:
    """Sizes of slabs, each a power of two, that hold pieces of `nbytes`; and for each piece its slab and where it
    begins there.

    >>> slabs([100, 200, 2000], slab_nbytes=1024)
    ([512, 2048], [(0, 0), (0, 128), (1, 0)])
    """
    used, places = [0], list[tuple[int, int]]()
    for size in nbytes:
        if used[-1] and used[-1] + size > slab_nbytes:
            used.append(0)
        places.append((len(used) - 1, used[-1]))
        used[-1] += -(-size // _ALIGNMENT) * _ALIGNMENT
    return [1 << max(end - 1, 0).bit_length() for end in used], places
