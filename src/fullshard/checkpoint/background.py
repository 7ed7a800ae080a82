"""Saves in the background: the state is copied before the call returns, and a thread does the rest.

One save at a time per process group, and with `queue` one more that waits: the next save and the next load wait for it.
A failure that was not read from the future is raised by the next save, by `wait`, by `close`, and at the end of the
process, which then exits with status 1.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from ..comm import Messenger
from .agreement import agree, with_all_ranks
from .errors import CheckpointError
from .saving import SaveJob, Snapshot
from .staging import Staging, StagingMemory
from .state import Tree, flatten


class Waited(NamedTuple):
    """How long a call of `async_save` kept its caller, in seconds: for the saves before it, for copies of the state,
    and for the state that did not fit into `staging_nbytes` to be written."""

    before: float = 0.0
    copying: float = 0.0
    writing: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


class SaveFuture(Future[str]):
    """The future of a background save; `result()` returns the directory of the generation or raises the failure.

    `waited`: how long the call kept its caller. `copied_nbytes`: bytes of this rank's state that were copied to the
    host. Both are known when the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False
        self.waited = Waited()
        self.copied_nbytes = 0

    def result(self, timeout: float | None = None) -> str:
        self._seen |= self.exception(timeout) is not None
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The failure, or None; waits for the end. A failure that was asked for here is not raised elsewhere."""
        error = super().exception(timeout)
        self._seen |= error is not None
        return error

    def failed(self) -> bool:
        """Whether it ended with a failure. Does not wait, and the failure is still raised elsewhere."""
        return self.done() and super().exception() is not None

    def unseen(self) -> BaseException | None:
        """Wait, and return a failure that was not read yet; the next call returns None."""
        seen = self._seen
        error = self.exception()
        return None if seen else error


class Background:
    """The saves of one process group. Those of threads without a group share one."""

    def __init__(self) -> None:
        # The saves whose failure was not looked for yet, oldest first: one, or two with a queue.
        self._running: list[SaveFuture] = []
        # Memory of earlier copies that no save uses now.
        self._memory: list[StagingMemory] = []

    def start(
        self,
        state_dict: dict[str, Any],
        take: Callable[[Tree], Snapshot],
        job: SaveJob,
        *,
        staging_nbytes: int | None = None,
        calls: Messenger | None = None,
    ) -> SaveFuture:
        """Copy the state that `take` finds in `state_dict`, and leave the rest to a thread. All ranks call it.

        `calls`: over which the calls of this thread agree while a save is in the background; then one save may be
        there already. Without, the one before has to end first.
        """
        begun = time.monotonic()
        messenger, future = job.messenger, SaveFuture()
        self.settle(calls or messenger, job.what, leave=0 if calls is None else 1)
        before = time.monotonic()
        if not self._running:
            # Here, not in the thread: a rank that calls this alone waits for the others where the guard sees it, and
            # the default group may be destroyed as soon as the call returns.
            with with_all_ranks(messenger, job.what):
                messenger.connect()
        memory = self._unused()
        job.staging = staging = Staging(memory, staging_nbytes)
        try:
            with messenger.telling(job.what):
                tree = flatten(state_dict)
            taken = take(tree)
            taken = taken._replace(parts=staging.before(taken.parts))
        except (RuntimeError, MemoryError, OSError) as error:  # no memory for the copy: tell the other ranks
            taken = Snapshot([], {}, [f"its copy on the host: {error}"])
            staging.live.end()
        copied = time.monotonic()
        after = next(reversed(self._running), None)
        self._running.append(future)
        _pending.append(future)
        # Not a daemon: the process waits for it at its end.
        with contextlib.ExitStack() as beside:
            # Entered here, not in the thread: the process group may be destroyed before the thread starts.
            beside.enter_context(messenger.beside())
            beside.callback(self._memory.append, memory)
            args = job, taken, future, beside.pop_all(), after
            threading.Thread(target=_run, args=args, name="fullshard-save", daemon=False).start()
        staging.live.wait()
        future.waited = Waited(before - begun, copied - before, time.monotonic() - copied)
        future.copied_nbytes = staging.copied_nbytes
        return future

    def settle(self, messenger: Messenger, what: str, leave: int = 0) -> None:
        """Wait until at most `leave` saves are in progress; raise the failure of one that ended on all ranks, if some
        rank has not seen it."""
        while running := tuple(self._running):
            oldest = running[0]
            if len(self._running) > leave:
                Future.exception(oldest)

            def failed(oldest: SaveFuture = oldest) -> dict[str, Any]:
                if oldest.done() and (error := oldest.unseen()) is not None:
                    raise error
                return {}

            try:
                agree(messenger, f"{what}: the save before", failed, lambda _: {})
            except CheckpointError:
                self._forget(oldest)
                raise
            if len(self._running) <= leave:
                return
            self._forget(oldest)

    def _forget(self, oldest: SaveFuture) -> None:
        Future.exception(oldest)  # the same outcome on all ranks, as soon as it is there
        oldest.unseen()
        with contextlib.suppress(ValueError):  # another thread did
            self._running.remove(oldest)
        # `close` may have removed it.
        with contextlib.suppress(ValueError):
            _pending.remove(oldest)

    def _unused(self) -> StagingMemory:
        try:
            return self._memory.pop()
        except IndexError:
            return StagingMemory()

    def wait(self) -> None:
        """Wait until no save is in progress; failures are kept for the next save."""
        for each in tuple(self._running):
            Future.exception(each)

    def release(self) -> None:
        """Free the memory of copies."""
        for each in self._memory:
            each.free()
        self._memory.clear()


def _run(
    job: SaveJob, taken: Snapshot, future: SaveFuture, beside: contextlib.ExitStack, after: SaveFuture | None
) -> None:
    try:
        with beside:
            if after is not None:
                Future.exception(after)
            path = job.run(taken)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(path)
    finally:
        if job.staging is not None:
            job.staging.live.end()


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
    """Wait for all background saves and free their memory. Raises the first failure that was not read."""
    errors = []
    while pending := tuple(_pending):
        error = pending[0].unseen()
        if error is not None:
            errors.append(error)
        with contextlib.suppress(ValueError):  # another thread, which closes too, removed it
            _pending.remove(pending[0])
    with _LOCK:
        known = [_alone, *_by_group.values()]
    for each in known:
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


def _wait_for_all() -> None:
    for each in list(_pending):
        Future.exception(each)


os.register_at_fork(after_in_child=_forked)
# Before the interpreter's executors stop, which it does before it waits for threads: packages of object stores look up
# names of servers in one. The last that was registered is the first that is called, so the module is imported before.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]
atexit.register(_at_exit)
