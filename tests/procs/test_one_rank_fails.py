"""One rank fails somewhere, its peers are told, all try again: bitwise what it would have been. Over gloo."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fullshard
from fullshard.policy import use_options
from tests.harness.failing_places import PLACES, Fault
from tests.harness.forked import run_forks
from tests.harness.models import Trained
from tests.harness.parity import Ours, assert_same_bits, train_alone
from tests.harness.random_models import EXPLORING, ModelSpec, build, examples, loss, model_specs

pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 180)
WHERE = tuple(name for name, place in PLACES.items() if place.modules == "all")
KINDS: tuple[type[Exception], ...] = (Fault, torch.OutOfMemoryError)
STEPS = 3


class Failing(NamedTuple):
    """`rank` raises in the last micro-batch of `step`."""

    rank: int
    step: int
    module: str
    place: str
    kind: type[Exception]


@st.composite
def _failing(draw: st.DrawFn) -> tuple[ModelSpec, int, Failing]:
    spec = draw(model_specs())
    world = draw(st.integers(2, 3))
    modules = [name for name, module in build(spec).named_modules() if not isinstance(module, nn.ModuleList)]
    return (
        spec,
        world,
        Failing(
            draw(st.integers(0, world - 1)),
            draw(st.integers(0, STEPS - 1)),
            draw(st.sampled_from(modules)),
            draw(st.sampled_from(WHERE)),
            draw(st.sampled_from(KINDS)),
        ),
    )


def _window(ours: Ours, spec: ModelSpec, failing: Failing | None, step: int, rank: int) -> None:
    """All micro-batches of a step, in one guarded block."""
    with fullshard.guard(ours.model):
        for micro, reduces in enumerate(spec.sync):
            ours.model.set_requires_gradient_sync(reduces)
            fails = failing is not None and micro == len(spec.sync) - 1 and failing.rank == rank
            if not fails:
                loss(spec, ours.model, step, micro, rank).backward()
                continue
            assert failing is not None
            disarm = PLACES[failing.place].arm(ours.model.get_submodule(failing.module), lambda: failing.kind("mine"))
            try:
                loss(spec, ours.model, step, micro, rank).backward()
            finally:
                disarm()


def _train(rank: int, spec: ModelSpec, failing: Failing) -> Trained:
    ours = Ours(spec, local=True)
    for step in range(STEPS):
        if step == failing.step:
            wanted: Any = failing.kind if rank == failing.rank else fullshard.PeerFailed
            with pytest.raises(
                wanted, match="mine" if rank == failing.rank else f"rank {failing.rank} raised"
            ) as caught:
                _window(ours, spec, failing, step, rank)
            if rank != failing.rank:
                assert caught.value.rank == failing.rank and caught.value.step == step
            ours.zero_grad()
        _window(ours, spec, None, step, rank)
        ours.update()
        ours.zero_grad()
    return ours.trained()[0]


def _comes_to_it(spec: ModelSpec, failing: Failing) -> bool:
    """Whether the plain model raises there."""
    plain = build(spec)
    disarm = PLACES[failing.place].arm(plain.get_submodule(failing.module), lambda: failing.kind("mine"))
    try:
        loss(spec, plain, failing.step, len(spec.sync) - 1, failing.rank).backward()
    except failing.kind:
        return True
    finally:
        disarm()
    return False


@pytest.mark.slow
@examples(2, 20)
@given(drawn=_failing())
def test_a_step_that_one_rank_failed_may_be_tried_again(drawn: tuple[ModelSpec, int, Failing]) -> None:
    spec, world, failing = drawn
    assume(_comes_to_it(spec, failing))
    with use_options(**spec.options()):
        undisturbed = run_forks(world, train_alone, (spec, STEPS), 60)
        disturbed = run_forks(world, _train, (spec, failing), 60)
    for ours, expected in zip(disturbed, undisturbed, strict=True):
        assert_same_bits(ours, expected)
