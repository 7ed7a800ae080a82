"""The planner on modules and layers that it was not written for, counted."""

from __future__ import annotations

import pytest
import torch

from fullshard.plan import Strategy, recurrent
from tests.harness.ordinary import FLOAT32_ONLY, ORDINARY
from tests.harness.planned import count, predict

# Of what the library holds, and of activations.
LIBRARY, ACTIVATIONS = 0.02, 0.05


CASES = [(name, dtype) for name in ORDINARY for dtype in ("", "bfloat16") if not dtype or name not in FLOAT32_ONLY]


def _expect_counted(name: str, compute: str = "") -> None:
    strategy = Strategy(ranks=2, compute=compute, reduce="float32" if compute else "", backend="fake")
    counted, simulation = count(ORDINARY[name], strategy, 16), predict(ORDINARY[name], strategy, 16)
    there = dict(zip(simulation.bytes.kinds, simulation.found.peak.nbytes, strict=True))
    peak = max(counted.step, counted.optimizer) + sum(counted[:3])
    activations = there["activations"] + there["loss"] + there["batch"]
    allowed = LIBRARY * (peak - activations) + ACTIVATIONS * activations
    assert abs(simulation.found.peak.total - peak) <= allowed, f"{peak:,}, {simulation.found.peak.total:,.0f}"


@pytest.mark.sample(1, full=60)
@pytest.mark.parametrize(("name", "compute"), CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_bytes_of_ordinary_programs_are_what_is_counted(name: str, compute: str) -> None:
    _expect_counted(name, compute)


def test_attention_of_a_layer_is_fused() -> None:
    _expect_counted("encoder, norms first")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_lstms_keep_what_onednn_keeps_where_it_takes_them() -> None:
    _expect_counted("lstm")
    _expect_counted("lstm, projected", "bfloat16")


def test_a_weight_has_the_dtype_of_its_shard_outside_of_its_unit() -> None:
    """Images are cast to it, and the unit casts them again."""
    _expect_counted("half-frozen patches", "bfloat16")


@pytest.mark.parametrize("name", ["reentrant", "not reentrant"])
def test_a_program_that_recomputes_itself(name: str) -> None:
    """In backward its forward meets the kernels of the first one."""
    _expect_counted(f"recomputed by itself, {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_of_a_long_batch_is_what_onednn_keeps(dtype: torch.dtype) -> None:
    """It has a few parts, each rounded up to a page."""
    layer = (90, 24, 33, 70, dtype)
    assert 90 * 24 > recurrent._ASKED
    assert 0 <= recurrent._asked(*layer) - recurrent.workspace_nbytes(*layer) <= 8 * 4096
