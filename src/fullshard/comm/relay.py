"""Messages of two stages: what arrives in the first is passed on in the second, by a thread of its own.

The thread of the model waits for a message when it needs it. If it were the one that passes on, other ranks would wait
for its computation, and a stage on a slow link would begin late. So each process group has a thread for each kind of
message, which passes on in the order in which messages were issued: equal on all ranks, as messages of one tag need.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from .data_group import Works


class Relayed(Works):
    """Waits for a message of two stages under way. `works`: what is waited for beside the second stage, which `pass_on`
    sends: it waits for the first, and yields works of the second. It must not leave receives in flight if it raises."""

    def __init__(self, works: Iterable[Any], pass_on: Callable[[], Iterable[Any]]) -> None:
        super().__init__(works)
        self._pass_on: Callable[[], Iterable[Any]] | None = pass_on
        self._is_passed_on = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Pass on. Called once, by the thread."""
        assert self._pass_on is not None
        try:
            with torch.no_grad():
                for work in self._pass_on():
                    self.left.append(work)
        except BaseException as error:
            self._error = error
        finally:
            # Released: holds buffers and the process group.
            self._pass_on = None
            self._is_passed_on.set()

    def wait(self) -> None:
        self._is_passed_on.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        super().wait()

    def is_completed(self) -> bool:
        return self._is_passed_on.is_set() and self._error is None and super().is_completed()


# By process group, then by the tag of the second stage.
_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, queue.SimpleQueue[Relayed | None]]]
_lines = weakref.WeakKeyDictionary()


def relay(group: dist.ProcessGroup, tag: int, message: Relayed) -> Relayed:
    """Let `message` be passed on, after those of this group and tag that were issued before. Returns it."""
    lines = _lines.setdefault(group, {})
    if tag not in lines:
        lines[tag] = line = queue.SimpleQueue[Relayed | None]()
        # A daemon: a process may end while a peer is silent.
        threading.Thread(target=_run, args=(line,), name=f"fullshard relay {tag:x}", daemon=True).start()
        weakref.finalize(group, line.put, None)
    lines[tag].put(message)
    return message


def _run(line: queue.SimpleQueue[Relayed | None]) -> None:
    while (message := line.get()) is not None:
        message.run()
        # Keeps nothing alive while it waits for the next.
        del message
