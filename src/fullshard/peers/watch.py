"""The watch of one process: gives signs of life, and ends waits that cannot complete.

It runs in its own thread (`begin`); without one (ranks that are threads of a test), the waiting loops call it. Cost per
rank:

    idle                one request each five seconds: the record, which is the sign of life (store.py)
    waiting             one request each `pace(ranks)`: 1 s at 64 ranks, 5 s at 10,000. Waits that poll the store spend
                        a part of these requests on polling (wait.py)
    leading             one more each second or two, for all records of the scope (diagnosis.py). Waiting ranks elect
                        the leader

It sends no message and raises nothing: it ends a wait, and the wait raises. `watch()` is that of the current process
group; it reports the end of the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._torch import StoreConnection, active_collectives, issued_by_group, known_groups, timeout_of
from .diagnosis import Leader
from .scope import Scope
from .store import Host, Records, Store
from .wait import (
    PATIENCE_SECONDS,
    STORE_WAIT_POSTS,
    AnyWatch,
    Fault,
    Settings,
    Wait,
    Waits,
    described,
    pace,
    store_answers,
)

_log = logging.getLogger("fullshard")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
# Period of the thread; requests are far rarer.
_TICK_SECONDS = 0.25
# A rank that was so late itself discards its observations of the others.
_LATE_SECONDS = 2.0
# After so many failed looks in a row, the process that served the store counts as gone.
_STORE_FAILURES = 4
# How long the process that serves the store waits at its end until others have read why it ends.
_LAST_SECONDS = 6.0

_FIRST = "the first contact of ranks"
# How many earlier faults are sent again with a new one.
_LATELY = 8

# ---- this rank's record ----------------------------------------------------------------------------------------------


class OwnRecord:
    """The record that this rank writes of itself, for the ranks that read it (`Record`, diagnosis.py)."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._host = watch, watch.host
        self._count = 0
        # The time at which it was written last, and the wait in it.
        self.posted = 0.0
        self.wait: Wait | None = None
        # The collectives issued over the user's groups when that wait began.
        self._issued: dict[str, int] | None = None
        # The processes of this machine that a rank of another machine asked about, and when.
        self._looks_at: dict[int, tuple[str, float]] = {}
        # The reason why the process ends.
        self.ended: str | None = None
        # The torch collective of the user's that the model's thread is in, when that was looked at, and whether it was
        # logged that it never ends.
        self._call: Wait | None = None
        self._looked, self._is_logged = 0.0, False

    def contents(self, wait: Wait | None) -> dict[str, Any]:
        """The record of a rank that is in `wait`."""
        self._count += 1
        waiting, scopes = self._watch.waiting, list(self._watch.scopes.values())
        found: dict[str, Any] = {
            "n": self._count,
            "process": self._host.identity(),
            "at": self._host.place(waiting.model_thread, _TORCH),
            "far": {scope.name: scope.far for scope in scopes},
        }
        for scope in scopes:
            if scope.failures.own is not None:
                found.setdefault("failed", {})[scope.name] = json.loads(scope.failures.own.dumps())
            if scope.told:
                found["doing"] = scope.told
        if scopes:
            found["step"] = scopes[0].step()
        if wait is not None:
            found["wait"] = wait.told()
            if wait.kind == "message" and not waiting.current():
                found["wait"]["also"] = "device"  # its host continues
            if wait is not self.wait or self._issued is None:
                self._issued = issued_by_group()
            found["torch"] = self._issued
        # Copies: the thread that reads mail adds to it.
        forgotten = self._host.now() - 2 * self._watch.settings.silence_seconds
        self._looks_at = {rank: look for rank, look in self._looks_at.copy().items() if look[1] > forgotten}
        if self._looks_at:
            found["sees"] = {rank: self._host.condition(it) for rank, (it, _) in self._looks_at.copy().items()}
        if waiting.are_several:
            found["beside"] = 1
        if self.ended is not None:
            found["ended"] = self.ended
        return found

    def post(self, wait: Wait | None, now: float) -> list[str]:
        """Write it; return the mail that it replaces."""
        record = json.dumps(self.contents(wait), separators=(",", ":"))
        self.posted, self.wait = now, wait
        return self._watch.records.post(record)

    def look_at(self, rank: int, process: str, now: float) -> None:
        """A rank of another machine asks about the process of `rank`, which is on this one."""
        if rank not in self._looks_at:
            self.posted = 0.0  # post the observation at once
        self._looks_at[rank] = process, now

    def torch_call(self, now: float) -> Wait | None:
        """The torch collective of the user's that the model's thread has been in for a while, as a wait. It cannot be
        ended."""
        thread, before = self._watch.waiting.model_thread, self._call
        if thread in self._watch.waiting.current() or not self._host.is_within(thread, _DISTRIBUTED, _TORCH):
            self._call = None
            return None
        if now - self._looked < PATIENCE_SECONDS:
            return before if before is not None and now - before.since > PATIENCE_SECONDS else None
        self._looked = now
        groups = known_groups()
        active = [one for one in active_collectives() if one.thread == thread and one.group in groups]
        if len({one.group for one in active}) != 1:
            self._call = None
            return None
        first = active[0]
        if before is None or (before.name, before.number) != (first.group, first.number):
            ranks = dist.get_process_group_ranks(groups[first.group])
            if len(ranks) > 2 and not first.needs_all:
                return None  # the needed ranks are not recorded
            self._is_logged = False
            call = self._host.called(thread, _TORCH) or first.call
            self._call = Wait("torch", None, call, name=first.group, number=first.number, ranks=ranks, since=now)
            return None
        return before

    def log(self, fault: Fault) -> None:
        """Log, once, that the torch collective will never end, if that is what `fault` says."""
        if self._call is not None and fault.kind == "disagree" and not self._is_logged:
            self._is_logged = True
            _log.error("rank %d waits in %s for ever: %s", self._watch.rank, self._call.doing, fault.text)


