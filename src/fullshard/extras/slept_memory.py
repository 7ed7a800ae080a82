"""The memory of one storage that `sleep` gives away, and how `wake` gets its values back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import base_of, collect_garbage, others_with_memory_of, without_torch_functions
from ..comm import ShardGroup, gathered
from ..comm.group import message_device
from ..layout import align_up
from ..param import ParamGroup


class SleptMemory:
    """One storage that gave its memory away. `replicas`: ranks that all have its values, of which each keeps a part;
    `group`: whose flat buffer it is."""

    # How much of it replicas bring back together: the room that `wake` needs beside it.
    slab_nbytes = 64 << 20

    def __init__(
        self, tensor: Tensor, *, drops: bool, replicas: ShardGroup | None, group: ParamGroup | None = None
    ) -> None:
        self.storage, self.device = tensor.untyped_storage(), tensor.device
        self.nbytes = self.storage.nbytes()
        self.drops = drops
        # Memory that torch cannot resize (numpy has seen it, or it is shared) stays where it is.
        self._can = self.storage.resizable()
        self.replicas = replicas if self._can and not drops else None
        self._group = group
        self._is_free = False
        self._host: Tensor | None = None
        # The known tensors on it with names, by id; and the names of those of which the program holds more, so that it
        # has to stay.
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.held: list[str] = []

    def settle(self) -> None:
        """Find out whether it can be given away. `tensors` are complete."""
        if self.frees and self._held():
            collect_garbage()
            self.held = self._held()
            self._can = not self.held

    @property
    def frees(self) -> bool:
        """Whether its memory is given back."""
        return self._can and (self.device.type != "cpu" or self.drops or self.replicas is not None)

    @property
    def kept_nbytes(self) -> int:
        """The bytes that this rank copies to the host."""
        return sum(n for _, n in self._kept()) if self.frees and not self.drops else 0

    @property
    def dropped_nbytes(self) -> int:
        """The bytes that this rank gives up without a copy."""
        return self.nbytes if self.drops else self.nbytes - self.kept_nbytes if self.frees else 0

    def _slabs(self) -> Iterator[tuple[int, int, int]]:
        """Parts that replicas bring back together: first byte, bytes, bytes of each replica's piece."""
        for at in range(0, self.nbytes, self.slab_nbytes):
            n = min(self.slab_nbytes, self.nbytes - at)
            yield at, n, align_up(-(-n // self.replicas.world), 16) if self.replicas is not None else n

    def _kept(self) -> Iterator[tuple[int, int]]:
        """The bytes of which this rank keeps a copy: first one, how many."""
        for at, n, piece in self._slabs():
            first = min(n, 0 if self.replicas is None else self.replicas.rank * piece)
            yield at + first, min(piece, n - first)

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def save(self) -> None:
        """Begin to copy the values to the host."""
        if self.frees and not self.drops:
            on_device = self.device.type != "cpu"
            self._host, used = torch.empty(self.kept_nbytes, dtype=torch.uint8, pin_memory=on_device), 0
            for at, n in self._kept():
                self._host[used : used + n].copy_(self._bytes()[at : at + n], non_blocking=on_device)
                used += n

    def _held(self) -> list[str]:
        with without_torch_functions():
            if self._group is not None:
                return self._group.held_elsewhere()
            tensors = [tensor for _, tensor in self.tensors.values()]
            bases = {id(base): base for tensor in tensors if (base := base_of(tensor)) is not None}
            known = len(self.tensors.keys() | bases.keys())
            name = next(name for name, _ in self.tensors.values())
            return [name] if others_with_memory_of(tensors[0]) + 1 > known else []

    def free(self) -> None:
        # A load that failed may have left tensors.
        if self.frees and not self._is_free and not self._held():
            if self._group is not None:
                with without_torch_functions():
                    self._group.let_go()
            self.storage.resize_(0)
            self._is_free = True

    def allocate(self) -> None:
        if self._is_free:
            self.storage.resize_(self.nbytes)
            if self._group is not None:
                with without_torch_functions():
                    self._group.take_again()
            self._is_free = False

    def gather(self) -> None:
        """Bring the values back from the replicas, which all do. Complete on return."""
        if self.replicas is None or self._host is None:
            return
        origin = self.replicas.origin
        elsewhere = message_device(str(dist.get_backend_config(origin)), self.device)
        device, used = self.device if elsewhere is None else torch.device(elsewhere), 0
        for (at, n, length), (_, own) in zip(self._slabs(), self._kept(), strict=True):
            piece = torch.zeros(length, dtype=torch.uint8, device=device)
            piece[:own].copy_(self._host[used : used + own])
            self._bytes()[at : at + n].copy_(gathered(piece, [origin], "fullshard.wake").view(-1)[:n])
            used += own

    def restore(self) -> None:
        """Begin to copy the values back; what was dropped is NaN in each floating dtype."""
        if self._host is not None and self.replicas is None:
            self._bytes().copy_(self._host, non_blocking=True)
        elif self.drops:
            self._bytes().fill_(255)


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested lists, tuples and dicts, with their keys."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from tensors_in(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from tensors_in(entry, f"{name}[{number}]")
