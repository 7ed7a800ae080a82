"""Programs as users write them (tests/programs), with one import changed: they come to what plain training and torch's
FSDP2 come to, bit by bit, or the table there says why not."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

from tests.harness import programs
from tests.harness.errors import RanksFailed
from tests.harness.pool import pool
from tests.programs import PROGRAMS

TIMEOUT = 110.0
# Half of the digits of float64: rounding that grew by less than 2**26, where any other fault is visible.
HALF = 2.0**-26


def _run(name: str, impl: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """`programs.run`, every command checked against the rules. What the table says that it warns of has to be warned
    of, and nothing else."""
    os.environ["FULLSHARD_CHECK"] = "1"
    text = PROGRAMS[name].warns if impl == "fullshard" else ""
    with warnings.catch_warnings(record=bool(text)) as caught:
        if impl == "torch":
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        if text:
            warnings.simplefilter("error")
            warnings.filterwarnings("always", text)
        result = programs.run(name, impl, dtype)
    assert not text or caught, f"{name}: expected a warning, {text!r}"
    return result


def _beside(rank: int, name: str, other: str, dtype: torch.dtype, allowed: float) -> list[str]:
    return programs.differences(_run(name, "fullshard", dtype), _run(name, other, dtype), allowed)


def _compare(name: str, other: str, kind: str) -> list[str]:
    dtype, allowed = (torch.float64, HALF) if kind == "digits" else (torch.float32, 0.0)
    found = pool(PROGRAMS[name].ranks).run(_beside, name, other, dtype, allowed, timeout=TIMEOUT)
    return [f"rank {rank}, {line}" for rank, lines in enumerate(found) for line in lines]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_plain_training(name: str) -> None:
    program = PROGRAMS[name]
    if program.plain == "none":  # it runs; what it comes to is compared with torch's
        pool(program.ranks).run(_alone, name, timeout=TIMEOUT)
        return
    if program.plain == "differs":
        assert _compare(name, "plain", "bits") != []
    else:
        assert _compare(name, "plain", program.plain) == []


def _alone(rank: int, name: str) -> None:
    _run(name, "fullshard")


@pytest.mark.slow
@pytest.mark.sample(full=20)
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_torch(name: str) -> None:
    """Torch's half: that it agrees, and where it is said not to, that it does not."""
    kind = PROGRAMS[name].torch
    if kind == "fails":
        with pytest.raises(RanksFailed):
            pool(PROGRAMS[name].ranks).run(_torch_alone, name, timeout=TIMEOUT)
    elif kind == "differs":
        assert _compare(name, "torch", "bits") != []
    elif kind != "none":
        assert _compare(name, "torch", kind) == []


def _torch_alone(rank: int, name: str) -> None:
    _run(name, "torch")
