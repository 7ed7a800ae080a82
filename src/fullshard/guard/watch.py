"""The watch of one process: gives signs of life, and ends waits that cannot complete.

It runs in its own thread (`begin`); without one (ranks that are threads of a test), the waiting loops call it. Cost per
rank:

    idle                one request each five seconds: the record, which is the sign of life (store.py)
    waiting             one request each `pace(ranks)`: 1 s at 64 ranks, 5 s at 10,000. Waits that poll the store spend
                        a part of these requests on polling (wait.py)
    leading             one more each second or two, for all records of the scope (leader.py). Waiting ranks elect the
                        leader

It sends no message and raises nothing: it ends a wait, and the wait raises.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from .._torch import active_collectives, issued_by_group, known_groups
from . import process
from .errors import Fault
from .leader import Leader
from .scope import Scope
from .store import Records, Store, dumps
from .wait import PATIENCE_SECONDS, STORE_WAIT_POSTS, Settings, Wait, Waiting, pace

# ---- watch -----------------------------------------------------------------------------------------------------------

_log = logging.getLogger("fullshard")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
# Period of the thread; requests are far rarer.
_TICK_SECONDS = 0.25
# A rank that was so late itself discards its observations of the others.
_LATE_SECONDS = 2.0
# After so many failed looks in a row, the process that served the store counts as gone.
_STORE_FAILURES = 4
# How many earlier faults are sent again with a new one.
_LATELY = 8


class Watch:
    """The watch of one process (in tests: of one thread), which is `rank` of the default process group."""

    def __init__(
        self, store: Store, beside: Store, rank: int, settings: Settings, host: process.Host | None = None
    ) -> None:
        self.rank, self.settings = rank, settings
        self.host = process.Host() if host is None else host
        self.records = Records(store, beside, rank)
        self.scopes: dict[tuple[tuple[int, ...], str], Scope] = {}
        # The thread that runs the model. The waits of it and of other threads (a background save), by thread.
        self.model_thread = threading.get_ident()
        self.waiting: dict[int, Wait | Waiting] = {}
        # Whether a watch thread calls `look`. Otherwise the waiting loops do.
        self.is_watched = False
        # Threads of this process that send messages beside the model's.
        self.beside = 0
        # Whether its process group is still the current one.
        self.is_current: Callable[[], bool] = lambda: True
        self._beside_lock = threading.Lock()
        self.ended: str | None = None
        self._process = os.getpid()
        self._thread: _Thread | None = None
        self._looking = threading.Lock()
        self.leader = Leader(self)
        self._count = 0
        self._looked = self._posted = 0.0
        self._posted_wait: object = None
        # Faults of scopes that this rank has not made yet.
        self._unheard: list[tuple[Fault, float]] = []
        # The last faults published, of any scope: each message repeats them, because it overwrites earlier ones.
        self.lately: list[Fault] = []
        # Processes of this machine that a rank of another machine asked about, and when.
        self._looks_at: dict[int, tuple[str, float]] = {}
        # Collectives issued over the user's groups when the reported wait began.
        self._issued: dict[str, int] | None = None
        self._torch: Wait | None = None
        self._torch_looked = 0.0
        self._warned = False

    def scope(self, ranks: Sequence[int], apart: str = "") -> Scope:
        """The scope of these ranks of the default group; all of them call it. `apart`: names a separate scope, whose
        failures do not affect the model's."""
        in_order = tuple(ranks)
        if list(in_order) != sorted(in_order):
            in_order = tuple(sorted(in_order))
        key = in_order, apart
        if key not in self.scopes:
            if not self.scopes:
                self.post()
                self._join()
            self.scopes[key] = made = Scope(self, *key)
            for fault, since in self._unheard:
                if fault.scope == made.name:
                    made.hear(fault, since)
        return self.scopes[key]

    def _join(self) -> None:
        self.records.join(self.host.identity().partition(" ")[0])

    def begin(self) -> None:
        """Start the watch thread. The caller's thread counts as the one that runs the model."""
        self.model_thread = threading.get_ident()
        if self._thread is None:
            self._thread = _Thread(self)
            self.is_watched = True
            self._thread.start()

    def send_beside(self, more: int) -> None:
        """Add `more` to the number of threads that send messages beside the model's."""
        with self._beside_lock:
            self.beside += more

    def stop(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.ends.set()

    def close(self) -> None:
        """Close the connections of all scopes, which are no longer used. Their threads may otherwise spin forever after
        a peer closed its end."""
        for scope in list(self.scopes.values()):
            for group in list(scope.groups.values()):
                group.close()

    def join(self, seconds: float) -> None:
        """Wait until the thread ends."""
        if self._thread is not None:
            self._thread.join(seconds)

    # ---- waits ---------------------------------------------------------------------------------------------

    @contextmanager
    def waits(self, wait: Wait) -> Iterator[None]:
        """Register a wait of this thread inside."""
        thread = threading.get_ident()
        before = self.waiting.get(thread)
        self.waiting[thread] = wait
        try:
            yield
        finally:
            if before is None:
                self.waiting.pop(thread, None)
            else:
                self.waiting[thread] = before

    def _oldest(self) -> Wait | None:
        """The wait of the model's thread, else of any other thread, else of a device."""
        waits = self._registered()
        found = waits.get(self.model_thread) or next(iter(waits.values()), None)
        if found is None:
            under_way = [one for scope in list(self.scopes.values()) for one in _under_way(scope)]
            found = min(under_way, key=lambda one: one.since, default=None)
        return None if found is None else _wait(found)

    def _registered(self) -> dict[int, Wait]:
        """The current waits, by thread."""
        waits = {thread: _wait(waiting) for thread, waiting in list(self.waiting.items())}
        return {thread: wait for thread, wait in waits.items() if not wait.is_over}

    def look_unless_watched(self) -> None:
        """Do the work of the watch thread, if there is none and it is time."""
        if not self.is_watched and self.host.now() - self._looked > _TICK_SECONDS / 5:
            self.look()

    def look(self) -> None:
        """Called once per tick. Raises the store's errors."""
        with self._looking:
            self._look(self.host.now())

    def _look(self, now: float) -> None:
        if self._looked and now - self._looked > _LATE_SECONDS:
            self.leader.forget()
        self._looked = now
        self.end_waits(now)
        wait = self._oldest()
        if wait is not None and not self._registered():
            self._end_by_what_is_known(wait, now)
        if wait is not None and now - wait.since < self._patience(wait):
            wait = None
        told = wait or self._in_torch(now)
        pause = self.settings.beat_seconds if told is None and self._posted_wait is None else self._pace(wait)
        if now >= self._posted + pause:
            if wait is not None and self.leader.claims(wait, is_told=wait is self._posted_wait):
                self.leader.claim(wait, now)
                self._posted = now
            else:
                self._post(told, now)
        self.leader.read(wait, now)

    def _pace(self, wait: Wait | None) -> float:
        """Seconds between two requests for the record, in `wait` or after it."""
        scopes = [wait.scope] if wait is not None and wait.scope is not None else list(self.scopes.values())
        seconds = pace(max((len(scope.ranks) for scope in scopes), default=1))
        if wait is not None and wait.asks_store:
            seconds *= STORE_WAIT_POSTS
        silence = self.settings.silence_seconds
        return min(seconds, silence / 4) if silence else seconds

    def _patience(self, wait: Wait) -> float:
        if wait.also == "closed":
            return 0.0
        scope = wait.scope
        ranks = 1 if scope is None else len(scope.ranks)
        # Spread the first requests of ten thousand ranks over time.
        spread = 0.0 if ranks < 2000 else pace(ranks) * ((self.rank * 37) % 101) / 101
        return PATIENCE_SECONDS + spread

    def end_waits(self, now: float) -> None:
        """End this process's waits that known faults make futile."""
        for waiting in self._registered().values():
            self._end_by_what_is_known(waiting, now)

    def _end_by_what_is_known(self, wait: Wait, now: float) -> None:
        scope = wait.scope
        if scope is None or wait.fault is not None:
            return
        for fault, since in list(scope.heard):
            counts = fault.epoch == scope.epoch and scope.is_of_others(fault)
            if counts and wait.is_ended_by(fault, now - max(since, wait.since)):
                scope.end(wait, fault)
                return

    # ---- this rank's record --------------------------------------------------------------------------------

    def record(self, wait: Wait | None) -> dict[str, Any]:
        """This rank's record."""
        self._count += 1
        scopes = list(self.scopes.values())
        found: dict[str, Any] = {
            "n": self._count,
            "process": self.host.identity(),
            "at": self.host.place(self.model_thread, _TORCH),
            "far": {scope.name: scope.far for scope in scopes},
        }
        for scope in scopes:
            if scope.failed is not None:
                found.setdefault("failed", {})[scope.name] = json.loads(scope.failed.dumps())
            if scope.told:
                found["doing"] = scope.told
        if scopes:
            found["step"] = scopes[0].step()
        if wait is not None:
            found["wait"] = wait.told()
            if not self._registered() and wait.kind == "message":
                found["wait"]["also"] = "device"  # its host continues
            if wait is not self._posted_wait or self._issued is None:
                self._issued = issued_by_group()
            found["torch"] = self._issued
        forgotten = self.host.now() - 2 * self.settings.silence_seconds
        self._looks_at = {rank: look for rank, look in self._looks_at.items() if look[1] > forgotten}
        if self._looks_at:
            found["sees"] = {rank: self.host.condition(process) for rank, (process, _) in self._looks_at.items()}
        if self.beside or len(self._registered()) > 1:
            found["beside"] = 1
        if self.ended is not None:
            found["ended"] = self.ended
        return found

    def post(self) -> None:
        """Write the record now."""
        self._post(None, self.host.now())

    def _post(self, wait: Wait | None, now: float) -> None:
        text = dumps(self.record(wait))
        self._posted, self._posted_wait = now, wait
        for mail in self.records.post(text):
            self._hear(Fault.loads(mail), now)

    def _hear(self, fault: Fault, now: float) -> None:
        if fault.kind == "look":
            if fault.rank not in self._looks_at:
                self._posted = 0.0  # post the observation at once
            self._looks_at[fault.rank] = fault.text, now
            return
        known = [scope for scope in list(self.scopes.values()) if scope.name == fault.scope]
        for scope in known:
            scope.hear(fault, now)
        if not known:
            self._unheard = [*self._unheard[-_LATELY:], (fault, now)]
        if self._torch is not None and fault.kind == "disagree" and not self._warned:
            # That wait is in one of the user's groups and cannot be ended.
            self._warned = True
            _log.error("rank %d waits in %s for ever: %s", self.rank, self._torch.doing, fault.text)
        self.end_waits(now)

    # ---- torch collectives ---------------------------------------------------------------------------------

    def _in_torch(self, now: float) -> Wait | None:
        """The torch collective that the model's thread has been in for a while."""
        if self.model_thread in self._registered() or not self.host.is_within(self.model_thread, _DISTRIBUTED, _TORCH):
            self._torch = None
            return None
        if now - self._torch_looked < PATIENCE_SECONDS:
            return self._torch if self._torch is not None and now - self._torch.since > PATIENCE_SECONDS else None
        self._torch_looked = now
        groups = known_groups()
        active = [one for one in active_collectives() if one.thread == self.model_thread and one.group in groups]
        if len({one.group for one in active}) != 1:
            self._torch = None
            return None
        first, before = active[0], self._torch
        if before is None or (before.name, before.number) != (first.group, first.number):
            ranks = dist.get_process_group_ranks(groups[first.group])
            if len(ranks) > 2 and not first.needs_all:
                return None  # the needed ranks are not recorded
            self._warned = False
            call = self.host.called(self.model_thread, _TORCH) or first.call
            self._torch = Wait("torch", None, call, name=first.group, number=first.number, ranks=ranks, since=now)
            return None
        return before

    def tell(self, ranks: Iterable[int], faults: Sequence[Fault]) -> None:
        """Leave `faults` for `ranks`, with earlier ones, because this overwrites mail that may be unread."""
        epochs = {scope.name: scope.epoch for scope in list(self.scopes.values())}
        lately = [one for one in self.lately if one not in faults and one.epoch >= epochs.get(one.scope, 0)]
        self.lately = said = [*lately, *faults][-_LATELY:]
        ends = {int(rank) for one in said for rank in one.meets}
        self.records.tell(
            ranks, [one.dumps() for one in said], {rank: [one.dumps(rank) for one in said] for rank in ends}
        )

    # ---- the end -------------------------------------------------------------------------------------------

    def end(self, text: str) -> None:
        """Report that the process ends."""
        self.ended = text
        with suppress(Exception):
            self.post()
            if not self.scopes:
                self._join()
            # The first few tell all ranks; later ones are found by their records.
            if self.records.store.add(f"{self.records.prefix}/ended", 1) <= 3:
                ranks = {rank for scope in self.scopes.values() for rank in scope.ranks}
                self.tell(ranks, [one for scope in self.scopes.values() for one in scope.telling(self._end_of(scope))])

    def _end_of(self, scope: Scope) -> Fault:
        text = self.ended or ""
        return Fault(
            self.rank, "ended", text, scope.name, scope.epoch, scope.step(), scope.told, scope.issued, scope.asked
        )

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until all others have ended or read why this process ends, because it serves the store."""
        begun = self.host.now()
        heard = [fault for scope in self.scopes.values() for fault, _ in scope.heard]
        lost = {fault.rank for fault in heard if fault.kind == "lost"}
        gone = lost | {fault.rank for fault in heard if fault.kind == "ended"}
        with suppress(Exception):
            while self.host.now() - begun < seconds:
                joined = self.records.joined()
                # Mail may have replaced the record of a rank that ended.
                if self.records.store.add(f"{self.records.prefix}/ended", 0) + len(lost) >= len(joined):
                    return
                texts = self.records.of(sorted(joined - {self.rank} - gone))
                if all('"ended":' in text for text in texts.values()):
                    return
                if not any(text.startswith('{"mail":') for text in texts.values()) and self.host.now() - begun > 0.5:
                    return
                self.host.sleep(0.05)

    def without_store(self) -> None:
        """End all waits: without the store their causes cannot be found."""
        for scope in list(self.scopes.values()):
            fault = scope.without_store()
            for wait in self._registered().values():
                if wait.scope is scope and wait.fault is None:
                    scope.end(wait, fault)


def _wait(waiting: Any) -> Wait:
    return waiting if isinstance(waiting, Wait) else waiting.wait_described


def _under_way(scope: Scope) -> list[Any]:
    found = (getattr(group, "oldest", None) for group in list(scope.groups.values()))
    return [one for one in (find() for find in found if find is not None) if one is not None]


class _Thread(threading.Thread):
    def __init__(self, watch: Watch) -> None:
        super().__init__(name="fullshard watch", daemon=True)
        self._watch = weakref.ref(watch)
        self.ends = threading.Event()

    def run(self) -> None:
        failures = 0
        while not self.ends.wait(_TICK_SECONDS):
            watch = self._watch()
            if watch is None:
                return
            if not (watch.beside or watch.is_current()):
                # The process group was destroyed, and no background save is running.
                watch.close()
                return
            try:
                watch.look()
                failures = 0
            except Exception as error:
                failures += 1
                if failures == 1:
                    _log.debug("rank %d: a look into the store failed: %s", watch.rank, error)
                if failures == _STORE_FAILURES:
                    watch.without_store()
            del watch
