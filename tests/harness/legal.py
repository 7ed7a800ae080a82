"""Zero false alarms: thousands of generated legal programs raise nothing and warn of nothing.

    python -m tests.harness.legal                          2,000 programs (minutes)
    python -m tests.harness.legal --count 100 --first 500  those of the numbers 500 to 599
    python -m tests.harness.legal --first 512 --count 1    one of them; an alarm prints its traceback
    python -m tests.harness.legal --ranks gloo             ranks are processes
    python -m tests.harness.legal --jobs 2                 so many at once

Each number is a program (`legal_programs.py`): a model, a strategy, an optimizer and some steps of what users do. An
alarm is an exception, a Python warning, or a record of the level WARNING or above from fullshard's logger. The end
shows how often each thing was done, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from fullshard.policy import use_options
from tests.harness import threads
from tests.harness.errors import RanksFailed
from tests.harness.legal_programs import Program, generate, run

COUNT = 2000
SECONDS = 60.0


class Alarm(NamedTuple):
    """What a legal program was told."""

    seed: int
    text: str


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"log: {record.levelname}: {record.getMessage()}")


def alarms_of(program: Program) -> list[Alarm]:
    """Run one program on its ranks; every command is checked against the legal transitions, too."""
    records = _Records()
    logger = logging.getLogger("fullshard")
    logger.addHandler(records)
    texts: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as warned, use_options(**program.spec.options()):
            warnings.simplefilter("always")
            try:
                steps = threads.run_ranks(program.world, run, program, timeout=SECONDS)
                assert steps == [len(program.steps)] * program.world, f"ranks took {steps} steps"
            except RanksFailed as failed:
                texts.append(str(failed))
    finally:
        logger.removeHandler(records)
    texts += [f"{w.category.__name__}: {w.message} ({w.filename}:{w.lineno})" for w in warned]
    return [Alarm(program.seed, text) for text in [*texts, *records.texts]]


class Counted(NamedTuple):
    """What some programs were made of, and their alarms."""

    programs: int
    of: Counter[str]
    alarms: list[Alarm]


def count(seeds: Iterable[int]) -> Counted:
    """Run the programs of these numbers."""
    total, of, alarms = 0, Counter[str](), []
    for seed in seeds:
        program = generate(seed)
        total += 1
        of.update(features(program))
        alarms += alarms_of(program)
    return Counted(total, of, alarms)


def features(program: Program) -> set[str]:
    """What a program has, by the words of the table."""
    found = {f"setting: {program.setting}", f"ranks: {program.world}", f"optimizer: {program.optimizer}"}
    found |= {f"strategy: {program.strategy}", f"precision: {program.spec.policy}"}
    return found | {f"step: {name}" for names in program.steps for name in names}


def _shortened(text: str) -> str:
    """What the first rank said is the cause."""
    first = text.split("\n--- rank", 2)
    return "\n--- rank".join(first[:2])[-4000:]


def _job(seeds: range, ranks: str) -> Counted:
    threads.RANKS = ranks
    return count(seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: no alarm; 1: some."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.legal", description="Zero false alarms.")
    parser.add_argument("--count", type=int, default=COUNT, help=f"how many programs (default {COUNT})")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--ranks", choices=["threads", "gloo"], default="threads", help="what the ranks are")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run programs")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chunk = 50
    last = options.first + options.count
    parts = [range(i, min(i + chunk, last)) for i in range(options.first, last, chunk)]
    total, of, alarms = 0, Counter[str](), []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(_job, parts, [options.ranks] * len(parts)):
            total += part.programs
            of += part.of
            alarms += part.alarms
            print(f"{total} programs, {len(alarms)} alarms, {time.monotonic() - start:.0f} s", flush=True)
            for alarm in part.alarms:
                print(f"ALARM in program {alarm.seed}: {_shortened(alarm.text)}", flush=True)
    for name, number in sorted(of.items()):
        print(f"{number:6} {name}")
    alarmed = sorted({alarm.seed for alarm in alarms})
    result = {"programs": total, "first": options.first, "ranks": options.ranks, "alarmed": len(alarmed)}
    print(json.dumps({**result, "seeds": alarmed, "seconds": round(time.monotonic() - start)}))
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
