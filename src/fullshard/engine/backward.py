"""Whether a backward of a root is running, and how it ended.

it ends      a callback of the engine
it raises    the engine drops that callback: so whether a backward is *still* running is read off the callback's life,
             and no flag of ours can survive a failed step (ADR 0008). Why it raised is not known here
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .._torch import queue_backward_callback
from .._torch.modules import outside_graphs

# Of nothing: it gives None, as a reference to what is over does.
_NONE: Any = weakref.ref(set())


class RunningBackward:
    """Whether a backward of a root, whose model `thread` runs, is running: from its first report (`begin`) on.

    `ended` is called by the engine at its end, `failed` when it dropped the callback instead: with what it raised, or
    None where that is not known.
    """

    def __init__(self, thread: int, ended: Callable[[], None], failed: Callable[[BaseException | None], None]) -> None:
        self._thread = thread
        self.ended, self._failed = ended, failed
        self._when_it_ends = outside_graphs(_End.report)
        # Gives something while a backward is running.
        self.end: weakref.ref[_End] = _NONE

    def begin(self) -> None:
        end = _End(self)
        self.end = weakref.ref(end, self._dropped)
        queue_backward_callback(partial(self._when_it_ends, end))

    def forget(self) -> None:
        """It ended, or what it left was discarded."""
        self.end = _NONE

    def settle(self) -> None:
        """Call `failed` for a backward that another thread of the engine dropped (on a device it runs there)."""
        if self.end is not _NONE and self.end() is None:
            self.forget()
            self._failed(sys.exception())

    def _dropped(self, which: weakref.ref[_End]) -> None:
        # Not in a thread of the engine's: the one that runs the model may be in its next forward. It calls `settle`.
        if self.end is which and threading.get_ident() == self._thread:
            self.settle()


class _End:
    """In what the engine calls when a backward is over. It lives exactly as long as the engine keeps that backward."""

    __slots__ = ("__weakref__", "_of")

    def __init__(self, of: RunningBackward) -> None:
        self._of = of

    def report(self) -> None:
        self._of.ended()