# ---- watch -----------------------------------------------------------------------------------------------------------


class Scopes(dict[tuple[tuple[int, ...], str], Scope]):
    """The scopes of one process, by their ranks and what sets them apart."""

    def __init__(self) -> None:
        super().__init__()
        # Held while one is made, or a fault finds its scope: one that comes meanwhile belongs to it.
        self.lock = threading.RLock()


class Watch:
    """The watch of one process (in tests: of one thread), which is `rank` of the default process group."""

    def __init__(self, store: Store, beside: Store, rank: int, settings: Settings, host: Host | None = None) -> None:
        self.settings = settings
        self.host = Host() if host is None else host
        self.records = Records(store, beside, rank)
        self.scopes = Scopes()
        self.waiting = Waits()
        self.own = OwnRecord(self)
        # The reader of the others' records; made once a wait lasts.
        self.leader: Leader | None = None
        # The last faults reported, of any scope: each message repeats them, because it overwrites earlier ones. And
        # those of scopes that this rank has not made yet, with the times at which they came.
        self._lately: list[Fault] = []
        self._early: list[tuple[Fault, float]] = []
        # Whether its process group is still the current one.
        self.is_current: Callable[[], bool] = lambda: True
        # Whether a watch thread calls `look`. Otherwise the waiting loops do.
        self.is_watched = False
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        # A lock that is held during a look; and the time of the last one.
        self._looking = threading.Lock()
        self._looked = 0.0

    @property
    def rank(self) -> int:
        """This rank of the default process group."""
        return self.records.rank

    def scope(self, ranks: Sequence[int], apart: str = "") -> Scope:
        """The scope of these ranks of the default group; all of them call it. `apart`: names a separate scope, whose
        failures do not affect the model's."""
        in_order = tuple(ranks)
        if list(in_order) != sorted(in_order):
            in_order = tuple(sorted(in_order))
        key = in_order, apart
        with self.scopes.lock:
            if key not in self.scopes:
                if not self.scopes:
                    with store_answers(_FIRST):
                        self.post()
                        self._join()
                self.scopes[key] = made = Scope(self, *key)
                for fault, since in self._early:
                    if fault.scope == made.name:
                        made.note_fault(fault, since)
            return self.scopes[key]

    def _join(self) -> None:
        self.records.join(self.host.identity().partition(" ")[0])

    def begin(self) -> None:
        """Start the watch thread. The caller's thread counts as the one that runs the model."""
        self.waiting.model_thread = threading.get_ident()
        if self._thread is None:
            arguments = weakref.ref(self), self._ends
            self._thread = threading.Thread(target=_watched, args=arguments, name="fullshard watch", daemon=True)
            self.is_watched = True
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._ends.set()

    def close(self) -> None:
        """Close the connections of all scopes, which are no longer used. Their threads may otherwise spin forever after
        a peer closed its end."""
        for scope in list(self.scopes.values()):
            for group in scope.groups.all():
                group.close()

    def join(self, seconds: float) -> None:
        """Wait until the thread ends."""
        if self._thread is not None:
            self._thread.join(seconds)

    # ---- looks ---------------------------------------------------------------------------------------------

    def _oldest(self) -> Wait | None:
        """The wait of the model's thread, else of any other thread, else of a device."""
        waits = self.waiting.current()
        found = waits.get(self.waiting.model_thread) or next(iter(waits.values()), None)
        if found is None:
            under_way = [one for scope in list(self.scopes.values()) for one in _under_way(scope)]
            found = min((described(one) for one in under_way), key=lambda one: one.since, default=None)
        return found

    def look_unless_watched(self) -> None:
        """Do the work of the watch thread, if there is none and it is time."""
        if not self.is_watched and self.host.now() - self._looked > _TICK_SECONDS / 5:
            self.look()

    def look(self) -> None:
        """Called once per tick. Raises the store's errors."""
        with self._looking:
            self._look(self.host.now())

    def _look(self, now: float) -> None:
        if self.leader is not None and now - self._looked > _LATE_SECONDS:
            self.leader.forget()
        self._looked = now
        self.end_waits(now)
        wait = self._oldest()
        if wait is not None and not self.waiting.current():
            self._end_by_what_is_known(wait, now)
        if wait is not None and now - wait.since < self._patience(wait):
            wait = None
        told = wait or self.own.torch_call(now)
        if wait is not None and self.leader is None:
            self.leader = Leader(self)
        pause = self.settings.beat_seconds if told is None and self.own.wait is None else self._pace(wait)
        if now >= self.own.posted + pause:
            if wait and self.leader and self.leader.claims(wait, is_told=wait is self.own.wait):
                self.leader.claim(wait, now)
                self.own.posted = now
            else:
                self._post(told, now)
        if self.leader is not None:
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
        for waiting in self.waiting.current().values():
            self._end_by_what_is_known(waiting, now)

    def _end_by_what_is_known(self, wait: Wait, now: float) -> None:
        scope = wait.scope
        if scope is None or wait.fault is not None:
            return
        for fault, since in list(scope.faults):
            counts = fault.epoch == scope.epoch and scope.is_of_others(fault)
            if counts and wait.is_ended_by(fault, now - max(since, wait.since)):
                scope.end(wait, fault)
                return

    def post(self) -> None:
        """Write this rank's record now."""
        self._post(None, self.host.now())

    def _post(self, wait: Wait | None, now: float) -> None:
        for mail in self.own.post(wait, now):
            self._receive(Fault.loads(mail), now)

    def _receive(self, fault: Fault, now: float) -> None:
        if fault.kind == "look":
            self.own.look_at(fault.rank, fault.text, now)
            return
        with self.scopes.lock:
            known = [scope for scope in self.scopes.values() if scope.name == fault.scope]
            if not known:
                self._early = [*self._early[-_LATELY:], (fault, now)]
        for scope in known:
            scope.note_fault(fault, now)
        self.own.log(fault)
        self.end_waits(now)

    def tell(self, ranks: Iterable[int], faults: Sequence[Fault]) -> None:
        """Leave `faults` for `ranks`, with earlier ones, because this overwrites mail that may be unread."""
        epochs = {scope.name: scope.epoch for scope in list(self.scopes.values())}
        lately = [one for one in self._lately if one not in faults and one.epoch >= epochs.get(one.scope, 0)]
        self._lately = said = [*lately, *faults][-_LATELY:]
        ends = {int(rank) for one in said for rank in one.meets}
        own = {rank: [one.dumps(rank) for one in said] for rank in ends}
        self.records.tell(ranks, [one.dumps() for one in said], own)

    def ask(self, rank: int, looks: Sequence[Fault]) -> None:
        """Ask `rank` to look at processes of its machine, which are of no interest later."""
        self.records.tell([rank], [one.dumps() for one in (*self._lately, *looks)])

    # ---- the end -------------------------------------------------------------------------------------------

    def end(self, text: str) -> None:
        """Report that the process ends."""
        self.own.ended = text
        with suppress(Exception):
            self.post()
            if not self.scopes:
                self._join()
            # The first few tell all ranks; later ones are found by their records.
            if self.records.store.add(f"{self.records.prefix}/ended", 1) <= 3:
                scopes = list(self.scopes.values())
                faults = [fault for scope in scopes for fault in scope.telling(scope.own_fault("ended", text))]
                self.tell({rank for scope in scopes for rank in scope.ranks}, faults)

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until all others have ended or read why this process ends, because it serves the store."""
        begun = self.host.now()
        known = [fault for scope in self.scopes.values() for fault, _ in scope.faults]
        lost = {fault.rank for fault in known if fault.kind == "lost"}
        gone = lost | {fault.rank for fault in known if fault.kind == "ended"}
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
            for wait in self.waiting.current().values():
                if wait.scope is scope and wait.fault is None:
                    scope.end(wait, fault)


def _under_way(scope: Scope) -> list[Any]:
    found = (getattr(group, "oldest", None) for group in scope.groups.all())
    return [one for one in (find() for find in found if find is not None) if one is not None]


def _watched(reference: weakref.ref[Watch], ends: threading.Event) -> None:
    """The watch's thread. Ends with the watch, and when its process group was destroyed."""
    failures = 0
    while not ends.wait(_TICK_SECONDS):
        watch = reference()
        if watch is None:
            return
        if not (watch.waiting.beside or watch.is_current()):
            # No background save is running.
            watch.close()
            return
        try:
            watch.look()
            failures = 0
        except Exception as error:
            failures += 1
            # The next look asks again: one that asks nothing would count as an answer.
            watch.own.posted = 0.0
            if failures == 1:
                _log.debug("rank %d: a look into the store failed: %s", watch.rank, error)
            if failures == _STORE_FAILURES:
                watch.without_store()
        del watch


