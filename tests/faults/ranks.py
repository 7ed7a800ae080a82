"""Ranks of a case: forks of this process over gloo, each bounded in time, whose end is told apart.

A fork of a process that has torch imported costs some milliseconds, so every case has processes of its own and none can
spoil the next. They meet, as under torchrun, through a store that none of them hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tests.faults.cases import GROUP_SECONDS
from tests.harness import forked


@dataclass(frozen=True)
class Caught:
    """An exception, as text: `kinds` are the names of its class and of the bases, `at` is monotonic time."""

    kinds: tuple[str, ...]
    text: str
    at: float
    trace: str = ""

    @staticmethod
    def of(error: BaseException) -> Caught:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        trace = "".join(traceback.format_exception(error))
        return Caught(kinds, text, time.monotonic(), trace)


@dataclass
class Report:
    """What became of one rank. `ended`: done, raised (`error`), hung (`error` is None, `output` has its stacks), died
    (by `signal`, or with the exit status `code` and no word)."""

    rank: int
    ended: Literal["done", "raised", "hung", "died"]
    error: Caught | None = None
    caught: list[Caught] = field(default_factory=list)
    state: dict[str, torch.Tensor] | None = None
    warned: list[str] = field(default_factory=list)
    code: int = 0
    output: str = ""
    # (moment, position of the fault in its case) of the faults that struck on this rank.
    strikes: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Told:
    """What a rank's program gathers for its report."""

    strikes_file: Path
    caught: list[Caught] = field(default_factory=list)
    state: dict[str, torch.Tensor] | None = None

    @property
    def folder(self) -> Path:
        """All ranks of the case share it."""
        return self.strikes_file.parent

    def struck(self, number: int) -> None:
        """Note, where it outlives this process, that the fault of this number strikes now."""
        with open(self.strikes_file, "a") as file:
            file.write(f"{time.monotonic()} {number}\n")


_stores: list[tuple[int, Connection]] = []


def _store_port() -> int:
    """Of a store in a process of its own, which ends with this one. Its threads must not be here: a fork inherits the
    locks that they hold at that moment, and waits for ever at its own connection (seen in one of some 300 cases)."""
    if not _stores:
        ours, theirs = Pipe()
        if not os.fork():
            try:
                ours.close()
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                theirs.send(store.port)
                theirs.recv()  # the end of the other process
            finally:
                os._exit(0)
        theirs.close()
        _stores.append((ours.recv(), ours))
    return _stores[0][0]


_cases_run = 0


@dataclass(frozen=True)
class Meeting:
    """How ranks meet: at the store of this port, or at one that rank 0 serves (`hosted`)."""

    port: int
    prefix: str
    seconds: float
    hosted: bool

    def begin(self, rank: int, world: int, folder: Path) -> None:
        store: dist.Store
        if self.hosted:
            store = forked.store_of_rank_0(rank, folder)
        else:
            store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        limit = timedelta(seconds=self.seconds)
        meeting = dist.PrefixStore(self.prefix, store)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=limit)


def run_ranks(
    world: int,
    fn: Callable[[int, Told], None],
    *,
    limit: float,
    environment: tuple[tuple[str, str], ...] = (),
    group: bool = True,
    deaths: tuple[int, ...] = (),
    group_seconds: float = GROUP_SECONDS,
    hosted: bool = False,
) -> list[Report]:
    """Call `fn(rank, told)` on `world` forks; one report for each rank. `group=False`: no process group is made.
    `deaths`: ranks that nobody waits for once the others have answered. `hosted`: rank 0 serves the store, and no rank
    waits for the others at its end."""
    global _cases_run
    _cases_run += 1
    port = _store_port() if group and not hosted else 0
    meeting = Meeting(port, f"case{_cases_run}", group_seconds, hosted) if group else None
    with tempfile.TemporaryDirectory(prefix="fullshard-faults-") as folder:
        ranks = [forked.fork(_rank_main, rank, world, fn, Path(folder), meeting, environment) for rank in range(world)]
        reports = _collect(ranks, Path(folder), limit, deaths)
        for _, conn in ranks:
            with contextlib.suppress(OSError):
                conn.send_bytes(b"all ranks have answered")
            conn.close()
        for pid, _ in ranks:
            forked.end(pid, 1.0)
        return reports


def _rank_main(
    conn: Connection,
    rank: int,
    world: int,
    fn: Callable[[int, Told], None],
    folder: Path,
    meeting: Meeting | None,
    environment: tuple[tuple[str, str], ...],
) -> None:
    forked.as_a_program(folder / f"output{rank}")
    forked.prepare()
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    told = Told(folder / f"strikes{rank}")
    error: Caught | None = None
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if meeting is not None:
                meeting.begin(rank, world, folder)
            fn(rank, told)
        except BaseException as raised:
            error = Caught.of(raised)
            if not isinstance(raised, SystemExit):
                # As the interpreter does with what nobody caught.
                sys.last_value = raised
                sys.excepthook(type(raised), raised, raised.__traceback__)
                error = replace(error, text=Caught.of(raised).text)  # with what that noted
    report = Report(rank, "raised" if error else "done", error, told.caught, told.state)
    report.warned = [*(str(warning.message) for warning in warned), *logged]
    conn.send_bytes(pickle.dumps(report))
    if error is None and not (meeting is not None and meeting.hosted):
        with contextlib.suppress(EOFError, OSError):
            conn.recv_bytes()  # until all have answered: a peer may still read what this rank sent
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(1 if error else 0)


def _collect(ranks: list[tuple[int, Connection]], folder: Path, limit: float, deaths: tuple[int, ...]) -> list[Report]:
    reports: dict[int, Report] = {}
    waiting = {conn: rank for rank, (_, conn) in enumerate(ranks)}
    deadline = time.monotonic() + limit
    while not set(waiting.values()) <= set(deaths) and (left := deadline - time.monotonic()) > 0:
        for conn in wait(list(waiting), timeout=left):
            assert isinstance(conn, Connection)
            rank = waiting.pop(conn)
            try:
                reports[rank] = pickle.loads(conn.recv_bytes())
            except (EOFError, OSError):
                status = os.waitpid(ranks[rank][0], 0)[1]
                reports[rank] = Report(rank, "died", code=os.waitstatus_to_exitcode(status))
    hung = set(waiting.values())
    for rank in hung:
        forked.stacks(ranks[rank][0])
    if hung:
        time.sleep(0.3)
    for rank in hung:
        reports[rank] = Report(rank, "hung")
    for rank, report in reports.items():
        report.output = _read(folder / f"output{rank}")[-6000:]
        lines = _read(folder / f"strikes{rank}").split("\n")
        report.strikes = [(float(line.split()[0]), int(line.split()[1])) for line in lines if line]
    return [reports[rank] for rank in range(len(ranks))]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
