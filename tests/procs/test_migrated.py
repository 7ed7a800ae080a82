"""Programs of FSDP1, DDP and FSDP2, before and after `fullshard migrate`: on two ranks they come to the same. The guide
of docs/migration.md is run by test_pages.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import migrations
from tests.harness.pool import pool

# Which of all programs run in `make test`.
CONVERTED = ("package_beside", "ddp_objects_first", "ddp_grad_sync_flag")
ADAPTED = ("flags", "blocks_in_blocks")


@pytest.mark.sample(2, full=30)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CONVERTED else pytest.mark.slow) for name in migrations.names()]
)
def test_a_migrated_program_trains_the_same(name: str, tmp_path: Path) -> None:
    found, new = migrations.migrated(name, tmp_path / name)
    assert found.texts
    assert pool(2).run(migrations.compare, str(migrations.entry(name)), str(new), timeout=60) == [[], []]


@pytest.mark.sample(full=30)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ADAPTED else pytest.mark.slow)
        for name in filter(migrations.uses_fsdp1, migrations.names())
    ],
)
def test_a_program_with_the_adapter_trains_the_same(name: str, tmp_path: Path) -> None:
    """Its imports alone have changed."""
    found, new = migrations.migrated(name, tmp_path / name, adapter=True)
    assert found.texts
    assert pool(2).run(migrations.compare, str(migrations.entry(name)), str(new), timeout=60) == [[], []]


def test_there_are_as_many_programs_as_promised() -> None:
    assert len(migrations.names()) + len(migrations.told()) >= 65
