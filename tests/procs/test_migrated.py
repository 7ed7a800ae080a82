"""Programs of FSDP1, DDP and FSDP2, before and after `fullshard migrate`: on two ranks they come to the same. The guide
of docs/migration.md is run by test_pages.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import migrations
from tests.harness.pool import pool

QUICK = ("seed_000_removed", "seed_001", "helper_module", "trainer_class", "ddp_optimizer_first", "optimizer_state")


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in migrations.names()]
)
def test_a_migrated_program_trains_the_same(name: str, tmp_path: Path) -> None:
    found, new = migrations.migrated(name, tmp_path / name)
    assert found.texts
    assert pool(2).run(migrations.compare, str(migrations.entry(name)), str(new), timeout=60) == [[], []]


def test_there_are_as_many_programs_as_promised() -> None:
    assert len(migrations.names()) >= 30
