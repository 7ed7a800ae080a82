"""The backend "late" for the device "simulated": messages that run later than they are issued, as on NCCL.

    issue     returns at once. The outputs are poisoned (NaN), the inputs remembered.
    run       some operators later, drawn from a seed: the inputs are read, exchanged over gloo, the outputs filled.
              Messages of one communicator run in their order, those of several in any.
    wait      orders the current stream after the message; by then it has run, since operators run at once

An input that was changed between issue and run, or memory that was freed, is a failure with the place that issued the
message. What the clocks know of it (tests/harness/clocks.py): a message reads and writes on an actor of its
communicator, after the stream that issued it; only `wait` orders a stream after it.

Tensors of the host go over gloo, at once.

    with held("all-to-all"):   messages of these kinds do not run, nor those after them on their communicator; a wait
        ...                    for one orders the stream alone; the host continues with memory that never arrived, as
                               on NCCL. `watched(queries=is_quiet)`: no event is over before them
    waits_on_host              set while a program asks for such an event: it waits on the host
"""

from __future__ import annotations

import functools
import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import simulated
from tests.harness.clocks import Clock

BACKEND = "late"
# Of how many operators a message runs after at most, if nothing waits for it.
_LATEST = 60
_NEW_NAMES = hasattr(dist.ProcessGroup, "all_gather_single")
# Failures of messages in this process; `failures` hands them out.
_failures: list[str] = []
_draws = random.Random(0)
# The groups of the job.
_groups: list[LateGroup] = []


def register(seed: int = 0) -> None:
    """Make the backend known to `torch.distributed` in this process. `seed`: when messages run."""
    simulated.load()
    _failures.clear()
    _draws.seed(seed)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["simulated"])


def end() -> None:
    """End all groups of this process: the job is over."""
    while _groups:
        _groups.pop().end()
    _freeze()


@functools.cache
def _freeze() -> None:
    """What the first job imported never becomes garbage; without this each later collection looks at all of it."""
    gc.collect()
    gc.freeze()


def failures() -> list[str]:
    """What messages found wrong so far, in this process."""
    return list(_failures)


# Kinds of messages that are held back; messages that are, or were; whether the host waits for one.
_kinds: set[str] = set()
_held: list[_Message] = []
waits_on_host = threading.Event()


@contextmanager
def held(*kinds: str) -> Iterator[None]:
    """Hold back the messages of `kinds` that are issued inside; they run afterwards, unless they were aborted."""
    _kinds.update(kinds)
    try:
        yield
    finally:
        let_go()
        _held.clear()
        waits_on_host.clear()


def let_go() -> None:
    """Let the messages run that are held back; later ones are not."""
    _kinds.clear()
    for message in _held:
        message.may_run.set()


# Whether messages of tensors on the host are refused, as NCCL alone does.
_device_alone = threading.Event()


@contextmanager
def device_alone() -> Iterator[None]:
    """No group sends from the host inside."""
    _device_alone.set()
    try:
        yield
    finally:
        _device_alone.clear()


def is_quiet() -> bool:
    """Whether all messages that were held back ran, or were aborted; for `simulated.watched(queries=...)`."""
    if all(message.is_over.is_set() for message in _held):
        return True
    waits_on_host.set()
    return False


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


