"""Data groups: process groups that messages of ours go over, which can be cut and made again when a peer failed.

A mesh's own process group is the user's, and cannot be cut without taking that from him. So, when a root forms, every
group of a mesh gets data groups: process groups of the same ranks that only we know, one for each purpose. Messages
over one are counted, so that a rank that fails can say how far it came, and who waits for a message can tell whether it
will come.

Cutting (`cut`) ends every wait of this rank on the group at once, from any thread, and those of its peers with it:

    gloo    has no call for it. A receive whose time is over closes all connections of its group, as torch 2.11 to 2.13
            have it; a receive of ours with a millisecond of time does no more than that
            (tests/procs/test_data_groups.py)
    NCCL    `abort` of the backend

Other backends have no data groups: theirs are used as they are, and a wait ends when the backend ends it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import default_store, same_group
from ..guard import Fault, Scope, Wait, wait_until

# ---- pairs -----------------------------------------------------------------------------------------------------------
# Messages from one rank to another, straight from the memory where something lies into the memory where it is needed.
#
# For backends whose collectives copy what they carry once more, and want it in one contiguous buffer (gloo). A
# collective there is work for a pool of threads; a send or a receive is a system call here and now, and its bytes move
# in the background, of whatever dtype. Whether that pays is a matter of size: `layout.gather`.
#
# Ranks issue the same messages in the same order, as they do with collectives; between two ranks those of equal tag
# match in that order. The tags are ours, so that a user's own `send` and `recv` on the same group are not mistaken for
# them.

PARAMETERS_TAG = 0x66736864
GRADIENTS_TAG = PARAMETERS_TAG + 1


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


def gather_each(group: dist.ProcessGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
    """Every rank's `pieces[i]` (n,) into `outs[i]` (world * n,) on every rank; all contiguous, of one dtype. A piece
    may be this rank's part of its `outs[i]` itself."""
    rank, world = group.rank(), group.size()
    chunks = [out.view(world, -1) for out in outs]
    arriving = {peer: [chunk[peer] for chunk in chunks] for peer in range(world) if peer != rank}
    works = exchange_each(group, arriving, dict.fromkeys(arriving, pieces), PARAMETERS_TAG)
    # While the messages are on their way.
    own = [chunk[rank] for chunk in chunks]
    if own[0].data_ptr() != pieces[0].data_ptr():
        torch._foreach_copy_(own, list(pieces))
    return works


def exchange_each(
    group: dist.ProcessGroup,
    arriving: Mapping[int, Sequence[Tensor]],
    leaving: Mapping[int, Sequence[Tensor]],
    tag: int,
) -> list[Work]:
    """`leaving[r][i]` of this rank into `arriving[this rank][i]` of rank r. Tensors are contiguous, and stay as they
    are until the works were waited for; empty ones are not sent."""
    rank, world = group.rank(), group.size()
    works: list[Work] = []
    # All receives first: bytes that arrive before their receive is posted wait in the sender's socket.
    for peer, tensors in arriving.items():
        works += [group.recv([tensor], peer, tag) for tensor in tensors if tensor.numel()]
    # Rank r begins with r + 1, so that not everybody sends to rank 0 first.
    for step in range(1, world):
        peer = (rank + step) % world
        works += [group.send([tensor], peer, tag) for tensor in leaving[peer] if tensor.numel()]
    return works


# ---- data group ------------------------------------------------------------------------------------------------------

_CUT_TAG = 0x66736866
_CUTS = ("gloo", "nccl")
# Words of a backend's errors about connections, and not about what it is asked to send.
_OF_CONNECTIONS = ("gloo/transport", "pair closure", "onnection", "ocket", "imed out", "NCCL")
# A connection was closed: so long somebody may take to say why, or to be seen gone.
_CLOSED_SECONDS = 3.5
# The backend's own limit comes after the one that the watch keeps, which knows names.
_BACKEND_SECONDS_MORE = 30.0


