"""Parameters that are added after `fully_shard` to a frozen base.

No unit has them, so nothing averages their gradients, and no reduction carries a comparison. Ranks that part are named
all the same; programs that average by hand are left alone. And models that `torch.inference_mode` made or would cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.peers import RanksDisagree, Scope
from tests.harness.models import seeded
from tests.harness.parity import environment
from tests.harness.threads import run_ranks
from tests.threads.programs import Adapted, Model, adapt, batch, part, shard

STEPS = 3
Program = Callable[[int], "Training"]


class Training:
    """Trains what requires a gradient; `averaged`: as a user who averages gradients of plain parameters does."""

    def __init__(self, rank: int, model: Any, *, averaged: bool = False, micro_batches: int = 1) -> None:
        self.rank, self.model, self.averaged, self.micro_batches = rank, model, averaged, micro_batches
        self.forwards = 0
        self.renew()

    def renew(self) -> None:
        """Build the optimizer, of what trains now."""
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1) if self.trained else None

    def step(self) -> None:
        for _ in range(self.micro_batches):
            self.forwards += 1
            inputs = part(batch(dist.get_world_size(), self.forwards), self.rank)
            loss = self.model(inputs).pow(2).mean()
            if loss.requires_grad:
                loss.backward()
        for p in self.trained if self.averaged else ():
            if p.grad is not None and not isinstance(p, torch.distributed.tensor.DTensor):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def frozen_and_adapted(rank: int, seed: int = 3) -> Any:
    return adapt(shard(seeded(Model)), seed)


def outcome(rank: int, make: Program, steps: int = STEPS) -> tuple[int, str, str]:
    """(forwards begun, what, text) of the first disagreement; ("", "") without one."""
    training = make(rank)
    try:
        for _ in range(steps):
            training.step()
    except RanksDisagree as error:
        return training.forwards, error.what, str(error)
    return training.forwards, "", ""


# ---- ranks that part -------------------------------------------------------------------------------------------------


def _head_replaced(rank: int) -> Training:
    model: Any = shard(seeded(Model)).requires_grad_(False)
    model.head = nn.Sequential(model.head, seeded(lambda: nn.Linear(11, 11), seed=3))
    return Training(rank, model)


def _a_parameter(rank: int) -> Training:
    model = shard(seeded(Model)).requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(11))
    model.register_forward_hook(lambda module, args, out: out * module.scale)
    return Training(rank, model)


def _without_a_step_in_between(rank: int) -> Training:
    """Four micro-batches a step: the values are equal at the second forward."""
    return Training(rank, frozen_and_adapted(rank), micro_batches=4)


def _base_trained_before(rank: int) -> Training:
    training = Training(rank, shard(seeded(Model)))
    for _ in range(3):
        training.step()
    adapt(training.model)
    training.renew()
    training.forwards = 0
    return training


def _on_some_blocks(rank: int) -> Training:
    model = seeded(Model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model).requires_grad_(False)
    layer = model.layers[-1]
    layer.up = Adapted(layer.up, 3)
    layer.up.base.requires_grad_(False)
    return Training(rank, model)


def _in_evaluation(rank: int) -> Training:
    """`from_pretrained` returns a model in evaluation mode, and many loops leave it there."""
    return Training(rank, frozen_and_adapted(rank).eval())


PARTED: dict[str, tuple[Program, int, str]] = {
    "adapters": (lambda rank: Training(rank, frozen_and_adapted(rank)), 2, "up.b.weight"),
    "adapters, seeds of their rank": (lambda rank: Training(rank, frozen_and_adapted(rank, rank)), 1, "up.a.weight"),
    "adapters, evaluation mode": (_in_evaluation, 2, "up.b.weight"),
    "adapters in one block": (_on_some_blocks, 2, "up.b.weight"),
    "adapters after training": (_base_trained_before, 2, "up.b.weight"),
    "adapters, micro-batches": (_without_a_step_in_between, 16, "up.a.weight"),
    "a head": (_head_replaced, 2, "head.1.weight"),
    "a parameter": (_a_parameter, 2, "scale"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", PARTED)
def test_ranks_that_part_are_named_with_the_cure(case: str) -> None:
    make, forward, name = PARTED[case]
    for found in run_ranks(2, outcome, make, 5):
        assert found[0] == forward and found[1].endswith(name), found
        assert "fully_shard" in found[2] and "ignored_params" in found[2] and "average its gradients" in found[2]


@pytest.mark.parametrize("communication", ["torch", "all-to-all"])
def test_it_is_found_with_messages_of_others(communication: str) -> None:
    with environment({"FULLSHARD_COMMUNICATION": communication}):
        found = run_ranks(2, outcome, PARTED["adapters"][0])
    assert {(forward, what) for forward, what, _ in found} == {(2, "layers.0.up.b.weight")}


def test_all_parameters_that_differ_are_listed() -> None:
    (_, what, text), _ = run_ranks(2, outcome, PARTED["adapters"][0])
    others = [f"layers.{i}.up.b.weight" for i in range(3) if f"layers.{i}.up.b.weight" != what]
    assert all(name in text for name in others), text


def test_a_rank_that_adds_alone_is_named_by_all() -> None:
    def make(rank: int) -> Training:
        model = shard(seeded(Model)).requires_grad_(False)
        return Training(rank, adapt(model) if rank else model)

    assert all(what for _, what, _ in run_ranks(2, outcome, make))


# ---- programs that are right -----------------------------------------------------------------------------------------


def _ignored(rank: int, seed: int, *, averaged: bool) -> Training:
    model = adapt(seeded(Model), seed)
    mine = {p for p in model.parameters() if p.requires_grad}
    if not averaged:
        for p in mine:
            nn.init.constant_(p, 0.1 * (rank + 1))
    for layer in model.layers:
        fully_shard(layer, ignored_params=mine)
    return Training(rank, fully_shard(model, ignored_params=mine), averaged=averaged)


def _sharded_by_a_further_call(rank: int) -> Training:
    model: Any = seeded(Model)
    for layer in model.layers:
        fully_shard(layer.down)
    adapt(model)
    return Training(rank, shard(model))


def _blocks_alone(rank: int) -> Training:
    model = seeded(Model).requires_grad_(False)
    model.head.requires_grad_(True)
    for layer in model.layers:
        fully_shard(layer)
    return Training(rank, model, averaged=True)


def _inputs_alone(rank: int) -> Training:
    """Nothing trains: the forward of a teacher that records a graph."""
    return Training(rank, shard(seeded(Model)).requires_grad_(False))


RIGHT: dict[str, Program] = {
    "averaged by the user": lambda rank: Training(rank, frozen_and_adapted(rank), averaged=True),
    "frozen": lambda rank: Training(rank, adapt(shard(seeded(Model)), rank, trains=False)),
    "ignored, averaged": lambda rank: _ignored(rank, 3, averaged=True),
    "ignored, a rank's own": lambda rank: _ignored(rank, 3, averaged=False),
    "added before": lambda rank: Training(rank, shard(adapt(seeded(Model)))),
    "sharded by a further call": _sharded_by_a_further_call,
    "blocks alone": _blocks_alone,
    "nothing trains": _inputs_alone,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", RIGHT)
def test_programs_that_average_or_mean_it_go_on(case: str) -> None:
    assert run_ranks(2, outcome, RIGHT[case], 4) == [(4, "", "")] * 2


def test_one_rank_trains_them() -> None:
    assert run_ranks(1, outcome, PARTED["adapters"][0]) == [(STEPS, "", "")]


# ---- what it costs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _questions(training: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[int] = []
    agree = Scope.agree

    def counted(self: Scope, what: str, value: str, **more: Any) -> Any:
        if what == "facts" and self.rank == 0:
            asked.append(training[0].forwards)
        return agree(self, what, value, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Scope, "agree", counted)
        yield asked


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "at"),
    [
        ("averaged by the user", [1, 2, 16]),
        ("ignored, averaged", [1, 2, 16]),
        ("added before", []),
        ("frozen", []),
        ("nothing trains", []),
    ],
)
def test_few_forwards_ask_and_only_where_something_trains_outside(
    case: str, at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Any] = []

    def train(rank: int) -> None:
        training = RIGHT[case](rank)
        if rank == 0:
            trainings.append(training)
        for _ in range(18):
            training.step()

    with _questions(trainings, monkeypatch) as asked:
        run_ranks(2, train)
    assert asked == at


# ---- made in inference mode ------------------------------------------------------------------------------------------


def test_fully_shard_in_inference_mode_is_refused() -> None:
    def inside(rank: int) -> None:
        model = seeded(Model)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"Model: expected .*outside.*inference_mode"):
            fully_shard(model)
        assert not any(isinstance(module, fullshard.FSDPModule) for module in model.modules())

    run_ranks(2, inside)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_made_in_inference_mode_are_refused_by_name(world: int) -> None:
    def inside(rank: int) -> None:
        with torch.inference_mode():
            model = seeded(Model)
        with pytest.raises(RuntimeError, match=r"found embedding\.weight, .* made inside.*no_grad"):
            fully_shard(model)

    run_ranks(world, inside)


def test_a_model_that_is_sharded_before_runs_in_inference_mode() -> None:
    def inside(rank: int) -> None:
        with torch.inference_mode(), torch.device("meta"):
            model: Any = Model()  # on the meta device nothing was made yet
        model = shard(model)
        fullshard.materialize(model, device="cpu", seed=0)
        with torch.inference_mode():
            assert model(part(batch(2, 0), rank)).isfinite().all()

    run_ranks(2, inside)
