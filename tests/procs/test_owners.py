"""Owners over gloo: a rank that is interrupted in the middle of a step is named on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fullshard
from tests.harness.forked import run_forks
from tests.harness.pool import pool


def _build(rank: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for module in (*model, model):
        fullshard.fully_shard(module)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    return model, optimizer, fullshard.step_on_owners(optimizer, model=model, chunk_nbytes=300)


def _backward(model: Any, rank: int, step: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    model(inputs).square().mean().backward()


def _raises(rank: int) -> tuple[str, bool]:
    """An exception that is no step's: rank 1 is interrupted while it packs what it sends back. The state is whole, and
    refused until the user says so."""
    from unittest import mock

    from fullshard.extras.owner_steps import FleetStep

    model, optimizer, owners = _build(rank)
    _backward(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    _backward(model, rank, 1)
    before = [p.to_local().clone() for p in model.parameters()]
    interrupted = mock.patch.object(FleetStep, "_send_back", side_effect=KeyboardInterrupt("injected"))
    try:
        if rank == 1:
            with interrupted:
                optimizer.step()
        else:
            optimizer.step()
    except BaseException as error:
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        # Those that had sent what they stepped cannot know whether all received it.
        with pytest.raises(fullshard.RanksDisagree, match="the middle of one of Adafactor, on ranks 0 and 2"):
            _backward(model, rank, 1)
        owners.accept()
        fullshard.mark_restored(model)
        optimizer.zero_grad()
        _backward(model, rank, 1)
        optimizer.step()
        return f"{type(error).__name__}: {error}", same
    return "", False


def test_an_interrupted_rank_is_named_and_all_continue() -> None:
    found = pool(3).run(_raises)
    assert found[1] == ("KeyboardInterrupt: injected", True)
    for said, same in (found[0], found[2]):
        assert said.startswith("PeerFailed") and "rank 1" in said and "injected" in said and same, said


@pytest.mark.slow
def test_what_one_process_steps_is_stepped_over_gloo() -> None:
    """The comparison of tests/threads/test_owners.py, with messages that are really under way."""
    from tests.threads.test_owners import Model, adafactor, assert_same, flat, give_gradients

    def job(rank: int) -> None:
        from tests.harness.models import seeded

        plain, model = seeded(Model), flat(seeded(Model))
        ref, optimizer = adafactor(plain.parameters()), adafactor(model.parameters())
        plan = fullshard.step_on_owners(optimizer, model=model, chunk_nbytes=300).plan()
        for step in range(4):
            give_gradients(plain, model, step)
            ref.step()
            optimizer.step()
        assert_same(plain, ref, model, optimizer, plan)

    run_forks(4, job, (), 90.0)
