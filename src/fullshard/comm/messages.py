"""Texts between ranks, to and from the first of them, on a group of their own: apart from the messages of training.

A save in the background sends while the model trains, and NCCL knows no texts on the host; so each process group gets
one gloo group beside it, made at the first use by all its ranks.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions, GatherOptions

from .group import message_device

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Messenger] = weakref.WeakKeyDictionary()


class Messenger(NamedTuple):
    """One rank of `world`. Alone, where there is no process group: then nothing is sent."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    device: str

    def collect(self, text: bytes) -> list[bytes] | None:
        """The texts of all ranks in their order, on the first one; None on the others."""
        if self.group is None or self.world == 1:
            return [text]
        longest = self._longest(len(text))
        if not longest:
            return [b""] * self.world if self.rank == 0 else None
        padded = torch.zeros(longest + 8, dtype=torch.uint8, device=self.device)
        padded[:8] = _tensor(len(text).to_bytes(8, "little"))
        padded[8 : 8 + len(text)] = _tensor(text)
        options = GatherOptions()
        options.rootRank = 0
        arrived = [torch.empty_like(padded) for _ in range(self.world)] if self.rank == 0 else []
        self.group.gather([arrived] if self.rank == 0 else [], [padded], options).wait()
        return [_unpadded(one) for one in arrived] if self.rank == 0 else None

    def share(self, text: bytes | None) -> bytes:
        """The text of the first rank, on all; others pass None."""
        if self.group is None or self.world == 1:
            assert text is not None
            return text
        length = torch.tensor([len(text or b"")], dtype=torch.int64, device=self.device)
        self._broadcast(length)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if text is not None:
            data.copy_(_tensor(text))
        if len(data):
            self._broadcast(data)
        return _bytes(data)

    def _broadcast(self, tensor: Tensor) -> None:
        assert self.group is not None
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([tensor], options).wait()

    def _longest(self, nbytes: int) -> int:
        assert self.group is not None
        length = torch.tensor([nbytes], dtype=torch.int64, device=self.device)
        self.group.allreduce([length], _max()).wait()
        return int(length)


def _max() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def alone() -> Messenger:
    """A world of this process by itself."""
    return Messenger(None, 0, 1, "cpu")


def messenger(process_group: dist.ProcessGroup | None) -> Messenger:
    """That of `process_group` (None: the default group; alone where there is none). The first call for a group is one
    of all its ranks."""
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return alone()
        process_group = dist.group.WORLD
        assert process_group is not None
    rank, world = process_group.rank(), process_group.size()
    backend = str(dist.get_backend_config(process_group))
    if world == 1 or not ("gloo" in backend or "nccl" in backend):
        # Backends of tests, whose groups are not connected by sockets.
        return Messenger(process_group, rank, world, message_device(backend, torch.device("cpu")) or "cpu")
    found = _made.get(process_group)
    if found is None:
        found = _made[process_group] = Messenger(_gloo_beside(process_group), rank, world, "cpu")
    return found


def _gloo_beside(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(process_group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc="fullshard_checkpoint")
    assert isinstance(made, dist.ProcessGroup)
    return made


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    here = tensor.cpu()  # not by numpy, which torch works without
    return ctypes.string_at(here.data_ptr(), len(here)) if len(here) else b""


def _unpadded(arrived: Tensor) -> bytes:
    data = _bytes(arrived)
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
