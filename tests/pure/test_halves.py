"""`make test` runs all tests, in two halves side by side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.halves import HALVES, ROOT, command, run


def test_every_test_is_in_one_half() -> None:
    tiers = sorted({path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")})
    assert sorted(tier for half in HALVES.values() for tier in half) == tiers


def test_options_reach_both_halves() -> None:
    for half, tiers in HALVES.items():
        words = command(half, ["-m", "not slow"])
        assert words[:3] == [sys.executable, "-m", "pytest"] and "not slow" in words
        assert words[-len(tiers) :] == [f"tests/{tier}" for tier in tiers]


@pytest.mark.parametrize(("first", "second", "worst"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (2, 1, 2)])
def test_the_worse_half_decides(
    first: int, second: int, worst: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And both are shown, and run at the same time: each waits for the other to have begun."""
    commands = {}
    for mine, other, status in (("a", "b", first), ("b", "a", second)):
        code = f"""
import pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
(here / {mine!r}).touch()
end = time.monotonic() + 30
while not (here / {other!r}).exists() and time.monotonic() < end:
    time.sleep(0.01)
print("half", {mine!r}, (here / {other!r}).exists())
sys.exit({status})
"""
        commands[mine] = [sys.executable, "-c", code]
    assert run(commands, shown="a") == worst
    printed = capfd.readouterr().out
    assert "half a True" in printed and "half b True" in printed
    assert f"a: status {first}; b: status {second}" in printed
