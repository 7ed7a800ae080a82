"""The bounds of tests/harness/tolerance.py: other orders of sums are inside, what is wrong is outside."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import tolerance
from tests.harness.models import BY_NAME, Case, Trained, adamw, assert_same_training, collect

WORLD, STEPS = 4, 3
CASES = ("uneven_mlp", "residual", "tiny_dims", "mixed_shapes", "frozen", "transformer", "tied")


@pytest.mark.parametrize(
    "dtype, terms",
    # Not 5000 of bfloat16: its sums stand still at 256, where n u is 10.
    [(dtype, n) for dtype in (torch.float64, torch.float32, torch.bfloat16) for n in (3, 100, 5000)][:-1],
)
def test_sums_in_other_orders_are_inside(dtype: torch.dtype, terms: int) -> None:
    """Of terms of one sign and of both; one by one, which rounds the most, forwards and backwards."""
    generator = torch.Generator().manual_seed(terms)
    for draw in (torch.rand, torch.randn):
        values = draw(terms, 200, generator=generator, dtype=torch.float64).to(dtype)
        ends = []
        for rows in (values, values.flip(0)):
            total = torch.zeros(200, dtype=dtype)
            for row in rows:
                total = total + row
            ends.append(total)
        assert terms == 3 or not torch.equal(*ends)
        tolerance.assert_close(*ends, terms)
        assert not tolerance.close(ends[1], ends[1] + 2 * tolerance.allowed(ends[1], terms), terms)


def test_the_bound_is_the_formula() -> None:
    assert tolerance.unit(torch.float32) == 2.0**-24
    deviations = math.sqrt(2 * math.log(2 * 50 / 1e-6))
    assert tolerance.sums(torch.float32, 300, 50) == pytest.approx(10 * 2.0**-24 * deviations)
    assert tolerance.terms_of(nn.Linear(5, 3), rows=7) == 7 + (5 + 3 + 8) + 8
    assert tolerance.updates(torch.tensor([1.0, -4.0]), 3) == 3 * 4 * 2.0**-24 * 4.0
    assert tolerance.allowed(torch.tensor([0.5, -2.0]), 1) == tolerance.sums(torch.float32, 1, 2) * 2.0


def test_the_tests_models_are_no_larger_than_the_default() -> None:
    for case in BY_NAME.values():
        assert tolerance.terms_of(case.build()) <= tolerance.TERMS, case.name


def test_shape_dtype_and_what_is_not_a_number_are_never_inside() -> None:
    one = torch.ones(3)
    for other in (
        torch.ones(2),
        one.double(),
        torch.tensor([1.0, torch.nan, 1.0]),
        torch.tensor([1.0, torch.inf, 1.0]),
    ):
        with pytest.raises(AssertionError):
            tolerance.assert_close(other, one, 10**6)


def _train(case: Case, gradients: Callable[[nn.Module, int], None], *, watched: bool) -> Trained:
    model = case.build()
    optimizer = adamw(model.parameters(), watched=watched)
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _by_rank(case: Case) -> Callable[[nn.Module, int], None]:
    def gradients(model: nn.Module, step: int) -> None:
        for rank in range(WORLD):
            (case.loss(model, case.batch(step, rank)) / WORLD).backward()

    return gradients


def _at_once(case: Case) -> Callable[[nn.Module, int], None]:
    """One batch of all ranks': other shapes of products, so other kernels, and another order."""

    def gradients(model: nn.Module, step: int) -> None:
        batches = [case.batch(step, rank) for rank in range(WORLD)]
        case.loss(model, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))).backward()

    return gradients


@pytest.mark.parametrize("name", CASES)
def test_another_order_is_inside_and_not_bitwise(name: str) -> None:
    case = BY_NAME[name]
    expected = _train(case, _by_rank(case), watched=True)
    found = _train(case, _at_once(case), watched=False)
    assert_same_training(found, expected)
    assert any(not torch.equal(found.state[key], value) for key, value in expected.state.items())


