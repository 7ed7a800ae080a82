"""The laws of benchmarks/scale.py for files: what a save and a load ask the file system for."""

from __future__ import annotations

from benchmarks.scale import Law, file_calls, law_of


def test_calls_with_a_file_name() -> None:
    found = file_calls((2, 4, 8))
    save, load, files = (law_of({world: counts[i] for world, counts in found.items()}) for i in range(3))
    assert files == Law(1, 3)
    assert save == Law(3, 19)
    assert load == Law(8, 2)
