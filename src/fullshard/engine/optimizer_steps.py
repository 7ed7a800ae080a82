"""Global hooks around each optimizer step of the process.

    before    checks that may refuse the step (`refuses_steps`; the checks are in misuse.py)
    after     the step is counted for its thread, and listeners are notified

torch has a public, global hook for each; the first `fully_shard` registers both.

Step counts and version counters of sharded parameters show that shards were written. Versions alone are not enough:
`foreach=True` and `fused=True` steps write DTensors without bumping versions. A write that shows in neither (a direct
`torch._foreach_copy_` on the parameters) leaves kept full parameters stale; see ADR 0007. Counts are per thread: the
ranks of a test may be threads, and the thread that runs a model's forward also steps it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._torch.modules import outside_graphs
from ..comm import settle_uploads, uploading

Check = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
C = TypeVar("C", bound=Check)

_checks: list[Check] = []
# As `_checks`, once there is a model on a device.
asked_on_devices: list[Callable[[Optimizer], None]] = []
_registrations = itertools.count()


def follow_steps() -> int:
    """Register the hooks, once per process. Returns the identifier of this thread."""
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(outside_graphs(_before))
        register_optimizer_step_post_hook(outside_graphs(_after))
    return threading.get_ident()


def refuses_steps(check: C) -> C:
    """Decorator: call `check(optimizer, args, kwargs)` before each optimizer step; it may raise."""
    _checks.append(check)
    return check


def asks_on_devices(check: Callable[[Optimizer], None]) -> None:
    """Call `check(optimizer)` before each optimizer step from now on, before the other checks; it may raise."""
    if check not in asked_on_devices:
        asked_on_devices.append(check)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for ask in asked_on_devices:
        ask(optimizer)
    for check in _checks:
        check(optimizer, args, kwargs)
    if uploading:
        settle_uploads()


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    thread = threading.get_ident()
    _steps[thread] += 1
    for function in _told:
        function(optimizer)
    listeners = _listeners.get(thread)
    for listener in tuple(listeners or ()):
        if not listener.optimizer_stepped(optimizer) and listeners is not None:
            listeners.discard(listener)


# ---- counting --------------------------------------------------------------------------------------------------------


class Listener(Protocol):
    """Notified of each step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> bool: ...


_steps: Counter[int] = Counter()
_listeners: dict[int, weakref.WeakSet[Listener]] = {}
_told: list[Callable[[Optimizer], None]] = []


# Optimizer steps of the thread with this identifier since the first model was run.
optimizer_steps: Callable[[int], int] = _steps.__getitem__


def tell_optimizer_steps(thread: int, listener: Listener) -> None:
    """Notify `listener` (held weakly) of the steps of the thread with this identifier."""
    _listeners.setdefault(thread, weakref.WeakSet()).add(listener)


def tell_each_step(function: Callable[[Optimizer], None]) -> None:
    """Call `function` with each optimizer that took a step, in any thread. Registers each function once."""
    if function not in _told:
        _told.append(function)


def note_optimizer_step(thread: int) -> None:
    """Count a step that ran no hooks: optimizer-in-backward."""
    _steps[thread] += 1
