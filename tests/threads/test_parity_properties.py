"""Any model trains as plain training does, on any number of ranks; a step that raised leaves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from fullshard.policy import use_options
from tests.harness.failing_places import PLACES, Fault
from tests.harness.models import Trained
from tests.harness.parity import Ours, assert_same_bits, train_alone, train_beside_oracle
from tests.harness.random_models import (
    EXPLORING,
    BlockSpec,
    LeafSpec,
    ModelSpec,
    build,
    examples,
    loss,
    model_specs,
)
from tests.harness.threads import run_ranks

# One example takes a fraction of a second; so long a limit is for those that explore.
pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 120)
TIMEOUT = 60.0


@examples(5, 150)
@given(spec=model_specs(), world=st.integers(2, 4))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, world: int) -> None:
    with use_options(**spec.options()):
        run_ranks(world, train_beside_oracle, spec, world, 3, timeout=TIMEOUT)


@pytest.mark.slow
@examples(4, 50)
@given(spec=model_specs(), shape=st.sampled_from([(2, 2), (2, 1), (3, 1), (4, 1)]))
def test_any_model_trains_as_plain_training_does_on_a_mesh_that_replicates(
    spec: ModelSpec, shape: tuple[int, int]
) -> None:
    """Windows with micro-batches that are not all-reduced among them; and replicas have the same bits."""
    world = shape[0] * shape[1]
    train = partial(train_beside_oracle, replicas=shape[0])
    with use_options(**spec.options()):
        replicas = run_ranks(world, train, spec, world, 3, timeout=TIMEOUT)
    for trained in replicas[1:]:
        assert_same_bits(trained, replicas[0])


FREED_EARLY = BlockSpec(
    (LeafSpec("scale"),), BlockSpec((LeafSpec("dense", unit=True), LeafSpec("table"))), recompute="inside"
)
FOUND = {
    # The gradients of the inner unit are ready before the outer block is recomputed, which gathers the inner one again:
    # at the end of the backward it is to be sharded as all others are.
    "recomputed after its gradients were ready": ModelSpec((FREED_EARLY,), width=3),
    # The root's trainable parameters (the head) have their gradients at once, and its inputs need none; its frozen ones
    # are still needed on the way to the first block.
    "frozen weights of the root behind a unit": ModelSpec(
        (BlockSpec((LeafSpec("dense"),)), BlockSpec((LeafSpec("dense_no_bias", 2),), unit=False)),
        width=3,
        tokens=False,
        frozen=(3, 4),
    ),
    "frozen weights of the root, recomputed": ModelSpec(
        (
            BlockSpec((LeafSpec("dense"),)),
            BlockSpec((LeafSpec("table"), LeafSpec("dense", unit=True)), unit=False, recompute="inside"),
        ),
        width=3,
        tokens=False,
        frozen=(3,),
    ),
    # An alarm that was false: gradients of a window, kept in bfloat16, that all but cancel.
    "gradients that cancel in bfloat16": ModelSpec(
        (
            BlockSpec(
                (LeafSpec("dense", 1),), BlockSpec((LeafSpec("dense", 1), LeafSpec("dense", 1)), unit=True), unit=True
            ),
        ),
        width=1,
        tokens=False,
        policy="fp32_reduced_in_bf16",
        sync=(False, False, True),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FOUND)
def test_models_that_were_wrong_once(name: str) -> None:
    """What the property above has found, kept by name."""
    spec = FOUND[name]
    with use_options(**spec.options()):
        run_ranks(2, train_beside_oracle, spec, 2, 3, timeout=TIMEOUT)


# ---- steps that raise ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing:
    """`module` raises in one extra micro-batch, which comes before micro-batch `micro` of `step`."""

    module: str
    place: str
    step: int
    micro: int
    sync: bool


def _raises(spec: ModelSpec, model: nn.Module, fault: Failing, rank: int) -> bool:
    """Run the micro-batch that is to fail; whether it did."""
    disarm = PLACES[fault.place].arm(model.get_submodule(fault.module), Fault)
    try:
        loss(spec, model, fault.step, 7, rank).backward()
    except Fault:
        return True
    finally:
        disarm()
    return False


def _train_with_fault(rank: int, spec: ModelSpec, fault: Failing, steps: int) -> Trained:
    ours = Ours(spec, local=True)
    for step in range(steps):
        for micro, reduces in enumerate(spec.sync):
            if (step, micro) == (fault.step, fault.micro):
                ours.model.set_requires_gradient_sync(fault.sync)
                assert _raises(spec, ours.model, fault, rank), "the plain model raised here and ours did not"
            ours.model.set_requires_gradient_sync(reduces)
            loss(spec, ours.model, step, micro, rank).backward()
        ours.update()
        ours.zero_grad()
    return ours.trained()[0]


@st.composite
def _models_with_faults(draw: st.DrawFn) -> tuple[ModelSpec, Failing]:
    spec = draw(model_specs())
    modules = [name for name, module in build(spec).named_modules() if not isinstance(module, nn.ModuleList)]
    return spec, Failing(
        module=draw(st.sampled_from(modules)),
        place=draw(st.sampled_from(["gradient of the output", "before", "after"])),
        step=draw(st.integers(0, 2)),
        micro=draw(st.integers(0, len(spec.sync) - 1)),
        sync=draw(st.booleans()),
    )


@examples(3, 80)
@given(drawn=_models_with_faults(), world=st.integers(2, 3))
def test_a_step_that_raised_leaves_nothing_behind(drawn: tuple[ModelSpec, Failing], world: int) -> None:
    """On all ranks a module raises, the caller goes on: bitwise what it would have been without that micro-batch."""
    spec, fault = drawn
    assume(_raises(spec, build(spec), fault, 0))
    with use_options(**spec.options()):
        undisturbed = run_ranks(world, train_alone, spec, 3, timeout=TIMEOUT)
        disturbed = run_ranks(world, _train_with_fault, spec, fault, 3, timeout=TIMEOUT)
    for ours, expected in zip(disturbed, undisturbed, strict=True):
        assert_same_bits(ours, expected)


# ---- gradients that not every rank has -----------------------------------------------------------------------

HALF = LeafSpec("scale", use="by_rank")  # at one step one rank uses it, at the next the other
WHOLE = LeafSpec("dense", 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [
        pytest.param((BlockSpec((WHOLE, HALF)),), False, id="part of a unit without input gradients"),
        pytest.param((BlockSpec((WHOLE, HALF)), BlockSpec((HALF, WHOLE))), True, id="part of each unit"),
        pytest.param((BlockSpec((HALF,), unit=False), BlockSpec((WHOLE,))), True, id="part of the root"),
    ],
)
def test_gradients_that_only_some_ranks_have(blocks: tuple[BlockSpec, ...], tokens: bool) -> None:
    """Every rank runs every unit, but what inside it is used depends on the rank's data: absent gradients are zeros."""
    spec = ModelSpec(blocks, width=3, tokens=tokens)
    with use_options(**spec.options()):
        run_ranks(2, train_beside_oracle, spec, 2, 2, timeout=TIMEOUT)
