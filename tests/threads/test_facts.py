"""What ranks do to their shards is compared: a rank that does something else is named on all ranks, with the fact."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.peers import RanksDisagree
from tests.harness.models import seeded
from tests.harness.parity import environment, on_nodes
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part, shard

# Whose program differs.
ODD = 1
STEPS = 4


class Run:
    """A training on one rank; `odd`: it is the one that differs. What differs happens in step 1 or before."""

    def __init__(self, rank: int, model: Any, **mesh: Any) -> None:
        self.rank, self.odd = rank, rank == ODD
        self.model = shard(model, **mesh) if not isinstance(model, fullshard.FSDPModule) else model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.max_norm, self.norm_type = 1.0, 2.0
        self.clips_after = False
        self.scaler: Any = None
        self.step = 0

    def other(self, value: Any, elsewhere: Any) -> Any:
        """`value` on the odd rank."""
        return value if self.odd else elsewhere

    def loss(self) -> Tensor:
        loss: Tensor = self.model(part(batch(dist.get_world_size(), self.step), self.rank)).pow(2).mean()
        return loss

    def clip(self) -> None:
        fullshard.clip_grad_norm_(self.model.parameters(), self.max_norm, self.norm_type)

    def one_step(self) -> None:
        loss = self.loss()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if not self.clips_after:
            self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.clips_after:
            self.clip()
        self.optimizer.zero_grad()
        self.step += 1


def train(rank: int, make: Callable[[int], Run], change: Callable[[Run], object], at: int) -> int:
    """How many steps were taken before all ranks raised `RanksDisagree`, or all of them."""
    run = make(rank)
    for step in range(STEPS):
        if step == at:
            change(run)
        try:
            run.one_step()
        except RanksDisagree as error:
            raise Named(step, error) from error
    return STEPS


class Named(Exception):
    """`RanksDisagree` was raised in this step."""


def outcome(rank: int, *args: Any) -> tuple[int, str, str]:
    """(step, what, text), as this rank had it; ("", "") without an error."""
    try:
        return train(rank, *args), "", ""
    except Named as named:
        step, error = named.args
        return step, error.what, str(error)


def plain(rank: int) -> Run:
    return Run(rank, seeded(Model))


# ---- what a rank does otherwise --------------------------------------------------------------------------------


class Odd(NamedTuple):
    """`change`: in step `at`, on every rank; `text`: of the error."""

    change: Callable[[Run], object]
    text: str
    at: int = 1


def _options(run: Run, **options: Any) -> None:
    for group in run.optimizer.param_groups:
        group.update(options)


def _scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=run.other(0.5, 0.9))
    step = run.one_step

    def and_schedule() -> None:
        step()
        scheduler.step()

    run.one_step = and_schedule  # type: ignore[method-assign]


def _other_class(run: Run) -> None:
    kind = run.other(torch.optim.Adam, torch.optim.AdamW)
    run.optimizer = kind(run.model.parameters(), lr=0.1)


def _subset(run: Run) -> None:
    params = [p for name, p in run.model.named_parameters() if not run.odd or name != "head.bias"]
    run.optimizer = torch.optim.AdamW(params, lr=0.1)


def _attribute(name: str, value: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        if run.odd:
            setattr(run, name, value)

    return change


def _scaler(**options: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.scaler = fullshard.GradScaler("cpu", init_scale=64.0)
        if run.odd:
            run.scaler = fullshard.GradScaler("cpu", **({"init_scale": 64.0} | options))

    return change


def _on_odd(change: Callable[[Run], object]) -> Callable[[Run], None]:
    def on_odd(run: Run) -> None:
        if run.odd:
            change(run)

    return on_odd


def _loads_its_own(run: Run) -> None:
    run.model.load_state_dict(run.model.state_dict())


def _loads_its_own_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def _loses_state(run: Run) -> None:
    run.optimizer.state.clear()


def _loses_one_state(run: Run) -> None:
    del run.optimizer.state[next(iter(run.optimizer.state))]


def _hook(run: Run) -> None:
    run.model.head.bias.register_hook(lambda gradient: gradient * 0.5)


def _hook_in_place(run: Run) -> None:
    run.model.head.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def _scales_gradients(run: Run) -> None:
    step, optimizer = run.optimizer.step, run.optimizer

    def scaled(*args: Any) -> Any:
        for p in run.model.parameters():
            p.grad.mul_(0.5)
        return step(*args)

    optimizer.step = scaled  # type: ignore[method-assign]


def _edits(run: Run) -> None:
    with torch.no_grad():
        run.model.head.bias.mul_(1.5)


ROW_2: dict[str, Odd] = {
    "learning rate": Odd(
        lambda run: _options(run, lr=run.other(0.2, 0.1)), "lr of the optimizer: .*0.1 on rank 0 and 0.2"
    ),
    "schedule": Odd(_scheduled, "lr of the optimizer: ", at=0),
    "weight decay": Odd(lambda run: _options(run, weight_decay=run.other(0.2, 0.1)), "weight_decay of the optimizer: "),
    "optimizer class": Odd(_other_class, "class of the optimizer: .*AdamW on rank 0 and Adam on rank 1"),
    "parameter subset": Odd(_subset, r"parameters of the optimizer: .*head.bias \(not on rank 1\)"),
    "max_norm": Odd(_attribute("max_norm", 0.5), "max_norm of clip_grad_norm_: .*1.0 on rank 0 and 0.5 on rank 1"),
    "norm_type": Odd(_attribute("norm_type", 1.0), "norm_type of clip_grad_norm_: "),
    "clip after the step": Odd(
        _attribute("clips_after", True),
        "calls since .*: .*clip_grad_norm_, optimizer.step on rank 0 and optimizer.step, clip_grad_norm_ on rank 1",
    ),
    "divide factor": Odd(
        lambda run: run.model.layers[1].set_gradient_divide_factor(run.other(1.0, 2.0)),
        "settings of layers.1: .*factor=1",
    ),
    "scale": Odd(_scaler(init_scale=128.0), "scale of GradScaler: .*64.0 on rank 0 and 128.0 on rank 1"),
    "growth": Odd(_scaler(growth_interval=7), "growth_interval of GradScaler: "),
    "load_state_dict": Odd(_on_odd(_loads_its_own), "calls since the last comparison: "),
    "load_state_dict of the optimizer": Odd(_on_odd(_loads_its_own_optimizer), "state of the optimizer: .*replaced"),
    "lost optimizer state": Odd(_on_odd(_loses_state), "state of the optimizer: .*one step further on rank 0"),
    "tensor hook": Odd(_on_odd(_hook), "calls since the last comparison: .*hooks"),
    # Beyond those of the review.
    "lost state of one parameter": Odd(_on_odd(_loses_one_state), "state of the optimizer: "),
    "post-accumulate hook": Odd(_on_odd(_hook_in_place), "calls since the last comparison: .*hooks"),
    "gradients scaled": Odd(_on_odd(_scales_gradients), "gradients that the optimizer took: .*written"),
    "parameters edited": Odd(_on_odd(_edits), "times that parameters of .* were written: "),
    "betas": Odd(lambda run: _options(run, betas=run.other((0.8, 0.99), (0.9, 0.99))), "betas of the optimizer: "),
    "maximize": Odd(lambda run: _options(run, maximize=run.odd), "maximize of the optimizer: "),
    "sums alone": Odd(lambda run: run.model.set_force_sum_reduction_for_comms(run.odd), "settings of root: "),
    "all-reduce hook": Odd(
        _on_odd(lambda run: run.model.layers[0].set_all_reduce_hook(lambda g: g.mul_(0.5))), "settings of layers.0: "
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", ROW_2)
def test_a_rank_that_does_something_else_is_named(case: str) -> None:
    """On all ranks in the same step, at the latest the one after, before a gradient of it is handed over."""
    odd = ROW_2[case]
    found = run_ranks(2, outcome, plain, odd.change, odd.at)
    for step, what, text in found:
        # A schedule changes the step after.
        assert odd.at <= step <= odd.at + 1 + (case == "schedule"), found
        assert what and re.search(odd.text, text), text
        assert "rank 0" in text and "rank 1" in text and "; " in text
    assert found[0][:2] == found[1][:2]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ROW_2)
def test_all_ranks_may_do_it(case: str) -> None:
    odd = ROW_2[case]

    def change(run: Run) -> None:
        run.odd = True
        odd.change(run)

    for step, what, text in run_ranks(2, outcome, plain, change, odd.at):
        assert (step, what) == (STEPS, ""), text


# ---- the strategies --------------------------------------------------------------------------------------------


def _hybrid(rank: int) -> Run:
    return Run(rank, seeded(Model), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _replicated(rank: int) -> Run:
    return Run(rank, seeded(Model), mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")))


def _mixed_precision(rank: int) -> Run:
    model: Any = seeded(Model)
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    return Run(rank, fully_shard(model, mp_policy=policy))


# How ranks come to their parameters, and on how many nodes they are.
STRATEGIES: dict[str, tuple[Callable[[int], Run], int]] = {
    "exchanged": (plain, 1),
    "reduced by the backend": (plain, 2),
    "hybrid": (_hybrid, 1),
    "hybrid, reduced by the backend": (_hybrid, 4),
    "replicated": (_replicated, 1),
    "mixed precision": (_mixed_precision, 1),
    "mixed precision, reduced by the backend": (_mixed_precision, 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_know_it_whoever_differs(strategy: str, odd: int) -> None:
    make, nodes = STRATEGIES[strategy]

    def change(run: Run) -> None:
        _options(run, lr=0.3 if run.rank == odd else 0.1)

    with on_nodes(4, nodes):
        found = run_ranks(4, outcome, make, change, 1)
    assert len({(step, what) for step, what, _ in found}) == 1 and found[0][0] == 2
    assert all(f"0.3 on rank {odd}" in text for _, _, text in found), found


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_ranks_go_on(strategy: str) -> None:
    make, nodes = STRATEGIES[strategy]
    with on_nodes(4, nodes):
        assert run_ranks(4, outcome, make, lambda run: None, 0) == [(STEPS, "", "")] * 4


@pytest.mark.parametrize("setting", ["torch", "custom"])
def test_where_no_message_carries_a_digest_forwards_ask(setting: str) -> None:
    """At the first forward that trains, the second, the 16th: so what differs from the second step on is found late."""

    def change(run: Run) -> None:
        _options(run, lr=run.other(0.2, 0.1))

    with environment({"FULLSHARD_COMMUNICATION": "torch"}):
        found = run_ranks(2, outcome, plain, change, 0)
    assert {(step, what) for step, what, _ in found} == {(1, "lr of the optimizer")}


# ---- what no unit has, and replicas ------------------------------------------------------------------------------


def _appended(rank: int, seed: int) -> Run:
    model = shard(seeded(Model))
    model.head = nn.Sequential(model.head, seeded(lambda: nn.Linear(11, 11), seed=seed))
    return Run(rank, model)


def _ignored(rank: int, seed: int) -> Run:
    model: Any = seeded(Model)
    model.head.weight = nn.Parameter(seeded(lambda: nn.Linear(6, 11), seed=seed).weight.detach())
    for layer in model.layers:
        fully_shard(layer)
    return Run(rank, fully_shard(model, ignored_params={model.head.weight}))


class _WithHead(Run):
    """A head that is no part of the model."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seeded(Model))
        self.head = seeded(lambda: nn.Linear(11, 3), seed=seed)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.head.parameters()], lr=0.1)

    def loss(self) -> Tensor:
        out: Tensor = self.head(self.model(part(batch(dist.get_world_size(), self.step), self.rank))).pow(2).mean()
        return out


