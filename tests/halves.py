"""All tests as two runs of pytest side by side: ranks that are threads, and the others, most of which start processes.

    python -m tests.halves -m "not slow"        what `make test` runs; options go to both

The second run prints as it goes, the first when it is over. Each keeps a core busy: one behind the other they take the
sum of both. The exit status is the worse one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# Tiers by the half that runs them; together all of tests/ (tests/pure/test_halves.py).
HALVES: dict[str, tuple[str, ...]] = {
    "processes": ("procs", "faults", "pure", "fake", "golden", "gpu"),
    "threads": ("threads",),
}


def command(half: str, options: list[str]) -> list[str]:
    paths = [f"tests/{tier}" for tier in HALVES[half]]
    # What failed last is remembered in a folder that two runs must not share.
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{half}", *options, *paths]


def run(commands: dict[str, list[str]], shown: str) -> int:
    """Run all of them at once, in the root of the repository. Prints what `shown` writes as it comes, and then what the
    others wrote; returns the worst status."""
    begun = time.monotonic()
    outputs: dict[str, IO[bytes]] = {name: tempfile.TemporaryFile() for name in commands if name != shown}
    runs = {
        name: subprocess.Popen(
            words, cwd=ROOT, stdout=outputs.get(name), stderr=subprocess.STDOUT if name in outputs else None
        )
        for name, words in commands.items()
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
    print(f"\n{'; '.join(lines)}; {(time.monotonic() - begun) / 60:.1f} minutes in all", flush=True)
    return max(abs(one.returncode) for one in runs.values())


if __name__ == "__main__":
    sys.exit(run({half: command(half, sys.argv[1:]) for half in HALVES}, shown="threads"))
