"""Saves in the background: the state is copied before the call returns, and a thread does the rest.

One save at a time per process group: the next save and the next load wait for it. A failure that nobody asked the
future for is raised by the next save, by `close`, and at the end of the process, which then exits with status 1.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..comm import Messenger
from .agreement import agree, with_all_ranks
from .saving import SaveJob, Snapshot, snapshot
from .state import flatten


class SaveFuture(Future[str]):
    """The future of a background save; `result()` returns the directory of the generation or raises the failure."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False

    def result(self, timeout: float | None = None) -> str:
        self._seen |= self.exception(timeout) is not None
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The failure, or None; waits for the end. A failure that was asked for here is not raised elsewhere."""
        error = super().exception(timeout)
        self._seen |= error is not None
        return error

    def unseen(self) -> BaseException | None:
        """Wait, and return a failure that nobody has asked for; the next call returns None."""
        seen = self._seen
        error = self.exception()
        return None if seen else error


class Background:
    """The saves of one process group."""

    def __init__(self) -> None:
        self._last: SaveFuture | None = None
        # Memory of the last copy, by the position of the tensor: a fresh page costs more than the copy into it, and
        # pinned memory much more.
        self._buffers: dict[int, Tensor] = {}

    def start(
        self, state_dict: dict[str, Any], path: str, messenger: Messenger, take_first: Sequence[str]
    ) -> SaveFuture:
        """Copy the state, and leave the rest to a thread."""
        self.settle(messenger, path)
        # Here, not in the thread: a rank that calls this alone waits for the others where the guard sees it, and the
        # default group may be destroyed as soon as the call returns.
        with with_all_ranks(messenger, f"saving {path}"):
            messenger.connect()
        copies = _Copies(self._buffers)
        try:
            with messenger.telling(f"saving {path}"):
                tree = flatten(state_dict)
            taken = snapshot(tree, copies.copy, companions=messenger.rank == 0)
            copies.finish()
        except (RuntimeError, MemoryError) as error:  # no memory for the copy: tell the other ranks
            taken = Snapshot([], {}, [f"its copy on the host: {error}"])
        self._buffers = copies.made
        future = self._last = SaveFuture()
        _pending.append(future)
        job = SaveJob(path, messenger, take_first)
        # Not a daemon: the process waits for it at its end.
        with contextlib.ExitStack() as beside:
            # Entered here, not in the thread: the process group may be destroyed before the thread starts.
            beside.enter_context(messenger.beside())
            args = job, taken, future, beside.pop_all()
            threading.Thread(target=_run, args=args, name="fullshard-save", daemon=False).start()
        return future

    def settle(self, messenger: Messenger, path: str) -> None:
        """Wait for the save in progress; raise its failure on all ranks if some rank has not seen it."""
        last, self._last = self._last, None
        if last is None:
            return
        # `close` may have removed it.
        with contextlib.suppress(ValueError):
            _pending.remove(last)

        def failed() -> dict[str, Any]:
            error = last.unseen()
            if error is not None:
                raise error
            return {}

        agree(messenger, f"saving {path}: the save before", failed, lambda _: {})

    def wait(self) -> None:
        """Wait until no save is in progress; failures are kept for the next save."""
        if self._last is not None:
            Future.exception(self._last)

    def release(self) -> None:
        """Free the memory of copies."""
        self._buffers = {}


class _Copies:
    """Copies of tensors on the host, in the memory of earlier copies where it fits."""

    def __init__(self, before: dict[int, Tensor]) -> None:
        self._before = before
        self.made: dict[int, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, local: Tensor) -> Tensor:
        number = len(self.made)
        held = self._before.get(number)
        on_device = local.device.type != "cpu"
        if held is None or held.shape != local.shape or held.dtype is not local.dtype:
            held = torch.empty(local.shape, dtype=local.dtype, pin_memory=on_device)
        self.made[number] = held
        if on_device:
            self._devices.add(local.device)
        with torch.no_grad():
            return held.copy_(local, non_blocking=on_device)

    def finish(self) -> None:
        """Wait for the copies from devices."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()


def _run(job: SaveJob, taken: Snapshot, future: SaveFuture, beside: contextlib.ExitStack) -> None:
    try:
        with beside:
            path = job.run(taken)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(path)


# ---- by process group ------------------------------------------------------------------------------------------

_by_group: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()
_alone = Background()
# Saves that no later save has waited for; they may outlive their group.
_pending: list[SaveFuture] = []
_LOCK = threading.Lock()


def background(messenger: Messenger) -> Background:
    """The background saves of `messenger`'s process group."""
    if messenger.group is None:
        return _alone
    with _LOCK:
        found = _by_group.get(messenger.group)
        if found is None:
            found = _by_group[messenger.group] = Background()
        return found


def close() -> None:
    """Wait for all background saves and free their memory. Raises the first failure that nobody has seen."""
    errors = []
    while _pending:
        error = _pending.pop(0).unseen()
        if error is not None:
            errors.append(error)
    for each in [_alone, *_by_group.values()]:
        each.release()
    if errors:
        raise errors[0]


def _forked() -> None:
    """A forked child has none of the saving threads: its parent waits for them."""
    _pending.clear()
    _by_group.clear()
    _alone.__init__()  # type: ignore[misc]


def _at_exit() -> None:
    try:
        close()
    except BaseException:
        print("fullshard: a checkpoint was not saved, and its future was never checked:", file=sys.stderr)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception here would not change the exit status.
        os._exit(1)


os.register_at_fork(after_in_child=_forked)
atexit.register(_at_exit)
