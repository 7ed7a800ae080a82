"""Buffers of messages, reused from step to step where allocating is expensive.

On a CPU a fresh large buffer costs a page fault for every 4 KiB when it is first written, as much as the copy itself;
and views of a buffer that stays can be made once. On a device with a caching allocator neither holds, and keeping
buffers would only hide memory from it: there every buffer is new.

A buffer belongs to one key (one layout), so its padding, zeroed once, is never written. Only buffers with padding that
others see are zeroed: send buffers. What a message or a copy fills whole is not.

A buffer that two whole steps did not use is freed: a layout is that of the parameters that are trainable now, and a
program that freezes others in each step would leave the buffers of all of them behind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count

import torch
from torch import Tensor

# Steps that a buffer is kept for without being used.
_KEPT_STEPS = 2
# Keys that are found again by their parts. A key itself stays good without that.
_KNOWN_KEYS = 4096


class Slot:
    """One buffer and what was derived from it. Whoever took it owns it until it gives it back."""

    __slots__ = ("key", "step", "tensor", "views")

    def __init__(self, key: int, tensor: Tensor) -> None:
        self.key = key
        self.tensor = tensor
        # Views that the owner of the key made of the buffer; kept with it.
        self.views: list[Tensor] = []
        # When it was given back last.
        self.step = 0


class BufferPool:
    """Free buffers by key. Not for concurrent use: one pool belongs to one root, or to the roots of one thread."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._keys: dict[Hashable, int] = {}
        self._numbers = count()
        self._free: dict[int, list[Slot]] = {}
        self._nbytes = 0
        self._step = 0
        # The roots that have ended a backward in this step.
        self._ended: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of this pool that are kept, in use or free."""
        return self._nbytes

    def key(self, *parts: Hashable) -> int:
        """A key for buffers used as `parts` say: equal parts, equal key. Made once: hashing a layout is slow."""
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
            slot.step = self._step
            self._free.setdefault(slot.key, []).append(slot)

    def end_of_backward(self, root: int) -> None:
        """`root`, by a number of its own, has reduced its gradients. When it does so again a step is over, and what was
        not used for longer than that is freed."""
        if root not in self._ended:
            self._ended.add(root)
            return
        self._ended = {root}
        self._step += 1
        if not self._keep:
            return
        oldest = self._step - _KEPT_STEPS
        # The one that was given back last is taken first: the oldest are in front.
        for key in [key for key, free in self._free.items() if free and free[0].step < oldest]:
            kept = [slot for slot in self._free[key] if slot.step >= oldest]
            self._nbytes -= sum(slot.tensor.nbytes for slot in self._free[key] if slot.step < oldest)
            if kept:
                self._free[key] = kept
            else:
                del self._free[key]
