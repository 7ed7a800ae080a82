"""What it costs to compare every copy of a shard, where ten thousand ranks hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.verify.replicas import Copies
from tests.harness.fake import fake_world


class _Collectives(TorchDispatchMode):
    """Names and bytes of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            tensors = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]
            self.sent.append((name, sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [8, 80_000])
def test_digests_are_sent_and_no_tensors(numel: int) -> None:
    """Two broadcasts, of 8 bytes and of 8 for each tensor and one more, whatever the tensors' size."""
    with fake_world(10_000, rank=9_999):
        mesh = init_device_mesh("cpu", (1250, 8), mesh_dim_names=("replicate", "shard"))
        model = nn.Module()
        for i in range(5):
            local = torch.zeros(numel // 8)
            value = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
            model.register_parameter(f"p{i}", nn.Parameter(value))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        copies = Copies(mesh, mesh["shard"], model, {f"p{i}": 0 for i in range(5)})
        with _Collectives() as collectives:
            copies.gradients()
        assert [sent for _, sent in collectives.sent] == [8, 8 * (1 + 5)], collectives.sent
        with _Collectives() as collectives:
            copies.stepped(optimizer)
        # The parameter, two moments and the number of steps of each.
        assert [sent for _, sent in collectives.sent] == [8, 8 * (1 + 5 * 4)], collectives.sent
        assert all("broadcast" in name for name, _ in collectives.sent)
