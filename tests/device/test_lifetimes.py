"""Lifetimes, laziness and coalescing: what C++ keeps longer than Python, when connections are made, what a launch is.

Every seeded fault of them is found over a backend of the shape of NCCL, and the sound engine shows nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.harness import lifetimes
from tests.harness.errors import RanksFailed
from tests.harness.lifetime_faults import LIFETIMES, Lifetime
from tests.harness.pool import pool
from tests.harness.seeded_faults import SeededFault, seeded

# By name and number.
PROGRAMS = {
    f"{i} {one.program.__name__}": one
    for i, one in enumerate({(x.program, x.args, x.world, x.backend): x for x in LIFETIMES.values()}.values())
}
PROGRAMS["closes"] = Lifetime(SeededFault("", "", ""), lifetimes.closes)


def _run(rank: int, program: Any, args: tuple[Any, ...], name: str) -> str:
    with seeded(LIFETIMES[name].fault) if name else nullcontext():
        return _told(program, rank, *args)


def _told(program: Any, *args: Any) -> str:
    try:
        return str(program(*args))
    except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if one.hangs or one.races else name for name, one in LIFETIMES.items()],
)
def test_a_fault_of_a_lifetime_is_found(name: str) -> None:
    one = LIFETIMES[name]
    try:
        found = pool(one.world, backend=one.backend).run(_run, one.program, one.args, name, timeout=20)
    except RanksFailed as failed:
        assert " hung" in str(failed)
        return
    assert any(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_sound_engine_shows_nothing(program: str) -> None:
    one = PROGRAMS[program]
    found = pool(one.world, backend=one.backend).run(_run, one.program, one.args, "", timeout=40)
    assert found == [""] * one.world


def test_there_are_thirty() -> None:
    assert len(LIFETIMES) >= 30
