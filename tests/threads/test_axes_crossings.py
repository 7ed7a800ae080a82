"""A checkpoint saved under one combination of axes loads under any other, bitwise, model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import axes_crossings as crossings
from tests.harness.models import Trained, assert_same_training

Saved = Callable[[str], tuple[Path, Trained]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns the folder of a combination, and what is in it; each is trained and saved once."""
    there: dict[str, tuple[Path, Trained]] = {}

    def of(name: str) -> tuple[Path, Trained]:
        if name not in there:
            folder = tmp_path_factory.mktemp("saved") / name.replace(" ", "-")
            there[name] = folder, crossings.save(name, folder)
        return there[name]

    return of


# One saved and one loaded with each kind of division.
QUICK = {("tp x sp x fsdp", "fsdp on three"), ("cp ring x fsdp", "cp x tp"), ("ep x fsdp", "ep x tp")}


@pytest.mark.sample(1, full=72)
@pytest.mark.threads_only(reason="worlds of other sizes in one test")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow, id=" to ".join(pair))
        for pair in crossings.pairs()
    ],
)
def test_a_checkpoint_crosses(first: str, second: str, saved: Saved) -> None:
    folder, expected = saved(first)
    for found in crossings.load(second, folder):
        assert_same_training(found, expected, 0)