# ---- the current process group ---------------------------------------------------------------------------------------

_watches: dict[int, tuple[weakref.ref[dist.ProcessGroup], Watch | None]] = {}
# The latest watch: it reports the end of the process even after the process group was destroyed.
_latest: list[Watch] = []
# Held while one is made: two threads that ask at the same moment would each get their own.
_making = threading.RLock()


def watch() -> Watch | None:
    """This process's watch; None without peers (no process group, a fake one, a single rank)."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    key = id(world)
    known = _watches.get(key)
    if known is None or known[0]() is not world:
        with _making:
            known = _watches.get(key)
            if known is None or known[0]() is not world:
                return _made(world)
    return known[1]


def _made(world: dist.ProcessGroup) -> Watch | None:
    key = id(world)
    silent = dist.get_backend(world) == "fake" or dist.get_world_size(world) == 1
    settings = Settings.read(1800.0 if silent else timeout_of(world))
    made = None if silent else _watch_of(world, settings)
    _watches[key] = (weakref.ref(world, lambda _: _watches.pop(key, None)), made)
    if made is not None:
        made.is_current = partial(is_current, weakref.ref(made))
        _latest[:] = [made]
    return made


def _watch_of(world: dist.ProcessGroup, settings: Settings) -> Watch:
    seconds = settings.silence_seconds or settings.limit_seconds
    with store_answers(_FIRST):
        return Watch(StoreConnection(seconds), StoreConnection(seconds), world.rank(), settings)


def is_current(which: AnyWatch | weakref.ref[Watch]) -> bool:
    """Whether `which` belongs to the current process group. Thread-safe."""
    which_now = which() if isinstance(which, weakref.ref) else which
    world = dist.group.WORLD if dist.is_initialized() else None
    known = None if world is None else _watches.get(id(world))
    return known is not None and known[0]() is world and known[1] is which_now


def scope_of(ranks: Sequence[int], apart: str = "") -> Scope | None:
    """The scope of these ranks; None without a watch, or for a single rank."""
    here = watch()
    return None if here is None or len(ranks) < 2 else here.scope(ranks, apart)


def mode() -> str:
    """The guard mode (`Settings.mode`), also without peers."""
    here = watch()
    return here.settings.mode if here is not None else Settings.read(0.0).mode


def _forked() -> None:
    """A forked child is not a rank: it has no watch thread, and must not report in its parent's name. It becomes one in
    a process group that it makes itself."""
    global _making
    _making = threading.RLock()
    _watches.clear()
    _latest.clear()
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None:
        _watches[id(world)] = (weakref.ref(world), None)


def _end() -> None:
    known = list(_latest)
    if not known and not _watches:
        with suppress(Exception):
            # Without a watch yet (an invalid setting may end the process), peers may wait for it at their first use.
            world = dist.group.WORLD if dist.is_initialized() else None
            if world is not None and dist.get_backend(world) != "fake" and world.size() > 1:
                known = [_watch_of(world, Settings())]
    error = getattr(sys, "last_value", None)
    text = f"its process ended with {type(error).__name__}: {error}" if error is not None else "its process ended"
    for one in known:
        one.stop()
        one.join(2)
        one.end(text)
        if one.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            one.wait_for_readers(_LAST_SECONDS)


os.register_at_fork(after_in_child=_forked)
atexit.register(_end)
