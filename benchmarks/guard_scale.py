"""What the guard asks the store for, at 8 to 10,000 ranks: counted; and a store server with a thousand real clients.

python -m benchmarks.guard_scale                        counted at 8, 64, 256 and 1,000 ranks: a few minutes
python -m benchmarks.guard_scale --worlds 10000         an hour of two busy cores
python -m benchmarks.guard_scale --worlds --clients 1000    the server alone: three minutes

counted     The code that runs in training (`Watch`, `Scope`, `Records`), of all ranks in this process, over a store in
            memory, in simulated time: benchmarks/simulated_ranks.py. A `get` counts as two requests, as torch's
            TCPStore sends them.
    rest        requests per rank and second, outside of any wait
    step        requests of a hundred steps with waits shorter than a second, beside those at rest
    wait        of all ranks but one that wait for a message of that one for 2, 10 and 60 seconds: requests per rank and
                second, the most of all ranks together in one second, those of the rank that reads, and what the server
                receives and sends
    question    requests of a rank for one question: all come at once, one comes nine seconds late, and with two answers
    failure     one rank raises while all others wait: seconds until all know, and requests of a rank until all
                have met again
server      torch's TCPStore in a process of its own; ranks with connections of their own, in `--processes` processes
            that each look after their share. All but one wait, 2, 10 and 60 seconds. False alarms; seconds between two
            signs of life; how late they were; how long a raised exception takes to reach everybody
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.simulated_ranks import SimulatedGroup, Simulation
from fullshard.peers import Settings, Wait, Watch

WORLDS = (8, 64, 256, 1000)
WAITS = (2.0, 10.0, 60.0)
# Between two measurements.
CALM_SECONDS = 10.0
LATE_SECONDS = 9.0


# ---- counted -------------------------------------------------------------------------------------------------


def counted(world: int) -> dict[str, Any]:
    """The figures at `world` ranks."""
    found: dict[str, Any] = {"world": world}
    with Simulation(world) as simulation:
        simulation.run(CALM_SECONDS)
        found["rest"] = _per_rank_and_second(simulation.counted(20.0), world)
        found["step"] = steps(simulation)
        found["wait"] = {f"{seconds:g}": wait_for_one(simulation, seconds) for seconds in WAITS}
        found["question"] = question(simulation, 0.0)
        found["question, one late"] = question(simulation, LATE_SECONDS)
        found["question, two answers"] = question(simulation, 0.0, answers=2)
        found["failure"] = failure(simulation)
    return found


def _per_rank_and_second(count: Any, world: int) -> float:
    return round(count.total / world / count.seconds, 3)


def steps(simulation: Simulation) -> int:
    """Requests of a hundred steps with two waits of a twentieth of a second each, beside those at rest."""
    everyone, world = range(simulation.world), simulation.world
    rest = simulation.counted(20.0).total
    before = 0
    for _ in range(100):
        for _ in range(2):
            simulation.wait_for_message(everyone)
            before += simulation.counted(0.05).total
            simulation.message_comes(everyone)
            before += simulation.counted(0.05).total
    # Twenty seconds of it; what falls on the edges of five seconds may differ by the ranks of one look.
    return max(0, before - rest - world // 10)


def wait_for_one(simulation: Simulation, seconds: float) -> dict[str, float]:
    """All but the last rank wait for a message of that one."""
    world = simulation.world
    waiting = range(world - 1)
    simulation.wait_for_message(waiting)
    count = simulation.counted(seconds)
    assert not simulation.cut, "a false alarm"
    leader = max(count.by_rank, key=lambda rank: count.by_rank[rank])
    others = count.total - count.by_rank[leader]
    simulation.groups[world - 1].issued += 1
    simulation.message_comes(waiting)
    after = simulation.counted(CALM_SECONDS)
    return {
        "requests": round(others / (world - 1) / seconds, 3),
        "reader": round(count.by_rank[leader] / seconds, 2),
        "most in a second": max(max(count.by_second.values()), max(after.by_second.values())),
        "kB/s": round(sum(count.bytes_by_rank.values()) / seconds / 1000, 1),
    }


def question(simulation: Simulation, late: float, answers: int = 1) -> dict[str, float]:
    """All ranks compare a value, which is one of `answers`; the last one comes `late`."""
    world, scopes = simulation.world, simulation.scopes
    simulation.returned.clear()
    rest = simulation.counted(CALM_SECONDS).total / CALM_SECONDS

    def ask(rank: int) -> None:
        simulation.start(rank, lambda: scopes[rank].agree("structure", str(rank * answers // world)))

    for rank in range(world - 1):
        ask(rank)
    count = simulation.counted(late)
    spent = count.total
    last = simulation.counted(0.0).total
    ask(world - 1)
    count = simulation.counted(60.0, lambda: len(simulation.returned) == world)
    assert not simulation.raised, next(iter(simulation.raised.values()))
    if answers > 1:
        assert len(set(simulation.returned[0].values())) == answers
    spent += last + count.total - rest * (late + count.seconds)
    return {"requests": round(spent / world, 2), "seconds more": round(count.seconds, 2)}


def failure(simulation: Simulation) -> dict[str, float]:
    """One rank raises while the others wait for it; all meet."""
    world, scopes = simulation.world, simulation.scopes
    simulation.returned.clear()
    one = world // 2
    others = [rank for rank in range(world) if rank != one]
    simulation.on_cut = lambda rank: simulation.start(rank, scopes[rank].meet)
    simulation.wait_for_message(others)
    simulation.run(CALM_SECONDS)

    def fail() -> bool:
        scopes[one].publish("raised", "ValueError: a bad batch")
        return scopes[one].meet()

    simulation.start(one, fail)
    begun = simulation.now
    told = simulation.counted(120.0, lambda: len(simulation.cut) == world - 1)
    rest = simulation.counted(120.0, lambda: len(simulation.returned) == world)
    assert not simulation.raised, next(iter(simulation.raised.values()))
    assert len(simulation.returned) == world, "somebody did not come"
    return {
        "known after": round(told.seconds, 2),
        "met after": round(simulation.now - begun, 2),
        "requests": round((told.total + rest.total) / world, 2),
        "most in a second": max((*told.by_second.values(), *rest.by_second.values())),
    }


# ---- a real server -------------------------------------------------------------------------------------------


class Timed:
    """A connection that notes when a record was written."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.written: list[float] = []
        self.slowest = 0.0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        begun = time.monotonic()
        found: bytes = self._store.compare_set(key, expected, desired)
        if "/rank/" in key:
            self.written.append(time.monotonic())
        self.slowest = max(self.slowest, time.monotonic() - begun)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def serve(sender: Connection) -> None:
    """The store, until the process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    sender.send(store.port)
    time.sleep(3600)


def drive(port: int, ranks: range, world: int, start: Any, sender: Connection) -> None:
    """Look after `ranks` of `world`."""

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)

    shared = connect()
    settings = Settings("full", 60.0, 1800.0)
    everyone = tuple(range(world))
    connections, watches, groups, scopes = [], [], [], []
    cut: dict[int, float] = {}
    for rank in ranks:
        connection = Timed(connect())
        watch = Watch(shared, connection, rank, settings)  # type: ignore[arg-type]
        watch.is_watched = True
        scope = watch.scope(everyone)
        group = SimulatedGroup("small", lambda rank=rank: cut.setdefault(rank, time.monotonic()))  # type: ignore[misc]
        scope.groups[group.name] = group
        connections.append(connection)
        watches.append(watch)
        groups.append(group)
        scopes.append(scope)
    start.wait()
    begun = time.monotonic()
    late_looks: list[float] = []
    due = [begun + 0.25 * i / len(watches) for i in range(len(watches))]

    def run(until: float) -> None:
        while (i := min(range(len(due)), key=due.__getitem__)) is not None and due[i] < until:
            if (pause := due[i] - time.monotonic()) > 0:
                time.sleep(pause)
            late_looks.append(time.monotonic() - due[i])
            watches[i].look()
            due[i] = max(due[i] + 0.25, time.monotonic())

    thread = watches[0].waiting.model_thread
    at = begun + CALM_SECONDS
    run(at)
    gaps: dict[str, float] = {}
    for seconds in WAITS:
        for i, rank in enumerate(ranks):
            if rank < world - 1:
                groups[i].issued += 1
                what = "the all-gather of layers.3"
                wait = Wait("message", scopes[i], what, name="small", number=groups[i].issued, ranks=everyone)
                watches[i].waiting[thread] = wait
        run(at + seconds)
        waiting = [i for i, rank in enumerate(ranks) if rank < world - 1]
        # The first second of a wait is none for its record; what was written before it counts for the first one after.
        gaps[f"{seconds:g}"] = max(
            (_widest(connections[i].written, at + 1.0, at + seconds) for i in waiting), default=0
        )
        for i, rank in enumerate(ranks):
            watches[i].waiting.pop(thread, None)
            if rank == world - 1:
                groups[i].issued += 1
        at += seconds + CALM_SECONDS
        run(at)
    alarms = sum(bool(scope.faults) for scope in scopes)
    widest = max(_widest(connection.written, begun, at) for connection in connections)
    # Somebody raises.
    for i, rank in enumerate(ranks):
        if rank < world - 1:
            groups[i].issued += 1
            watches[i].waiting[thread] = Wait(
                "message", scopes[i], "the gather", name="small", number=groups[i].issued, ranks=everyone
            )
    run(at + 4)
    if world - 1 in ranks:
        scopes[-1].publish("raised", "ValueError: a bad batch")
    raised = time.monotonic()
    run(at + 12)
    sender.send(
        {
            "alarms": alarms,
            "gaps": gaps,
            "widest": widest,
            "late look": max(late_looks),
            "slowest": max(connection.slowest for connection in connections),
            "told": max((when - raised for when in cut.values()), default=0.0),
            "cut": len(cut),
            "reads": sum(watch.leader is not None and bool(watch.leader.leads) for watch in watches),
        }
    )


def _widest(times: list[float], begin: float, end: float) -> float:
    """The most seconds between two of `times`, after `begin` and before `end`."""
    inside = [one for one in times if begin <= one <= end]
    return max((later - earlier for earlier, later in zip(inside, inside[1:], strict=False)), default=0.0)


def with_server(clients: int, processes: int) -> dict[str, Any]:
    """The figures of that many real clients."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sender,), daemon=True)
    server.start()
    port = receiver.recv()
    start = context.Barrier(processes)
    parts = [range(clients * i // processes, clients * (i + 1) // processes) for i in range(processes)]
    started = []
    for part in parts:
        pipe, theirs = context.Pipe(duplex=False)
        process = context.Process(target=drive, args=(port, part, clients, start, theirs), daemon=True)
        process.start()
        started.append((process, pipe))
    answers = []
    try:
        for process, pipe in started:
            while not pipe.poll(1.0):
                if not process.is_alive():
                    raise SystemExit("a process of clients ended without an answer; its output is above")
            answers.append(pipe.recv())
    finally:
        for process, _ in started:
            process.kill()
        server.kill()
    return {
        "clients": clients,
        "processes": processes,
        "false alarms": sum(one["alarms"] for one in answers),
        "widest between signs of life, s": round(max(one["widest"] for one in answers), 2),
        "in waits, s": {
            f"{seconds:g}": round(max(one["gaps"][f"{seconds:g}"] for one in answers), 2) for seconds in WAITS
        },
        "slowest request, s": round(max(one["slowest"] for one in answers), 3),
        "latest look, s": round(max(one["late look"] for one in answers), 3),
        "raised: all know after, s": round(max(one["told"] for one in answers), 2),
        "raised: know": sum(one["cut"] for one in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--clients", type=int, default=0, help="real clients of a real server; 0: none")
    parser.add_argument("--processes", type=int, default=8, help="that look after the clients")
    options = parser.parse_args()
    found: dict[str, Any] = {"counted": []}
    for world in options.worlds:
        found["counted"].append(counted(world))
        print(json.dumps(found["counted"][-1], indent=1), flush=True)
    if options.clients:
        found["server"] = with_server(options.clients, options.processes)
        print(json.dumps(found["server"], indent=1), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