class _Message:
    """One message. `exchange(inputs, outputs)` runs it on copies in the memory of the host."""

    def __init__(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        exchange: Callable[[list[Tensor], list[Tensor]], None],
    ) -> None:
        self.name = name
        self.reads, self.writes = list(reads), list(writes)
        self.exchange = exchange
        self.stack = simulated.frames()
        self.after = _draws.randrange(_LATEST)
        self.may_run, self.is_over = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.reached: Clock = {}
        # An operation in place reads what it writes; the others find NaN in their outputs until they ran.
        hosts = [simulated.on_host(tensor) for tensor in self.reads]
        self.issued = [host.clone() for host in hosts]
        if not all(any(write is read for read in self.reads) for write in self.writes):
            for write in self.writes:
                _bytes(simulated.on_host(write)).fill_(0xFF)
            for host, copy in zip(hosts, self.issued, strict=True):
                host.copy_(copy)

    def run(self) -> None:
        inputs = []
        for tensor, issued in zip(self.reads, self.issued, strict=True):
            if self._was_freed(tensor, "read"):
                inputs.append(issued)
                continue
            found = simulated.on_host(tensor).clone()
            if not torch.equal(_bytes(found), _bytes(issued)):
                self._fails("its input was changed before it ran")
            inputs.append(found)
        outputs = [torch.empty(write.shape, dtype=write.dtype) for write in self.writes]
        self.exchange(inputs, outputs)
        for tensor, output in zip(self.writes, outputs, strict=True):
            if not self._was_freed(tensor, "written"):
                simulated.on_host(tensor).copy_(output)

    def _was_freed(self, tensor: Tensor, verb: str) -> bool:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
        if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
            self._fails(f"its memory was freed before it was {verb}")
            return True
        return False

    def _fails(self, what: str) -> None:
        _failures.append("\n    ".join([f"{self.name}: {what}; issued at", *self.stack]))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _LateWork(dist.Work):
    def __init__(self, group: LateGroup, message: _Message) -> None:
        super().__init__()
        self._group, self._message = group, message
        # As on NCCL: the inputs are held until a stream waits, the outputs for as long as the work is.
        self._inputs = list(message.reads)

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        if self._group.is_behind_held(self._message):
            reached, actor = self._message.reached, simulated.current()
            simulated._TELLING.tell(lambda watch: watch.clocks.wait(actor, reached))
            self._inputs.clear()
            return True
        self._group.let_run(self._message)
        limit = timeout or self._group.timeout
        if not self._message.is_over.wait(limit.total_seconds() or None):
            raise RuntimeError(f"{self._message.name}: Timed out waiting {limit}")
        if self._message.error is not None:
            raise RuntimeError(str(self._message.error)) from self._message.error
        reached, actor = self._message.reached, simulated.current()
        simulated._TELLING.tell(lambda watch: watch.clocks.wait(actor, reached))
        self._inputs.clear()
        return True

    def is_completed(self) -> bool:
        return self._message.is_over.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._message.error is None

    def exception(self) -> Any:
        return self._message.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._message.writes


