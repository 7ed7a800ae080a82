"""`load_state_dict` of a model with another layout: other ranks in a shard, replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks
from tests.threads.test_weights import Odd, plain


def _mesh(layout: str) -> DeviceMesh:
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == "hsdp across":
        return DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", [0, 1, 2, 3])


def _model(layout: str, seed: int) -> Any:
    model: Any = seeded(Odd, seed)
    mesh = _mesh(layout)
    fully_shard(model.q, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.own, model.scale})
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("of", "to"),
    [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("hsdp across", "fsdp"), ("hsdp", "hsdp across")],
)
@pytest.mark.sample(2, full=8)
def test_a_state_dict_of_another_layout_loads(of: str, to: str, assign: bool) -> None:
    def rank_main(rank: int) -> None:
        source, target = _model(of, 0), _model(to, 1)
        before = dict(target.named_parameters())
        loaded = target.load_state_dict(source.state_dict(), assign=assign)
        assert not loaded.missing_keys and not loaded.unexpected_keys
        for name, tensor in target.state_dict().items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(found, plain()[name]), name
        assert all(
            parameter is before[name]
            for name, parameter in target.named_parameters()
            if name[:5] != "scale" and name != "own"
        )
        assert target.head.weight is target.embed.weight

    run_ranks(4, rank_main)


def test_training_continues_from_it() -> None:
    """Two steps after the load are those of a model that never changed its layout."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def rank_main(rank: int) -> Any:
        found = []
        for layout in ("fsdp", "hsdp"):
            source: Any = seeded(make)
            fully_shard(source, mesh=_mesh("fsdp"))
            model: Any = seeded(make, seed=1) if layout == "hsdp" else source
            if layout == "hsdp":
                fully_shard(model, mesh=_mesh("hsdp"))
                model.load_state_dict(source.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(2):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(collect(model, optimizer))
        return found

    for one, other in run_ranks(4, rank_main):
        # Sums of four ranks in another order: 2 eps for each of two steps.
        assert_same_training(one, other, 4.0)


def test_ranks_that_no_group_has_are_named() -> None:
    def rank_main(rank: int) -> None:
        low, high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
        if rank in (0, 3):
            return
        source: Any = nn.Linear(3, 4)
        target: Any = nn.Linear(3, 4)
        fully_shard(target, mesh=high)
        state = dict(source.state_dict())
        state["weight"] = DTensor.from_local(
            torch.ones(2, 3), low, target.weight.placements, run_check=False, shape=(4, 3), stride=(3, 1)
        )
        with pytest.raises(RuntimeError, match=r"found meshes of ranks \[0, 1, 2\]; move them with fullshard.transfer"):
            target.load_state_dict(state)

    run_ranks(4, rank_main)
