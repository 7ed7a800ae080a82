"""Buffers of messages, which are reused between steps if allocation is expensive, and the messages that hold them.

On a CPU the first write to a fresh large buffer costs a page fault per 4 KiB, as much as the copy itself; and views of
a kept buffer are made only once. A device with a caching allocator has neither cost, and kept buffers would only hide
memory from it: there every buffer is new.

A buffer belongs to one key (one layout), so its padding is zeroed once and never written. Only send buffers are zeroed,
because other ranks receive their padding.

A buffer unused for two whole steps is freed: a layout depends on which parameters are trainable, so a program that
freezes others in each step would otherwise accumulate buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from .data_group import Work, drain

# Steps for which an unused buffer is kept.
_KEPT_STEPS = 2
# Limit of the key cache. Keys stay valid after it is cleared.
_KNOWN_KEYS = 4096
_FREED = torch.empty(0)


@dataclass(slots=True, eq=False, repr=False)
class Buffer:
    """One buffer and its views. The caller of `take` owns it until `give`."""

    key: int
    tensor: Tensor
    # Views that the key's owner made of the buffer.
    views: list[Tensor] = field(default_factory=list)
    # The step in which it was last given back.
    step: int = 0


class BufferPool:
    """Free buffers by key. Not thread-safe: a pool belongs to one root, or to the roots of one thread."""

    def __init__(self, *, keep: bool) -> None:
        # Whether buffers that come back are kept, with what is in them, for the next `take`; and whether one that came
        # back may be written while a tensor still shows its memory.
        self.keeps = self.reuses = keep
        self._keys: dict[Hashable, int] = {}
        self._numbers = count()
        self._free: dict[int, list[Buffer]] = {}
        self._nbytes = 0
        self._step = 0
        # The roots that ended a backward in this step.
        self._ended: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of this pool that are kept, in use or free."""
        return self._nbytes

    def key(self, *parts: Hashable) -> int:
        """The key for `parts`: equal parts, equal key. Callers keep it, because hashing a layout is slow."""
        found = self._keys.get(parts)
        if found is None:
            if len(self._keys) >= _KNOWN_KEYS:
                self._keys.clear()
            found = self._keys[parts] = next(self._numbers)
        return found

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
        """A buffer of `numel` elements, with the views that `make_views` makes of it; `zeroed` when it is new."""
        free = self._free.get(key)
        if free:
            return free.pop()
        make = torch.zeros if zeroed else torch.empty
        if torch.is_inference_mode_enabled():
            # The first use may be an evaluation; training cannot write buffers made in inference mode.
            with torch.inference_mode(False):
                buffer = Buffer(key, make(numel, dtype=dtype, device=device))
                buffer.views = [] if make_views is None else make_views(buffer.tensor)
        else:
            buffer = Buffer(key, make(numel, dtype=dtype, device=device))
            if make_views is not None:
                buffer.views = make_views(buffer.tensor)
        if self.keeps:
            self._nbytes += buffer.tensor.nbytes
        return buffer

    def give(self, *buffers: Buffer) -> None:
        """Return buffers; the next `take` may overwrite them. A pool that keeps nothing frees them, whoever still holds
        one: a reduction does so while its replicas sum."""
        for buffer in buffers:
            if self.keeps:
                buffer.step = self._step
                self._free.setdefault(buffer.key, []).append(buffer)
            else:
                buffer.tensor, buffer.views = _FREED, []

    def end_of_backward(self, root: int) -> None:
        """`root` (its number) has reduced its gradients. When it does so again, a new step begins, and buffers unused
        for too long are freed."""
        if root not in self._ended:
            self._ended.add(root)
            return
        self._ended = {root}
        self._step += 1
        if not self.keeps:
            return
        oldest = self._step - _KEPT_STEPS
        # `take` pops the latest, so the oldest are in front.
        for key in [key for key, free in self._free.items() if free and free[0].step < oldest]:
            kept = [buffer for buffer in self._free[key] if buffer.step >= oldest]
            self._nbytes -= sum(buffer.tensor.nbytes for buffer in self._free[key] if buffer.step < oldest)
            if kept:
                self._free[key] = kept
            else:
                del self._free[key]


# ---- messages under way ----------------------------------------------------------------------------------------------


class Flight:
    """Messages under way, and what they read and write until `release`."""

    works: Sequence[Work] = ()
    # The buffers, all of `pool`.
    buffers: Sequence[Buffer] = ()
    pool: BufferPool
    # Other tensors that are kept alive.
    kept: Sequence[Tensor] = ()

    @property
    def held_nbytes(self) -> int:
        """Bytes of the buffers, and of what else is kept alive."""
        return sum([buffer.tensor.nbytes for buffer in self.buffers]) + sum([tensor.nbytes for tensor in self.kept])

    def arrive(self) -> None:
        """Wait for the messages."""
        # Drop them even if one of them raises: a retry must not wait for them again.
        works, self.works = self.works, ()
        for work in works:
            work.wait()

    def release(self) -> None:
        """Return the buffers to the pool, once what arrived was read."""
        buffers, self.buffers, self.kept = self.buffers, (), ()
        if buffers:
            self.pool.give(*buffers)

    def abandon(self) -> None:
        """Wait for the messages and discard what they brought."""
        works, self.works = self.works, ()
        for work in works:
            drain(work)
        self.release()
