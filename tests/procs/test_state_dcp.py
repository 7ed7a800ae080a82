"""Checkpoints by torch.distributed.checkpoint, over gloo processes: what was saved is trained on, in any world.

What `get_*` gives is compared with torch's FSDP2 in tests/threads/test_state_dicts.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation
from tests.harness.models import BY_NAME, Trained, adamw, assert_same_training, collect
from tests.harness.pool import pool
from tests.threads.test_state_dicts import AFTER, BEFORE, copied, finish, reference, train, trained

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
TIMEOUT = 60.0


class Stateful(dcp.stateful.Stateful):
    """As torch's tutorial writes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# ---- files -----------------------------------------------------------------------------------------------------


def _save(rank: int, name: str, impl: str, folder: str) -> Trained:
    """Train the first steps on this world, and save."""
    case = BY_NAME[name]
    model, optimizer = trained(case, IMPLEMENTATIONS[impl], rank)
    here = collect(model, optimizer)
    dcp.save({"app": Stateful(model, optimizer)}, checkpoint_id=folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder + "-model")
    return here


def _load(rank: int, name: str, impl: str, folder: str) -> Trained:
    """What another program, on another world, finds in the files; then its model trains on."""
    case = BY_NAME[name]
    model = case.shard(case.build(seed=1), IMPLEMENTATIONS[impl].fully_shard)
    optimizer = adamw(model.parameters())
    dcp.load({"app": Stateful(model, optimizer)}, checkpoint_id=folder)
    found = collect(model, optimizer)
    # Into the tensors themselves, as programs without the helpers do.
    other = case.shard(case.build(seed=2), IMPLEMENTATIONS[impl].fully_shard)
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder + "-model")
    assert_same_training(Trained(collect(other, adamw(other.parameters())).params), Trained(found.params), 0)
    train(case, model, optimizer, rank, range(BEFORE, BEFORE + AFTER))
    return found


@pytest.mark.sample(1)
@behaviour("a DCP checkpoint of either is read by either, on another world", area="state", torch="equal")
@pytest.mark.parametrize(
    ("saver", "writers", "loader", "readers"),
    [
        ("fullshard", 2, "fullshard", 3),
        ("fullshard", 3, "fullshard", 1),
        ("fullshard", 1, "torch", 2),
        ("torch", 2, "fullshard", 3),
    ],
)
@pytest.mark.parametrize("name", ["tied", "tiny_dims"])
def test_a_checkpoint_is_read_on_another_world_and_by_the_other_library(
    name: str, saver: str, writers: int, loader: str, readers: int, tmp_path: Path
) -> None:
    """Bit by bit: every rank of the readers finds what the writers had."""
    folder = str(tmp_path / "checkpoint")
    written = pool(writers).run(_save, name, saver, folder, timeout=TIMEOUT)[0]
    for found in pool(readers).run(_load, name, loader, folder, timeout=TIMEOUT):
        assert_same_training(found, written, 0)


def _alone(rank: int, impl: str) -> bool:
    """A rank saves its own part alone while the others compute: nothing it does may wait for them."""
    case = BY_NAME["transformer"]
    model, optimizer = trained(case, IMPLEMENTATIONS[impl], rank)
    loss = case.loss(model, case.batch(7, rank))
    state = (model.state_dict(), optimizer.state_dict()) if rank == 1 else None
    dist.barrier()
    loss.backward()
    optimizer.step()
    return state is not None and all(isinstance(value, DTensor) for value in state[0].values())


@behaviour(
    "one rank alone takes a state dict in the middle of a step",
    area="state",
    torch="better",
    reason="torch's frees the full parameters of that rank, which is then one gather later than the others",
)
def test_one_rank_alone_takes_a_state_dict_in_the_middle_of_a_step(impl: Implementation) -> None:
    assert pool(2).run(_alone, impl.name, timeout=20.0) == [False, True]


# ---- set_* -----------------------------------------------------------------------------------------------------


def _set(rank: int, name: str, impl_name: str) -> None:
    case, impl = BY_NAME[name], IMPLEMENTATIONS[impl_name]
    expected = reference(name, 2)
    source, source_optimizer = trained(case, impl, rank)
    for full, broadcast, on_meta in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        options = StateDictOptions(full_state_dict=full, cpu_offload=full and broadcast)
        state, optimizer_state = get_state_dict(source, source_optimizer, options=options)
        assert bool(state) == (rank == 0 or not broadcast)
        with torch.device("meta" if on_meta else "cpu"):
            model = case.make() if on_meta else case.build(seed=1)
        case.shard(model, impl.fully_shard)
        setting = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast)
        # Those on the meta device get data by assignment. An optimizer made before holds torch's old ones.
        optimizer = None if on_meta and impl is TORCH else adamw(model.parameters())
        if optimizer is not None and not on_meta:
            train(case, model, optimizer, rank, range(1))
        if broadcast:  # set_state_dict takes the empty dicts of the other ranks for "nothing to load", and hangs
            set_model_state_dict(model, copied(state), options=setting)
            optimizer = optimizer or adamw(model.parameters())
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizer_state), options=setting)
        else:
            assert optimizer is not None
            states = {"model_state_dict": copied(state), "optim_state_dict": copy.deepcopy(optimizer_state)}
            set_state_dict(model, optimizer, **states, options=setting)
        finish(case, model, optimizer, rank, expected)


@pytest.mark.slow
@behaviour("`set_model_state_dict`, `set_optimizer_state_dict`: sharded, full, broadcast from rank 0", area="state")
@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device:UserWarning", "ignore:Multiple backends:UserWarning")
@for_each_implementation
@pytest.mark.parametrize("name", ["residual", "tiny_dims"])
def test_what_is_set_is_trained_on(name: str, impl: Implementation) -> None:
    """Sharded, full on every rank, and full on rank 0 alone and broadcast; also into parameters on the meta device."""
    pool(2).run(_set, name, impl.name, timeout=TIMEOUT)
