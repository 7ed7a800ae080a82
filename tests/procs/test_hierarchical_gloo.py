"""Reductions in two hops over gloo, 4 ranks as 2 nodes of 2: plain training, late ranks, failures, who disagrees."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.comm.hierarchical import HierarchicalReduce
from fullshard.engine import unit_of
from tests.harness.behaviours import behaviour
from tests.harness.models import BY_NAME, Trained, adamw, assert_same_training, collect, train_reference
from tests.harness.parity import assert_same_bits, environment
from tests.harness.pool import pool

STEPS = 3
WORLD = 4
TIMEOUT = 60.0
HOPS = {"FULLSHARD_COMMUNICATION": "hierarchical", "FULLSHARD_LOCAL_WORLD_SIZE": "2"}


def _hops(model: nn.Module) -> list[bool]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    channels = [channel for unit in units for known in unit._reduces for channel in known.values()]
    return [isinstance(channel, HierarchicalReduce) for channel in channels]


def _train(
    rank: int, name: str, dials: dict[str, str], *, jitter: bool = False, shape: tuple[int, ...] = (WORLD,)
) -> Trained:
    case = BY_NAME[name]
    with environment(dials):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model: Any = case.shard(case.build(), fullshard.fully_shard, mesh=mesh)
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            if jitter:
                time.sleep(0.02 * ((rank * 7 + step * 3) % 4))
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                case.loss(model, case.batch(2 * step + micro, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert set(_hops(model)) == {"FULLSHARD_LOCAL_WORLD_SIZE" in dials}
        return collect(model, optimizer)


def _ways(rank: int, name: str) -> tuple[Trained, ...]:
    return (
        _train(rank, name, HOPS),
        _train(rank, name, HOPS, jitter=True),
        _train(rank, name, {"FULLSHARD_COMMUNICATION": "torch"}),
        _train(rank, name, {}),
    )


@behaviour(
    "gradients reduced in two hops, 2 nodes of 2: plain training, the same bits whoever is late ({name})",
    area="communication",
    torch="none",
    reason="not in torch",
)
@pytest.mark.parametrize("name", ["tied", "frozen", "tiny_dims"])
def test_training_as_plain_training_whoever_is_late(name: str) -> None:
    """Two micro-batches, the first without messages; beside one hop, and torch's messages."""
    case = BY_NAME[name]

    def loss(model: nn.Module, batches: Any) -> torch.Tensor:
        return case.loss(model, batches[0]) + case.loss(model, batches[1])

    batches: Any = [
        [(case.batch(2 * step, rank), case.batch(2 * step + 1, rank)) for rank in range(WORLD)] for step in range(STEPS)
    ]
    plain = train_reference(case.build(), loss, batches)
    everyones = pool(WORLD).run(_ways, name, timeout=TIMEOUT)
    first = everyones[0][0]
    for hops, late, *others in everyones:
        assert_same_bits(hops, first)
        assert_same_bits(late, first)
        for other in others:
            assert_same_training(other, plain)
    assert_same_training(first, plain)


def _failing(rank: int, place: str) -> Trained:
    """Rank 3 raises in a backward that has messages in both hops; then all try again."""
    case = BY_NAME["transformer"]
    with environment({**HOPS, "FULLSHARD_REDUCTIONS": "1"}):
        model: Any = case.shard(case.build(), fullshard.fully_shard)
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            if step == 1 and place:
                armed = [rank == 3]

                def fail(_: Any, armed: list[bool] = armed) -> None:
                    if armed and armed.pop():
                        raise ValueError("mine")

                # A peer that is told in the moment before the exception leaves the backward hears no more than that.
                told = "mine|its backward ended with an exception"
                with pytest.raises(ValueError if rank == 3 else fullshard.PeerFailed, match=told):
                    with fullshard.guard(model):
                        loss = case.loss(model, case.batch(step, rank))
                        hook = model.get_submodule(place).register_full_backward_pre_hook(lambda *_: fail(None))
                        loss = case.loss(model, case.batch(step, rank))
                        try:
                            loss.backward()
                        finally:
                            hook.remove()
                model.zero_grad()
            case.loss(model, case.batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return collect(model, optimizer)


def test_a_rank_that_fails_between_the_hops() -> None:
    """Its peers are told wherever they wait, in the first hop or the second; what follows is as if it had not been."""
    expected = pool(WORLD).run(_failing, "", timeout=TIMEOUT)[0]
    for trained in pool(WORLD).run(_failing, "layers.0.attention", timeout=TIMEOUT):
        assert_same_bits(trained, expected)


def _uneven(rank: int) -> None:
    """Nodes of one, one and two ranks, as torchrun has it: `auto` stays with one hop, two are refused on all ranks."""
    case = BY_NAME["one_unit"]
    with environment({"LOCAL_WORLD_SIZE": "1" if rank < 2 else "2"}):
        model: Any = case.shard(case.build(), fullshard.fully_shard)
        case.loss(model, case.batch(0, rank)).backward()
        assert _hops(model) == [False]
        with pytest.raises(fullshard.RanksDisagree, match=r"1 on ranks 0 and 1, 2 on ranks 2 and 3"):
            model.set_communication("hierarchical")
    with environment({"LOCAL_WORLD_SIZE": "2"}):
        model = case.shard(case.build(), fullshard.fully_shard)
        case.loss(model, case.batch(0, rank)).backward()
        assert _hops(model) == [True]
        # A rank alone changes how it sends: nobody mistakes one kind of message for the other.
        if rank == 1:
            model.set_communication("all-to-all")
        with pytest.raises(fullshard.RanksDisagree, match="/2x2"):
            case.loss(model, case.batch(1, rank)).backward()


@behaviour(
    "two hops with unequal nodes, or asked for by some ranks alone: an error that names the ranks",
    area="communication",
    torch="none",
    reason="not in torch",
)
def test_ranks_that_disagree_about_nodes() -> None:
    pool(WORLD).run(_uneven, timeout=TIMEOUT)
