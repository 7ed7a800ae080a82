"""Which worlds a test made: `run_ranks`, `fake_world` and the pool note theirs; docs/compatibility.md shows them."""

from __future__ import annotations

# "threads 2", "fake 1000", "gloo 4"; emptied by who asks, before each test.
SEEN: set[str] = set()
# How the reason begins for which a test was left out that asks for another number of ranks (`pytest --world`).
OTHER_WORLD = "asks for"


def note(tier: str, world: int) -> None:
    SEEN.add(f"{tier} {world}")
