"""Experts between processes: ranks that fail or differ are named on all ranks, and training continues afterwards."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from fullshard import PeerFailed, RanksDisagree, prepare_fully_shard
from tests.harness import pipelines
from tests.harness.axes import batch, llama, loss, plainly, train
from tests.harness.hang import patience
from tests.harness.models import Trained, adamw, assert_same_training, collect
from tests.harness.pool import pool

EP = {"expert_parallel_degree": 2}
PLANS = [
    pytest.param(4, {**EP, "tensor_parallel_degree": 2}, id="ep-tp"),
    pytest.param(2, EP, id="ep", marks=pytest.mark.slow),
    pytest.param(4, EP, id="ep-dp", marks=pytest.mark.slow),
    pytest.param(
        4, {"expert_parallel_degree": 4, "tensor_parallel_degree": 2}, id="ep-over-tp", marks=pytest.mark.slow
    ),
]
BAD = 1  # the rank that is at fault
make = partial(llama, experts=4)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(("world", "plan"), [(4, EP), (8, {**EP, "tensor_parallel_degree": 2})], ids=["ep", "ep-tp"])
def test_experts_of_the_stages_of_a_pipeline(world: int, plan: dict[str, int]) -> None:
    """Each stage divides its own; parameters, optimizer state, norms and losses are those of one process."""
    pipelines.check(world, make, {**plan, "pipeline_parallel_degree": 2})


def raised(step: Any) -> tuple[str, float]:
    began = time.monotonic()
    try:
        step()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


def fails(rank: int, plan: Any) -> tuple[str, float, Trained]:
    """One rank raises before its tokens leave, in the second forward; then all train from there."""
    model: Any = make()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, parallelism=plan, show=False)
    calls = []

    def broken(module: Any, args: Any) -> None:
        calls.append(0)
        if len(calls) == 2 and rank == BAD:
            raise ValueError("no such token")

    handle = model.layers[1].ffn.experts.register_forward_pre_hook(broken)
    train(model, optimizer, prepared, [0])
    told, seconds = raised(lambda: loss(model, batch(1, prepared.share[0])).backward())
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, prepared, [1, 2])
    return told, seconds, collect(model, optimizer)


@pytest.mark.slow
@pytest.mark.hang_after(200)
@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_a_rank_that_raises_is_named_and_all_continue(world: int, plan: Any) -> None:
    """Within seconds, on all ranks; what they train afterwards is what one process trains."""
    shares = 2 if "tensor_parallel_degree" in plan else world
    expected, _ = plainly(make, shares)
    for rank, (told, seconds, trained) in enumerate(pool(world).run(fails, plan, timeout=150)):
        assert seconds < patience(30)
        if rank == BAD:
            assert told == "ValueError: no such token"
        else:
            assert told.startswith("PeerFailed: ") and f"rank {BAD}" in told and "no such token" in told, told
        assert_same_training(trained, expected)


def differs(rank: int, plan: Any, what: str) -> tuple[str, float]:
    model: Any = llama(experts=8 if what == "experts" and rank == BAD else 4)
    prepared = prepare_fully_shard(model, parallelism=plan, show=False)
    if what == "top-k" and rank == BAD:
        model.layers[1].ffn.experts_per_token = 1
    return raised(lambda: loss(model, batch(1, prepared.share[0])).backward())


@pytest.mark.slow
@pytest.mark.hang_after(200)
@pytest.mark.parametrize("what", ["top-k", "experts"])
@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_ranks_that_differ_are_named(world: int, plan: Any, what: str) -> None:
    """Another number of experts for each token, with the layer; another number of experts, with the parameter."""
    for told, seconds in pool(world).run(differs, plan, what, timeout=150):
        assert seconds < patience(30) and told.split(":")[0] in (RanksDisagree.__name__, PeerFailed.__name__), told
        if what == "top-k":
            assert "layers.1.ffn.experts: expected the ranks that divide these experts (ep) to call them alike" in told
            assert "4 experts, 1 for each token" in told and "4 experts, 2 for each token" in told
        else:
            assert ": expected the same shape on every rank" in told