class DataGroup:
    """The connections of `origin`, a process group of ranks of `scope`, for one purpose. Use `open_data_group`."""

    def __init__(self, scope: Scope, origin: dist.ProcessGroup, device: torch.device, purpose: str) -> None:
        self.scope, self.device, self.purpose = scope, device, purpose
        self.ranks = tuple(dist.get_process_group_ranks(origin))
        # The same on all of its ranks, and never given twice.
        self.name = scope.group_name(f"{purpose} {'.'.join(map(str, _ends(self.ranks)))}")
        # It must not keep the group alive whose attribute it is, as it were.
        self._origin = weakref.ref(origin)
        self.issued = 0
        self.is_cut = False
        # What is under way on a device, where nobody waits on the host.
        self._under_way: deque[Sent] = deque()
        self._group: dist.ProcessGroup | None = None
        self._renewed = -1

    @property
    def is_connected(self) -> bool:
        """Whether there are connections that no meeting of the scope gave up."""
        return self._renewed == self.scope.renewed

    @property
    def group(self) -> dist.ProcessGroup:
        """What messages go over now. Made anew where a meeting of the scope gave the last one up: by the first message
        that somebody sends over it, so that it does not matter who still holds what."""
        if self._renewed != self.scope.renewed:
            self.connect()
        assert self._group is not None
        return self._group

    def connect(self) -> None:
        """New connections: at first, and after a meeting that asked for them. Every rank of the group makes this call;
        after an exception again, when the ranks have met."""
        scope = self.scope
        if self.is_connected:
            return
        origin = self._origin()
        if origin is None:
            raise RuntimeError(f"{self.name}: expected its process group to exist, found that it was destroyed")
        name = f"{scope.watch.records.prefix}/{scope.name}/{scope.renewed}/{self.name}"
        doing = scope.told or "the connections of " + self.purpose
        wait = Wait("connect", scope, doing, name=self.name, ranks=self.ranks)
        store = _ConnectingStore(default_store(), wait)
        seconds = scope.watch.settings.limit_seconds + _BACKEND_SECONDS_MORE
        try:
            # Once all are here a backend connects at once. Before that its own wait for them would end with its limit.
            store.add(f"{name}/here", 1)
            wait_until(lambda: store.add(f"{name}/here", 0) >= len(self.ranks), wait)
            with scope.watch.waits(wait):
                made = same_group(origin, self.ranks, self.device, store, name, seconds)
            if store.held is not None:
                raise store.held
        except BaseException as error:
            scope.interrupted(error, wait.doing)
            raise
        self._group, self.issued, self.is_cut, self._renewed = made, 0, False, scope.renewed
        self._under_way.clear()

    def expire(self) -> None:
        """A meeting gave these connections up."""
        self.cut()
        self.issued = 0

    def close(self) -> None:
        """Give the connections up; there will be no others."""
        self._group, self._renewed = None, -1
        self._under_way.clear()

    def issue(self, call: Callable[..., Any], *args: Any) -> Sent:
        """`call(*args)`, which sends one message over `group` and returns its work."""
        try:
            work = call(*args)
        except RuntimeError as error:
            self.refuse(self.issued + 1, error)
        return self._sent(work)

    def issue_each(self, call: Callable[..., list[Work]], *args: Any) -> list[Work]:
        """`issue` for what is one message to the ranks and several works here."""
        try:
            works = call(*args)
        except RuntimeError as error:
            self.refuse(self.issued + 1, error)
        self.issued += 1
        return [Sent(self, work, self.issued) for work in works]

    def _sent(self, work: Work) -> Sent:
        self.issued += 1
        sent = Sent(self, work, self.issued)
        if self.device.type != "cpu":
            self._under_way.append(sent)
        return sent

    def oldest(self) -> Sent | None:
        """Of what is under way on a device."""
        while self._under_way and self._under_way[0].is_completed:
            self._under_way.popleft()
        return self._under_way[0] if self._under_way else None

    def cut(self) -> None:
        """End all waits on the group, here and on its peers. From any thread; does not raise."""
        if self.is_cut or self._group is None:
            return
        self.is_cut = True
        if self.device.type != "cpu":
            with suppress(RuntimeError):
                self._group.abort()
            return
        rank, size = self._group.rank(), self._group.size()
        for step in range(1, size):
            try:
                self._group.recv([torch.empty(1)], (rank + step) % size, _CUT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return
                # The connection to this peer had been closed, by that peer: those to the others are still open.

    def refuse(self, number: int, error: RuntimeError) -> NoReturn:
        """Raise what there is to say of a backend's `error` for message `number`."""
        explained = self._explain(number, error)
        if explained is error:
            raise error
        raise explained from error

    def _explain(self, number: int, error: RuntimeError) -> RuntimeError:
        """What to raise instead of a backend's `error`. Waits some seconds for somebody to say why a connection
        was closed. The scope's data groups are cut afterwards.

        What a backend refuses to send (a dtype that it has no sum for) is `error` itself: no peer has to do with it.
        """
        scope = self.scope
        if scope.failure is None and not any(word in str(error) for word in _OF_CONNECTIONS):
            return error
        scope.has_raised = True
        doing = scope.told or f"message {number} of {self.name}"
        text = str(error).split("\n")[0]
        wait = Wait("message", scope, doing, name=self.name, number=number, ranks=self.ranks, also="closed")
        fault = scope.failure or self._told_in_time(wait)
        if fault is not None:
            scope.fail(fault)
            return fault.error(doing)
        scope.publish("raised", text)
        scope.fail(Fault(scope.rank, "raised", text, scope.name, scope.epoch))
        return RuntimeError(
            f"{doing}: expected an answer of the other ranks, found that a message between them failed ({text}) and "
            f"that none of them said why: a process that was killed, and served the store, or a broken network; see "
            f"the output of the other ranks"
        )

    def _told_in_time(self, wait: Wait) -> Fault | None:
        watch, seconds = self.scope.watch, _CLOSED_SECONDS
        with suppress(RuntimeError):
            if not watch.records.is_one_machine():
                # Whether a process of another one is gone is known by its signs of life alone.
                seconds = max(seconds, watch.settings.beat_seconds + 2)
            end = time.monotonic() + seconds
            wait_until(lambda: wait.fault is not None or time.monotonic() > end, wait)
        return wait.fault


def _ends(ranks: Sequence[int]) -> Sequence[int]:
    """Enough of `ranks` to tell them apart from those of other groups of one mesh axis: all of a few."""
    return ranks if len(ranks) <= 8 else (*ranks[:2], ranks[-1], len(ranks))


class _ConnectingStore(dist.Store):
    """The store through which a backend finds its peers, whose waits end when one of them failed. Instead of the
    backend's own wait for the time limit. An exception from outside (Ctrl-C) is `held` until the connections are there:
    the others would wait for them in their backend, where nobody can tell them."""

    def __init__(self, inner: Any, wait: Wait) -> None:
        super().__init__()
        self._inner, self._wait = inner, wait
        self.held: BaseException | None = None

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._inner.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._inner.compare_set(key, expected, desired)
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  (the watch keeps it)
        while True:
            try:
                return wait_until(lambda: bool(self._inner.check(keys)), self._wait)
            except RuntimeError:
                raise
            except BaseException as error:
                self.held = error


class Sent:
    """A message under way over a data group, the `number`th of it."""

    __slots__ = ("_described", "_renewed", "_work", "group", "number", "since")

    def __init__(self, group: DataGroup, work: Work, number: int) -> None:
        self.group, self._work, self.number = group, work, number
        self._renewed = group.scope.renewed
        self._described: Wait | None = None
        self.since = time.monotonic() if group.device.type != "cpu" else 0.0

    @property
    def wait_described(self) -> Wait:
        """As a wait, for the watch."""
        if self._described is None or self._described.since != self.since:
            group = self.group
            scope = group.scope
            self._described = Wait(
                "message", scope, scope.told or group.name, name=group.name, number=self.number, ranks=group.ranks
            )
            self._described.since = self.since
        return self._described

    def wait(self) -> object:
        """As `Work.wait`. Raises `PeerFailed` or `RanksDisagree` when the message will not come."""
        scope = self.group.scope
        self.since = time.monotonic()
        thread = scope.watch.enter(self)
        try:
            return self._work.wait()
        except RuntimeError as error:
            if self._renewed != scope.renewed:
                raise  # of connections that were given up
            scope.watch.over(thread)
            self.group.refuse(self.number, error)
        finally:
            scope.watch.over(thread)

    def drain(self) -> None:
        """Wait for a message that nobody needs: the buffers it uses are free afterwards, whatever became of it."""
        try:
            self.wait()
        except RuntimeError:
            if not self.group.is_cut and self._renewed == self.group.scope.renewed:
                raise

    @property
    def is_completed(self) -> bool:
        return bool(self._work.is_completed())  # type: ignore[attr-defined]


def drain(work: Work) -> None:
    """`Sent.drain`, of any work."""
    if isinstance(work, Sent):
        work.drain()
    else:
        work.wait()


# Of each process group, the data groups made in its place, by purpose.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DataGroup]] = weakref.WeakKeyDictionary()


def can_cut(backend: str) -> bool:
    """Whether groups of `backend` have data groups."""
    return backend in _CUTS


def open_data_group(
    scope: Scope,
    origin: dist.ProcessGroup,
    device: torch.device,
    backend: str,
    purpose: str,
) -> DataGroup | None:
    """The data group instead of `origin`; None where its backend has none. Its connections are made with its first
    message, which is at the same place on all ranks: where one of them was interrupted while it made several data
    groups, and another one was not, both have the same to do."""
    if not can_cut(backend) or origin.size() < 2:
        return None
    made = _made.setdefault(origin, {})
    if purpose not in made or made[purpose].scope is not scope:
        scope.watch.begin()
        made[purpose] = group = DataGroup(scope, origin, device, purpose)
        scope.groups[group.name] = group
    return made[purpose]


def data_group(origin: dist.ProcessGroup, purpose: str = "small") -> DataGroup | None:
    """The data group instead of a mesh's group, for small messages of ours; None where there is none."""
    return _made.get(origin, {}).get(purpose)
