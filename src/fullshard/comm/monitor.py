"""One thread of each process: it gives signs of life, and looks after the main thread where that waits for a message.

It never sends a message and never raises: when a wait is in vain it cuts the lines (lines.py), and the wait raises.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from .control import BEAT_SECONDS, is_current
from .faults import Fault

if TYPE_CHECKING:
    from .control import Control

_threads: weakref.WeakKeyDictionary[Control, _Monitor] = weakref.WeakKeyDictionary()
# So many beats in a row without the store: the process that served it is gone.
_STORE_FAILURES = 4


class _Monitor(threading.Thread):
    def __init__(self, control: Control) -> None:
        super().__init__(name="fullshard monitor", daemon=True)
        self._control = weakref.ref(control)
        self.ends = threading.Event()
        self._failures = 0

    def run(self) -> None:
        while not self.ends.wait(BEAT_SECONDS):
            watched = self._control()
            if watched is None or not is_current(watched):
                return  # the process group was destroyed
            try:
                watched.beat()
                watched.lookout.look(watched.thread)
                for domain in list(watched.domains.values()):
                    domain.look()
                self._failures = 0
            except RuntimeError:
                self._failures += 1
                if self._failures == _STORE_FAILURES:
                    self._without_store(watched)
                    return
            del watched

    def _without_store(self, watched: Control) -> None:
        text = (
            "since the store through which ranks meet is gone, with the process that served it (rank 0, or a launcher)"
        )
        for domain in list(watched.domains.values()):
            if domain.waiting is not None and domain.failure is None:
                domain.fail(Fault(domain.ranks[0], "lost", text))


def watch_over(control: Control) -> None:
    """Begin, once for each control. The caller's thread is the one that runs the model."""
    control.thread = threading.get_ident()
    if control not in _threads:
        control.beat()  # so that a process that is killed at once was alive once
        _threads[control] = thread = _Monitor(control)
        thread.start()


def _end() -> None:
    """The process ends: say so to those who wait, and leave no thread inside of the store's code."""
    for thread in list(_threads.values()):
        thread.ends.set()
    for thread in list(_threads.values()):
        thread.join(timeout=2)
    error = getattr(sys, "last_value", None)
    text = f"its process ended with {type(error).__name__}: {error}" if error is not None else "its process ended"
    for watched in list(_threads):
        if is_current(watched):
            watched.publish("ended", text)


atexit.register(_end)
