"""Units that only some ranks run, on a device: the order of all accesses, late messages, numbers of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from tests.harness import nccl, simulated
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.on_device import whole
from tests.harness.optional_units import STEPS, WIDTH, Model, batch, loss_of, parts_of, shard
from tests.harness.pool import pool

# ---- training and evaluation -----------------------------------------------------------------------------------------


def _evaluated(model: nn.Module, step: int, rank: int, device: str) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(batch(step, rank)[0].to(device), parts_of(step + rank, rank))
    return out.cpu().clone()


def _trains(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor], list[str]]:
    """The parameters after some steps, what evaluations before and between them returned, and what went wrong."""
    with simulated.watched() as seen:
        model = shard(seeded(Model).to("simulated"), mark=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        evaluated = [_evaluated(model, 7, rank, "simulated")]
        for step in STEPS:
            inputs, targets = (part.to("simulated") for part in batch(step, rank))
            F.mse_loss(model(inputs, parts_of(step, rank)), targets).backward()
            fullshard.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            evaluated.append(_evaluated(model, step, rank, "simulated"))
        values = {name: whole(parameter).cpu().clone() for name, parameter in model.named_parameters()}
        torch.accelerator.synchronize()
    return values, evaluated, [race.explain() for race in seen.races] + nccl.failures()


def _plain(world: int) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    model = seeded(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    evaluated = [[_evaluated(model, 7, rank, "cpu")] for rank in range(world)]
    for step in STEPS:
        for rank in range(world):
            (loss_of(model, step, rank, parts_of(step, rank)) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world):
            evaluated[rank].append(_evaluated(model, step, rank, "cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, evaluated


_slow = pytest.mark.slow


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=_slow), pytest.param(2, marks=_slow)])
@pytest.mark.parametrize("reshard", [True, False, pytest.param(2, marks=_slow)])
def test_who_leaves_a_unit_out_sends_what_the_others_send(reshard: bool | int, seed: int) -> None:
    """2: parameters stay on the ranks of a block, half of four."""
    world = 4 if reshard == 2 else 2
    expected, outputs = _plain(world)
    found = pool(world, backend="nccl").run(_trains, {"reshard_after_forward": reshard}, seed=seed, timeout=120)
    for (values, evaluated, faults), returned in zip(found, outputs, strict=True):
        assert not faults, faults[0]
        # The numbers of test_training.py: sums of as many terms, as many steps.
        terms = 4 * len(STEPS)
        for name, value in values.items():
            assert_close_to_tensor_max(value, expected[name], terms, name)
        for number, (out, plain) in enumerate(zip(evaluated, returned, strict=True)):
            assert_close_to_tensor_max(out, plain, terms, f"the output of evaluation {number}")


# ---- what differs is still named -------------------------------------------------------------------------------------


class _Routed(nn.Module):
    """Layers of one size in the order of `route`, and an optional one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, route: tuple[int, ...], last: bool) -> Tensor:
        for index in route:
            x = torch.tanh(self.layers[index](x))
        return self.last(x) if last else x


def _evaluates_otherwise(rank: int) -> tuple[str, list[Tensor]]:
    model = seeded(_Routed).to("simulated")
    for layer in model.layers:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model.last, optional=True)
    sharded: Any = fullshard.fully_shard(model)
    x = torch.ones(2, WIDTH, device="simulated")
    with torch.no_grad():
        with pytest.raises(fullshard.RanksDisagree) as caught:
            sharded(x, (1, 0) if rank else (0, 1), rank == 0)
        # The order of the refused evaluation is none: nothing is prefetched by it.
        outputs = [sharded(x, (0, 1), rank == last).cpu() for last in (0, 1, 0)]
    return str(caught.value), outputs


def test_an_evaluation_in_another_order_is_named_although_ranks_leave_out_others() -> None:
    (said, outputs), (same, others) = pool(2, backend="nccl").run(_evaluates_otherwise)
    assert said == same and "layers.0" in said and "layers.1" in said
    plain, x = seeded(_Routed), torch.ones(2, WIDTH)
    with torch.no_grad():
        for rank, found in enumerate((outputs, others)):
            for last, out in zip((0, 1, 0), found, strict=True):
                assert_close_to_tensor_max(out, plain(x, (0, 1), rank == last), WIDTH, f"rank {rank}")
