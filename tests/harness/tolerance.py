"""How far two correct computations may be apart: derived from dtype, length of sums and steps, never from a run.

Sharding changes the order in which sums are made, and the shape of a product decides which kernel makes it. So results
differ from processor to processor, and a number that was read off one of them says nothing about another.

*A sum.* `u` is half of the dtype's eps. A sum of n rounded terms, in any order, is off by at most
`gamma(n) = n u / (1 - n u)` of the sum of the terms' sizes (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., sections 3.1 and 4.2). Rounding errors being of both signs, the sum of n of them grows with sqrt(n): it is
above `k` standard deviations with probability below 2 exp(-k^2 / 2) (Higham and Mary, A New Approach to Probabilistic
Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019). One rounding is uniform within u of the power of two below
it, so its relative variance is u^2 / 3 at mantissa 1, u^2 / 12 at 2, and u^2 / 6 on the mean of mantissas. Terms of
random signs sum to sqrt(n) of one of them, and so do their errors: the same bound, relative to the largest element of
the result (the same authors, Sharper Probabilistic Backward Error Analysis, SIAM J. Sci. Comput. 42(5), 2020). Two
computations have twice the variance. With `RISK` for all elements of a tensor together that makes

    sums(dtype, n, elements) = sqrt(2 / 6) u sqrt(n) sqrt(2 log(2 elements / RISK))

*A network.* The sums of a forward and a backward come one after another; variances of independent errors add, so n is
the length of all sums on the way: `terms_of(model, rows)`.

*A training.* What an optimizer makes of an error depends on the gradients: AdamW divides each element by its own size,
so an element that is nothing but rounding moves by a whole step in either direction. No constant covers that, and
none is needed: `watch(optimizer)` takes each step of the oracle's optimizer again, beside it, with gradients that are
off by `sums` of their largest element with random signs, and off by what the parameters are already off
(to first order the gradient of a product of layers is off by the sum of what its factors are). Where that arrives is
how far rounding may take parameters and state: `Trained.allowed`. The processor that runs the test computes both.

*A training that is long, or of a network whose gradients cancel.* To first order is too much after some five steps,
and too little where a gradient is much smaller than what it is made of. There the oracle trains again as a whole, with
`disturb(optimizer, sign)`: a product `W x` that was rounded is the exact one of a matrix whose elements are off by
gamma(n) of their size (Higham, section 3.5), so its forwards and backwards run with such weights. With `model=`, the
gradients of its modules' outputs are off too, each by itself: a backward that rounds is no gradient of any forward, and
where much cancels (attention whose scores are nearly equal) that is most of it. Its ends are how far rounding goes:
`ends(...)`.

What has to be found stays far outside: a wrong divisor, a missing rank or a weight of the step before change gradients
by some 1/100 of their size or more, and rounding in float32 by less than 1/10,000 (tests/pure/test_tolerance.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import rounding
from fullshard.rounding import sums, unit

# Samples or tokens that a test's gradient is summed over, at most, where the test does not say.
ROWS = 128
# The length of all sums behind a gradient or an output of the tests' tiny models, at most (test_tolerance.py).
TERMS = 1024


def figure(terms: int = TERMS, steps: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """How far apart losses or norms may be after `steps`, relative to their size, to first order: each step adds once
    what rounding makes of a gradient.
    """
    return steps * sums(dtype, terms)


def terms_of(parameters: nn.Module | Iterable[Tensor], rows: int = ROWS) -> int:
    """See `fullshard.rounding`."""
    return rounding.terms_of(parameters.parameters() if isinstance(parameters, nn.Module) else parameters, rows)


def coarsest(parameters: Iterable[Tensor]) -> torch.dtype:
    """The dtype with the largest eps: what passes through a network is as exact as that."""
    return max((p.dtype for p in parameters), key=unit)


def allowed(
    expected: Tensor, terms: int | nn.Module, *, dtype: torch.dtype | None = None, scale: float | None = None
) -> float:
    """The largest difference that rounding explains. `dtype`: that of the sums, if narrower than `expected`'s; `scale`:
    the size of what is summed, if it is much larger than the sum.
    """
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    if isinstance(terms, nn.Module):
        terms = terms_of(terms)
    if scale is None:
        scale = expected.detach().abs().max().item() if expected.numel() else 0.0
    return sums(dtype or expected.dtype, terms, expected.numel()) * scale


def close(found: Tensor, expected: Tensor, terms: int | nn.Module = TERMS, **options: Any) -> bool:
    """Whether two computations of the same sums agree."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    return largest(found, expected) <= allowed(expected, terms, **options)


def assert_close(
    found: Any, expected: Any, terms: int | nn.Module = TERMS, what: str = "tensor", **options: Any
) -> None:
    """Fail unless shapes and dtypes are equal and rounding explains every difference. DTensors are gathered."""
    found, expected = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (found, expected))
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    difference, limit = largest(found, expected), allowed(expected, terms, **options)
    assert difference <= limit, f"{what}: off by {difference:.3g}, where rounding explains {limit:.3g}"


