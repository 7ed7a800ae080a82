"""Point-to-point messages for torch's threaded process group, which has none: `send` and `recv` between threads.

`threads.run_ranks` begins with `install`. A send is done when its receiver has taken it, as one of gloo is when nothing
buffers it, so a wrong order of messages waits for ever here, too. A rank that is released leaves its wait.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ret_work

# The tag of small texts between ranks (comm/messages.py).
_TEXTS = 0x66736869
_changed = threading.Condition()
_waiting: dict[tuple[str, int, int, int], Tensor] = {}
# (group, sender, receiver, bytes) of each message but texts, in the order in which they arrived.
SENT: list[tuple[str, int, int, int]] = []


def install() -> None:
    """Threaded groups send and receive from now on, and nothing is under way or sent."""
    _waiting.clear()
    SENT.clear()
    ProcessLocalGroup.send, ProcessLocalGroup.recv = _send, _recv


def _wait(group: Any, ready: Any) -> None:
    while not _changed.wait_for(ready, timeout=0.05):
        if type(group)._terminate.is_set():
            sys.exit("the run is over")


def _send(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
    key = (self.pg_name, self._rank, peer, tag)
    with _changed:
        assert key not in _waiting
        _waiting[key] = tensors[0].detach()
        _changed.notify_all()
        _wait(self, lambda: key not in _waiting)
    return ret_work(tensors)


def _recv(self: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
    key = (self.pg_name, peer, self._rank, tag)
    with _changed:
        _wait(self, lambda: key in _waiting)
        there = _waiting.pop(key)
        assert there.shape == tensors[0].shape and there.dtype is tensors[0].dtype
        with torch.no_grad():
            tensors[0].copy_(there)
        if tag != _TEXTS:
            SENT.append((self.pg_name, peer, self._rank, there.nbytes))
        _changed.notify_all()
    return ret_work(tensors)
