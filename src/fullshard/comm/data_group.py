"""Messages: the line over which ranks send them, the data group that carries them, and its connections.

A `Line` sends: it has the collectives. A mesh's own process group belongs to the user, so fullshard must not cut it.
When a root forms, every group of a mesh gets private data groups of the same ranks, one per purpose, which its lines
use from then on. They count their messages, so that a failing rank can report its last message, and a waiting rank can
tell whether its message will come. All messages are asynchronous: one under way is a `Sent`; several, with their
buffers, are a `Flight` (pool.py).

A data group connects at once, inside of a wait that the watch knows, also on NCCL, which would do it at the first
message. Cutting it ends every wait of this rank and its peers on it at once, from any thread:

    gloo    `cut_host` posts a receive that times out, which closes all connections of its group (torch 2.11 to 2.13)
    NCCL    `abort` of the backend

Other backends have no data groups: their groups are used directly, and a wait ends when the backend ends it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from .._torch import backend_of, capturing, default_store, error_of, is_capturing_elsewhere, same_group
from ..peers import Fault, Scope, Wait, wait_until

_log = logging.getLogger("fullshard")

_CUTS = ("gloo", "nccl")
# How long a wait for a collective lasts before it looks whether the watch ended it; and how long a cut may take.
_SLICE = timedelta(seconds=2)
_CUT_SECONDS = 3.0
_CUT_TAG = 0x66736866
# Words in a backend's errors about connections, as opposed to errors about arguments.
_OF_CONNECTIONS = ("gloo/transport", "pair closure", "onnection", "ocket", "imed out", "NCCL")
# How long to wait, after a connection was closed, until a peer reports why or is found dead.
_CLOSED_SECONDS = 3.5
# The backend's timeout must come after the watch's, whose error names ranks.
_BACKEND_SECONDS_MORE = 30.0
# What torch's watchdog of NCCL reads, by its newer and older names.
_WATCHDOG = (
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG"),
    *("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_DISTRIBUTED_DEBUG"),
    *("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"),
)

# ---- messages under way ----------------------------------------------------------------------------------------------


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> object: ...


class Works:
    """Several works that are one message; of none, it is over."""

    def __init__(self, works: Iterable[Any] = ()) -> None:
        self.left = deque(works)

    def wait(self) -> None:
        """Wait for what is left. After an exception: for what comes after the work that raised it."""
        while self.left:
            self.left.popleft().wait()

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(work.is_completed() for work in self.left)


class Observer(Protocol):
    """Is called with the messages of a data group (observe/recorder.py)."""

    def now(self) -> int:
        """The time of its clock."""

    def sent(self, message: Sent, call: str, arguments: Sequence[Any], begun: int) -> None:
        """`message` was issued by `call` with `arguments`, which began at `begun`."""

    def waits(self, message: Sent) -> None:
        """A wait for it begins, on the thread that needs it."""

    def waited(self, message: Sent) -> None:
        """The wait is over; it may have raised."""


class Sent:
    """A message in flight over a data group, its `number`th.

    On a device the host waits for nothing: `wait` orders the current stream after the message. The data group still
    knows the message until it is over, but its buffers are the caller's alone from then on.
    """

    __slots__ = ("_described", "_in_one", "_passed", "_renewed", "_work", "group", "number", "since")

    def __init__(self, group: DataGroup, work: Work, number: int, *, in_one: bool) -> None:
        """`in_one`: the wait cannot be cut into slices. On a device it does not block; a point-to-point message of gloo
        closes its connection when a wait for it times out."""
        self.group, self.number, self._in_one = group, number, in_one
        # A work on a device holds its outputs for as long as it exists. An event replaces it once a stream waits.
        self._work: Any = work
        self._passed: Any = None
        self._renewed = group.scope.renewed
        self._described: Wait | None = None
        self.since = time.monotonic() if group.on_streams else 0.0

    @property
    def wait_described(self) -> Wait:
        """Describes it as a `Wait`, for the watch."""
        if self._described is None or self._described.since != self.since:
            group = self.group
            scope = group.scope
            self._described = Wait(
                "message", scope, scope.told or group.name, name=group.name, number=self.number, ranks=group.ranks
            )
            self._described.since = self.since
        if self._renewed != self.group.scope.renewed:
            # A meeting gave its connections up. This wait ends within some seconds, and messages of the new epoch have
            # the same numbers: it must not be taken for one of them, which others do not send.
            self._described.epoch = -1
        return self._described

    def wait(self) -> object:
        """Wait as `Work.wait` does. Raises `PeerFailed` or `RanksDisagree` when the message will not come."""
        scope, work = self.group.scope, self._work
        if work is None:
            return None  # a stream waits already
        observer = self.group.observer
        if observer is not None:
            observer.waits(self)
        self.since = time.monotonic()
        waiting, thread = scope.watch.waiting, threading.get_ident()
        waiting[thread] = self
        whole = self._in_one
        try:
            while True:
                try:
                    done = work.wait() if whole else work.wait(_SLICE)
                    break
                except RuntimeError as error:
                    if not whole and work.is_completed():
                        whole = True  # it may have arrived since the slice was over; then its own wait says so
                    elif whole or self._is_overdue():
                        if self._renewed != scope.renewed:
                            raise  # its connections were given up
                        waiting.pop(thread, None)
                        self.group.refuse(self.number, error)
            if self.group.on_streams:
                self._passed = torch.accelerator.current_stream(self.group.device).record_event()
                self._work = None
            return done
        finally:
            waiting.pop(thread, None)
            if observer is not None:
                observer.waited(self)

    @property
    def future(self) -> torch.futures.Future[Any] | None:
        """Completes when it arrives, at once if it did; None if the backend has none (point-to-point messages)."""
        try:
            return self._work.get_future() if isinstance(self._work, dist.Work) else None
        except RuntimeError:
            return None

    def _is_overdue(self) -> bool:
        """A slice of the wait is over: whether the group was cut some time ago. A collective that is issued while its
        connection closes may never end, and no cut ends it, because there is nothing left to cut."""
        if self._renewed != self.group.scope.renewed:
            # `cut_at` may be that of the connections that the group has now, which are not cut.
            return self.since < time.monotonic() - _CUT_SECONDS
        return 0 < self.group.cut_at < time.monotonic() - _CUT_SECONDS

    def drain(self) -> None:
        """Wait for a message that is no longer needed. Its buffers are free afterwards, even if it failed."""
        while True:
            try:
                self.wait()
                return
            except RuntimeError:
                if not self.group.is_cut and self._renewed == self.group.scope.renewed:
                    raise
            if not isinstance(self._work, Works):
                return

    @property
    def is_completed(self) -> bool:
        work = self._work
        return bool(self._passed.query() if work is None else work.is_completed())


def drain(work: Work) -> None:
    """`Sent.drain` for any work."""
    if isinstance(work, Sent):
        work.drain()
    else:
        work.wait()


# ---- data group ------------------------------------------------------------------------------------------------------


class DataGroup:
    """The connections of `origin`, a process group of ranks of `scope`, for one purpose. Use `open_data_group`."""

    # While its messages are recorded.
    observer: Observer | None = None

    def __init__(
        self, scope: Scope, origin: dist.ProcessGroup, device: torch.device, backend: str, purpose: str
    ) -> None:
        self.scope, self.device, self.backend, self.purpose = scope, device, backend, purpose
        self.ranks = tuple(dist.get_process_group_ranks(origin))
        # The same on all of its ranks, and unique.
        self.name = scope.groups.new_name(f"{purpose} {'.'.join(map(str, _ends(self.ranks)))}")
        # Whether messages run on streams of the device, so that no wait blocks the host. Those of gloo block it,
        # wherever their tensors are.
        self.on_streams = backend == "nccl"
        # Weak: `_made` is keyed weakly by this group, which a strong reference would keep alive.
        self._origin = weakref.ref(origin)
        self.issued = 0
        # When its connections were cut, by `time.monotonic`; 0 while they are not.
        self.cut_at = 0.0
        # Messages in flight on a device, for which no host thread waits.
        self._under_way: deque[Sent] = deque()
        self._group: dist.ProcessGroup | None = None
        self._renewed = -1

    @property
    def is_cut(self) -> bool:
        """Whether its connections were cut."""
        return self.cut_at > 0

    @property
    def is_connected(self) -> bool:
        """Whether there are connections that no meeting of the scope has given up since."""
        return self._renewed == self.scope.renewed

    @property
    def group(self) -> dist.ProcessGroup:
        """The current process group. After a meeting of the scope gave the last one up, the first message makes a new
        one, so stale references do no harm."""
        if self._renewed != self.scope.renewed:
            self.connect()
        assert self._group is not None
        return self._group

    def connect(self) -> None:
        """Connect: at first, and after a meeting that asked for it. Collective over the ranks of the group; after an
        exception, call it again once the ranks have met."""
        scope = self.scope
        if self.is_connected:
            return
        origin = self._origin()
        if origin is None:
            raise RuntimeError(f"{self.name}: expected its process group to exist, found that it was destroyed")
        name = f"{scope.watch.records.prefix}/{scope.name}/{scope.renewed}/{self.name}"
        doing = scope.doing or "the connections of " + self.purpose
        wait = Wait("connect", scope, doing, name=self.name, ranks=self.ranks)
        made = self._connected(origin, name, wait)
        self._group, self.issued, self.cut_at, self._renewed = made, 0, 0.0, scope.renewed
        self._under_way.clear()

    def _connected(self, origin: dist.ProcessGroup, name: str, wait: Wait) -> dist.ProcessGroup:
        """Connections between the ranks. Collective over them, inside of `wait`; `name`: the same on all of them, and
        unique. A thread makes them: neither gloo nor NCCL returns while a rank that is gone is missing. Nothing of
        Python's is left with the backend, which may call its store whenever it likes, from threads of C++."""
        scope, seconds = self.scope, self.scope.watch.settings.limit_seconds + _BACKEND_SECONDS_MORE

        def connect() -> dist.ProcessGroup:
            # A store of C++: a backend may use it for as long as it exists, from any thread. Nothing limits how long a
            # silent one is waited for.
            return same_group(origin, self.ranks, self.device, self.backend, default_store(), name, seconds)

        with scope.reporting("the connections of a group"):
            # First wait for all ranks here: the backend's own wait for them would end with its timeout.
            with scope.store_answers("the connections of a group"):
                asked = scope.watch.records.store
                asked.add(f"{name}/here", 1)
                wait_until(lambda: asked.add(f"{name}/here", 0) >= len(self.ranks), wait)
            return scope.made_within(wait, connect, dist.DistNetworkError)

    def expire(self) -> None:
        """Called when a meeting gives these connections up."""
        self.cut()
        self.issued = 0

    def close(self) -> None:
        """Give the connections up permanently."""
        group, self._group, self._renewed = self._group, None, -1
        self._under_way.clear()
        if self.on_streams and group is not None and not self.is_cut:
            # Not left to its destructor, which aborts and warns.
            with suppress(RuntimeError):
                group.shutdown()

    def issue(self, call: str | Callable[..., Any], *args: Any) -> Sent:
        """Send one message over `group`: by `call(*args)`, which returns its work, or by the method of that name.

        Raises `RuntimeError` while the current stream captures a graph."""
        if self.on_streams and capturing(self.device)():
            raise RuntimeError(
                f"{self.scope.told or self.name}: expected no graph to be captured where ranks exchange a message, "
                f"found that the current stream captures one, whose replays would leave out what ranks compare; "
                f"capture what modules compute between messages, and run the sharded model outside of the capture"
            )
        if self._renewed != self.scope.renewed:
            self.connect()
        begun = 0 if self.observer is None else self.observer.now()
        try:
            work = getattr(self._group, call)(*args) if isinstance(call, str) else call(*args)
        except RuntimeError as error:
            self.refuse(self.issued + 1, error)
        self.issued += 1
        # Nothing else than torch's own work has a `wait` with a time limit.
        sent = Sent(self, work, self.issued, in_one=self.backend != "gloo" or not isinstance(work, dist.Work))
        if self.observer is not None:
            self.observer.sent(sent, call if isinstance(call, str) else call.__name__, args, begun)
        if self.on_streams:
            self._under_way.append(sent)
        return sent

    def oldest(self) -> Sent | None:
        """The oldest message in flight on a device, or None; None, too, while a graph is captured, when no thread may
        ask the device."""
        if not self._under_way or is_capturing_elsewhere(self.device):
            return None
        while self._under_way and self._under_way[0].is_completed:
            self._under_way.popleft()
        return self._under_way[0] if self._under_way else None

    @property
    def under_way(self) -> str:
        """The name of the oldest unfinished message on a device, or "". From any thread: changes nothing."""
        left = (sent for sent in list(self._under_way) if not sent.is_completed)
        return next((f"message {sent.number} of {self.name}" for sent in left), "")

    def cut(self) -> None:
        """End all waits on the group, here and on its peers. From any thread; does not raise."""
        if self.is_cut or self._group is None:
            return
        self.cut_at = time.monotonic()
        if self.on_streams:
            with suppress(RuntimeError):
                self._group.abort()
            return
        cut_host(self._group, self.device)

    @property
    def broke(self) -> str:
        """Why NCCL ended the communicator itself, or "": its watchdog found an error, or a message over its time limit.
        The messages that this ended count as arrived on their streams."""
        return error_of(self._group, self.device) if self.on_streams and self._group is not None else ""

    def check(self) -> None:
        """Raise if the backend ended the connections itself, though no peer failed."""
        if not self.is_cut and (text := self.broke):
            self.refuse(self.issued, RuntimeError(f"NCCL ended the communicator ({text})"))

    def refuse(self, number: int, error: RuntimeError) -> NoReturn:
        """Raise a backend's `error` for message `number`; `_explained`, if it is about connections and not about the
        message itself, such as a dtype that the backend cannot sum."""
        scope = self.scope
        if scope.failures.cause is None and not is_of_connections(error):
            raise error
        doing = scope.told or f"message {number} of {self.name}"
        # On a device, what was queued after a message that failed ran without its bytes: also if NCCL refuses this one
        # because it ended the communicator itself. Otherwise one that was never sent, or that a cut ended, spoils
        # nothing more.
        failed = self.on_streams and not self.is_cut and (number <= self.issued or bool(self.broke))
        spoiled = f"message {min(number, self.issued)} of {self.name}" if failed else ""
        wait = Wait("message", scope, doing, name=self.name, number=number, ranks=self.ranks, also="closed")
        raise _explained(scope, wait, str(error).split("\n")[0], spoiled) from error


