"""`set_keep_unsharded_storage`: full parameters stay at one address, beside torch's (2.15) and plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard, report
from fullshard.engine import unit_of
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, probes, sharded
from tests.harness.models import BY_NAME, adamw, assert_same_training, collect, seeded, train_reference
from tests.harness.threads import run_ranks

STEPS = 4


def _places(model: nn.Module) -> list[int]:
    """The addresses of all full parameters, in forward; gathered by hand."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    found = [p.data_ptr() for p in model.parameters()]
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return found


@behaviour(
    "`set_keep_unsharded_storage`: full parameters stay at one address, with the values of plain training",
    area="when parameters are full",
    since="2.15",
)
@for_each_implementation
@pytest.mark.parametrize("reshard", [True, False])
def test_addresses_stay_and_values_are_those_of_plain_training(impl: Implementation, reshard: bool) -> None:
    """Other memory is taken in between, so that a freed storage would come back elsewhere."""
    case = BY_NAME["residual"]
    batches = [[case.batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_reference(case.build(), case.loss, batches)

    def rank_main(rank: int) -> Any:
        model: Any = case.shard(case.build(), impl.fully_shard, reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        optimizer = adamw(model.parameters(), watched=False)
        places, others = [_places(model)], []
        for step in range(STEPS):
            case.loss(model, batches[step][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            others += [torch.empty_like(p.to_local()) for p in model.parameters()]
            places.append(_places(model))
        assert all(found == places[0] for found in places)
        return collect(model, optimizer)

    for trained in run_ranks(2, rank_main):
        assert_same_training(trained, expected)


def _live(module: nn.Module) -> int:
    unit = unit_of(module)
    assert unit is not None
    return sum(group.memory.live_nbytes for group in unit.groups)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"reshard_after_forward": False}),
        (4, {"reshard_after_forward": 2}),
        (2, {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}),
        (2, {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (1, {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        (1, {}),
    ],
    ids=["plain", "kept", "part", "offload", "mixed", "one, mixed", "one"],
)
def test_bytes_stay_while_it_is_on_and_go_when_it_is_off(world: int, options: dict[str, Any]) -> None:
    """Bit for bit the values of a model without it. In a world of one with one dtype there is nothing to keep."""

    def rank_main(rank: int) -> None:
        results = []
        for keep in (False, True):
            model: Any = sharded(FULLSHARD, probes(), **options)
            model.set_keep_unsharded_storage(keep)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.full((2, 5), rank + 1.0)).float().pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            nbytes = [_live(module) for module in model]
            full = [unit_of(module).full_nbytes for module in model]  # type: ignore[union-attr]
            assert nbytes == (full if keep else [0] * len(nbytes))
            results.append([p.full_tensor() for p in model.parameters()])
            model.set_keep_unsharded_storage(False)
            assert [_live(module) for module in model] == [0] * len(nbytes)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(world, rank_main)


def test_it_is_set_of_one_module_or_all() -> None:
    def rank_main(rank: int) -> None:
        model: Any = sharded(FULLSHARD, probes())
        model[1].set_keep_unsharded_storage(True, recurse=False)
        model(torch.ones(2, 5)).sum().backward()
        assert [_live(module) > 0 for module in model] == [False, True, False]
        text = str(report(model))
        assert "storage of full parameters kept (set_keep_unsharded_storage): 1" in text
        told = report(model)
        assert [unit.keeps_storage for unit in told.units if unit.name] == [False, True, False]
        # A full storage needs no bytes of the budget of prefetched gathers, but those of its message.
        plans = [unit_of(module).record.plan.gather_nbytes for module in model]  # type: ignore[union-attr]
        assert plans[1] < plans[0] == plans[2]

    run_ranks(2, rank_main)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_conversion_makes_other_storages_that_stay(device: str) -> None:
    """`to(dtype)` before training, and `to_empty` of a model from the meta device."""

    def rank_main(rank: int) -> None:
        with torch.device(device):
            model: Any = seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(2))))
        for module in (*model, model):
            fully_shard(module)
        model.set_keep_unsharded_storage(True)
        if device == "meta":
            model.to_empty(device="cpu")
            for p in model.parameters():
                nn.init.ones_(p)
        else:
            model(torch.ones(2, 5)).sum().backward()
            model.to(torch.bfloat16)
        dtype = next(model.parameters()).dtype
        places = []
        for _ in range(2):
            places.append(_places(model))
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        assert places[0] == places[1]
        assert all(_live(module) == unit_of(module).full_nbytes for module in model)  # type: ignore[union-attr]

    run_ranks(2, rank_main)


def test_with_a_memory_budget() -> None:
    """Resident units and gathers within a budget; the values are those without."""

    def rank_main(rank: int) -> None:
        results = []
        for keep in (False, True):
            model: Any = sharded(FULLSHARD, probes())
            model.set_keep_unsharded_storage(keep)
            model.set_memory_budget(prefetch=1 << 10, gradients=1 << 10, resident=200)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                model(torch.full((2, 5), rank + 1.0)).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([p.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(2, rank_main)
