"""What the package promises holds over real gloo processes with one, two and four ranks: tests of the threads tier, run
with `--ranks=gloo --world=N` in a child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.pool import pool

ROOT = Path(__file__).parents[2]
WORLDS = (1, 2, 4)


@pytest.mark.slow
@pytest.mark.sample(full=6)
@pytest.mark.hang_after(3000)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("part", range(20))
def test_the_tier_over_gloo(part: int, world: int) -> None:
    """The tests of the threads tier that ask for this number of ranks, or for any; with two, all of them. But for
    programs that have a test of their own over gloo."""
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--ranks=gloo", f"--world={world}", f"--part={part}/20"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--deselect=tests/threads/test_legal.py", "tests/threads"],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "quick"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    assert child.stdout.count("\nPASSED ") > 20


def _in_memory_of_the_group(rank: int) -> list[torch.Tensor]:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for module in (*model, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.full((2, 4), rank + 1.0)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_messages_in_memory_of_the_process_group_go_over_data_groups() -> None:
    """torch does not know a data group, so it cannot be asked for its backend."""
    plain = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    for rank in range(2):
        (plain(torch.full((2, 4), rank + 1.0)).square().sum() / 2).backward()
    for found in pool(2).run(_in_memory_of_the_group):
        for ours, theirs in zip(found, plain.parameters(), strict=True):
            assert theirs.grad is not None
            assert_close_to_tensor_max(ours, theirs.grad, 4)
