"""An exception at any line of the guard, or at any call of the store, on one rank or on several, which try again: all
steps are what they are without it, or every rank has an error that says why. Nobody waits without end.

Ranks are simulated (benchmarks/simulated_ranks.py): a minute of theirs takes no time.
"""

from __future__ import annotations

import inspect
import linecache
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.simulated_ranks import Simulation, Store
from fullshard.agree.recovery import Peers
from fullshard.peers import PeerFailed, RanksDisagree, Wait, Watch

ROOM = os.path.dirname(inspect.getfile(Watch)) + os.sep
STEPS = 3
WORLD = 3
# So often a rank tries a step again.
ATTEMPTS = 8
QUICK, ALL = range(50), range(1000)


class Interrupt(KeyboardInterrupt):
    """What is thrown in."""


class Diverged(Exception):
    """Ranks are at different steps, and all of them know it: they would load a checkpoint."""


class Disturbed:
    """The connection of one rank: raises at its `at`th request, before it arrives or after that."""

    def __init__(self, store: Store, thread: Callable[[], int | None]) -> None:
        self._store, self._thread = store, thread
        self.requests, self.at, self.arrives = 0, -1, False
        self.unreliable: random.Random | None = None

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def disturbed(*args: Any) -> Any:
            # Those of the thread that runs the model are counted; a look that fails is made again.
            mine = threading.get_ident() == self._thread()
            self.requests += mine
            fails = mine and self.requests == self.at
            if fails and not self.arrives:
                raise Interrupt("before a request")
            found = call(*args)
            if not mine and self.unreliable is not None and self.unreliable.random() < 0.1:
                raise RuntimeError("Connection reset by peer")
            if fails:
                raise Interrupt("after a request")
            return found

        return disturbed


class Run:
    """A small training of `WORLD` ranks with retry. `lines`: at which line of the room each rank is interrupted, and
    `requests` at which call of the store; counted from the first step. `watched`: waits are looked after by somebody
    else than who waits. `unreliable`: draws which of the requests of that one fail, a tenth of them."""

    def __init__(
        self,
        lines: dict[int, list[int]],
        requests: dict[int, list[tuple[int, bool]]],
        *,
        watched: bool = True,
        unreliable: random.Random | None = None,
    ) -> None:
        self.lines, self.requests, self.watched, self.unreliable = lines, requests, watched, unreliable
        self.connections: list[Disturbed] = []
        self.idents: dict[int, int] = {}
        # How many lines and requests there were; what each rank computed.
        self.passed = [0] * WORLD
        self.results: list[list[str]] = [[] for _ in range(WORLD)]
        self.where: list[str] = []
        with Simulation(WORLD, silence=20.0, limit=60.0, connect=self._connect) as simulation:
            self.simulation = simulation
            simulation.look = self._look
            for watch in simulation.watches:
                watch.is_watched = watched
            simulation.run(5)
            for rank in range(WORLD):
                simulation.start(rank, lambda rank=rank: self._train(rank))  # type: ignore[misc]
            simulation.run(600, lambda: len(simulation.returned) + len(simulation.raised) == WORLD)
            self.raised, self.returned = dict(simulation.raised), dict(simulation.returned)
            self.seconds = simulation.now

    def _connect(self, store: Store, rank: int) -> Disturbed:
        self.connections.append(Disturbed(store, lambda: self.idents.get(rank)))
        return self.connections[-1]

    def _train(self, rank: int) -> None:
        self.idents[rank] = threading.get_ident()
        connection = self.connections[rank]
        connection.unreliable = self.unreliable
        planned = sorted(self.lines.get(rank, ()))
        asked = sorted(self.requests.get(rank, ()))

        def arm() -> None:
            if asked and connection.requests >= connection.at:
                at, connection.arrives = asked.pop(0)
                connection.at = max(at, connection.requests + 1)

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.startswith(ROOM):
                return None
            if event == "line":
                self.passed[rank] += 1
                if planned and self.passed[rank] >= planned[0] and not _leaves_a_block(frame):
                    planned.pop(0)
                    self.where.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
                    raise Interrupt("at a line")
            return trace

        peers = Peers((), threading.get_ident())
        peers.scopes = [self.simulation.scopes[rank]]
        failures = 0
        sys.settrace(trace)
        try:
            while len(self.results[rank]) < STEPS:
                try:
                    arm()
                    self._attempt(rank, peers)
                except (Interrupt, PeerFailed, RanksDisagree) as error:
                    failures += 1
                    if failures == ATTEMPTS:
                        raise
                    last = error
        except Diverged:
            raise
        except BaseException as error:
            raise error from last
        finally:
            sys.settrace(None)
            connection.at, connection.unreliable = -1, None
            peers.scopes[0].watch.end("its process ended")

    def _attempt(self, rank: int, peers: Peers) -> None:
        """A step in a `fullshard.guard`."""
        (scope,) = peers.scopes
        results = self.results[rank]
        try:
            peers.meet()
            for scope_ in peers.scopes:
                scope_.refuse_failure()
            if scope.agree("step", str(len(results))) is not None:
                raise Diverged
            self._message(rank)
            told = scope.agree("values", f"{rank} at {len(results)}")
            self._message(rank)
            peers.come_together("the end")
        except Diverged:
            raise
        except BaseException as error:
            peers.attempt_failed(error, "a block")
            raise
        results.append(str(told))

    def _message(self, rank: int) -> None:
        """All ranks send one, and wait for the others."""
        simulation = self.simulation
        scope, group, watch = (each[rank] for each in (simulation.scopes, simulation.groups, simulation.watches))
        group.issued += 1
        number, epoch = group.issued, scope.epoch
        thread = threading.get_ident()
        watch.waiting[thread] = Wait("message", scope, "a message", name="small", number=number, ranks=scope.ranks)
        try:
            while not self._sent(number, epoch):
                if scope.failures.cause is not None:
                    scope.failures.has_raised = True
                    raise scope.failures.cause.error("a message")
                simulation.sleep(0.05)
                watch.look_unless_watched()
        finally:
            watch.waiting.pop(thread, None)

    def _look(self, watch: Watch) -> None:
        if self.watched:
            with suppress(RuntimeError):  # as its thread does: the next look comes
                watch.look()

    def _sent(self, number: int, epoch: int) -> bool:
        pairs = zip(self.simulation.scopes, self.simulation.groups, strict=True)
        return all(scope.epoch > epoch or (scope.epoch == epoch and group.issued >= number) for scope, group in pairs)


