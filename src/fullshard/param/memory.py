"""The memory of the full parameters of one group: there while they are needed, zero bytes otherwise.

Autograd saves views of full parameters in forward and reads them in backward, after the memory was given back and
filled again. They must therefore keep their storage *object*: its bytes are resized, it is never replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OwnedMemory:
    """A storage of its own for `numel` elements; `allocate` and `release` resize it. On a meta device they do too.

    It begins allocated: views of it can only be made while its bytes exist (torch checks bounds, and `set_` even grows
    a storage that is too small). They stay valid when it is released and allocated again.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.size()

    @property
    def live_nbytes(self) -> int:
        """Bytes held right now."""
        return self._storage.size()

    def allocate(self) -> None:
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def release(self) -> None:
        self._storage.resize_(0)


class SharedMemory:
    """One rank, one dtype: the memory is that of the shards. It is never given back and costs nothing."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat.detach()

    @property
    def live_nbytes(self) -> int:
        """Nothing beyond the shards."""
        return 0

    def allocate(self) -> None:
        pass

    def release(self) -> None:
        pass


class TrackedMemory:
    """Storages that come and go together: `owned` ones, made here, and those of tensors that somebody else made."""

    def __init__(self) -> None:
        self.owned: list[OwnedMemory] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def track(self, memory: OwnedMemory) -> None:
        self.owned.append(memory)

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """From now on it comes and goes with the others; one that is among them already is not counted twice."""
        if all(storage.data_ptr() != memory.flat.untyped_storage().data_ptr() for memory in self.owned):
            self._storages[storage.data_ptr()] = (storage, storage.size())

    @property
    def live_nbytes(self) -> int:
        """Bytes held right now."""
        others = sum(storage.size() for storage, _ in self._storages.values())
        return others + sum(memory.live_nbytes for memory in self.owned)

    def allocate(self) -> None:
        for memory in self.owned:
            memory.allocate()
        for storage, nbytes in self._storages.values():
            if storage.size() != nbytes:
                storage.resize_(nbytes)

    def release(self) -> None:
        for memory in self.owned:
            memory.release()
        for storage, _ in self._storages.values():
            storage.resize_(0)