def _ends(ranks: Sequence[int]) -> Sequence[int]:
    """Enough of `ranks` to distinguish the groups of one mesh axis: all if there are few."""
    return ranks if len(ranks) <= 8 else (*ranks[:2], ranks[-1], len(ranks))


# The data groups made for each process group, by purpose.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DataGroup]] = weakref.WeakKeyDictionary()


def can_cut(backend: str) -> bool:
    """Whether groups of `backend` have data groups."""
    return backend in _CUTS


def open_data_group(
    scope: Scope, origin: dist.ProcessGroup, device: torch.device, backend: str, purpose: str
) -> DataGroup | None:
    """The data group that replaces `origin`; None if its backend has none. Its first message, which is at the same
    place on all ranks, connects it: so ranks agree even if one of them was interrupted while opening data groups."""
    if not can_cut(backend) or origin.size() < 2:
        return None
    made = _made.setdefault(origin, {})
    if purpose not in made or made[purpose].scope is not scope:
        scope.watch.begin()
        if backend == "nccl":
            _tell_of_watchdog()
        made[purpose] = group = DataGroup(scope, origin, device, backend, purpose)
        scope.groups[group.name] = group
    return made[purpose]


@functools.cache
def _tell_of_watchdog() -> None:
    """Log once what decides whether torch's watchdog ends this process before our watch raises."""
    found = ", ".join(f"{name}={os.environ[name]}" for name in _WATCHDOG if name in os.environ)
    _log.info(
        "NCCL: torch's watchdog ends this process after an error of NCCL or a time-out unless variables say otherwise, "
        "found %s; see docs/failures.md, On a device",
        found or "none of them",
    )


