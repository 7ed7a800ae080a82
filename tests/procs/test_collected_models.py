"""Whoever holds a parameter takes part: one rank has collected the model that it was of, and another one has not.

Legal programs, in which something outlives its model. Which rank collects, and when, is no matter.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import fully_shard
from tests.harness.pool import pool


def _model(*, trained: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    fully_shard(model[1])
    fully_shard(model)
    if trained:
        model(torch.ones(2, 4)).sum().backward()
    return model


def _full(values: Any) -> list[Tensor]:
    return [value.detach().full_tensor() for value in values]


def state_dict(collect: Callable[[], None]) -> list[Tensor]:
    values = list(_model().state_dict().values())
    collect()
    return _full(values)


def state_dict_of_a_model_that_never_ran(collect: Callable[[], None]) -> list[Tensor]:
    values = list(_model(trained=False).state_dict().values())
    collect()
    return _full(values)


def parameters(collect: Callable[[], None]) -> list[Tensor]:
    held = list(_model().parameters())
    collect()
    first = held[0].full_tensor()
    return [first.detach(), *_full(held)]


def gradients(collect: Callable[[], None]) -> list[Tensor]:
    held = list(_model().parameters())
    collect()
    return _full(parameter.grad for parameter in held)


def optimizer(collect: Callable[[], None]) -> list[Tensor]:
    """Stepped once more after its model is gone; then another model trains on the same ranks."""
    held = torch.optim.AdamW(_model().parameters(), lr=0.1)
    held.step()
    collect()
    held.step()
    other = _model()
    collect()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    other(torch.ones(2, 4)).sum().backward()
    return _full(parameter for group in held.param_groups for parameter in group["params"]) + _full(other.parameters())


def state_dict_of_an_optimizer(collect: Callable[[], None]) -> list[Tensor]:
    held = torch.optim.AdamW(_model().parameters())
    held.step()
    state = held.state_dict()["state"]
    del held
    collect()
    return _full(value for values in state.values() for value in values.values() if isinstance(value, DTensor))


def one_model_after_another(collect: Callable[[], None]) -> list[Tensor]:
    """Values of each are gathered while the next one trains."""
    found: list[Tensor] = []
    held: list[Any] = []
    for _ in range(3):
        model = _model()
        rate = torch.optim.SGD(model.parameters(), lr=0.1)
        held.append((dict(model.named_parameters()), rate))
        rate.step()
        if len(held) > 1:
            names, earlier = held[-2]
            del model
            collect()
            found += _full(names.values())
            earlier.step()
            model = _model()
        model(torch.ones(2, 4)).sum().backward()
        with fullshard.full_params(model):
            found += [parameter.detach().clone() for parameter in model.parameters()]
        del model
        collect()
    return found


def after_a_failure(collect: Callable[[], None]) -> list[Tensor]:
    """A step fails on all ranks, the model goes, and what is left of it is gathered."""
    model = _model()
    held = list(model.parameters())
    handle = model[1].register_forward_pre_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        model(torch.ones(2, 4))
    handle.remove()
    del model, handle
    collect()
    return _full(held)


PROGRAMS = (
    state_dict,
    state_dict_of_a_model_that_never_ran,
    parameters,
    gradients,
    optimizer,
    state_dict_of_an_optimizer,
    one_model_after_another,
    after_a_failure,
)


def _run(rank: int, program: Callable[[Callable[[], None]], list[Tensor]], collects: int) -> list[Tensor]:
    assert threading.current_thread() is threading.main_thread()
    gc.collect()
    gc.disable()
    try:
        return program(gc.collect if rank == collects else lambda: None)
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_does_not_matter_which_rank_collects(program: Any) -> None:
    """Neither rank does in the last run."""
    found = [pool(2).run(_run, program, collects, timeout=20) for collects in (0, 1, -1)]
    expected = found[0][0]
    assert expected
    for ranks in found:
        for values in ranks:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, expected, strict=True))
