"""Buffers of messages, reused from step to step where allocating is expensive.

On a CPU a fresh large buffer costs a page fault for every 4 KiB when it is first written, as much as the copy itself;
and views of a buffer that stays can be made once. On a device with a caching allocator neither holds, and keeping
buffers would only hide memory from it: there every buffer is new.

A buffer belongs to one key (one layout), so its padding, zeroed once, is never written. Only buffers with padding that
others see are zeroed: send buffers. What a message or a copy fills whole is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Slot:
    """One buffer and what was derived from it. Whoever took it owns it until it gives it back."""

    __slots__ = ("key", "tensor", "views")

    def __init__(self, key: int, tensor: Tensor) -> None:
        self.key = key
        self.tensor = tensor
        # Views that the owner of the key made of the buffer; kept with it.
        self.views: list[Tensor] = []


class BufferPool:
    """Free buffers by key. Not for concurrent use: one pool belongs to one root."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._keys: dict[Hashable, int] = {}
        self._free: dict[int, list[Slot]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of this pool that are kept, in use or free."""
        return self._nbytes

    def key(self, *parts: Hashable) -> int:
        """A key for buffers used as `parts` say: equal parts, equal key. Made once: hashing a layout is slow."""
        return self._keys.setdefault(parts, len(self._keys))

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
        """A buffer of `numel` elements, with the views that `make_views` makes of it; `zeroed` when it is new."""
        free = self._free.get(key)
        if free:
            return free.pop()
        make = torch.zeros if zeroed else torch.empty
        if torch.is_inference_mode_enabled():
            # The first use may be an evaluation; a buffer made in inference mode could not be written in training.
            with torch.inference_mode(False):
                slot = Slot(key, make(numel, dtype=dtype, device=device))
                slot.views = [] if make_views is None else make_views(slot.tensor)
        else:
            slot = Slot(key, make(numel, dtype=dtype, device=device))
            if make_views is not None:
                slot.views = make_views(slot.tensor)
        if self._keep:
            self._nbytes += slot.tensor.nbytes
        return slot

    def give(self, slot: Slot) -> None:
        """The buffer may be overwritten by whoever takes it next."""
        if self._keep:
            self._free.setdefault(slot.key, []).append(slot)

    def clear(self) -> None:
        """Forget the free buffers."""
        self._nbytes -= sum(slot.tensor.nbytes for free in self._free.values() for slot in free)
        self._free.clear()
