"""Write the figures of the documents: `python -m benchmarks.figures [NAME ...]`, all of them without a name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import engine, results
from benchmarks.figures.draw import Picture

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
FIGURES: dict[str, Callable[[], Picture]] = {
    "rows": engine.rows,
    "flat": engine.flat,
    "life": engine.life,
    "level_states": engine.level_states,
    "levels_memory": engine.levels_memory,
    "memory_step": engine.memory_step,
    "memory_ranks": engine.memory_ranks,
    "memory_peaks": results.memory_peaks,
    "step": results.step,
    "order": engine.order,
    "meshes": engine.meshes,
    "precision": engine.precision,
    "faults": results.faults,
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or FIGURES:
        (FOLDER / f"{name}.svg").write_text(FIGURES[name]().svg())
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
