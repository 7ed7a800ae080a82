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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import PeerFailed, fully_shard
from tests.harness.fates import run_fates

SECONDS = 5.0


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _sharded(device: str = "cpu") -> Any:
    with torch.device(device):
        model = _model()
    return fully_shard(model)


def _trained() -> Any:
    model = _sharded()
    model(torch.ones(2, 4)).sum().backward()
    return model


# What is prepared on all ranks, and what the others then do.
CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "sync_module_states": (_model, fullshard.sync_module_states, 2),
    "materialize": (lambda: _sharded("meta"), fullshard.materialize, 2),
    "find_drift": (_sharded, fullshard.find_drift, 2),
    "check_gradients": (_trained, fullshard.check_gradients, 2),
    "check_gradients of a plain model": (_model, fullshard.check_gradients, 2),
    "joined": (_sharded, lambda model: list(fullshard.joined(model, [1])), 2),
    "replay": (_trained, lambda model: fullshard.replay(lambda: None, model), 2),
    "blocks": (_model, lambda model: fully_shard(model, reshard_after_forward=2), 4),
    "a communicator for reductions": (_sharded, lambda model: model.set_separate_reduce_scatter_group(), 2),
    "the first forward": (_sharded, lambda model: model(torch.ones(2, 4)), 2),
}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("a bad token")


def _sleep_somewhere() -> None:
    time.sleep(30)


def _waiting(rank: int, name: str, deed: Callable[[], None]) -> tuple[str, str, float]:
    prepare, call, _ = CALLS[name]
    fullshard.find_drift(_sharded())  # a record
    prepared = prepare()
    if rank == dist.get_world_size() - 1:
        deed()
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call(prepared)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


def _others(name: str, deed: Callable[[], None], limit: float) -> None:
    world = CALLS[name][2]
    told = run_fates(world, _waiting, name, deed, limit=limit, timeout=15, lost=(world - 1,))
    for rank in range(world - 1):
        assert told[rank].value is not None, f"{told[rank].text}\n{told[rank].output}"
        kind, text, seconds = told[rank].value
        assert kind == "PeerFailed", text
        if deed is _kill:
            assert f"rank {world - 1} gave no sign of life since its process has ended" in text
        elif deed is _raise:
            assert "its process ended with ValueError: a bad token" in text
        else:
            assert f"rank {world - 1}" in text and "in _sleep_somewhere" in text
        assert seconds < SECONDS + (limit if deed is _sleep_somewhere else 0.0)


# In `make test`; the others take their time.
FAST = ("sync_module_states", "materialize", "check_gradients", "a communicator for reductions", "blocks")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CALLS])
def test_a_killed_rank_is_named(name: str) -> None:
    _others(name, _kill, 30.0)


@pytest.mark.parametrize("name", [pytest.param("sync_module_states", marks=pytest.mark.slow), "materialize"])
def test_a_rank_that_raised_is_named(name: str) -> None:
    _others(name, _raise, 30.0)


@pytest.mark.parametrize("name", ["sync_module_states", pytest.param("blocks", marks=pytest.mark.slow)])
def test_at_the_limit_a_rank_that_is_elsewhere_is_named(name: str) -> None:
    _others(name, _sleep_somewhere, 3.0)


def _apart(rank: int) -> None:
    model = _sharded()
    if rank == 0:
        model.set_separate_reduce_scatter_group()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def test_a_communicator_for_reductions_on_one_rank_alone() -> None:
    for one in run_fates(2, _apart, timeout=15):
        assert "RanksDisagree" in one.kinds, (one.text, one.output)
        assert "set_separate_reduce_scatter_group" in one.text and one.seconds < SECONDS


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


SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "guard": ({"FULLSHARD_GUARD": "off"}, "FULLSHARD_GUARD"),
    "structure": ({"FULLSHARD_GUARD": "structure"}, "FULLSHARD_GUARD"),
}


def _settings(rank: int, name: str) -> Tensor:
    if rank == 1:
        os.environ.update(SETTINGS[name][0])
    model = _sharded()
    out: Tensor = model(torch.ones(2, 4))
    out.sum().backward()
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_one_rank_alone_are_named(name: str) -> None:
    for one in run_fates(2, _settings, name, timeout=15):
        assert "RanksDisagree" in one.kinds, (one.text, one.output)
        assert SETTINGS[name][1] in one.text and one.seconds < SECONDS


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
        assert told[rank].seconds < SECONDS