def communicators(origin: dist.ProcessGroup) -> list[DataGroup]:
    """The data groups of `origin` that are connected, on a device: each is a communicator beside that of `origin`."""
    return [group for group in _made.get(origin, {}).values() if group.device.type != "cpu" and group.is_connected]


def data_group(origin: dist.ProcessGroup, purpose: str = "small") -> DataGroup | None:
    """The data group for small messages that replaces a mesh's group, or None."""
    return _made.get(origin, {}).get(purpose)


def cut_host(group: dist.ProcessGroup, device: torch.device) -> None:
    """Cut the connections of a `group` of gloo, whatever the `device` of its messages is. Does not raise."""
    rank, size, backend = group.rank(), group.size(), backend_of(group, device)
    for step in range(1, size):
        try:
            backend.recv([torch.empty(1)], (rank + step) % size, _CUT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
            # This peer had already closed its connection: those to the others are still open.


def is_of_connections(error: RuntimeError) -> bool:
    """Whether a backend's `error` is about its connections, and not about the message that it was given."""
    return any(word in str(error) for word in _OF_CONNECTIONS)


def _explained(scope: Scope, wait: Wait, text: str, spoiled: str) -> RuntimeError:
    """The exception to raise instead of a backend's error, whose `text` it was, in `wait`. Waits some seconds for a
    peer to report why a connection was closed. The scope's data groups are cut afterwards. `spoiled`: the message after
    which the device computed without its bytes, or ""."""
    scope.failures.has_raised = True
    fault = scope.failures.cause or _reported(scope, wait)
    if fault is not None:
        scope.fail(fault, spoiled)
        return fault.error(wait.doing)
    scope.publish("raised", text)
    scope.fail(Fault(scope.rank, "raised", text, scope.name, scope.epoch), spoiled)
    return RuntimeError(
        f"{wait.doing}: expected an answer of the other ranks, found that a message between them failed ({text}) and "
        f"that none of them said why: a process that was killed, and served the store, or a broken network; see "
        f"the output of the other ranks"
    )


def _reported(scope: Scope, wait: Wait) -> Fault | None:
    watch, seconds = scope.watch, _CLOSED_SECONDS
    # Without the store, which the process that is gone may have served, the watch ends this wait.
    with suppress(RuntimeError):
        if not watch.records.is_one_machine():
            # Only missing signs of life show that a process on another machine is gone.
            seconds = max(seconds, watch.settings.beat_seconds + 2)
    with suppress(RuntimeError):
        end = time.monotonic() + seconds
        wait_until(lambda: wait.fault is not None or time.monotonic() > end, wait)
    return wait.fault


# ---- line ------------------------------------------------------------------------------------------------------------

# Dtypes that every backend supports; others (float8 and int16 weights, complex numbers on NCCL) are sent as bytes.
CARRIED = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)
)

