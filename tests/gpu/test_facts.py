"""A comparison on a device: the answer is there a step later, without a wait of the host."""

from __future__ import annotations

import pytest
import torch

from fullshard.comm import Comparison
from tests.gpu.conftest import without_waits

OWN, OTHER = 0x0123_4567_89AB_CDEE, 0x0123_4567_89AB_CDEC


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("differ", [True, False])
def test_rows_are_compared_on_the_device(dtype: torch.dtype, differ: bool, device: torch.device) -> None:
    sent = [torch.zeros(3, 8, dtype=dtype, device=device) for _ in range(2)]
    for rows, digest in zip(sent, (OWN, OTHER if differ else OWN), strict=True):
        Comparison(digest, device, 0, {}).write(rows)
    comparison = Comparison(OWN, device, 0, {})
    torch.accelerator.synchronize(device)
    with without_waits(device):
        comparison.met(torch.stack([sent[0][0], sent[1][0]]))
        comparison.write(sent[0])
        comparison.arrive()
    assert not comparison.is_here
    assert comparison.differs() is differ
    assert comparison.is_here
    assert bool((sent[0] == 255).all()) is differ
