"""`fullshard verify` on one device: what it trains there is equal to plain training there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fullshard.program import find_program
from fullshard.verify.comparison import Comparison
from fullshard.verify.processes import train
from fullshard.verify.setting import Setting
from fullshard.verify.strategy import parse_strategy

ENTRY = "tests.harness.verified:program"


@pytest.mark.parametrize("strategy", ["zero2+bf16+micro=2+recompute", "zero3+offload"])
def test_training_is_equal(strategy: str, device: torch.device, tmp_path: Path) -> None:
    setting = Setting(ENTRY, "fullshard", parse_strategy(strategy), 1, 2, device.type)
    program = find_program(ENTRY)
    train(program, setting, device, tmp_path)
    result = Comparison(program, setting, tmp_path, device).run()
    assert result.verdict == "equal", result.difference