def _seeded_replicas(rank: int, replicas: tuple[int, ...]) -> Run:
    """Without values when they are cut; then each rank draws its rows."""
    mesh = init_device_mesh("cpu", replicas, mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model: Any = Model()
    model = shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().normal_(generator=generator)
    return Run(rank, model)


def _loaded_replicas(rank: int, replicas: tuple[int, ...]) -> Run:
    mesh = init_device_mesh("cpu", replicas, mesh_dim_names=("replicate", "shard"))
    run = Run(rank, shard(seeded(Model), mesh=mesh))
    with torch.no_grad():
        for p in run.model.parameters():
            p.to_local().mul_(1.0 + rank // replicas[1])
    return run


def _another_checkpoint(rank: int) -> Run:
    model = shard(seeded(Model))
    model.load_state_dict(seeded(Model, seed=5 + rank).state_dict())
    return Run(rank, model)


def _load_another(run: Run) -> None:
    run.model.load_state_dict(seeded(Model, seed=5 + run.rank).state_dict())


def _materialized(rank: int) -> Run:
    with torch.device("meta"):
        model: Any = Model()
    model = shard(model)

    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.1 + rank)

    return Run(rank, fullshard.materialize(model, device="cpu", init=init, seed=0))


def _nothing(run: Run) -> None:
    pass


class Place(NamedTuple):
    """`make(rank)`; the error comes in step `step`, with `text`."""

    make: Callable[[int], Run]
    text: str
    step: int = 0
    change: Callable[[Run], object] = _nothing
    world: int = 2


ROW_3: dict[str, Place] = {
    "layer appended, other values": Place(lambda rank: _appended(rank, rank), "^head.1.weight: "),
    "layer appended, trained": Place(lambda rank: _appended(rank, 0), "^head.1.weight: ", 1),
    "ignored_params, trained": Place(lambda rank: _ignored(rank, 0), "^head.weight: ", 1),
    "head outside, trained": Place(
        lambda rank: _WithHead(rank, 0),
        "^Linear.weight, parameter 0 beside the model's in the optimizer: ",
        1,
    ),
    "replicas of HSDP, seeds": Place(lambda rank: _seeded_replicas(rank, (2, 2)), "^shard of ", world=4),
    "replicas alone, seeds": Place(lambda rank: _seeded_replicas(rank, (2, 1)), "^shard of "),
    "replicas of HSDP, loaded": Place(lambda rank: _loaded_replicas(rank, (2, 2)), "^shard of ", world=4),
    "replicas alone, loaded": Place(lambda rank: _loaded_replicas(rank, (2, 1)), "^shard of "),
    "another checkpoint": Place(_another_checkpoint, "weight: expected the same values on every rank"),
    "another checkpoint later": Place(plain, "^loaded values of ", 1, _load_another),
    "materialize(init=)": Place(_materialized, "weight: expected the same values on every rank"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ROW_3)
def test_values_that_no_reduction_brings_together(case: str) -> None:
    place = ROW_3[case]
    found = run_ranks(place.world, outcome, place.make, place.change, 1)
    assert {step for step, _, _ in found} == {place.step}, found
    for _, what, text in found:
        assert what and re.search(place.text, text), text


def test_ignored_parameters_that_differ_from_the_beginning_are_the_users() -> None:
    def train_head(rank: int) -> Run:
        return _ignored(rank, rank)

    assert run_ranks(2, outcome, train_head, _nothing, 0) == [(STEPS, "", "")] * 2
