"""What ranks cost together at 64, 1,024 and 10,000 of them, counted, and where that ends.

    python -m benchmarks.scale                                      two minutes on one core
    python -m benchmarks.scale --write benchmarks/scale_DATE.md     and the document

counted    on the code that runs in training, at each of the numbers of ranks that a line names
computed   by the law in the line, after the counts at all of these numbers followed it exactly; else the script stops

store         benchmarks/simulated_ranks.py, as in benchmarks/guard_scale.py: at 8, 64, 256, 1,024 and 10,000 ranks;
              what a server answers in a second, measured (benchmarks/store_rate.py)
connections   processes on gloo with torch's TCPStore: those that its server has, and the descriptors of a rank
ways          bytes and messages of a gather over hosts of eight ranks, by `layout.levels`
files         calls of the system with a name, from Python's audit events, of ranks in threads; `stat` has no event
barrier       the tree of `Messenger.fold` (comm/messages.py), and `folded` of benchmarks/checkpoint_scale.py
step          `fullshard plan`, whose messages are tested against counted ones
slow hosts    each host of eight ranks is slow with a probability of 1 %: draws, along the same tree
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fullshard
from benchmarks.checkpoint_scale import folded
from benchmarks.guard_scale import failure, question
from benchmarks.simulated_ranks import RANKS_PER_MACHINE, Simulation
from benchmarks.store_rate import machine, rates, table
from fullshard import checkpoint
from fullshard.comm.messages import below
from fullshard.layout import crossing, levels_of

SHOWN = (64, 1024, 10_000)
SIMULATED = (8, 64, 256, 1024, 10_000)
# With a thread for each rank.
ASKED = (64, 1024)
PROCESSES = (2, 4, 8, 16, 32)
THREADS = (2, 8, 64, 256)
SLOW = 0.01
DRAWS = 400
USUAL_LIMIT = 1024
_CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.link", "os.rmdir")


class Law(NamedTuple):
    """A count is `each` times the ranks, and `once`."""

    each: int
    once: int = 0

    def at(self, world: int) -> int:
        return self.each * world + self.once

    def reaches(self, limit: int) -> int:
        """The first number of ranks at which the count is above `limit`."""
        return (limit - self.once) // self.each + 1

    def __str__(self) -> str:
        return f"{self.each} W" + (f" {'+' if self.once > 0 else '-'} {abs(self.once)}" if self.once else "")


def law_of(counts: Mapping[int, int]) -> Law:
    """The law that the counts at all numbers of ranks follow exactly, at least three. `ValueError`: they follow none.

    >>> law_of({2: 7, 4: 11, 8: 19})
    Law(each=2, once=3)
    """
    if len(counts) < 3:
        raise ValueError(f"expected counts at three numbers of ranks or more, found {dict(counts)}")
    first, second = sorted(counts)[:2]
    each = (counts[second] - counts[first]) // (second - first)
    law = Law(each, counts[first] - each * first)
    if any(law.at(world) != found for world, found in counts.items()):
        raise ValueError(f"expected counts of the form a W + b, found {dict(counts)}; the table does not hold")
    return law


# ---- store -----------------------------------------------------------------------------------------------------------


def store_requests(world: int) -> tuple[int, int]:
    """Requests of all ranks to the store: until all are there, and in ten seconds of steps whose waits are short."""
    with Simulation(world) as simulation:
        start = simulation.count.total
        simulation.run(10.0)
        return start, simulation.counted(10.0).total


def asked(world: int) -> dict[str, float]:
    """Requests of a rank for a question, and after a failure until all have met."""
    with Simulation(world) as simulation:
        simulation.run(10.0)
        one, after = question(simulation, 0.0), failure(simulation)
    return {
        "question": one["requests"],
        "failure": after["requests"],
        "met": after["met after"],
        "most": after["most in a second"],
    }


# ---- connections -----------------------------------------------------------------------------------------------------


def connections(world: int) -> tuple[int, int]:
    """Connections of the store's server, and descriptors that a rank opened since it joined torch's group: after a
    step and a clipping, of processes of this machine on gloo."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # Forks share what torch takes, so that there can be some tens of them.
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    ranks = [context.Process(target=_connect, args=(rank, world, port, answers)) for rank in range(world)]
    for each in ranks:
        each.start()
    try:
        said = dict(answers.get(timeout=300) for _ in ranks)
        for each in ranks:
            each.join(60)
    finally:
        for each in ranks:
            each.kill()
    return said[0][0], said[world - 1][1]


