"""What ranks do together beside their steps, when one of them does not come: named, in time; and all may try again."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import PeerFailed, fully_shard
from tests.harness.fates import run_fates
from tests.harness.hang import patience

SECONDS = 5.0


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _sharded() -> Any:
    return fully_shard(_model())


def _trained() -> Any:
    model = _sharded()
    model(torch.ones(2, 4)).sum().backward()
    return model


# What is prepared on all ranks, and what the others then do. Other calls and fates are rows of tests/faults/table.
CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "check_gradients of a plain model": (_model, fullshard.check_gradients, 2),
    "joined": (_sharded, lambda model: list(fullshard.joined(model, [1])), 2),
    "replay": (_trained, lambda model: fullshard.replay(lambda: None, model), 2),
    "blocks": (_model, lambda model: fully_shard(model, reshard_after_forward=2), 4),
    "a communicator for reductions": (_sharded, lambda model: model.set_separate_reduce_scatter_group(), 2),
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _waiting(rank: int, name: str) -> tuple[str, str, float]:
    prepare, call, _ = CALLS[name]
    fullshard.find_drift(_sharded())  # a record
    prepared = prepare()
    if rank == dist.get_world_size() - 1:
        _kill()
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call(prepared)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_killed_rank_is_named(name: str) -> None:
    world = CALLS[name][2]
    told = run_fates(world, _waiting, name, limit=30.0, timeout=15, lost=(world - 1,))
    for rank in range(world - 1):
        assert told[rank].value is not None, f"{told[rank].text}\n{told[rank].output}"
        kind, text, seconds = told[rank].value
        assert kind == "PeerFailed" and f"rank {world - 1} gave no sign of life since its process has ended" in text
        assert seconds < patience(SECONDS)


def _apart(rank: int) -> None:
    model = _sharded()
    if rank == 0:
        model.set_separate_reduce_scatter_group()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def test_a_communicator_for_reductions_on_one_rank_alone() -> None:
    for one in run_fates(2, _apart, timeout=15):
        assert "RanksDisagree" in one.kinds, (one.text, one.output)
        assert "set_separate_reduce_scatter_group" in one.text and one.seconds < patience(SECONDS)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _again(rank: int) -> list[float]:
    """One rank leaves what the others wait for, and catches why; then all try again."""
    fullshard.find_drift(_sharded())
    found = []
    for attempt in range(3):
        model = nn.Linear(3, 3)
        nn.init.constant_(model.weight, rank + attempt)
        with pytest.MonkeyPatch.context() as patch:
            if attempt == 1 and rank == 1:
                patch.setattr(importlib.import_module("fullshard.api.materialize"), "broadcast_over", _interrupt)
            try:
                fullshard.sync_module_states(model)
            except KeyboardInterrupt:
                continue
            except PeerFailed as error:
                assert "rank 1 raised in sync_module_states: KeyboardInterrupt" in str(error)
                if attempt == 1:
                    continue
                # Who had sent all of its own and waited for nobody hears of it at the next call.
                fullshard.sync_module_states(model)
        found.append(float(model.weight.detach()[0, 0]))
    sharded = fully_shard(model)
    sharded(torch.ones(1, 3)).sum().backward()
    return found


def test_all_try_again_after_one_left() -> None:
    for one in run_fates(3, _again, timeout=20):
        assert one.value is not None and one.value[-1] == 2.0, f"{one.text}\n{one.output}"


def _axes(rank: int) -> None:
    """A mesh of two axes: each rank waits for another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _model()
    fully_shard(model, mesh=mesh)
    fullshard.sync_module_states(_model(), mesh=mesh)
    if rank == 3:
        _kill()
    fullshard.sync_module_states(_model(), mesh=mesh)


@pytest.mark.slow
def test_over_two_axes_all_hear_of_it() -> None:
    told = run_fates(4, _axes, timeout=15, lost=(3,))
    for rank in range(3):
        assert told[rank].kinds[0] == "PeerFailed" and "rank 3" in told[rank].text, (told[rank].text, told[rank].output)
        assert told[rank].seconds < patience(SECONDS)
