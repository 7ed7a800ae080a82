"""All tests in several runs of pytest side by side, which share a queue of test files.

    python -m tests.workers -m "not slow"       what `make test` runs; options go to every worker
    python -m tests.workers --full              what `make test-full` runs

    worker        tiers
    threads-1     ranks that are threads; then pure
    processes-1   the others, those with processes first; then threads
    processes-2   the others, those with processes after fake; then threads

A worker takes the next file that no other one has taken (tests/harness/queue.py). Ranks of some tests are forks of
their worker, which must not have run ranks that are threads: so those come last, or from a worker of their own. The
pure tests run in any worker, and come late in each, so that all end at the same time. Tests of processes wait much of
their time, for each other and for time limits: a second worker keeps a core busy where one does not. It begins at the
other end, because two that begin with processes start the same pools of them twice. A second one for threads from the
beginning leaves programs of many processes without a core, and their time limits pass. The first worker prints as it
goes, the others when they are over. The exit status is the worst one; where a signal ended a worker, the last lines say
which test ran and where its threads were. With --full the last line but one says what was left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
_FIRST = ("procs", "hosts", "device", "faults")
_ALONE = ("gpu", "golden", "fake")
# Tiers of a worker in their order; together all of tests/ (tests/pure/test_workers.py).
TIERS: dict[str, tuple[str, ...]] = {
    "threads-1": ("threads", "pure"),
    "processes-1": (*_FIRST, *_ALONE, "pure", "threads"),
    "processes-2": (*_ALONE, *reversed(_FIRST), "pure", "threads"),
}


def commands(folder: Path, options: list[str]) -> dict[str, list[str]]:
    """The command of each worker, by its name. `folder`: empty, for what they tell each other."""
    found = {}
    for name, tiers in TIERS.items():
        # What failed last is remembered in a folder that two runs must not share.
        own = ["-p", "tests.harness.queue", f"--queue={folder}", "-o", f"cache_dir=.pytest_cache/{name}"]
        own.append(f"--last-words={last_words(folder, name)}")
        paths = [f"tests/{tier}" for tier in tiers]
        found[name] = [sys.executable, "-m", "pytest", *own, *options, *paths]
    return found


def last_words(folder: Path, name: str) -> Path:
    """The file in which a worker leaves the test that it runs, and its stacks if a signal ends it."""
    return folder / f"{name}.last-words"


def note_left_out(folder: Path, line: str) -> None:
    """Keep `line`, in which a worker says what it left out of all tests, for the end of the run."""
    (folder / f"{os.environ.get('TESTS_WORKER', 0)}.left-out").write_text(line)


def _said_left_out(folder: Path) -> list[str]:
    """What a worker said that collects all tests: it left out the most."""
    return sorted((path.read_text() for path in folder.glob("*.left-out")), key=len)[-1:]


def run(commands: dict[str, list[str]], shown: str, folder: Path) -> int:
    """Run all of them at once, in the root of the repository. Prints what `shown` writes as it comes, then what the
    others wrote, then the last words of those that a signal ended; returns the worst status."""
    begun = time.monotonic()
    outputs: dict[str, IO[bytes]] = {name: tempfile.TemporaryFile() for name in commands if name != shown}
    # Thousands of processes import the same modules. Each would compile them anew, and pytest its assertions.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    runs = {
        name: subprocess.Popen(
            words,
            cwd=ROOT,
            env={**kept, "TESTS_WORKER": str(number)},
            stdout=outputs.get(name),
            stderr=subprocess.STDOUT if name in outputs else None,
        )
        for number, (name, words) in enumerate(commands.items())
    }
    lines = []
    try:
        for name in [shown, *outputs]:
            runs[name].wait()
            if name in outputs:
                outputs[name].seek(0)
                print(f"\n---- {name} ----", flush=True)
                sys.stdout.buffer.write(outputs[name].read())
                sys.stdout.flush()
            lines.append(f"{name}: status {runs[name].returncode}")
    finally:
        for one in runs.values():
            if one.poll() is None:
                one.terminate()
                one.wait()
        for output in outputs.values():
            output.close()
    for name, one in runs.items():
        if one.returncode < 0 and last_words(folder, name).exists():
            print(f"\n---- {name} was ended by signal {-one.returncode} ----\n{last_words(folder, name).read_text()}")
    print("", *_said_left_out(folder), sep="\n", end="")
    print(f"\n{'; '.join(lines)}; {(time.monotonic() - begun) / 60:.1f} minutes in all", flush=True)
    return max(abs(one.returncode) for one in runs.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        workers = commands(Path(folder), sys.argv[1:])
        sys.exit(run(workers, shown=next(iter(workers)), folder=Path(folder)))
