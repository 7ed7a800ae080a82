"""`guard(model, optimizer)` over gloo: waits in the middle of a step end, and all ranks know what was written."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fullshard
from fullshard import PeerFailed, RanksDisagree
from tests.harness.pool import pool
from tests.threads.test_guarded_steps import LOAD, attempt, backward, batch, build, once, same, state


def _closure(rank: int, fails: bool) -> list[torch.Tensor]:
    model, optimizer = build(torch.optim.SGD)
    tries = 0

    def closure(step: int) -> float:
        nonlocal tries
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        if fails and rank == 1 and step == 1 and not tries:
            tries += 1
            raise ValueError("injected in the closure")
        loss.backward()
        return float(loss.detach())

    step = 0
    while step < 3:
        try:
            with fullshard.guard(model, optimizer):
                optimizer.step(partial(closure, step))
        except (ValueError, PeerFailed):
            assert fails and step == 1
            continue
        step += 1
    return state(model, optimizer)


def test_a_closure_that_raises_has_written_nothing() -> None:
    same(pool(2).run(_closure, True), pool(2).run(_closure, False))


def _after(rank: int) -> list[str]:
    model, optimizer = build()
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    attempt(model, optimizer, rank, 0)
    if rank == 2:
        once(optimizer, "after")
    with pytest.raises((ValueError, PeerFailed)) as caught:
        attempt(model, optimizer, rank, 1)
    said = ["\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])]
    optimizer.zero_grad()
    with pytest.raises(RanksDisagree) as refused:
        backward(model, rank, 1)
    said.append(str(refused.value))
    model.load_state_dict(kept)
    backward(model, rank, 1)
    return said


def test_after_a_step_of_some_every_forward_refuses() -> None:
    found = pool(3).run(_after)
    for rank, (first, second) in enumerate(found):
        assert LOAD in first and ("has taken it" in first or rank == 2)
        assert rank == 2 or "rank 2 raised at step 1 in the step of AdamW: ValueError: injected after" in first
        assert "2 on ranks 0 and 1 and 1, and the middle of one of AdamW, on rank 2" in second and LOAD in second


def _in_backward(rank: int, fails: bool) -> list[torch.Tensor]:
    """Steps in backward are taken as it goes; one that failed before the first of them is tried again."""
    model, optimizer = build()
    fullshard.step_in_backward(model, optimizer)
    for step in range(3):
        hook = model[0].register_full_backward_pre_hook(lambda *_: [][0]) if fails and rank and step == 1 else None
        try:
            attempt(model, optimizer, rank, step)
        except (IndexError, PeerFailed):
            assert fails and step == 1
            if hook is not None:
                hook.remove()
            optimizer.zero_grad()
            attempt(model, optimizer, rank, step)
    return state(model, optimizer)


def test_steps_in_backward() -> None:
    same(pool(2).run(_in_backward, True), pool(2).run(_in_backward, False))
