"""Faults as objects: say in one line which rank fails at which step, and let the code under test ask.

>>> faults = Faults().fail_at(rank=1, step=2, event="backward")
>>> faults.check(rank=1, step=1, event="backward")  # whether it has struck, where that raises nothing
False
>>> faults.check(rank=1, step=2, event="backward")
Traceback (most recent call last):
    ...
tests.harness.faults.InjectedFault: injected fault on rank 1 at step 2, event 'backward'
>>> faults.check(rank=1, step=2, event="backward")  # each fault strikes once, so that a retry can succeed
False
>>> faults.pending
()
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


class InjectedFault(RuntimeError):
    """Raised by a fault that was asked for, so that a test can tell it from a real one."""


@dataclass(frozen=True)
class Fault:
    """One fault: `rank` (None = every rank), `step` and `event` say when; `kind` says what happens.

    "raise": `InjectedFault`. "kill": the process ends at once by SIGKILL, as a lost machine would (procs tier only).
    "stall": the rank sleeps `seconds`, as a straggler or a stuck file system would. "do": `action` is called with the
    context that the code under test gave to `check`, and does whatever it does.
    """

    step: int
    event: str = "step"
    rank: int | None = None
    kind: Literal["raise", "kill", "stall", "do"] = "raise"
    seconds: float = 0.0
    action: Callable[[Any], None] | None = None


class Faults:
    """The faults of one run. Safe to share between ranks that are threads; each rank that is a process has its own
    copy.
    """

    def __init__(self, *faults: Fault) -> None:
        self._lock = threading.Lock()
        self._pending: list[Fault] = list(faults)
        self._struck: list[tuple[int, Fault]] = []
        # Called with (rank, fault) just before a fault does what it does: it may leave no later moment to note it.
        self.listener: Callable[[int, Fault], None] | None = None

    def __getstate__(self) -> list[Fault]:
        return list(self._pending)

    def __setstate__(self, pending: list[Fault]) -> None:
        self.__init__(*pending)  # type: ignore[misc]  # a lock cannot be pickled, so the copy gets a new one

    def fail_at(self, *, step: int, event: str = "step", rank: int | None = None) -> Faults:
        return self.add(Fault(step=step, event=event, rank=rank))

    def kill_at(self, *, step: int, event: str = "step", rank: int) -> Faults:
        return self.add(Fault(step=step, event=event, rank=rank, kind="kill"))

    def add(self, fault: Fault) -> Faults:
        with self._lock:
            self._pending.append(fault)
        return self

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults that have not struck. A fault for every rank stays pending: it strikes once on each rank."""
        with self._lock:
            return tuple(self._pending)

    @property
    def struck(self) -> tuple[tuple[int, Fault], ...]:
        """(rank, fault) of those that have struck, in order: assert on it, or the test may pass without its fault."""
        with self._lock:
            return tuple(self._struck)

    def check(self, *, rank: int, step: int, event: str = "step", context: Any = None) -> bool:
        """Strike here if a fault was asked for at this rank, step and event; otherwise do nothing. Whether one did.

        `context`: what a fault of kind "do" acts on.
        """
        with self._lock:
            fault = next((f for f in self._pending if self._matches(f, rank, step, event)), None)
            if fault is None:
                return False
            self._struck.append((rank, fault))
            if fault.rank is not None:
                self._pending.remove(fault)
        if self.listener is not None:
            self.listener(rank, fault)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stall":
            time.sleep(fault.seconds)
        elif fault.kind == "do":
            assert fault.action is not None, "a fault of kind 'do' needs an action"
            fault.action(context)
        else:
            raise InjectedFault(f"injected fault on rank {rank} at step {step}, event {event!r}")
        return True

    def hook(self, *, rank: int, step: int, event: str) -> Callable[..., None]:
        """`check` as a function that takes and ignores any arguments: fits every kind of module or tensor hook."""

        def strike(*_: Any, **__: Any) -> None:
            self.check(rank=rank, step=step, event=event)

        return strike

    def _matches(self, fault: Fault, rank: int, step: int, event: str) -> bool:
        if fault.step != step or fault.event != event or fault.rank not in (None, rank):
            return False
        return fault.rank is not None or (rank, fault) not in self._struck
