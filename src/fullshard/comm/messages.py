"""Texts between ranks, to and from the first of them, over a data group of their own: apart from the messages of
training.

A save in the background sends while the model trains, and NCCL knows no texts on the host; so each process group gets
one gloo group beside it, at the first message. It has a scope of its own, too: what fails there is nothing that a step
has to do with, nor the other way round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions, GatherOptions

from ..guard import scope_of
from .data_group import DataGroup, open_data_group
from .group import message_device


class Messenger(NamedTuple):
    """One rank of `world`. Alone, where there is no process group: then nothing is sent. The process group itself is
    used where it can have no data group."""

    group: DataGroup | dist.ProcessGroup | None
    rank: int
    world: int
    device: str

    def connect(self) -> None:
        """Wait for all ranks, where their connections are not there yet."""
        if isinstance(self.group, DataGroup):
            self.group.connect()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside all ranks do `what`. After a failure all of them come together first; an exception of one, of whatever
        type, is one of all."""
        if not isinstance(self.group, DataGroup):
            yield
            return
        scope = self.group.scope
        doing, scope.doing = scope.doing, what
        try:
            if scope.must_meet or scope.causes():
                scope.meet()
            yield
        except BaseException as error:
            scope.interrupted(error, what)
            raise
        finally:
            scope.doing = doing

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Inside this rank prepares `what`. An exception is told to the others, who wait for it there."""
        try:
            yield
        except BaseException as error:
            if isinstance(self.group, DataGroup):
                self.group.scope.interrupted(error, what)
            raise

    @contextmanager
    def beside(self) -> Iterator[None]:
        """This thread sends inside, beside that of the model."""
        watch = self.group.scope.watch if isinstance(self.group, DataGroup) else None
        if watch is None:
            yield
            return
        watch.send_beside(1)
        try:
            yield
        finally:
            watch.send_beside(-1)

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
        self._send("gather", [arrived] if self.rank == 0 else [], [padded], options)
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
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._send("broadcast", [tensor], options)

    def _longest(self, nbytes: int) -> int:
        length = torch.tensor([nbytes], dtype=torch.int64, device=self.device)
        self._send("allreduce", [length], _max())
        return int(length)

    def _send(self, call: str, *args: Any) -> None:
        if isinstance(self.group, DataGroup):
            self.group.issue(getattr(self.group.group, call), *args).wait()
        else:
            getattr(self.group, call)(*args).wait()


def _max() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def alone() -> Messenger:
    """A world of this process by itself."""
    return Messenger(None, 0, 1, "cpu")


def messenger(process_group: dist.ProcessGroup | None) -> Messenger:
    """That of `process_group` (None: the default group; alone where there is none). Sends nothing."""
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
    # Of several groups of the same ranks each has its own; torch gives them the same names on all ranks.
    scope = scope_of(dist.get_process_group_ranks(process_group), f"checkpoints {process_group.group_name}")
    assert scope is not None
    made = open_data_group(scope, process_group, torch.device("cpu"), "gloo", "checkpoint")
    return Messenger(made, rank, world, "cpu")


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    here = tensor.cpu()  # not by numpy, which torch works without
    return ctypes.string_at(here.data_ptr(), len(here)) if len(here) else b""


def _unpadded(arrived: Tensor) -> bytes:
    data = _bytes(arrived)
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
