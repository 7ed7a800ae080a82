"""State of parameters on several axes: state dicts, DCP's full ones, initialisation, and loading back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, run
from tests.harness.threads import run_ranks
from tests.threads.test_tensor_parallel import Block, batch, blocks, collect, plan_tp

# torch says so of the last layer; nothing here edits its output.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
FULL = StateDictOptions(full_state_dict=True)


def even() -> nn.Sequential:
    """Every dim is a multiple of both axes: torch's loader of full state dicts asserts so for strided shards."""
    return nn.Sequential(Block(8, 12), Block(8, 12), nn.Linear(8, 4))


def inputs(step: int, dp_rank: int) -> torch.Tensor:
    return torch.cat([batch(step, dp_rank), batch(step + 50, dp_rank)[..., :2]], dim=-1)


def parallel(impl: Implementation, model: Any, mesh: DeviceMesh) -> Any:
    plan_tp(model, mesh["tp"], sequence=False)
    for block in model:
        impl.fully_shard(block, mesh=mesh["dp"])
    return impl.fully_shard(model, mesh=mesh["dp"])


@pytest.mark.slow
@behaviour("full state dicts of 2-D parameters and their AdamW state, and loading them back", area="state")
@for_each_implementation
def test_full_state_dicts_go_out_and_come_back(impl: Implementation) -> None:
    """Keys and values are those of the plain model; loaded into another sharded model, the next step is the same."""
    models, others = ([even() for _ in range(4)] for _ in range(2))
    for model in models:
        model.load_state_dict(models[0].state_dict())
    names = list(models[0].state_dict())

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, other = (parallel(impl, made[rank], mesh) for made in (models, others))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other)]

        def step(model: Any, optimizer: Any, number: int) -> None:
            optimizer.zero_grad()
            model(inputs(number, mesh.get_local_rank("dp"))).square().mean().backward()
            optimizer.step()

        step(model, optimizers[0], 0)
        sharded = model.state_dict()
        assert list(sharded) == names and all(isinstance(value, DTensor) for value in sharded.values())
        full = get_model_state_dict(model, options=FULL)
        state = get_optimizer_state_dict(model, optimizers[0], options=FULL)
        assert list(full) == names and set(state["state"]) == set(names)  # type: ignore[arg-type]
        for name, p in model.named_parameters():
            assert torch.equal(full[name], p.full_tensor())
        set_model_state_dict(other, dict(full), options=FULL)
        # A copy: torch loads scalars as they are, and the two optimizers would count one step together.
        set_optimizer_state_dict(other, optimizers[1], copy.deepcopy(state), options=FULL)
        for m, optimizer in zip((model, other), optimizers, strict=True):
            step(m, optimizer, 1)
        first, second = (collect(m, o) for m, o in zip((model, other), optimizers, strict=True))
        for name, value in first.items():
            tolerance.assert_close(value, second[name], what=name)

    run(rank_main, impl, world=4)


@behaviour("meta device, tensor parallelism, sharding, to_empty, then initialisation", area="initialisation")
@for_each_implementation
def test_meta_device_then_both_parallelisms_then_memory(impl: Implementation) -> None:
    wanted = even().state_dict()

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model: Any = even()
        parallel(impl, model, mesh)
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        model.to_empty(device="cpu")
        set_model_state_dict(model, dict(wanted), options=FULL)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), wanted[name]), name
        model(inputs(0, mesh.get_local_rank("dp"))).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(rank_main, impl, world=4)


def test_plain_tensors_load_into_uneven_shards_of_two_axes() -> None:
    """Rows 5 over tp 2 over dp 2: every rank takes its own part of the whole tensor."""
    wanted = {name: torch.randn_like(value) for name, value in blocks().state_dict().items()}

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(FULLSHARD, blocks(), mesh)
        model.load_state_dict(wanted)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), wanted[name]), name
        with fullshard.full_params(model):
            assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())

    run_ranks(4, rank_main)


def test_steps_on_shards_and_the_report_know_two_axes() -> None:
    """Our own tools on 2-D parameters: `step_on_shards` and `report`."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallel(FULLSHARD, blocks(), mesh)
        infos = fullshard.report(model).units
        assert infos[1].param_names[2] == "0.up.weight" and infos[1].world == 2
        assert infos[1].numel == 6 + 6 + 10 * 6 + 10 + 6 * 10 + 6
        # This rank's part of the tp mesh is what its data-parallel ranks share.
        assert infos[1].padded_local_numel < infos[1].numel / 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fullshard.step_on_shards(optimizer)
        model(batch(0, mesh.get_local_rank("dp"))).square().mean().backward()
        optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())

    run_ranks(4, rank_main)
