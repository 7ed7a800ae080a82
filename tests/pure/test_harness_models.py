"""The oracle and the comparison that the parity tests lean on."""

from __future__ import annotations

import doctest

import pytest
import torch

from tests.harness import faults
from tests.harness.faults import Fault, Faults, InjectedFault
from tests.harness.models import CASES, Case, assert_close_to_tensor_max, assert_same_training, train_reference

EPS = torch.finfo(torch.float32).eps


def _batches(case: Case, steps: int, world: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    return [[case.batch(step, rank) for rank in range(world)] for step in range(steps)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_training_moves_what_is_trainable_and_nothing_else(case: Case) -> None:
    model = case.build()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    trained = train_reference(model, case.loss, _batches(case, steps=2, world=2))
    for name, param in model.named_parameters():
        assert torch.equal(trained.params[name], before[name]) == (not param.requires_grad), name
        assert (f"{name}.exp_avg" in trained.state) == param.requires_grad, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models_and_batches_depend_on_their_seed_alone(case: Case) -> None:
    state = torch.random.get_rng_state()
    first, second = case.build(seed=3), case.build(seed=3)
    assert torch.equal(torch.random.get_rng_state(), state), "build() drew from the caller's random state"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(case.batch(1, 0)[0], case.batch(1, 0)[0])
    assert not torch.equal(case.batch(1, 0)[0], case.batch(1, 1)[0])
    assert not torch.equal(case.batch(1, 0)[0], case.batch(2, 0)[0])


def test_reference_is_the_mean_over_ranks() -> None:
    """Two ranks with the same batch are one rank with that batch."""
    case = CASES[0]
    one = train_reference(case.build(), case.loss, [[case.batch(0)], [case.batch(1)]])
    two = train_reference(case.build(), case.loss, [[case.batch(0)] * 2, [case.batch(1)] * 2])
    assert_same_training(two, one, eps_multiple=4)


def test_closeness_is_measured_against_the_maximum() -> None:
    expected = torch.tensor([1.0, 1e-6, 0.0])
    assert_close_to_tensor_max(expected + torch.tensor([0.0, EPS, -EPS]), expected, 1)
    with pytest.raises(AssertionError, match=r"at \(1,\).* 3 eps of the maximum"):
        assert_close_to_tensor_max(expected + torch.tensor([0.0, 3 * EPS, 0.0]), expected, 2)
    with pytest.raises(AssertionError, match="found nan"):
        assert_close_to_tensor_max(torch.tensor([1.0, float("nan"), 0.0]), expected, 1e9)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_tensor_max(torch.zeros(2), torch.zeros(3), 1)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_tensor_max(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), 1)


def test_missing_state_is_a_difference() -> None:
    case = CASES[0]
    full = train_reference(case.build(), case.loss, [[case.batch(0)]])
    part = train_reference(case.build(), case.loss, [[case.batch(0)]])
    del part.state["0.weight.exp_avg"]
    with pytest.raises(AssertionError, match=r"0\.weight\.exp_avg"):
        assert_same_training(part, full, eps_multiple=100)


def test_faults_strike_where_and_as_often_as_they_were_asked_for() -> None:
    assert doctest.testmod(faults).failed == 0
    plan = Faults(Fault(step=1, event="forward"), Fault(step=2, rank=0), Fault(step=2, rank=0))
    for rank in (0, 1):  # a fault for every rank: once on each
        with pytest.raises(InjectedFault, match=f"rank {rank} at step 1, event 'forward'"):
            plan.check(rank=rank, step=1, event="forward")
        plan.check(rank=rank, step=1, event="forward")
    plan.check(rank=1, step=2)
    for _ in range(2):  # two equal faults strike twice
        with pytest.raises(InjectedFault):
            plan.check(rank=0, step=2)
    plan.check(rank=0, step=2)
    assert [rank for rank, _ in plan.struck] == [0, 1, 0, 0]
