"""Tracks whether a backward of a root is running, and how it ended.

it ends      the autograd engine calls a callback
it raises    the engine drops the callback without a call. The lifetime of the callback therefore says whether the
             backward still runs, and no stale flag survives a failed step (ADR 0008). The exception is not known here.
             On a device its thread may drop it late: then the model's next call outside of a backward says so
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .._torch import current_backward, queue_backward_callback
from .._torch.modules import outside_graphs

# A dead reference: no backward is running.
_NONE: Any = weakref.ref(set())


class RunningBackward:
    """The running backward of a root whose model runs in `thread`, from its first report (`begin`) on.

    The engine calls `ended` when the backward is over. If it dropped the callback instead, `failed` is called with the
    exception, or None if that is unknown.
    """

    def __init__(self, thread: int, ended: Callable[[], None], failed: Callable[[BaseException | None], None]) -> None:
        self._thread = thread
        self.ended, self._failed = ended, failed
        self._when_it_ends = outside_graphs(_End.report)
        # Alive while a backward is running.
        self.end: weakref.ref[_End] = _NONE

    def begin(self) -> None:
        end = _End(self)
        self.end = weakref.ref(end, self._dropped)
        queue_backward_callback(partial(self._when_it_ends, end))

    def forget(self) -> None:
        """The backward ended, or its leftovers were discarded."""
        self.end = _NONE

    def settle(self) -> None:
        """Call `failed` for a backward that ended without its callback: that was dropped, or no backward runs in the
        model's thread. The engine's device thread may hold a callback for a while after the exception arrived here."""
        if self.end is _NONE:
            return
        if self.end() is None or (threading.get_ident() == self._thread and current_backward() == -1):
            self.forget()
            self._failed(sys.exception())

    def _dropped(self, which: weakref.ref[_End]) -> None:
        # Only in the model's thread: from an engine thread, `failed` could run during the next forward. Otherwise the
        # model's thread calls `settle` later.
        if self.end is which and threading.get_ident() == self._thread:
            self.settle()


class _End:
    """Held by the engine's end-of-backward callback, so it lives exactly as long as the engine keeps that backward."""

    __slots__ = ("__weakref__", "_of")

    def __init__(self, of: RunningBackward) -> None:
        self._of = of

    def report(self) -> None:
        self._of.ended()
