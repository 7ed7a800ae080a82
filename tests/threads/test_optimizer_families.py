"""Every optimizer of torch.optim on sharded parameters: those that work are as in plain training, the others are named.

What works is decided by the operators that DTensor has, so it is the same for both implementations.
`fullshard.step_on_shards` (test_optimizer.py) does without them, for optimizers that treat each element by itself.
"""

from __future__ import annotations

import inspect
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.harness import installed, tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, run, sharded
from tests.harness.models import Trained, assert_close_to_tensor_max, assert_same_training, collect, seeded
from tests.harness.on_device import whole
from tests.harness.threads import WORLD, several

# Each as it is used where it is not at its simplest; in all ways that torch has on a CPU.
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 0.1},
    "Adadelta": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
WAYS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("Adam", "AdamW")  # on DTensors
CASES = [(name, way) for name in ELEMENTWISE for way in WAYS if way != "fused" or name in FUSED]
# (optimizer, way, even shapes): torch has no operator on DTensors.
REFUSED = [
    ("Adafactor", "loop", True),
    ("Adafactor", "foreach", True),
    ("Rprop", "loop", True),
    ("Rprop", "foreach", True),
    ("SGD", "fused", True),
    ("Adagrad", "fused", True),
    ("LBFGS", "", False),
]
STEPS = 3


def _model(*, even: bool) -> nn.Module:
    """Two matrices and two vectors; `even`: their rows are cut in halves."""
    width, out = (6, 4) if even else (5, 3)
    return seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, out)))


def _train(name: str, model: nn.Module, ranks: range, **options: Any) -> Trained:
    """`STEPS` steps under a scheduler, by a closure, as LBFGS wants it; Muon has the matrices alone."""
    kind = getattr(torch.optim, name)
    optimizer = kind([p for p in model.parameters() if name != "Muon" or p.ndim == 2], **options)
    if name != "LBFGS":  # it calls its closure again
        tolerance.watch(optimizer)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4, cycle_momentum=False)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for rank in ranks:
                inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = model(inputs).square().mean() / len(ranks)
                loss.backward()
                total = total + loss.detach()
            return total

        optimizer.step(closure)
        schedule.step()
    return collect(model, optimizer)


@behaviour(
    "torch.optim, each element by itself: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD; "
    "loop, foreach, Adam and AdamW also fused; with a scheduler: values and state",
    area="training",
)
@for_each_implementation
def test_elementwise_optimizers(impl: Implementation) -> None:
    def train(name: str, way: str, model: nn.Module, ranks: range) -> Trained:
        return _train(name, model, ranks, lr=1e-2, weight_decay=0.1, **ELEMENTWISE[name], **WAYS[way])

    expected = {case: train(*case, _model(even=False), range(WORLD)) for case in CASES}

    def job(rank: int, impl: Implementation) -> None:
        for case in CASES:
            model = sharded(impl, _model(even=False))
            assert_same_training(train(*case, model, range(rank, rank + 1)), expected[case])

    run(job, impl)


@behaviour("torch.optim: LBFGS, where rows divide by the ranks", area="training")
@for_each_implementation
def test_lbfgs(impl: Implementation) -> None:
    """Its line of search is over all parameters as one vector. Each rank's closure has the loss of its own rows."""
    expected = _train("LBFGS", _model(even=True), range(2), lr=0.1, max_iter=3)

    def job(rank: int, impl: Implementation) -> None:
        found = _train("LBFGS", sharded(impl, _model(even=True)), range(rank, rank + 1), lr=0.1, max_iter=3)
        for name, value in expected.params.items():
            tolerance.assert_close(found.params[name], value, what=name)

    run(job, impl, world=2)


@behaviour("torch.optim: Muon, on the whole matrices", area="training")
@for_each_implementation
@pytest.mark.parametrize("even", [True, False])
def test_muon(even: bool, impl: Implementation) -> None:
    """Beside plain Muon on whole matrices with the same gradients. Torch makes a matrix orthogonal in bfloat16, whose
    products DTensors add up in another order, each torch in its own: five times a polynomial of slope 4, so one bit of
    bfloat16 may be a few steps. In float64 the same bit is 4**5 * 2**-53 of a step, far less than a bit of a weight in
    float32. Each step rounds a weight twice, by its decay and by its update: those bits alone may differ."""
    steps, options = 3, {"lr": 1e-2, "weight_decay": 0.1}

    def job(rank: int, impl: Implementation) -> None:
        model = sharded(impl, _model(even=even))
        matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
        plain = {name: nn.Parameter(whole(p.detach()).clone()) for name, p in matrices.items()}
        optimizer = torch.optim.Muon(matrices.values(), **options)  # type: ignore[arg-type]
        reference = torch.optim.Muon(plain.values(), **options)  # type: ignore[arg-type]
        for step in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().mean().backward()
            for name, p in matrices.items():
                assert p.grad is not None
                plain[name].grad = whole(p.grad).clone()
            optimizer.step()
            reference.step()
        for name, p in matrices.items():
            assert_close_to_tensor_max(whole(p.detach()), plain[name].detach(), 2 * steps, name)
            found, expected = optimizer.state[p], reference.state[plain[name]]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(whole(found[key]), value), (name, key)

    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", _in_float64()):
        run(job, impl, world=2)


def _in_float64() -> Any:
    """The installed torch's Newton-Schulz iterations, in float64."""
    text = inspect.getsource(torch.optim._muon._zeropower_via_newtonschulz)
    changed = text.replace("grad.bfloat16()", "grad.double()").replace("torch.bfloat16", "torch.float64")
    assert changed != text and "bfloat16" not in changed
    made: dict[str, Any] = {}
    exec(changed, dict(vars(torch.optim._muon)), made)
    return made["_zeropower_via_newtonschulz"]


@behaviour("torch.optim, refused by DTensor, which lacks an operator: Adafactor, Rprop, fused SGD and Adagrad; "
           "LBFGS where rows do not divide", area="training")  # fmt: skip
@for_each_implementation
def test_refused_optimizers(impl: Implementation) -> None:
    """Red when the pinned torch has learned one of them: it goes to the others then, and out of docs/at-home.md. What
    another torch has learned trains as plain training does."""
    expected = {
        (name, way, even): _train(name, _model(even=even), range(several()), lr=1e-2, **WAYS.get(way, {}))
        for name, way, even in REFUSED
        if not installed.is_pinned()
    }
    words = "sharding strategy|placement changes|unevenly sharded"
    if installed.release() < (2, 11):
        words += "|found no DeviceMesh from dtensor args|Cannot find device mesh from args"

    def job(rank: int, impl: Implementation) -> None:
        for name, way, even in REFUSED:
            options = {"lr": 1e-2, **WAYS.get(way, {})}
            try:
                found = _train(name, sharded(impl, _model(even=even)), range(rank, rank + 1), **options)
            except (RuntimeError, NotImplementedError) as error:
                assert re.search(words, str(error))
            else:
                assert not installed.is_pinned(), f"torch has learned {name} {way}"
                if name != "LBFGS":  # its line search is over the parameters of one rank
                    assert_same_training(found, expected[name, way, even])

    run(job, impl, world=several())
