"""A rank of a training run holds its share and no more: shards always, full parameters only around their use."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import report
from fullshard.observe import Report, UnitReport
from fullshard.train.config import Config
from tests.harness.pool import pool
from tests.procs.test_train_world import config_of, trainer_of

BLOCKS = tuple(f"layers.{i}" for i in range(4))


class Moment(NamedTuple):
    """Bytes of full parameters that are allocated in each unit ("" is the root) when a hook of a module runs."""

    hook: str  # "before", "after" (forward) or "backward"
    module: str
    live: dict[str, int]

    @property
    def blocks(self) -> set[str]:
        return {name for name, nbytes in self.live.items() if name and nbytes}

    @property
    def unit(self) -> str:
        """The unit that the module's parameters belong to."""
        return next((b for b in BLOCKS if self.module == b or self.module.startswith(f"{b}.")), "")


class Seen(NamedTuple):
    units: tuple[UnitReport, ...]
    moments: list[Moment]  # of the second step: the first one records the order
    between_steps: dict[str, int]
    after_validation: dict[str, int]
    after_backward: Report
    gradient_rows: dict[str, tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]]


def observed(rank: int, config: Config) -> Seen:
    trainer = trainer_of(rank, config)
    model, moments = trainer.model, []

    def live() -> dict[str, int]:
        return {unit.name: unit.full_nbytes_live for unit in report(model).units}

    def note(hook: str, name: str, *_: object) -> None:
        moments.append(Moment(hook, name, live()))

    assert not any(live().values())
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(note, "before", name))
        module.register_forward_hook(partial(note, "after", name))
        if isinstance(module, nn.Linear):
            module.register_full_backward_pre_hook(partial(note, "backward", name))
    # The step without its zero_grad, to see the gradients.
    rows: dict[str, tuple[int, ...]] = {}
    held = []

    def look_at_gradients() -> None:
        held.append(report(model, trainer.optimizer))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            rows[name] = tuple(parameter.grad.to_local().shape)
        type(trainer.optimizer).zero_grad(trainer.optimizer)

    trainer.optimizer.zero_grad = look_at_gradients  # type: ignore[method-assign]
    trainer.step(1)
    moments.clear()
    trainer.step(2)
    second, between = list(moments), live()
    trainer.validate()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Seen(report(model).units, second, between, live(), held[-1], rows, shapes)


@pytest.fixture(scope="module", params=[pytest.param("none", marks=pytest.mark.slow), "units"])
def seen(request: pytest.FixtureRequest) -> list[Seen]:
    """What each of two ranks saw, with and without recomputed activations."""
    config = config_of("model.layers=4", f"sharding.activation_checkpointing={request.param}", "training.micro_batch=2")
    return pool(2).run(observed, config, timeout=60)


@pytest.mark.slow
def test_ranks_share_every_element(seen: list[Seen]) -> None:
    """The ranks' elements add up to the model's, unit by unit, and none has more than its rows of the larger half."""
    for first, second in zip(seen[0].units, seen[1].units, strict=True):
        assert first.local_numel + second.local_numel == first.numel, first.name
        assert first.padded_local_numel == second.padded_local_numel
        assert first.numel / 2 <= first.padded_local_numel < 0.52 * first.numel, first.name
    assert [u.name for u in seen[0].units] == ["", *BLOCKS]


@pytest.mark.slow
def test_storages_hold_the_share(seen: list[Seen]) -> None:
    """Parameters, gradients and AdamW state, counted from their storages, are half of the unsharded bytes."""
    for rank in seen:
        held, num_tensors = rank.after_backward.measured, len(rank.shapes)
        own_nbytes = sum(unit.local_numel * unit.storage_itemsize for unit in rank.units)
        padded_nbytes = sum(unit.padded_local_numel * unit.storage_itemsize for unit in rank.units)
        unsharded_nbytes = 4 * sum(unit.numel * unit.storage_itemsize for unit in rank.units)  # AdamW keeps two more
        # From the bare elements to the padded flat buffer: a shard's storage may or may not include its padding.
        assert own_nbytes <= held.parameters <= padded_nbytes
        # A message of gradients also tells who has one: at most 16 bytes per tensor.
        assert own_nbytes <= held.gradients <= padded_nbytes + 16 * num_tensors
        assert held.optimizer == 2 * own_nbytes + 4 * num_tensors  # AdamW's step counters are float32 scalars
        assert held.parameters + held.gradients + held.optimizer < 0.52 * unsharded_nbytes


@pytest.mark.slow
def test_gradients_are_this_ranks_rows(seen: list[Seen]) -> None:
    """Row counts of the local gradients are torch.chunk's, uneven and empty ones included."""
    for rank, found in enumerate(seen):
        for name, shape in found.shapes.items():
            chunks = torch.empty(shape, device="meta").chunk(2)
            expected = tuple(chunks[rank].shape) if rank < len(chunks) else (0, *shape[1:])
            assert found.gradient_rows[name] == expected, name


@pytest.mark.slow
def test_full_parameters_live_only_around_their_use(seen: list[Seen]) -> None:
    """At every hook the running unit is whole, and beside the root at most one other block is."""
    for rank in seen:
        assert {(m.hook, m.unit) for m in rank.moments} == {
            *((hook, unit) for hook in ("before", "after", "backward") for unit in BLOCKS),
            ("before", ""),
            ("after", ""),
        }
        whole = {unit.name: unit.numel * unit.compute_itemsize for unit in rank.units}
        for moment in rank.moments:
            assert len(moment.blocks) <= 2, moment
            if (moment.hook, moment.module) == ("after", moment.unit) and moment.unit:
                assert moment.live[moment.unit] == 0, moment  # its forward is over: freed
            else:
                # Padding to whole rows per rank, and to 64 bytes per tensor, is all that may be added.
                assert whole[moment.unit] <= moment.live[moment.unit] <= 1.05 * whole[moment.unit], moment


@pytest.mark.slow
def test_nothing_full_between_steps(seen: list[Seen]) -> None:
    """After a step, and after a validation, no full parameter is allocated anywhere."""
    for rank in seen:
        assert not any(rank.between_steps.values())
        assert not any(rank.after_validation.values())
