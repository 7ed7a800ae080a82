"""Any model trains as plain training does, on any number of ranks. What a step that raises leaves:
test_disturbed_properties.py."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.policy import use_options
from tests.harness.parity import assert_same_bits, train_beside_oracle
from tests.harness.random_models import (
    EXPLORING,
    BlockSpec,
    LeafSpec,
    ModelSpec,
    examples,
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
