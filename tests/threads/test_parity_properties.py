"""Any model, strategy and world trains as plain training does, whatever happens between its good micro-batches.

Between the steps parts of the model are frozen and trained again, and it is evaluated; before the micro-batches of each
step one fails on all ranks: at a random place of a random module, by a random kind of exception.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fullshard
from fullshard.policy import use_options
from tests.harness.failing_places import PLACES, Fault
from tests.harness.parity import assert_same_bits, train_beside_oracle
from tests.harness.random_models import EXPLORING, BlockSpec, LeafSpec, ModelSpec, build, examples, loss, model_specs
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


# ---- what happens between good micro-batches -----------------------------------------------------------------

STEPS = 3

# What a plain module has, too: whether a place is come to is tried on the plain model.
WHERE = tuple(name for name, place in PLACES.items() if place.modules == "all")
KINDS: tuple[type[BaseException], ...] = (Fault, KeyboardInterrupt, torch.OutOfMemoryError)


class Failing(NamedTuple):
    """A micro-batch that fails. `sync`: it would have reduced; `reset`: `reset_iter_state()` is called after it."""

    module: str
    place: str
    kind: type[BaseException]
    sync: bool
    reset: bool


class Disturbed(NamedTuple):
    """`failing[i]`, `frozen[i]` and `evaluated[i]` come before step i. `frozen` says which blocks are."""

    spec: ModelSpec
    failing: tuple[Failing, ...]
    frozen: tuple[int | None, ...]
    evaluated: tuple[bool, ...]


def _fails(model: nn.Module, spec: ModelSpec, failing: Failing, step: int, rank: int) -> bool:
    """Run the micro-batch that is to fail; whether it did."""
    disarm = PLACES[failing.place].arm(model.get_submodule(failing.module), lambda: failing.kind("on purpose"))
    try:
        loss(spec, model, step, 7, rank).backward()
    except failing.kind as error:
        assert "on purpose" in str(error)
        return True
    finally:
        disarm()
    return False


@st.composite
def _disturbed(draw: st.DrawFn) -> Disturbed:
    spec = draw(model_specs())
    modules = [name for name, module in build(spec).named_modules() if not isinstance(module, nn.ModuleList)]
    failing = st.builds(
        Failing, st.sampled_from(modules), st.sampled_from(WHERE), st.sampled_from(KINDS), st.booleans(), st.booleans()
    )
    block = st.none() | st.integers(0, len(spec.blocks) - 1)
    # Where nothing in front of a block requires gradients, re-entrant recomputation gives those after it none: in the
    # plain model, too.
    freezes = spec.tokens
    return Disturbed(
        spec,
        draw(st.tuples(*[failing] * STEPS)),
        draw(st.tuples(*[block] * STEPS)) if freezes else (None,) * STEPS,
        draw(st.tuples(*[st.booleans()] * STEPS)),
    )


def _prepare(drawn: Disturbed, model: Any, step: int) -> None:
    """Blocks that were trainable at first are frozen for a step, or trained again."""
    always = [p.requires_grad for p in build(drawn.spec).get_submodule("blocks").parameters()]
    for p, trainable in zip(model.blocks.parameters(), always, strict=True):
        p.requires_grad_(trainable)
    if drawn.frozen[step] is not None:
        model.blocks[drawn.frozen[step]].requires_grad_(False)


def _disturb(drawn: Disturbed, model: Any, step: int, rank: int) -> None:
    if drawn.evaluated[step]:
        model.eval()
        with torch.no_grad():
            loss(drawn.spec, model, step, 9, rank)
        model.train()
    failing = drawn.failing[step]
    model.set_requires_gradient_sync(failing.sync)
    assert _fails(model, drawn.spec, failing, step, rank), "the plain model raised here and ours did not"
    if failing.reset:
        model.reset_iter_state()


def _all_come_to_their_places(drawn: Disturbed) -> bool:
    plain = build(drawn.spec)
    for step, failing in enumerate(drawn.failing):
        _prepare(drawn, plain, step)
        if not _fails(plain, drawn.spec, failing, step, 0):
            return False
    return True


def _with(**options: Any) -> Callable[..., Any]:
    return partial(fullshard.fully_shard, **options)


def _in_part(module: nn.Module, *, reshard_after_forward: Any, **options: Any) -> Any:
    """An integer where the spec says that the unit is freed after forward."""
    kept = 2 if reshard_after_forward else reshard_after_forward
    return fullshard.fully_shard(module, reshard_after_forward=kept, **options)


# (ranks, replicas, what shards)
STRATEGIES: dict[str, tuple[int, int, Callable[..., Any] | None]] = {
    "1": (1, 1, None),
    "2": (2, 1, None),
    "3": (3, 1, None),
    "4": (4, 1, None),
    "2 x 2": (4, 2, None),
    "2 x 1": (2, 2, None),
    "3 x 1": (3, 3, None),
    "4, kept in part": (4, 1, _in_part),
    "2, offloaded": (2, 1, _with(offload_policy=fullshard.CPUOffloadPolicy(pin_memory=False))),
}


@pytest.mark.slow
@examples(4, 150)
@given(drawn=_disturbed(), strategy=st.sampled_from(list(STRATEGIES)))
def test_disturbed_training_is_plain_training(drawn: Disturbed, strategy: str) -> None:
    """Bitwise on one rank, within the bounds of parity.py elsewhere; all ranks have the same bits."""
    assume(_all_come_to_their_places(drawn))
    world, replicas, fully_shard = STRATEGIES[strategy]
    train = partial(
        train_beside_oracle,
        replicas=replicas,
        disturb=partial(_disturb, drawn),
        prepare=partial(_prepare, drawn),
        fully_shard=fully_shard,
        lasting=True,
    )
    with use_options(**drawn.spec.options()):
        trained = run_ranks(world, train, drawn.spec, world, STEPS, timeout=TIMEOUT)
    for other in trained[1:]:
        assert_same_bits(other, trained[0])
