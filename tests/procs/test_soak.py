"""Nothing grows with the steps: descriptors, threads, tensors, hooks, groups, registries, memory (harness/soak.py).

`make test` has nine turns; the minute is in `make test-full`.
"""

from __future__ import annotations

import pytest

from tests.harness.soak import ALLOWED, LEAKS, growth, soak_on, table

SEEN_AS = {
    "memory": {"resident KiB"},
    "descriptor": {"descriptors", "objects"},
    "thread": {"threads", "objects"},
    "tensor": {"tensors", "bytes"},
    "object": {"objects"},
    "hook": {"hooks"},
    "group": {"groups", "descriptors", "threads", "objects"},
    "registry": {"registries"},
}


@pytest.mark.slow
def test_nothing_grows() -> None:
    """Training, evaluation, checkpoints, exceptions and retries, windows that do not fit."""
    histories = soak_on(2, 0.0, 9)
    assert [growth(history) for history in histories] == [{}, {}], table(histories)


@pytest.mark.slow
def test_every_leak_is_seen() -> None:
    (history,) = soak_on(1, 0.0, 9, leak="all")
    assert growth(history).keys() == ALLOWED.keys(), table([history])


@pytest.mark.slow
@pytest.mark.parametrize("leak", LEAKS)
def test_each_leak_is_seen_as_what_it_is(leak: str) -> None:
    (history,) = soak_on(1, 0.0, 9, leak=leak)
    grew = growth(history).keys()
    assert grew and grew <= SEEN_AS[leak], table([history])


@pytest.mark.slow
@pytest.mark.hang_after(400)
def test_nothing_grows_in_a_minute() -> None:
    histories = soak_on(2, 60.0, 9)
    assert [growth(history) for history in histories] == [{}, {}], table(histories)
