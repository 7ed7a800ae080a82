"""How many optimizer steps a thread took: one of the two signs that shards were written.

The other is the version of the sharded parameters. It is not enough: torch's list operations (`foreach=True`,
`fused=True`) write DTensors without raising any version. Where neither sign is given (a direct `torch._foreach_copy_`
on the parameters), full parameters that the user asked to keep are used as they were gathered; see ADR 0010.

The hook is torch's public, global one. It counts, and tells those who want to know which optimizer it was. By thread,
because the ranks of a test may be threads of one process; a model is stepped by the thread that runs its forward.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .outside import outside_graphs


class Listener(Protocol):
    """Somebody who wants to know of each step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> bool: ...


_steps: Counter[int] = Counter()
_listeners: dict[int, weakref.WeakSet[Listener]] = {}
_told: list[Callable[[Optimizer], None]] = []
_registrations = itertools.count()


def optimizer_steps(thread: int) -> int:
    """Optimizer steps of the thread with this identifier since the first model was run."""
    return _steps[thread]


def count_optimizer_steps() -> int:
    """Begin to count, once in a process; the identifier of this thread."""
    if next(_registrations) == 0:
        register_optimizer_step_post_hook(outside_graphs(_count))
    return threading.get_ident()


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


def _count(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    thread = threading.get_ident()
    _steps[thread] += 1
    for function in _told:
        function(optimizer)
    listeners = _listeners.get(thread)
    for listener in tuple(listeners or ()):
        if not listener.optimizer_stepped(optimizer) and listeners is not None:
            listeners.discard(listener)
