"""`context_parallel` on a device beside torch's own attention, and torch's own `context_parallel`, on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from tests.harness import tolerance


@pytest.mark.parametrize("variant", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_beside_torch(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    """Result and gradients: of plain attention, and on CUDA also of the context that torch has."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, weight = (torch.randn(2, 4, 64, 16, generator=generator).to(device, dtype) for _ in range(4))
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("cp",))

    def run() -> list[torch.Tensor]:
        parts = [one.clone().requires_grad_() for one in (query, key, value)]
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, parts, weight)]

    expected = run()
    with fullshard.context_parallel(mesh, variant=variant):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance.allowed(other, 4 * 16 * 64, dtype=dtype)
    if device.type != "cuda" or dtype is torch.float32:
        return  # torch's has kernels in half precision alone
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(mesh, buffers=[], buffer_seq_dims=[]):
        theirs = run()
    for one, other in zip(found, theirs, strict=True):
        assert (one - other).abs().max() <= tolerance.allowed(other, 4 * 16 * 64, dtype=dtype)