def _leaves_a_block(frame: Any) -> bool:
    """Whether the frame may be at the end of a `with`, which tracing sees once more. Python itself raises nothing from
    outside between the end of a block and its `__exit__`: a lock would stay locked."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def judge(run: Run, clean: Run) -> None:
    """Nobody waits for ever; all have the same results, or each one an error."""
    ended = run.raised.keys() | run.returned.keys()
    assert len(ended) == WORLD, f"{run.where}: of {WORLD} ranks only {sorted(ended)} ended: {run.raised}"
    if len(run.returned) == WORLD:
        assert run.results == clean.results, run.where
    else:
        # One that is interrupted after it said that it came to the end of the last step fails alone.
        alone = all(len(run.results[rank]) == STEPS - 1 for rank in run.raised)
        assert alone or len(run.raised) == WORLD, f"{run.where}: only {run.raised} raised"
        for error in run.raised.values():
            assert isinstance(error, Interrupt | PeerFailed | RanksDisagree | Diverged), run.where
    for mine, expected in zip(run.results, clean.results, strict=True):
        assert mine == expected[: len(mine)], run.where


@pytest.fixture(scope="module")
def clean() -> Run:
    run = Run({}, {})
    assert not run.raised and all(len(results) == STEPS for results in run.results)
    return run


def disturbed(seed: int, clean: Run) -> Run:
    """What a seed does: on one rank or on several, up to three times each, at lines or at requests."""
    draw = random.Random(seed)
    ranks = draw.sample(range(WORLD), draw.choice((1, 1, 2, 3)))
    lines, requests = {}, {}
    for rank in ranks:
        times = draw.choice((1, 1, 2, 3))
        if draw.random() < 0.7:
            lines[rank] = [draw.randint(1, clean.passed[rank]) for _ in range(times)]
            if times > 1 and draw.random() < 0.5:  # soon after another one
                lines[rank][1:] = [lines[rank][0] + draw.randint(1, 150) for _ in lines[rank][1:]]
        else:
            most = clean.connections[rank].requests
            requests[rank] = [(draw.randint(1, most), draw.random() < 0.5) for _ in range(times)]
    unreliable = draw if draw.random() < 0.2 else None
    return Run(lines, requests, watched=draw.random() < 0.7, unreliable=unreliable)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seeds", [QUICK[i::10] for i in range(10)], ids=lambda seeds: f"{seeds[0]}")
def test_an_exception_anywhere(seeds: range, clean: Run) -> None:
    for seed in seeds:
        judge(disturbed(seed, clean), clean)


@pytest.mark.slow
@pytest.mark.hang_after(1200)
def test_an_exception_anywhere_at_length(clean: Run) -> None:
    for seed in ALL:
        judge(disturbed(seed, clean), clean)