def largest(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where something is not a number on one side alone."""
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (found.detach().to(wide) - expected.detach().to(wide)).abs()
    return difference.nan_to_num(nan=math.inf).max().item()


def watch(optimizer: torch.optim.Optimizer, rows: int = ROWS, terms: int = 0, dtype: torch.dtype | None = None) -> Any:
    """From now on each step of `optimizer`, which is an oracle's, notes what rounding can make of it; returns
    `optimizer`. Where parameters turn out to be shards nothing is noted: an oracle has whole ones.

    `terms`: the length of the sums behind a gradient, where it is not `terms_of(parameters, rows)`; `dtype`: that of
    these sums, where it is not the coarsest of the parameters'.
    """
    optimizer.tolerance = Watched(optimizer, rows, terms, dtype)  # type: ignore[attr-defined]
    return optimizer


def disturb(
    optimizer: torch.optim.Optimizer, sign: float, rows: int = ROWS, model: nn.Module | None = None
) -> Callable[[], None]:
    """From now on, forwards and backwards run with weights that are off by what rounding makes of their products, and
    `optimizer` finds gradients off by what it makes of all sums behind them, those over `rows` with the rest (that of
    softmax and norms is in no weight); with random signs, times `sign`.

    Call what is returned to have the weights themselves, when the training is over.
    """
    generator = torch.Generator().manual_seed(0)
    weights: list[tuple[Tensor, Tensor]] = []

    def restore(*_: Any) -> None:
        for p, exact in weights:
            p.copy_(exact)
        weights.clear()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        restore()
        terms = terms_of([p for group in optimizer.param_groups for p in group["params"]], rows)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient = _local(p.grad)
                    gradient += sign * _noise(gradient, sums(gradient.dtype, terms, gradient.numel()), generator)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in map(_local, group["params"]):
                weights.append((p, p.clone()))
                relative = sums(p.dtype, terms_of([p], 0), p.numel())
                p += sign * relative * p * _signs(p, generator)

    def on_output(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            relative = sums(output.dtype, terms_of(module.parameters(recurse=False), 0), output.numel())
            output.register_hook(lambda gradient: gradient + sign * _noise(gradient, relative, generator))

    for module in model.modules() if model is not None else ():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(on_output)
    after(optimizer)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return restore


def _noise(gradient: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    """`relative` times the largest element, with random signs. What is zero is nothing but zeros, in any order."""
    scale = gradient.abs().max() if gradient.numel() else gradient.new_zeros(())
    return relative * scale * _signs(gradient, generator) * (gradient != 0)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like.device, like.dtype)


def updates(value: Tensor, steps: int) -> float:
    """What `steps` updates may be apart, from one gradient: either rounds twice at the size of its result, at what is
    decayed and at the difference.
    """
    value = _local(value)
    if not value.is_floating_point() or not value.numel():
        return 0.0
    return steps * 2 * 2 * unit(value.dtype) * value.abs().max().item()


def ends(values: Mapping[str, Tensor], disturbed: Iterable[Mapping[str, Tensor]], steps: int) -> dict[str, float]:
    """How far rounding takes each of `values`, if these disturbed trainings went as far as they did in `steps`."""
    disturbed = list(disturbed)
    return {
        name: updates(value, steps) + max(largest(end[name], value) for end in disturbed)
        for name, value in values.items()
    }


def watched(optimizer: torch.optim.Optimizer) -> Watched | None:
    """What was noted; None if the optimizer is not watched, is of shards, or has taken no step."""
    found: Watched | None = getattr(optimizer, "tolerance", None)
    return found if found is not None and found.steps else None


class Watched:
    """Two optimizers that take each step of a third from gradients that are off, in opposite directions."""

    def __init__(self, optimizer: torch.optim.Optimizer, rows: int, terms: int, dtype: torch.dtype | None) -> None:
        self.rows, self.terms, self.dtype = rows, terms, dtype
        self.parameters: list[Tensor] = []
        self.steps = 0
        # The largest relative error of a step's gradients; that of losses and norms too.
        self.relative = 0.0
        self._generator = torch.Generator().manual_seed(0)
        self._others = [_Other(optimizer, self.parameters) for _ in range(2)]
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in parameters):
            return None
        closure = kwargs.pop("closure", None) or next(iter(args[1:]), None)
        if closure is not None:
            # It makes the gradients, which are needed here.
            with torch.enable_grad():
                loss = closure()
            args = (args[0], lambda: loss)
        known = {id(p) for p in self.parameters}
        self.parameters.extend(p for p in parameters if id(p) not in known)
        self.steps += 1
        terms = self.terms or terms_of(parameters, self.rows)
        dtype = self.dtype or coarsest(parameters)
        moved = math.sqrt(max(sum(r * r for r in other.moved()) for other in self._others))
        noises: list[Tensor | None] = []
        for p in self.parameters:
            gradient = None if p.grad is None else _local(p.grad)
            if gradient is None:
                noises.append(None)
                continue
            relative = sums(dtype, terms, gradient.numel()) + moved
            self.relative = max(self.relative, relative)
            noises.append(_noise(gradient, relative, self._generator))
        for sign, other in zip((1, -1), self._others, strict=True):
            other.step(optimizer, [None if noise is None else sign * noise for noise in noises])
        return args, kwargs

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for other in self._others:
            other.compare(optimizer)

    def of_parameter(self, parameter: Tensor) -> float:
        """How far rounding may have taken `parameter`."""
        i = next(i for i, p in enumerate(self.parameters) if p is parameter)
        return max(other.apart(i, None) for other in self._others) + updates(parameter, self.steps)

    def of_state(self, optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> float:
        """How far rounding may have taken `optimizer.state[parameter][key]`."""
        i = next(i for i, p in enumerate(self.parameters) if p is parameter)
        value = optimizer.state[parameter][key]
        return max(other.apart(i, key) for other in self._others) + updates(value, self.steps)


class _Other:
    """An optimizer beside another one. It is where that one is, plus `offsets`, so that it goes along when others write
    to its parameters, load its state or change its rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        self.watched = parameters
        self.parameters: list[Tensor] = []
        self.offsets: list[dict[str | None, Tensor]] = []
        self.kind: Any = type(optimizer)
        self.optimizer: Any = None

    def step(self, optimizer: torch.optim.Optimizer, noises: list[Tensor | None]) -> None:
        for p in self.watched[len(self.parameters) :]:
            self.parameters.append(torch.zeros_like(_local(p)).requires_grad_())
            self.offsets.append({})
        places = {id(p): i for i, p in enumerate(self.watched)}
        groups = [
            {**group, "params": [self.parameters[places[id(p)]] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.optimizer = copy.copy(optimizer)
        self.optimizer.param_groups = groups
        self.optimizer.state = type(optimizer.state)(dict)
        with torch.no_grad():
            for i, (p, mine, noise) in enumerate(zip(self.watched, self.parameters, noises, strict=True)):
                mine.copy_(_moved(_local(p), self.offsets[i].get(None)))
                mine.grad = None if noise is None else _local(p.grad) + noise  # type: ignore[arg-type]
                if p in optimizer.state:
                    self.optimizer.state[mine] = {
                        key: _moved(_local(value), self.offsets[i].get(key)) if isinstance(value, Tensor) else value
                        for key, value in optimizer.state[p].items()
                    }
        # Without the hooks of the one that is watched, and of schedules.
        step: Any = self.kind.step
        getattr(step, "__wrapped__", step)(self.optimizer)

    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer is None:
            return
        for i, (p, mine) in enumerate(zip(self.watched, self.parameters, strict=True)):
            self.offsets[i] = {None: mine.detach() - _local(p)}
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.offsets[i][key] = self.optimizer.state[mine][key] - _local(value)
            mine.grad = None
        self.optimizer = None

    def apart(self, i: int, key: str | None) -> float:
        offset = self.offsets[i].get(key)
        return offset.abs().max().item() if offset is not None and offset.numel() else 0.0

    def moved(self) -> Iterable[float]:
        """By how much of its size each parameter is off."""
        for p, offsets in zip(self.watched, self.offsets, strict=False):  # some may be new
            size = _local(p).norm().item()
            if None in offsets and size > 0:
                yield offsets[None].norm().item() / size


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return local


def _moved(value: Tensor, offset: Tensor | None) -> Tensor:
    if offset is None or offset.shape != value.shape:
        return value.clone()
    result = value + offset
    return result.clamp(min=0) if bool((value >= 0).all()) else result  # a mean of squares stays one


def assert_parameters_close(
    found: Mapping[str, Tensor] | nn.Module, oracle: nn.Module, optimizer: torch.optim.Optimizer, what: str = ""
) -> None:
    """Parameters of a training are those of its oracle, whose `optimizer` was watched. DTensors are gathered.

    Those that the optimizer does not have may be off as the farthest that it has: they were made from these.
    """
    if isinstance(found, nn.Module):
        found = dict(found.named_parameters())
    bounds = watched(optimizer)
    assert bounds is not None, "watch() the oracle's optimizer before its first step"
    farthest = max(bounds.of_parameter(p) for p in bounds.parameters)
    expected = dict(oracle.named_parameters())
    assert found.keys() == expected.keys(), f"{sorted(found.keys() ^ expected.keys())} only on one side"
    for name, wanted in expected.items():
        mine: Any = found[name]
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, f"{what} {name}"
        limit = bounds.of_parameter(wanted) if any(p is wanted for p in bounds.parameters) else farthest
        difference = largest(mine, wanted)
        assert difference <= limit, f"{what} {name}: off by {difference:.3g}, where rounding explains {limit:.3g}"
