"""Lines: the connections that data messages go over, which can be cut and made again when a peer failed.

A mesh's own process group is the user's, and cannot be cut without taking that from him. So, when a root forms, every
group of a mesh gets a line: a process group of the same ranks that only we know. Messages over a line are counted, so
that a rank that fails can say how far it came (control.py), and who waits for a message can tell whether it will come.

Cutting (`cut`) ends every wait of this rank on the line at once, from any thread, and those of its peers with it:

    gloo    has no call for it. A receive whose time is over closes all connections of its group, as torch 2.11 to 2.13
            have it; a receive of ours with a millisecond of time does no more than that (tests/procs/test_lines.py)
    NCCL    `abort` of the backend

Other backends have no lines: their groups are used as they are, and a wait ends when the backend ends it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .._torch_compat import same_group
from .monitor import watch_over
from .pairs import Work

if TYPE_CHECKING:
    from .domain import Domain

_CUT_TAG = 0x66736866
_CUTS = ("gloo", "nccl")


class Line:
    """The connections of `origin`, a process group of ranks of `domain`, for one purpose. Use `open_line`."""

    def __init__(self, domain: Domain, origin: dist.ProcessGroup, device: torch.device, purpose: str) -> None:
        self.domain, self.device, self.purpose = domain, device, purpose
        self.ranks = tuple(dist.get_process_group_ranks(origin))
        # The same on all of its ranks, and never given twice.
        self.name = domain.line_name(f"{purpose} {'.'.join(map(str, self.ranks))}")
        # A line must not keep the group alive of which it is an attribute, as it were.
        self._origin = weakref.ref(origin, self._forget)
        self.issued = 0
        self.is_cut = False
        # What is under way on a device, where nobody waits on the host.
        self.under_way: deque[Sent] = deque()
        self.group = self._make()

    def _make(self) -> dist.ProcessGroup:
        name = f"{self.domain.prefix}/{self.domain.renewed}/{self.name}"
        origin = self._origin()
        if origin is None:
            raise RuntimeError(f"line {self.name}: expected its process group to exist, found that it was destroyed")
        return same_group(origin, self.ranks, self.device, name)

    def _forget(self, _: object) -> None:
        self.domain.lines.pop(self.name, None)

    def renew(self) -> None:
        """New connections; every rank of the line makes this call."""
        self.cut()
        self.under_way.clear()
        self.issued = 0
        self.group = self._make()
        self.is_cut = False

    def issue(self, call: Callable[..., Any], *args: Any) -> Sent:
        """`call(*args)`, which sends one message over `group` and returns its work."""
        try:
            work = call(*args)
        except RuntimeError as error:
            self.refuse(self.issued + 1, error)
        return self._sent(work)

    def refuse(self, number: int, error: RuntimeError) -> NoReturn:
        """Raise what there is to say of a backend's `error` for message `number`."""
        explained = self.domain.explain(self, number, error)
        if explained is error:
            raise error
        raise explained from error

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
            self.under_way.append(sent)
        return sent

    def cut(self) -> None:
        """End all waits on the line, here and on its peers. From any thread; does not raise."""
        if self.is_cut:
            return
        self.is_cut = True
        if self.device.type != "cpu":
            with suppress(RuntimeError):
                self.group.abort()
            return
        rank, size = self.group.rank(), self.group.size()
        for step in range(1, size):
            try:
                self.group.recv([torch.empty(1)], (rank + step) % size, _CUT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return
                # The connection to this peer had been closed, by that peer: those to the others are still open.


class Sent:
    """A message under way over a line, the `number`th of it."""

    __slots__ = ("_epoch", "_work", "line", "number", "since")

    def __init__(self, line: Line, work: Work, number: int) -> None:
        self.line, self._work, self.number = line, work, number
        self._epoch = line.domain.renewed
        self.since = time.monotonic() if line.device.type != "cpu" else 0.0

    def wait(self) -> object:
        """As `Work.wait`. Raises `PeerFailed` or `RanksDisagree` when the message will not come."""
        domain = self.line.domain
        self.since = time.monotonic()
        domain.waiting = self
        try:
            return self._work.wait()
        except RuntimeError as error:
            if self._epoch != domain.renewed:
                raise  # of connections that were given up
            self.line.refuse(self.number, error)
        finally:
            domain.waiting = None

    def drain(self) -> None:
        """Wait for a message that nobody needs: the buffers it uses are free afterwards, whatever became of it."""
        try:
            self.wait()
        except RuntimeError:
            if not self.line.is_cut and self._epoch == self.line.domain.renewed:
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


# Of each process group, the lines made in its place, by purpose.
_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Line]] = weakref.WeakKeyDictionary()


def can_cut(backend: str) -> bool:
    """Whether groups of `backend` have lines."""
    return backend in _CUTS


def open_line(
    domain: Domain, origin: dist.ProcessGroup, device: torch.device, backend: str, purpose: str
) -> Line | None:
    """The line in the place of `origin`; None where its backend has none. All ranks of `origin` make their first call
    together."""
    if not can_cut(backend) or origin.size() < 2:
        return None
    made = _lines.setdefault(origin, {})
    if purpose not in made or made[purpose].domain is not domain:
        made[purpose] = line = Line(domain, origin, device, purpose)
        domain.add_line(line)
        watch_over(domain.control)
    return made[purpose]


def stand_in(origin: dist.ProcessGroup) -> Line | None:
    """The line of a mesh's group, for small messages of ours between steps; None before a root formed."""
    return _lines.get(origin, {}).get("small")