def _wrong_divisor(case: Case, model: nn.Module, step: int, names: list[str]) -> None:
    """By the largest of five ranks' where there are four."""
    _by_rank(case)(model, step)
    model.get_parameter(names[0]).grad.mul_(WORLD / (WORLD + 1))  # type: ignore[union-attr]


def _missing_rank(case: Case, model: nn.Module, step: int, names: list[str]) -> None:
    """One parameter's gradient lacks what the last rank has."""
    _by_rank(case)(model, step)
    other = case.build()
    other.load_state_dict(model.state_dict())
    (case.loss(other, case.batch(step, WORLD - 1)) / WORLD).backward()
    model.get_parameter(names[0]).grad.sub_(other.get_parameter(names[0]).grad)  # type: ignore[union-attr,arg-type]


def _twice(case: Case, model: nn.Module, step: int, names: list[str]) -> None:
    """A batch of the first rank counted again."""
    _by_rank(case)(model, step)
    (case.loss(model, case.batch(step, 0)) / WORLD).backward()


def _stale_weight(case: Case, model: nn.Module, step: int, names: list[str]) -> None:
    """Gradients from one parameter as it was before the last step."""
    parameter = model.get_parameter(names[0])
    now, before = parameter.detach().clone(), model.before[names[0]]  # type: ignore[index]
    parameter.data.copy_(before)
    _by_rank(case)(model, step)
    parameter.data.copy_(now)


@pytest.mark.sample(7)
@pytest.mark.parametrize("wrong", [_wrong_divisor, _missing_rank, _twice, _stale_weight])
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_in_the_last_step_alone_is_outside(name: str, wrong: Any) -> None:
    """Of one parameter alone, for some of each model: state or parameters of at least one are outside."""
    case = BY_NAME[name]
    expected = _train(case, _by_rank(case), watched=True)
    trainable = [n for n, p in case.build().named_parameters() if p.requires_grad]
    for first in trainable[:: 1 + len(trainable) // 6]:

        def gradients(model: Any, step: int, first: str = first) -> None:
            if step == STEPS - 1:
                wrong(case, model, step, [first])
            else:
                model.__dict__["before"] = {n: p.detach().clone() for n, p in model.named_parameters()}
                _by_rank(case)(model, step)

        with pytest.raises(AssertionError, match="difference"):
            assert_same_training(_train(case, gradients, watched=False), expected)


def test_what_others_write_meanwhile_is_followed() -> None:
    """Parameters and state that are replaced, a rate that changes, a group that is added; and nothing is changed."""

    def train(watched: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = adamw(model[0].parameters(), watched=watched)
        for step in range(4):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                optimizer.add_param_group({"params": list(model[1].parameters())})
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.param_groups[0]["lr"] = 0.02
            with torch.no_grad():
                model[0].weight.mul_(2.0)
        return [p.detach() for p in model.parameters()], (model, optimizer)

    (plain, _), (seen, (model, optimizer)) = train(False), train(True)
    assert all(map(torch.equal, plain, seen))
    bounds = tolerance.watched(optimizer)
    assert bounds is not None and bounds.steps == 4
    for p in model.parameters():
        assert 0 < bounds.of_parameter(p) < 1e-4 * p.detach().abs().max().item()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam])
def test_other_optimizers_are_watched_too(kind: Any) -> None:
    case = BY_NAME["residual"]
    ends = []
    for gradients in (_by_rank(case), _at_once(case)):
        model = case.build()
        optimizer = tolerance.watch(kind(model.parameters(), lr=1e-2))
        for step in range(STEPS):
            gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((model, optimizer))
    tolerance.assert_parameters_close(ends[1][0], *ends[0])
    with torch.no_grad():
        ends[1][0][0].up.bias.mul_(1.001)
    with pytest.raises(AssertionError, match="up.bias: off by"):
        tolerance.assert_parameters_close(ends[1][0], *ends[0])
