"""Units that only some ranks run in a step: `fully_shard(module, optional=True)`, beside plain training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.policy import use_options
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.optional_units import (
    OPTIONAL,
    PARTS,
    STEPS,
    UNITS,
    WIDTH,
    Model,
    Tower,
    batch,
    loss_of,
    parts_of,
    shard,
)
from tests.harness.threads import run_ranks


def reference(world: int, steps: Sequence[int], micros: int = 1, clip: float | None = None) -> Trained:
    """Plain training: the mean of the ranks' losses."""
    model = seeded(Model)
    optimizer = adamw(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        for micro in range(micros):
            losses = [loss_of(model, step, rank, parts_of(step + micro, rank), micro) for rank in range(world)]
            (sum(losses) / world).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return collect(model, optimizer)


def _train(rank: int, models: list[Model], **given: Any) -> tuple[Trained, list[set[str]]]:
    mesh = {}
    shape = given.pop("shape", None)
    micros, clip = given.pop("micros", 1), given.pop("clip", None)
    if shape is not None:
        mesh = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))}
    model = shard(models[rank], mark=True, **mesh, **given)
    optimizer = adamw(model.parameters())
    absent = []
    for step in STEPS:
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            loss_of(model, step, rank, parts_of(step + micro, rank), micro).backward()
        if clip is not None:
            model.clip_grad_norm_(clip)
        absent.append({name for name, p in model.named_parameters() if p.grad is None})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(batch(step, rank)[0], parts_of(step + rank, rank))
            model.train()
    return collect(model, optimizer), absent


