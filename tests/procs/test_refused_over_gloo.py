"""tests/threads/test_refused_commands.py with connections that are really cut."""

from __future__ import annotations

import pytest
import torch

from tests.harness.forked import run_forks
from tests.threads.test_refused_commands import refused_steps, undisturbed_steps

STEPS = 30


@pytest.mark.slow
def test_any_command_may_be_the_first_that_is_refused() -> None:
    expected = run_forks(2, undisturbed_steps, (STEPS,), 60)
    for (found, refused), plain in zip(run_forks(2, refused_steps, (STEPS,), 60), expected, strict=True):
        assert all(map(torch.equal, found, plain))
        assert {"unshard", "wait", "reshard", "reduce"} <= refused
