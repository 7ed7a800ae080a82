"""`context_parallel` on a device: order on streams, late messages, values, and a digest of batches that waits for
nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from fullshard import context_parallel
from tests.harness import tolerance
from tests.harness.pool import pool

B, H, K, S, E = 2, 4, 2, 16, 8


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, S, E, generator=generator) for heads in (H, K, K, H)]


def _attends(rank: int, variant: str) -> dict[str, Any]:
    """Three attentions, forward and backward, each with what the one before returned."""
    from tests.harness import nccl, simulated

    with simulated.watched() as seen:
        mesh = init_device_mesh("simulated", (2,), mesh_dim_names=("cp",))
        cp = context_parallel(mesh, variant=variant)
        here = [one.to("simulated") for one in _whole()]
        found = []
        for _ in range(3):
            with cp:
                *parts, weight = cp.split(here, seq_dim=2)
                parts = [part.requires_grad_() for part in parts]
                out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
                grads = torch.autograd.grad(out, parts, weight)
                found = [cp.unsplit(one.detach(), seq_dim=2) for one in (out, *grads)]
                # Memory of this one is used again at once, late messages or not.
                here = [here[0] * 0.5 + found[0] * 0.5, *here[1:]]
                del out, grads, parts, weight
        torch.accelerator.synchronize()
        values = [one.cpu() for one in found]
        del found, here
        gc.collect()
    return {"values": values, "faults": [race.explain() for race in seen.races] + nccl.failures()}


def _alone() -> list[torch.Tensor]:
    here, found = _whole(), []
    for _ in range(3):
        parts = [one.clone().requires_grad_() for one in here[:3]]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        found = [out.detach(), *torch.autograd.grad(out, parts, here[3])]
        here = [here[0] * 0.5 + found[0] * 0.5, *here[1:]]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["ulysses", "ring"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_attention_on_a_device_late_messages_included(variant: str, seed: int) -> None:
    expected = _alone()
    for found in pool(2, backend="nccl").run(_attends, variant, seed=seed, timeout=90):
        assert not found["faults"], found["faults"][0]
        for one, other in zip(found["values"], expected, strict=True):
            assert (one - other).abs().max() <= 3 * tolerance.allowed(other, 4 * E * S * H)
