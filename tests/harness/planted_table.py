"""The faults of planted_faults.py and planted_later.py, and what `fullshard verify` says of each.

$ python -m tests.harness.planted_table            all of them, some three minutes
$ python -m tests.harness.planted_table replica    those with that word in their name
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.harness.errors import RanksFailed
from tests.harness.planted_faults import PLACES, PLANTED
from tests.harness.planted_later import LATER
from tests.harness.verified import compare, explain, record_planted


def main(words: list[str]) -> None:
    chosen = {
        name: fault for name, fault in (PLANTED | LATER).items() if not words or any(word in name for word in words)
    }
    found, right = [], []
    print(f"{'fault':<66}{'found':<30}{'place':<14}said")
    for name, fault in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                difference = explain(compare(Path(folder), record_planted(Path(folder), fault)), fault)
            except RanksFailed as error:
                print(f"{name:<66}{'the training failed':<30}{'':<14}{error.args[0].splitlines()[0]}", flush=True)
                continue
        if difference is None:
            print(f"{name:<66}MISSED", flush=True)
            continue
        found.append(name)
        is_right = difference.cause.startswith(f"{PLACES[fault.place]}:")
        right += [name] * is_right
        where = f"step {difference.step}, {difference.phase}"
        print(f"{name:<66}{where:<30}{'right' if is_right else 'WRONG':<14}{difference.cause}", flush=True)
    print(f"{len(found)} of {len(chosen)} found, the place of {len(right)} right")
    missed = sorted(set(chosen) - set(found))
    print(f"missed: {', '.join(missed) or 'none'}; wrong place: {', '.join(sorted(set(found) - set(right))) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
