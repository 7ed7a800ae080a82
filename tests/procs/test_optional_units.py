"""Optional units of which one rank raises: the others, which join it, raise too, and all continue."""

from __future__ import annotations

import pytest

import fullshard
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.nested_units import PARTS, STEPS, Model, loss_of, reference, shard
from tests.harness.optional_units import batch
from tests.harness.pool import pool


class Broken(Exception):
    pass


def _fails(*_: object) -> None:
    raise Broken


def _trains_after_an_error(rank: int, where: str, on: int, kept: bool) -> tuple[Trained, str]:
    """Rank `on` raises inside of the tower in step 2, which the other one leaves out."""
    model = shard(seeded(Model), reshard_after_forward=not kept)
    optimizer = adamw(model.parameters())
    said = ""
    for step in STEPS:
        if step == 2:
            mix = model.tower.inner.mix
            forward = where == "forward"
            if rank == on:
                handle = mix.register_forward_pre_hook(_fails) if forward else mix.register_full_backward_hook(_fails)
            with pytest.raises((Broken, fullshard.PeerFailed)) as caught:
                model(batch(step, rank)[0], PARTS if rank == on else ["layer"]).square().mean().backward()
            said = f"{type(caught.value).__name__}: {caught.value}"
            if rank == on:
                handle.remove()
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "on", "kept"),
    [
        ("forward", 0, False),
        ("backward", 1, True),
        pytest.param("forward", 1, True, marks=pytest.mark.slow),
        pytest.param("backward", 0, False, marks=pytest.mark.slow),
    ],
)
def test_an_exception_inside_of_one_that_the_other_rank_leaves_out(where: str, on: int, kept: bool) -> None:
    expected = reference(2)
    for rank, (trained, said) in enumerate(pool(2).run(_trains_after_an_error, where, on, kept)):
        assert_same_training(trained, expected)
        assert said.startswith("Broken" if rank == on else "PeerFailed"), said
        assert rank == on or f"found that rank {on} raised at step 2" in said, said


def _recomputes(rank: int, again: str) -> str:
    model = shard(seeded(lambda: Model(again)))
    parts = PARTS if rank else ["layer"]
    with pytest.raises((RuntimeError, fullshard.PeerFailed)) as caught:
        model(batch(0, rank)[0], parts).square().mean().backward()
    return str(caught.value)


@pytest.mark.parametrize("again", ["around", pytest.param("around, reentrant", marks=pytest.mark.slow)])
def test_recomputation_that_gathers_out_of_place_is_refused(again: str) -> None:
    """A rank without the tower visits the units inside youngest first."""
    waiting, refused = pool(2).run(_recomputes, again)
    assert "an optional unit, and each unit inside of one, to be recomputed by itself" in refused, refused
    assert "tower.first: " in refused or "tower: " in refused, refused
    assert "found that rank 1 raised at step 0 in its backward" in waiting, waiting
