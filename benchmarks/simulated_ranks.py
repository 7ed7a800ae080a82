"""Ranks of one process over a store in memory, in a time of their own: what `fullshard.guard` asks for, counted.

The code under test is the one that runs in training: `Watch`, `Scope`, `Records`. What it is given is simulated: the
store (a dictionary that counts), the time, and what is seen of processes (`Host`). Whatever a rank does in a call that
waits runs in a thread of its own; one thread runs at a time, the one whose time is next, so that a run is the same each
time, and a minute of ten thousand ranks takes as long as their code takes.

    with Simulation(64) as simulated:
        simulated.wait_for_message(range(63))
        simulated.run(10)
        print(simulated.requests())
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fullshard.peers import Scope, Settings, Wait, Watch
from fullshard.peers.store import Host

# The watch's thread looks so often.
_TICK_SECONDS = 0.25
# The looks of all ranks are spread over a tick in so many parts.
_PARTS = 10
_STACK_NBYTES = 256 * 1024
RANKS_PER_MACHINE = 8
# A line such as a record tells it.
_PLACE = "/home/somebody/project/pretrain/train.py:312 in train_one_step"


class Store:
    """What a store keeps, and answers as torch's HashStore and TCPStore do."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        if key not in self.kept:
            raise RuntimeError(f"wait timeout, keys: {key}")
        return self.kept[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.kept.get(key, b"0")) + amount
        self.kept[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self.kept.get(key)
        if (found is None and not expected) or (found is not None and found == expected.encode()):
            self.kept[key] = desired.encode()
        elif found is None:
            return expected.encode()
        return self.kept[key]

    def has_extended_api(self) -> bool:
        return True

    def append(self, key: str, value: str) -> None:
        self.kept[key] = self.kept.get(key, b"") + value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


_MESSAGES = {"get": 2, "multi_get": 2}  # torch's TCPStore asks first whether the keys are there


class Counting:
    """A connection to `store`, whose requests are noted as those of `rank`."""

    def __init__(self, store: Any, note: Callable[[str, int], None]) -> None:
        self._store, self._note = store, note

    def has_extended_api(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            found = call(*args)
            self._note(name, _nbytes(args) + _nbytes(found))
            return found

        self.__dict__[name] = counted
        return counted


def _nbytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return 8


class SimulatedHost(Host):
    """A rank's clock is the simulation's; eight ranks share a machine."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation, self._rank = simulation, rank

    def now(self) -> float:
        return self._simulation.now

    def sleep(self, seconds: float) -> None:
        self._simulation.sleep(seconds)

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._simulation)

    def identity(self) -> str:
        return f"{self._rank // RANKS_PER_MACHINE} {self._rank} 0"

    def condition(self, process: str) -> tuple[str, int]:
        machine, rank, _ = process.split()
        if int(machine) != self._rank // RANKS_PER_MACHINE:
            return "unknown", 0
        return self._simulation.states.get(int(rank), "exists"), self._simulation.ticks.get(int(rank), 0)

    def place(self, thread: int, torch: str) -> str:
        return _PLACE

    def called(self, thread: int, torch: str) -> str:
        return ""

    def is_within(self, thread: int, folder: str, torch: str) -> bool:
        return False


class SimulatedEvent:
    """An event for which one thread of the simulation waits."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._is_set = simulation, False
        self._waiting: Callable[[], None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._waiting()

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            self._simulation.sleep(timeout, self)
        return self._is_set

    def is_waited_for(self, wake: Callable[[], None] | None) -> None:
        """`wake` ends the wait that begins; None: it is over."""
        self._waiting = wake


class SimulatedGroup:
    """A data group: counts what its rank sent, and says when it was cut."""

    def __init__(self, name: str, on_cut: Callable[[], None]) -> None:
        self.name, self.issued, self.is_cut, self._on_cut = name, 0, False, on_cut
        self.is_connected = True

    def cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self._on_cut()

    def close(self) -> None:
        self.is_connected = False

    def expire(self) -> None:
        self.issued, self.is_cut = 0, False


@dataclass
class Count:
    """What was asked since the last `start_counting`."""

    seconds: float
    by_rank: Counter[int] = field(default_factory=Counter)
    by_second: Counter[int] = field(default_factory=Counter)
    by_call: Counter[str] = field(default_factory=Counter)
    bytes_by_rank: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.by_rank.values())


class Simulation:
    """`world` ranks of one scope, all of which have said that they are there. Lists are in the order of ranks."""

    def __init__(
        self,
        world: int,
        *,
        silence: float = 60.0,
        limit: float = 1800.0,
        connect: Callable[[Store, int], Any] = lambda store, rank: store,
    ) -> None:
        """`connect`: makes the connection of a rank to the store."""
        self.world, self.now, self._connect = world, 0.0, connect
        # What is seen of a rank's process, if it is not "exists", and the processor time that it has used.
        self.states: dict[int, str] = {}
        self.ticks: dict[int, int] = {}
        # Ranks whose watch does not get to look.
        self.held: set[int] = set()
        self.store = Store()
        self.count = Count(0.0)
        # What ended: by rank the exception, or what its call returned. And when a rank's data groups were cut.
        self.raised: dict[int, BaseException] = {}
        self.returned: dict[int, Any] = {}
        self.cut: dict[int, float] = {}
        self.on_cut: Callable[[int], None] = lambda rank: None
        self.look: Callable[[Watch], None] = Watch.look
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._driver = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._ends = False
        self._started = 0.0
        ranks = tuple(range(world))
        self.watches: list[Watch] = []
        self.scopes: list[Scope] = []
        self.groups: list[SimulatedGroup] = []
        for rank in ranks:
            self._add_rank(rank, ranks, Settings("full", silence, limit))
        for part in range(_PARTS):
            self._at(self.now + part * _TICK_SECONDS / _PARTS, lambda part=part: self._look(part))  # type: ignore[misc]

    def _add_rank(self, rank: int, ranks: tuple[int, ...], settings: Settings) -> None:
        # Records are given in the course of five seconds, as processes do that were not started in one moment.
        self.now = 5.0 * rank / len(ranks)
        connection: Any = Counting(self._connect(self.store, rank), lambda call, nbytes: self._note(rank, call, nbytes))
        watch = Watch(connection, connection, rank, settings, SimulatedHost(self, rank))
        watch.is_watched = True
        scope = watch.scope(ranks)
        group = SimulatedGroup("small", lambda: self._was_cut(rank))
        scope.groups[group.name] = group
        scope.step = lambda: 1000
        self.watches.append(watch)
        self.scopes.append(scope)
        self.groups.append(group)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End all threads."""
        self._ends = True
        for _, _, go_on in self._events:
            if isinstance(go_on, _Go):
                go_on()
        for thread in self._threads:
            thread.join()

    # ---- time ----------------------------------------------------------------------------------------------

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Let so much time go by, at most until `until()`. How much it was."""
        begun, end = self.now, self.now + seconds
        while self._events and self._events[0][0] <= end and not until():
            self.now, _, call = heapq.heappop(self._events)
            call()
        if not until():
            self.now = end
        return self.now - begun

    def sleep(self, seconds: float, event: SimulatedEvent | None = None) -> None:
        """Of a thread that `start` began: let the others continue, until `event` at most."""
        go = _Go(self._driver)
        self._at(self.now + seconds, go)
        if event is not None:
            event.is_waited_for(lambda: self._at(self.now, go))
        self._driver.release()
        go.acquire()
        if event is not None:
            event.is_waited_for(None)
        if self._ends:
            raise SystemExit

    def start(self, rank: int, call: Callable[[], Any]) -> None:
        """Let `rank` make a call that may wait."""
        go = _Go(self._driver)

        def run() -> None:
            go.acquire()
            try:
                if not self._ends:
                    self.returned[rank] = call()
            except SystemExit:
                pass
            except BaseException as error:
                self.raised[rank] = error
            finally:
                self._driver.release()

        before = threading.stack_size(_STACK_NBYTES)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        threading.stack_size(before)
        self._threads.append(thread)
        self._at(self.now, go)

    def _look(self, part: int) -> None:
        for watch in self.watches[part::_PARTS]:
            if self.states.get(watch.rank, "exists") == "exists" and watch.rank not in self.held:
                self.look(watch)
        self._at(self.now + _TICK_SECONDS, lambda: self._look(part))

    # ---- what ranks do -------------------------------------------------------------------------------------

    def wait_for_message(self, ranks: Iterable[int]) -> None:
        """These ranks have sent the next message of their group, and wait for it."""
        for rank in ranks:
            group = self.groups[rank]
            group.issued += 1
            everyone = self.scopes[rank].ranks
            what = "the all-gather of layers.3"
            wait = Wait("message", self.scopes[rank], what, name=group.name, number=group.issued, ranks=everyone)
            self.watches[rank].waiting[threading.get_ident()] = wait

    def message_comes(self, ranks: Iterable[int]) -> None:
        """It is there."""
        for rank in ranks:
            self.watches[rank].waiting.pop(threading.get_ident(), None)

    def _was_cut(self, rank: int) -> None:
        self.cut[rank] = self.now
        self.watches[rank].waiting.pop(threading.get_ident(), None)
        self.on_cut(rank)

    # ---- what was counted ----------------------------------------------------------------------------------

    def _note(self, rank: int, call: str, nbytes: int) -> None:
        messages = _MESSAGES.get(call, 1)
        self.count.by_rank[rank] += messages
        self.count.by_second[int(self.now - self._started)] += messages
        self.count.by_call[call] += messages
        self.count.bytes_by_rank[rank] += nbytes

    def counted(self, seconds: float, until: Callable[[], bool] = lambda: False) -> Count:
        """`run`, and what was asked for meanwhile."""
        self.count, self._started = Count(0.0), self.now
        self.count.seconds = self.run(seconds, until)
        return self.count

    @property
    def leaders(self) -> Sequence[int]:
        """The ranks that read the others' records now."""
        return [watch.rank for watch in self.watches if watch.leader is not None and watch.leader.leads]


class _Go:
    """Wakes up one thread, and waits until it sleeps or ends."""

    def __init__(self, driver: threading.Semaphore) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._driver, self._is_over = driver, False

    def __call__(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._lock.release()
        self._driver.acquire()

    def acquire(self) -> None:
        self._lock.acquire()