OPTIONS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
    "accumulated": {"micros": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_one_process(world: int, options: str) -> None:
    models = [seeded(Model) for _ in range(world)]
    given = OPTIONS[options]
    found = run_ranks(world, lambda rank: _train(rank, models, **given))
    expected = reference(world, STEPS, given.get("micros", 1))
    for trained, absent in found:
        assert_same_training(trained, expected)
        assert absent == found[0][1]
    ran = [{part for rank in range(world) for part in parts_of(step, rank)} for step in STEPS]
    if "micros" not in given:
        for parts, names in zip(ran, found[0][1], strict=True):
            assert ("aux.weight" in names) == ("aux" not in parts)
            assert ("tower.blocks.1.up.weight" in names) == ("tower" not in parts)


# ---- the strategies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [pytest.param((2, 2), marks=pytest.mark.slow), (2, 1)], ids=str)
def test_replicas(shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    models = [seeded(Model) for _ in range(world)]
    expected = reference(world, STEPS)
    found = run_ranks(world, lambda rank: _train(rank, models, shape=shape))
    for trained, absent in found:
        assert_same_training(trained, expected)
        assert absent == found[0][1]


def test_recomputation() -> None:
    models = [seeded(lambda: Model(again=True)) for _ in range(2)]
    expected = reference(2, STEPS)
    for trained, _ in run_ranks(2, lambda rank: _train(rank, models)):
        assert_same_training(trained, expected)


def _keeps_a_block(rank: int, models: list[Model]) -> Trained:
    """The younger of the tower's blocks stays unsharded, so the older one is what every rank gathers next."""
    model = models[rank]
    for name in UNITS:
        kept = {"reshard_after_forward": False} if name == "tower.blocks.1" else {}
        fullshard.fully_shard(model.get_submodule(name), optional=name in OPTIONAL, **kept)
    fullshard.fully_shard(model, reshard_after_forward=None)
    optimizer = adamw(model.parameters())
    for step in STEPS:
        loss_of(model, step, rank, parts_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def test_recomputation_of_the_unit_that_is_gathered_next() -> None:
    models = [seeded(lambda: Model(again=True)) for _ in range(2)]
    expected = reference(2, STEPS)
    for trained in run_ranks(2, lambda rank: _keeps_a_block(rank, models)):
        assert_same_training(trained, expected)


@pytest.mark.slow
def test_a_part_stays_on_the_ranks_of_a_block() -> None:
    models = [seeded(Model) for _ in range(4)]
    expected = reference(4, STEPS)
    for trained, _ in run_ranks(4, lambda rank: _train(rank, models, reshard_after_forward=2)):
        assert_same_training(trained, expected)


def _zero_of(rank: int, step: int) -> list[str]:
    return [part for part in PARTS if part not in parts_of(step, rank)]


# Steps in which every part runs on some rank of two.
_ALL_RUN = [step for step in range(60) if {*parts_of(step, 0), *parts_of(step, 1)} == {*PARTS}]


def _train_in(rank: int, impl: Implementation, models: list[Model], mark: bool, policy: Any) -> Trained:
    model = shard(models[rank], impl.fully_shard, mark=mark, mp_policy=impl.MixedPrecisionPolicy(*policy))
    optimizer = adamw(model.parameters())
    for step in _ALL_RUN[:4]:
        zero = {} if mark else {"zero": _zero_of(rank, step)}
        loss_of(model, step, rank, parts_of(step, rank), **zero).backward()
        impl.clip(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", [(None, None), (torch.bfloat16, torch.float32)], ids=["float32", "bfloat16"])
def test_equal_to_ranks_that_run_all_parts_times_zero(policy: tuple[Any, Any]) -> None:
    """Zeros add nothing, with clipping too. FSDP2 adds in another order."""
    models = [[seeded(Model) for _ in range(2)] for _ in range(3)]
    plain = reference(2, _ALL_RUN[:4], clip=0.05)
    ours = run_ranks(2, lambda rank: _train_in(rank, FULLSHARD, models[0], True, policy))
    theirs = run_ranks(2, lambda rank: _train_in(rank, FULLSHARD, models[1], False, policy))
    torch_s = run_ranks(2, lambda rank: _train_in(rank, TORCH, models[2], False, policy))
    for found, expected, fsdp2 in zip(ours, theirs, torch_s, strict=True):
        assert_same_training(found, expected, eps_multiple=0)
        if policy[0] is None:
            assert_same_training(found, plain)
            assert_same_training(fsdp2, plain)


class Towers(nn.Module):
    """Runs its towers in the order it is given, each as often as it is named."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: Tower() for name in "ab"})
        self.head = nn.Linear(WIDTH, 4)
        for parameter in self.head.parameters():
            parameter.requires_grad_(trained)

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = self.towers[name](x)
        return self.head(x)


def _train_towers(rank: int, models: list[Towers], orders: Sequence[Sequence[str]]) -> Trained:
    model = models[rank]
    for tower in model.towers.values():
        for part in (*tower.blocks, tower):
            fullshard.fully_shard(part, optional=True, reshard_after_forward=False)
    fullshard.fully_shard(model)
    optimizer = adamw(model.parameters())
    for step, order in enumerate(orders):
        loss_of(model, step, rank, order[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def test_any_order_and_number_where_it_is_kept() -> None:
    orders = [("ab", "ba"), ("aab", "b"), ("", "bb"), ("", ""), ("baab", "a")]
    models = [seeded(Towers) for _ in range(2)]
    plain = seeded(Towers)
    optimizer = adamw(plain.parameters())
    for step, order in enumerate(orders):
        optimizer.zero_grad()
        (sum(loss_of(plain, step, rank, order[rank]) for rank in range(2)) / 2).backward()
        optimizer.step()
    expected = collect(plain, optimizer)
    for trained in run_ranks(2, lambda rank: _train_towers(rank, models, orders)):
        assert_same_training(trained, expected)


class _Last(nn.Module):
    """A layer, and an optional one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, last: bool) -> Tensor:
        x = self.layer(x)
        return self.last(x) if last else x


def _evaluates(rank: int, models: list[_Last]) -> list[Tensor]:
    model = models[rank]
    fullshard.fully_shard(model.layer, reshard_after_forward=False)
    fullshard.fully_shard(model.last, optional=True)
    fullshard.fully_shard(model, reshard_after_forward=False)
    with torch.no_grad():
        return [model(torch.ones(2, WIDTH), (rank + step) % 2 == 0) for step in range(3)]


def test_an_evaluation_whose_only_message_is_of_what_a_rank_leaves_out() -> None:
    """From the second one on the layer is there already. The rank that joins says the same of its forward."""
    models, plain = [seeded(_Last) for _ in range(2)], seeded(_Last)
    with use_options(prefetch_depth=0):
        outputs = run_ranks(2, lambda rank: _evaluates(rank, models))
    for rank, found in enumerate(outputs):
        for step, out in enumerate(found):
            with torch.no_grad():
                assert torch.equal(out, plain(torch.ones(2, WIDTH), (rank + step) % 2 == 0))


# ---- steps of another kind -------------------------------------------------------------------------------------------


def _two_forwards(rank: int, models: list[Model], how: str) -> Trained:
    model = shard(models[rank], mark=True) if how != "plain" else models[rank]
    ranks = [rank] if how != "plain" else range(2)
    optimizer = adamw(model.parameters())
    for step in range(3):
        losses = [
            sum(loss_of(model, step, each, parts_of(step + micro, each), micro) for each in ranks) / len(ranks)
            for micro in range(2)
        ]
        if how == "apart":
            losses[1].backward()
            losses[0].backward()
        else:
            sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.parametrize("how", ["together", "apart"])
def test_two_forwards_before_a_backward(how: str) -> None:
    models = [seeded(Model) for _ in range(3)]
    expected = _two_forwards(2, models, "plain")
    for trained in run_ranks(2, lambda rank: _two_forwards(rank, models, how)):
        assert_same_training(trained, expected)


class _Broken(Exception):
    pass


def _train_after_an_error(rank: int, models: list[Model], where: str) -> Trained:
    model = shard(models[rank], mark=True)
    optimizer = adamw(model.parameters())

    def fail(*_: object) -> None:
        raise _Broken

    for step in range(4):
        if step == 2:
            if where == "forward":
                handle = model.layers[2].register_forward_pre_hook(fail)
            else:
                handle = model.layers[0].up.register_full_backward_hook(fail)
            with pytest.raises(_Broken):
                loss_of(model, step, rank, parts_of(step, rank)).backward()
            handle.remove()
        loss_of(model, step, rank, parts_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing(where: str) -> None:
    models = [seeded(Model) for _ in range(2)]
    expected = reference(2, range(4))
    for trained in run_ranks(2, lambda rank: _train_after_an_error(rank, models, where)):
        assert_same_training(trained, expected)


class _Catching(nn.Module):
    """Continues without its optional part where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        try:
            x = self.tower(x.double() if fails else x)
        except RuntimeError:
            pass
        return self.head(x)


def _caught(rank: int, models: list[_Catching]) -> list[list[tuple[str, str]]]:
    model = models[rank]
    for part in (*model.tower.blocks, model.tower):
        fullshard.fully_shard(part, optional=True)
    fullshard.fully_shard(model.head)
    fullshard.fully_shard(model)
    made = []
    for step in range(2):
        with fullshard.observe.record(model) as trace:
            loss_of(model, step, rank, rank == step).backward()  # type: ignore[arg-type]
        made.append([one for one in trace.commands if one[0] in ("unshard", "reduce")])
        assert all(p.grad is not None for p in model.parameters())
    return made


def test_a_run_that_the_model_catches() -> None:
    models = [seeded(_Catching) for _ in range(2)]
    first, second = run_ranks(2, lambda rank: _caught(rank, models))
    assert first == second


def _messages(rank: int, models: list[Model], steps: Sequence[int]) -> list[list[tuple[str, str]]]:
    model = shard(models[rank], mark=True)
    made = []
    for step in steps:
        with fullshard.observe.record(model) as trace:
            loss_of(model, step, rank, parts_of(step, rank)).backward()
        made.append([one for one in trace.commands if one[0] in ("unshard", "reduce")])
        model.zero_grad()
    return made


def test_messages_are_those_of_a_step_in_which_all_run() -> None:
    models = [seeded(Model) for _ in range(3)]
    found = run_ranks(3, lambda rank: _messages(rank, models, STEPS))
    assert found[0] == found[1] == found[2]
    # From the second step on, where the order is known, each step has the messages of every other.
    assert all(each == found[0][1] for each in found[0][1:])
    names = {name for _, name in found[0][0]}
    assert names == {*UNITS, "root"}


def _prepared(rank: int, models: list[Model]) -> Trained:
    config = {
        "wrap": {"by": "plan", "plan": list(UNITS)},
        "override": [{"modules": name, "optional": True} for name in OPTIONAL],
    }
    model = models[rank]
    optimizer = adamw(model.parameters(), watched=False)
    fullshard.prepare_fully_shard(model, optimizer, config, show=False)
    for step in range(3):
        loss_of(model, step, rank, parts_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def test_a_configuration_marks_units() -> None:
    models = [seeded(Model) for _ in range(2)]
    expected = reference(2, range(3))
    for trained in run_ranks(2, lambda rank: _prepared(rank, models)):
        assert_same_training(trained, expected)


# ---- refused ---------------------------------------------------------------------------------------------------------


class _Order(nn.Module):
    """Runs parts in the order of `names`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = self.parts[name](x)
        return x


def _ordered(rank: int, optional: str, orders: Sequence[str], alone: bool) -> str:
    model = seeded(_Order)
    for name, part in model.parts.items():
        fullshard.fully_shard(part, optional=name in optional)
    fullshard.fully_shard(model)
    try:
        for _ in range(2):
            model(torch.ones(2, WIDTH), orders[rank])
        if alone:
            model.parts[optional](torch.ones(2, WIDTH))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("optional", "orders", "said"),
    [
        ("b", ("abbc", "ac"), "parts.b: expected one run of an optional unit"),
        ("b", ("acb", "ac"), "parts.b: expected one run of an optional unit"),
        # All ranks compare what they are about to send.
        ("b", ("bac", "ac"), "run it at its place in the order of modules"),
        ("bc", ("acb", "a"), "parts.b: expected one run of an optional unit"),
    ],
)
def test_a_run_that_no_other_rank_joins_is_refused_by_name(optional: str, orders: tuple[str, str], said: str) -> None:
    first, second = run_ranks(2, lambda rank: _ordered(rank, optional, orders, False))
    assert said in first
    assert said in second


def test_a_run_outside_of_the_model_is_refused() -> None:
    for found in run_ranks(2, lambda rank: _ordered(rank, "b", ("abc", "ac"), True)):
        assert "parts.b: expected an optional unit to run inside of the forward of the model" in found


def test_without_the_mark_the_error_names_it() -> None:
    for found in run_ranks(2, lambda rank: _ordered(rank, "", ("abc", "ac"), False)):
        assert "RanksDisagree" in found and "fully_shard(module, optional=True)" in found


def _marked_on_one(rank: int) -> str:
    model = seeded(_Order)
    fullshard.fully_shard(model.parts["b"], optional=rank == 1)
    fullshard.fully_shard(model)
    try:
        model(torch.ones(2, WIDTH), "abc")
    except fullshard.RanksDisagree as error:
        return str(error)
    return ""


def test_a_mark_on_one_rank_is_named() -> None:
    for found in run_ranks(2, _marked_on_one):
        assert "parts.b" in found and "optional" in found


def _refusals(rank: int) -> list[str]:
    found = []
    model = seeded(_Order)
    for args, given in [
        (([model.parts["a"], model.parts["b"]],), {"optional": True}),
        ((model,), {"optional": "yes"}),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            fullshard.fully_shard(*args, **given)
        found.append(str(caught.value))
    fullshard.fully_shard(model, optional=True)
    with pytest.raises(ValueError) as caught:
        model(torch.ones(2, WIDTH), "a")
    found.append(str(caught.value))
    return found


def test_marks_that_mean_nothing_are_refused() -> None:
    several, text, root = run_ranks(1, _refusals)[0]
    assert "expected one module, found 2" in several
    assert "True or False" in text
    assert "expected optional=True for a unit inside of the model" in root