class LateGroup(dist.ProcessGroup):
    """Ranks that are processes. Its calls are those that torch's functions make of a group, by their old and new
    names."""

    supports_coalescing = True
    made = 0
    # How many of them sent a message of the device: NCCL makes its communicator then.
    used = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        LateGroup.made += 1
        self._number, self.timeout = LateGroup.made, timeout
        self._own_name = ""
        self._inner = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, size, timeout)
        self._inner._set_sequence_number_for_group()
        _groups.append(self)
        self._queue: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._aborted = False
        self._thread: threading.Thread | None = None

    # ---- when messages run ----

    def is_behind_held(self, message: _Message) -> bool:
        """Whether `message` is held back, or comes after one that is."""
        with self._changed:
            if message in _held:
                return True
            return message in self._queue and any(
                one in _held for one in list(self._queue)[: self._queue.index(message)]
            )

    def let_run(self, message: _Message) -> None:
        """`message` and those before it may run now."""
        with self._changed:
            if message in self._queue:
                for earlier in self._queue:
                    earlier.may_run.set()
                    if earlier is message:
                        break
            self._changed.notify_all()

    def _heard(self, _: str) -> None:
        with self._changed:
            if self._queue and self._queue[0] not in _held:
                self._queue[0].after -= 1
                if self._queue[0].after <= 0:
                    self._queue[0].may_run.set()

    def _issue(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        exchange: Callable[[list[Tensor], list[Tensor]], None],
    ) -> dist.Work:
        if self._aborted:
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}")
        if not simulated.is_device(reads[0] if reads else writes[0]):
            if _device_alone.is_set():
                raise RuntimeError("No backend type associated with device type cpu")
            outputs = list(writes)
            exchange(list(reads), outputs)
            return _Done()
        if self._thread is None:
            LateGroup.used += 1
        message = _Message(name, reads, writes, exchange)
        actor, stream = f"messages of group {self._number}", simulated.current()
        found = [(*simulated.extent(t), False) for t in reads if t.numel()]
        found += [(*simulated.extent(t), True) for t in writes if t.numel()]

        def note(watch: simulated.Watch) -> None:
            if self._heard not in watch.listeners:
                watch.listeners.append(self._heard)
            watch.clocks.wait(actor, watch.clocks.now(stream))
            simulated._note_accesses(watch, name, found, actor, message.stack)
            message.reached = watch.clocks.now(actor)

        simulated._TELLING.tell(note)
        with self._changed:
            if name in _kinds:
                _held.append(message)
            self._queue.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=actor, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return _LateWork(self, message)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._aborted:
                    self._changed.wait()
                if self._aborted:
                    return
                message = self._queue[0]
            message.may_run.wait()
            try:
                if self._aborted:
                    raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}")
                message.run()
            except BaseException as error:  # what the waiting thread raises
                message.error = error
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()
            message.reads, message.issued = [], []
            message.is_over.set()
            # Its outputs are those of whoever holds the work, and not held until the next message comes.
            del message

    def end(self) -> None:
        """Let go of its threads and of gloo's, which wake up a hundred times a second for as long as they exist."""
        # What was sent runs on all ranks or on none: gloo's threads end only when their messages have, and a message
        # whose peer gave up here would keep them for the time limit of the group.
        self.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue, timeout=5)
        self.abort()
        if self._thread is not None:
            self._thread.join(2)
        self._inner = None  # type: ignore[assignment]

    def abort(self) -> None:
        self._aborted = True
        with self._changed:
            for message in self._queue:
                message.error = RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}")
                message.may_run.set()
                message.is_over.set()
            self._changed.notify_all()

    def shutdown(self) -> None:
        with self._changed:
            for message in self._queue:
                message.may_run.set()

    # ---- messages ----

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002, ARG002
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            for out, piece in zip(written, read, strict=True):
                chunks = list(out.view(self.size(), -1).unbind())
                self._inner.allgather([chunks], [piece.reshape(-1)]).wait()

        return self._issue("all-gather", list(inputs), list(outputs), exchange)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        op = opts.reduceOp

        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            for out, pieces in zip(written, read, strict=True):
                summed = pieces.clone().reshape(-1)
                self._reduce(summed, op)
                out.view(-1).copy_(summed.view(self.size(), -1)[self.rank()])

        return self._issue("reduce-scatter", list(inputs), list(outputs), exchange)

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        mean = op == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if mean else op
        self._inner.allreduce([tensor], options).wait()
        if mean:
            tensor.div_(self.size())

    def all_to_all_single(self, output: Tensor, input: Tensor, *rest: Any) -> dist.Work:  # noqa: A002
        splits = [list(part) for part in rest[:2]] or [[], []]

        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            self._inner.alltoall_base(written[0], read[0], *splits).wait()

        return self._issue("all-to-all", [input], [output], exchange)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            for tensor, out in zip(read, written, strict=True):
                if out is not tensor:
                    out.copy_(tensor)
                self._reduce(out, op)

        return self._issue("all-reduce", list(tensors), list(tensors), exchange)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            for tensor, out in zip(read, written, strict=True):
                if out is not tensor:
                    out.copy_(tensor)
                self._inner.broadcast([out], opts).wait()

        return self._issue("broadcast", list(tensors), list(tensors), exchange)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        def exchange(read: list[Tensor], written: list[Tensor]) -> None:
            self._inner.allgather([written], read).wait()

        return self._issue("all-gather", list(inputs), list(outputs[0]), exchange)

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        self._inner.barrier().wait()
        return _Done()

    def send(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        return cast(dist.Work, self._inner.send([simulated.on_host(t).clone() for t in tensors], peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        return cast(dist.Work, self._inner.recv([simulated.on_host(t) for t in tensors], peer, tag))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- names ----

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    @property
    def group_name(self) -> str:
        return self._own_name or cast(str, dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        return self.group_name


class _Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True