def _connect(rank: int, world: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    torch.manual_seed(0)
    model = fullshard.fully_shard(torch.nn.Linear(16, 64))
    model(torch.ones(2, 16)).sum().backward()
    fullshard.clip_grad_norm_(model.parameters(), 1.0)
    dist.barrier()
    answers.put((rank, (_served(port), len(os.listdir("/proc/self/fd")) - before)))
    dist.barrier()
    dist.destroy_process_group()


def _served(port: int) -> int:
    """Established connections whose own end is `port`."""
    count = 0
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            _, own, _, state, *_ = line.split()
            count += state == "01" and int(own.rsplit(":", 1)[1], 16) == port
    return count


# ---- ways ------------------------------------------------------------------------------------------------------------


def messages_in_levels(world: int) -> int:
    """Messages that a rank sends for a gather in two levels: its piece, and what it passes on."""
    levels = levels_of([rank // RANKS_PER_MACHINE for rank in range(world)])
    if levels is None:
        raise ValueError(f"expected several hosts of {RANKS_PER_MACHINE} ranks, found {world} ranks")
    counterparts, neighbours = len(levels.counterparts(0)), len(levels.neighbours(0))
    return counterparts + neighbours + counterparts * neighbours


def crosses(world: int) -> str:
    """The parts of a unit that a host sends for a gather: around a ring, from rank to rank, and in two levels."""
    share = crossing([[rank // RANKS_PER_MACHINE for rank in range(world)]])
    return ", ".join(f"{part:.3f}" for part in share)


# ---- files -----------------------------------------------------------------------------------------------------------


class _Calls:
    """Counts calls while it is on; Python keeps an audit hook until the process ends."""

    def __init__(self) -> None:
        self.count, self.on = Counter[str](), False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in _CALLS:
            self.count[event] += 1


def file_calls(worlds: Sequence[int] = THREADS) -> dict[int, tuple[int, int, int]]:
    """By the number of ranks: calls with a file's name of a save and of a load, all ranks together, and files."""
    from tests.harness.threads import run_ranks

    calls = _Calls()
    found = {}
    # The first run imports what saves and loads need, and is not counted.
    for world in (worlds[0], *worlds):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "one")
            save, load = run_ranks(world, _save_and_load, target, calls)[0]
            found[world] = (save, load, sum(each.is_file() for each in target.rglob("*")))
    return found


def _save_and_load(rank: int, target: Path, calls: _Calls) -> tuple[int, int]:
    torch.manual_seed(0)
    model = fullshard.fully_shard(torch.nn.Linear(64, 256))

    def count(call: Callable[[], object]) -> int:
        dist.barrier()
        if rank == 0:
            calls.count.clear()
            calls.on = True
        dist.barrier()
        call()
        dist.barrier()
        calls.on = False
        return calls.count.total()

    state = {"model": model.state_dict()}
    save = count(lambda: checkpoint.save(state, checkpoint_id=target))
    return save, count(lambda: checkpoint.load(state, checkpoint_id=target))


# ---- barrier and slow hosts ------------------------------------------------------------------------------------------


def tree(world: int) -> tuple[int, int, int]:
    """Of a barrier: messages towards the first rank, those that follow one another, and those that a rank gets."""
    found = folded([b"."] * world, lambda texts: texts[0])
    return sum(size > 0 for size in found.sent), found.depth, found.fan_in


class Slow(NamedTuple):
    """Shares of all draws. waits: a slow host is there, for which a step, a barrier and a save wait; two: in a barrier
    two ranks of slow hosts send one after the other. most: of such ranks on one path."""

    hosts: int
    waits: float
    expected: float
    two: float
    most: int


def slow_hosts(world: int, draws: int = DRAWS, seed: int = 0) -> Slow:
    """What is waited for. `ValueError`: the draws are five standard deviations or more from the probability that at
    least one host is slow."""
    chance, hosts = random.Random(seed), math.ceil(world / RANKS_PER_MACHINE)
    paths = []
    for _ in range(draws):
        slow = [chance.random() < SLOW for _ in range(hosts)]
        after = [0] * world
        for rank in reversed(range(world)):
            after[rank] = slow[rank // RANKS_PER_MACHINE] + max((after[one] for one in below(rank, world)), default=0)
        paths.append(after[0])
    waits, expected = sum(path > 0 for path in paths) / draws, 1 - (1 - SLOW) ** hosts
    if abs(waits - expected) > 5 * math.sqrt(expected * (1 - expected) / draws) + 1 / draws:
        raise ValueError(f"expected a share of {expected:.3f} with a slow host, found {waits:.3f} in {draws} draws")
    return Slow(hosts, waits, expected, sum(path > 1 for path in paths) / draws, max(paths))


# ---- a step ----------------------------------------------------------------------------------------------------------


def step(world: int) -> dict[str, Any]:
    """The messages of a rank in a step of llama-8b, as `fullshard plan` tells them."""
    command = f"plan llama-8b --ranks {world} --hosts {world // RANKS_PER_MACHINE} --hardware h100-80g --micro 1"
    told = subprocess.run(
        [sys.executable, "-m", "fullshard", *command.split(), "--recompute", "whole", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


# ---- the document ----------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A row: what is counted, by which law, where it was counted, and the counts."""

    name: str
    law: Law
    counts: dict[int, int]

    def row(self) -> str:
        cells = [f"{self.law.at(world):,}{'' if world in self.counts else ' (computed)'}" for world in SHOWN]
        return " | ".join(["", self.name, str(self.law), ", ".join(f"{n:,}" for n in self.counts), *cells, ""]).strip()


def line(name: str, counts: dict[int, int]) -> Line:
    return Line(name, law_of(counts), counts)


def lines() -> list[Line]:
    """All rows whose counts follow a law."""
    store = {world: store_requests(world) for world in SIMULATED}
    opened = {world: connections(world) for world in PROCESSES}
    files = file_calls()
    barriers = {world: tree(world) for world in SIMULATED}
    return [
        line("store requests until all are there", {n: found[0] for n, found in store.items()}),
        line("store requests in 10 s of steps", {n: found[1] for n, found in store.items()}),
        line("connections of the store's server", {n: found[0] for n, found in opened.items()}),
        line("descriptors of a rank, on gloo", {n: found[1] for n, found in opened.items()}),
        line("messages of a rank for a gather in two levels", {n: messages_in_levels(n) for n in (16, *SHOWN)}),
        line("files of a checkpoint", {n: found[2] for n, found in files.items()}),
        line("file calls of a save", {n: found[0] for n, found in files.items()}),
        line("file calls of a load", {n: found[1] for n, found in files.items()}),
        line("messages of a barrier towards rank 0", {n: found[0] for n, found in barriers.items()}),
    ]


def document(command: str, date: str) -> str:
    rows = {each.name: each for each in lines()}
    start, server = rows["store requests until all are there"].law, rows["connections of the store's server"].law
    rank, load = rows["descriptors of a rank, on gloo"].law, rows["file calls of a load"].law
    files, answered = rows["files of a checkpoint"].law, rates()
    # Of signs of life, by as many processes as the server had in the best case.
    per_second = round(max(answered["compare_set"].values()), -2)
    steps, trees, waits = ([call(world) for world in SHOWN] for call in (step, tree, slow_hosts))
    breaks = sorted(
        [
            (server.reaches(USUAL_LIMIT), f"connections of the store's server ({server}) above `ulimit -n` 1,024"),
            (rank.reaches(USUAL_LIMIT), f"descriptors of a rank on gloo ({rank}) above `ulimit -n` 1,024"),
            (start.reaches(int(per_second)), f"a start ({start} requests) takes the store more than a second"),
        ]
    )
    head = ["", "", *(f"{world:,} ranks" for world in SHOWN), ""]
    text = [
        f"# What ranks cost together, counted, {date}",
        "",
        f"`{command}`: W ranks; all of them together where a line names no rank. A law holds exactly at all numbers of",
        "ranks where it was counted; *computed* is a value by the law alone. Nothing here is a time of this machine.",
        "",
        "| | law | counted at | " + " | ".join(f"{world:,} ranks" for world in SHOWN) + " |",
        "|---|---|---|---|---|---|",
        *(each.row() for each in rows.values()),
        "",
        " | ".join(head).strip(),
        "|---|---|---|---|",
        _row("messages of a rank in a step, llama-8b", (sum(each["messages"].values()) for each in steps)),
        _row("GB that a rank sends in it", (f"{sum(each['bytes_sent'].values()) / 1e9:.2f}" for each in steps)),
        _row(
            "GB of padding in one gather of all units",
            (f"{sum(one['bytes'] for one in each['padding']) / 1e9:.2f}" for each in steps),
        ),
        _row("of a unit a host sends for a gather: ring, pairs, two levels", (crosses(world) for world in SHOWN)),
        _row("messages of a barrier, one after another", (depth for _, depth, _ in trees)),
        _row("messages that a rank gets in it", (fan for _, _, fan in trees)),
        _row("hosts of eight ranks", (each.hosts for each in waits)),
        _row("waits for a slow host", (f"{each.waits:.1%}" for each in waits)),
        _row("1 - 0.99^hosts", (f"{each.expected:.1%}" for each in waits)),
        _row("a barrier waits for two, one after the other", (f"{each.two:.1%}" for each in waits)),
        _row("ranks of slow hosts on one path, at most", (each.most for each in waits)),
        "",
        f"1 % of hosts are slow, each independently, in {DRAWS} draws. Where one is, a step, a barrier and each of the",
        "two rounds of a save wait for it; a save's writes do, too. The step is what `fullshard plan` predicts, not a",
        "run; padding is where tensors have fewer rows than ranks, or not a multiple, and HSDP avoids it.",
        "",
        "Requests of a rank, which follow no exact law (those at 10,000 ranks: guard_scale_2026-11-22.md):",
        "",
        "| ranks | for a question | after a failure | all met after, simulated | most of all in a second |",
        "|---|---|---|---|---|",
    ]
    for world in ASKED:
        one = asked(world)
        text.append(f"| {world:,} | {one['question']} | {one['failure']} | {one['met']} s | {one['most']:,} |")
    text += [
        "",
        "## What breaks first",
        "",
        *(f"{number}. From {world:,} ranks on: {what}." for number, (world, what) in enumerate(breaks, 1)),
        "",
        f"Connections were counted at {', '.join(map(str, PROCESSES))} processes; these limits are computed and were",
        "not reached. They leave out what a process has open before; rank 0 has both where no torchrun serves",
        "the store. On NCCL nothing was counted. A gather has as many messages in two levels as from rank to rank,",
        "and as a ring has rounds; `auto` chooses by bytes and measured rates, for which a rank sends 12 messages.",
        f"At 10,000 ranks {files.at(10_000):,} files are in one checkpoint, and a load makes {load.at(10_000):,}",
        "calls; whether a file system takes them was not measured.",
        "",
        "## What a store's server answers",
        "",
        f"Measured in the same run by `benchmarks/store_rate.py`, on {machine()},",
        f"which clients, server and other work share (load {os.getloadavg()[0]:.0f} before): a",
        "server of its own answers more. `peers/wait.py` assumes 20,000. With 1,000 real clients",
        "(guard_scale_2026-11-22.md) the slowest request of a start took 5.0 s: connecting costs more than requests.",
        "",
        *table(answered),
    ]
    return "\n".join(text) + "\n"


def _row(name: str, cells: Any) -> str:
    return f"| {name} | " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the document; its name ends with the date")
    options = parser.parse_args(arguments)
    date = options.write.stem.rpartition("_")[2] if options.write else "not written"
    text = document("python -m benchmarks.scale" + (f" --write {options.write}" if options.write else ""), date)
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