# The methods of a process group that torch's own functions call, renamed in 2.13. A process group written in Python
# implements only one set of names.
if hasattr(dist.ProcessGroup, "all_gather_single"):
    _GATHERS, GATHERS_EACH = "all_gather_single", "all_gather_single_coalesced"
    _REDUCES, REDUCES_EACH = "reduce_scatter_single", "reduce_scatter_single_coalesced"
    _EXCHANGES = "all_to_all_single"
else:
    _GATHERS, GATHERS_EACH = "_allgather_base", "allgather_into_tensor_coalesced"
    _REDUCES, REDUCES_EACH = "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"
    _EXCHANGES = "alltoall_base"

# Asynchronous, and shared: backends only read them.
GATHER = AllgatherOptions()
GATHER.asyncOp = True
_EXCHANGE = AllToAllOptions()
_EXCHANGE.asyncOp = True

# Reduce ops for sums and means over ranks.
SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.AVG


class Line:
    """Ranks that exchange messages, and the collectives between them.

    `origin`: the mesh's process group, or one made for a purpose."""

    # The one way to send: runs the method `call` of the process group with `args`, or the function `call`.
    send: Callable[..., Work]

    def __init__(self, origin: dist.ProcessGroup, data_group: DataGroup | None = None) -> None:
        self.origin = origin
        self.use(data_group)

    def use(self, data_group: DataGroup | None) -> None:
        """Send over `data_group` from now on, whose connections can be cut; None: over `origin`."""
        self.data_group = data_group
        self.send = functools.partial(_call, self.origin) if data_group is None else data_group.issue

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group in use: the data group's, if it has one."""
        return self.origin if self.data_group is None else self.data_group.group

    def gather_into(self, out: Tensor, piece: Tensor) -> Work:
        """All-gather `piece` (n,) into `out` (world * n,); contiguous, of one dtype. `piece` may be this rank's part of
        `out`."""
        if out.dtype not in CARRIED:
            out, piece = carried(out), carried(piece)
        return self.send(_GATHERS, out, piece, GATHER)

    def exchange(self, out: Tensor, pieces: Tensor, arriving: Sequence[int] = (), leaving: Sequence[int] = ()) -> Work:
        """`pieces` and `out` (world * n,): chunk r goes to rank r; chunk r of `out` comes from rank r. `arriving`,
        `leaving`: the elements of each chunk, where they are not as many for each rank; in dtypes that backends know.
        """
        if out.dtype not in CARRIED:
            out, pieces = carried(out), carried(pieces)
        return self.send(_EXCHANGES, out, pieces, list(arriving), list(leaving), _EXCHANGE)

    def reduce_scatter(self, out: Tensor, pieces: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """Reduce chunk `rank` of all ranks' `pieces` (world * n,) into `out` (n,)."""
        options = with_op(ReduceScatterOptions(), op)
        return self.send(_REDUCES, out, pieces, options)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """Reduce `tensor` over all ranks, in place on every rank."""
        return self.send("allreduce", [tensor], with_op(AllreduceOptions(), op))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Broadcast `tensor` from the rank at `source` of the group."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self.send("broadcast", [tensor], options)


def _call(origin: dist.ProcessGroup, call: str | Callable[..., Work], *args: Any) -> Work:
    work: Work = getattr(origin, call)(*args) if isinstance(call, str) else call(*args)
    return work


def with_op(options: Any, op: dist.ReduceOp.RedOpType) -> Any:
    """The `options` of a message that reduces by `op`."""
    options.reduceOp, options.asyncOp = dist.ReduceOp(op), True
    return options


def carried(tensor: Tensor) -> Tensor:
    """The contiguous `tensor`, which is only moved, in a dtype that backends support."""
    return tensor if tensor.dtype in CARRIED else tensor.view(torch.uint8)
