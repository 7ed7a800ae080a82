"""What `pip install fullshard` gives: the wheel, in an environment of its own, trains the quickstart on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import try_package


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_the_wheel_trains_the_quickstart(tmp_path: Path) -> None:
    """torch is that of this environment."""
    printed = try_package.try_wheel(try_package.build(tmp_path))
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (.*)$", printed, flags=re.M)]
    assert len(losses) == 4 and losses[-1] < 0.02
