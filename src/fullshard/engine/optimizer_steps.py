"""What happens before and after each step of any optimizer of the process.

    before    what may refuse the step (`refuses_steps`; who may hold, write and step what is in misuse.py)
    after     the step is counted, for its thread; and those who want to know are told which optimizer it was

torch has one public, global hook for each; both are registered once, by the first `fully_shard`.

The count is one of the two signs that shards were written. The other is the version of the sharded parameters. It is
not enough: torch's list operations (`foreach=True`, `fused=True`) write DTensors without raising any version. Where
neither sign is given (a direct `torch._foreach_copy_` on the parameters), full parameters that the user asked to keep
are used as they were gathered; see ADR 0007. By thread, because the ranks of a test may be threads of one process; a
model is stepped by the thread that runs its forward.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._torch.modules import outside_graphs
from ..param import name_mixed

Check = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

_checks: list[Check] = []
_registrations = itertools.count()


def follow_steps() -> int:
    """From now on it is so, once in a process; the identifier of this thread."""
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(outside_graphs(_before))
        register_optimizer_step_post_hook(outside_graphs(_after))
    return threading.get_ident()


def refuses_steps(check: Check) -> Check:
    """A function that is called with each optimizer before it steps, its arguments and its keywords, and may raise."""
    _checks.append(check)
    return check


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for check in _checks:
        check(optimizer, args, kwargs)
    # Operations of a step pass by us: they are many, and mix nothing (ADR 0010). A step in another thread is one beside
    # a program that goes on meanwhile, and what that reads must not depend on when it asks. A step that raised leaves
    # names out until the next one is over.
    if threading.current_thread() is threading.main_thread():
        name_mixed(False)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name_mixed(True)
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
    """Somebody who wants to know of each step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> bool: ...


_steps: Counter[int] = Counter()
_listeners: dict[int, weakref.WeakSet[Listener]] = {}
_told: list[Callable[[Optimizer], None]] = []


def optimizer_steps(thread: int) -> int:
    """Optimizer steps of the thread with this identifier since the first model was run."""
    return _steps[thread]


def tell_optimizer_steps(thread: int, listener: Listener) -> None:
    """Tell `listener`, as long as it exists, of the steps that the thread with this identifier takes."""
    _listeners.setdefault(thread, weakref.WeakSet()).add(listener)


def tell_each_step(function: Callable[[Optimizer], None]) -> None:
    """Call `function` with each optimizer that took a step, in whatever thread. Once for each function."""
    if function not in _told:
        _told.append(function)


def note_optimizer_step(thread: int) -> None:
    """A step that ran no hooks: one in backward."""
    _steps[thread] += 1
