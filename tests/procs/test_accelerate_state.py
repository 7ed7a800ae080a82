"""Accelerate: `save_state` and `load_state` of a prepared model, and float16 with its scaler.

The state that Accelerate has on an accelerator is made as in test_accelerate.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import for_each_implementation
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.packages import Poisoned, llama, loss_of, own, tokens, train
from tests.harness.pool import pool
from tests.procs.test_accelerate import TIMEOUT, WORLD, accelerator_of

# Imports of packages take longer than what is tested.
pytestmark = pytest.mark.slow

STEPS = 2


def _saved_and_loaded(rank: int, impl: str, kind: str, folder: str) -> tuple[Trained, list[float], float]:
    """Train, save, train on; then the same from the checkpoint, with a model of other values. The scheduler's rate."""
    for resumed in (False, True):
        with accelerator_of(rank, impl, state_dict_type=kind) as accelerator:
            model: Any = llama(tied=True)
            if resumed:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
            optimizer = adamw(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
            schedule = accelerator.prepare_scheduler(schedule)
            if not resumed:
                _train(accelerator, model, optimizer, rank, range(STEPS))
                schedule.scheduler.step()
                accelerator.save_state(folder)
            else:
                accelerator.load_state(folder)
            losses = _train(accelerator, model, optimizer, rank, range(STEPS, 2 * STEPS))
            result = collect(model, optimizer.optimizer), losses, schedule.get_last_lr()[0]
            if not resumed:
                first = result
    assert_same_training(result[0], first[0], 0)
    assert result[1:] == first[1:]
    return result


def _train(accelerator: Any, model: Any, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, own(tokens(step, dist.get_world_size()), rank))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@behaviour("Accelerate: `save_state` and `load_state`, in shards or whole: training continues bitwise", area="packages")
@for_each_implementation
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_saved_state_goes_on(impl: Any, kind: str, tmp_path: Path) -> None:
    expected = plain_training(WORLD)
    for trained, _, rate in pool(WORLD).run(_saved_and_loaded, impl.name, kind, str(tmp_path), timeout=TIMEOUT):
        assert rate == 0.005
        assert_same_training(trained, expected)


def plain_training(world: int) -> Trained:
    """One process, whose rate is halved in the middle."""
    plain = llama(tied=True)
    whole = adamw(plain.parameters())
    train(plain, whole, None, world, STEPS)
    whole.param_groups[0]["lr"] /= 2
    for step in range(STEPS, 2 * STEPS):
        loss_of(plain, tokens(step, world)).backward()
        whole.step()
        whole.zero_grad()
    return collect(plain, whole)


# ---- float16 with a scaler -------------------------------------------------------------------------------------


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _scaled(rank: int, impl: str) -> tuple[Trained, list[bool], float]:
    # mixed_precision: a dtype says nothing to the Accelerator, which on a CPU would refuse a scaler.
    with accelerator_of(rank, impl, mixed_precision="fp16") as accelerator:
        accelerator.native_amp = True
        accelerator.scaler = (fullshard if impl == "fullshard" else torch.amp).GradScaler(device="cpu", init_scale=1024)
        model: Any = seeded(Poisoned)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
        skipped = []
        for step in range(3):
            model.poisoned = step == 1
            output = model(_inputs(step, rank))
            assert output.dtype == torch.float16
            accelerator.backward(output.float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        return collect(model, optimizer.optimizer), skipped, accelerator.scaler.get_scale()


@behaviour(
    "Accelerate: float16 with a GradScaler: a step that overflows on one rank is skipped by all", area="packages"
)
@for_each_implementation
def test_all_ranks_skip_a_step_that_overflowed(impl: Any) -> None:
    plain = seeded(Poisoned)
    # Gradients are float16 products and float16 sums.
    optimizer = tolerance.watch(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), dtype=torch.float16)
    for step in (0, 2):
        for rank in range(WORLD):
            (plain(_inputs(step, rank)).square().mean() / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(plain, optimizer)
    for trained, skipped, scale in pool(WORLD).run(_scaled, impl.name, timeout=TIMEOUT):
        assert skipped == [False, True, False] and scale == 512.0
        assert_same_training(trained, expected)
