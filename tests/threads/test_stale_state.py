"""Optimizers that hold the wrong tensors, steps with a part of the gradients, parameters edited under way.

Each is right, or an error with the fix: never a run that learns nothing, or something else, without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fullshard
from fullshard.engine import optimizer_steps
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part, shard

WORLD = 2


def _base(seed: int = 0) -> Any:
    return seeded(Model, seed)


def _loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens).pow(2).mean()
    return loss


def _whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# ---- optimizers over full parameters -------------------------------------------------------------------------


def _train_once(model: Any, rank: int, world: int = WORLD, seed: int = 0) -> None:
    _loss(model, part(batch(world, seed), rank)).backward()


@behaviour(
    "an optimizer over full parameters (built after `unshard()`) is refused at its first step, with their names",
    area="training",
    torch="better",
    reason="torch's steps train nothing, and say nothing",
)
def test_an_optimizer_built_after_unshard_is_refused(impl: Implementation) -> None:
    def job(rank: int) -> None:
        model = shard(_base(), impl)
        model.unshard()
        model.layers[1].unshard()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.reshard()
        model.layers[1].reshard()
        before = _whole(model)
        _train_once(model, rank)
        with pytest.raises(RuntimeError, match=r"AdamW\.step: expected the sharded .*: embedding\.weight, .*reshard"):
            optimizer.step()
        assert _equal(_whole(model), before)

    run_ranks(WORLD, job)


def _within_full_params(model: Any, tokens: Tensor) -> list[Tensor]:
    with fullshard.full_params(model):
        return list(model.parameters())


def _between(model: Any, tokens: Tensor) -> list[Tensor]:
    loss = _loss(model, tokens)
    found = list(model.parameters())
    loss.backward()
    model.zero_grad()
    return found


def _in_forward(model: Any, tokens: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    handle = model.layers[0].register_forward_pre_hook(lambda module, _: found.extend(module.parameters()))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    return found


MOMENTS: dict[str, tuple[int, dict[str, Any], Callable[..., list[Tensor]], str]] = {
    "full_params": (WORLD, {}, _within_full_params, "full_params is open"),
    "root between forward and backward": (WORLD, {}, _between, "between forward and backward"),
    "all between forward and backward": (WORLD, {"reshard_after_forward": False}, _between, "between forward and"),
    "kept parts": (4, {"reshard_after_forward": 2}, _between, "between forward and backward"),
    "in forward": (WORLD, {}, _in_forward, "between forward and backward"),
    "one rank": (1, {}, _in_forward, "between forward and backward"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_optimizer_over_full_parameters_is_refused(moment: str) -> None:
    """At its first step and at each one after, whatever kind of step; one that is built later trains."""
    world, options, take, when = MOMENTS[moment]

    def job(rank: int) -> None:
        model = shard(_base(), **options)
        tokens = part(batch(world, 0), rank)
        taken = take(model, tokens)
        assert taken
        optimizer = torch.optim.SGD(taken, lr=0.1)
        before = _whole(model)
        for stepping in (optimizer, fullshard.step_on_shards(torch.optim.AdamW(taken, lr=0.1)), optimizer):
            _loss(model, tokens).backward()
            with pytest.raises(RuntimeError, match=f"found full ones, .*{when}.*Build the optimizer"):
                stepping.step()
            model.zero_grad()
        assert _equal(_whole(model), before)
        good = torch.optim.SGD(model.parameters(), lr=0.1)
        _loss(model, tokens).backward()
        good.step()
        # Also once they joined parameters that are trained.
        good.add_param_group({"params": taken[:1]})
        if not any(taken[0] is p for p in model.parameters()):
            with pytest.raises(RuntimeError, match="found full ones"):
                good.step()
        assert not _equal(_whole(model), before)

    run_ranks(world, job)


def test_full_parameters_that_somebody_trains_on_purpose_are_left_alone() -> None:
    """Gradients of their own, inside `full_params`, and written back; also when the copies are trained on behind it."""

    def job(rank: int) -> None:
        model = shard(_base())
        before = _whole(model)
        with fullshard.full_params(model, writeback=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for i, p in enumerate(model.parameters()):
                p.grad = torch.ones_like(p) if i else None  # one of them has none
            optimizer.step()
        for i, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
            tolerance.assert_close(p.full_tensor(), old - 0.5 if i else old)  # type: ignore[attr-defined]
        copies = optimizer.param_groups[0]["params"]
        torch.optim.SGD(copies, lr=0.5).step()
        for p, old in zip(copies[1:], before[1:], strict=True):
            tolerance.assert_close(p, old - 1.0)

    run_ranks(WORLD, job)


def test_nothing_is_remembered_of_models_that_are_gone_and_windows_that_are_closed() -> None:
    import gc

    gc.collect()  # what other tests left
    known = set(optimizer_steps._full)

    def job(rank: int) -> None:
        model = shard(_base())
        with fullshard.full_params(model):
            pass
        assert len(optimizer_steps._full) > len(known)

    run_ranks(WORLD, job)
    gc.collect()
    assert set(optimizer_steps._full) <= known

    def windows(rank: int) -> None:
        model = shard(_base())
        ours = {id(module._unit()) for module in model.modules() if isinstance(module, fullshard.FSDPModule)}
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            _train_once(model, rank)
            assert ours & set(optimizer_steps._open) == (set() if sync else ours)

    run_ranks(WORLD, windows)


# ---- optimizers from before a memory was given ---------------------------------------------------------------


class Beside(nn.Module):
    """A unit, and a plain parameter that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.plain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.plain

    def reset_parameters(self) -> None:
        nn.init.ones_(self.plain)


@pytest.mark.parametrize("how", ["to_empty", "materialize"])
def test_an_optimizer_from_before_to_empty(how: str) -> None:
    """It keeps sharded parameters, which stay the same objects; it does not keep plain ones, which do not: refused."""

    def job(rank: int) -> None:
        with torch.device("meta"):
            model: Any = Beside()
        unsharded = torch.optim.SGD(model.parameters(), lr=0.1)
        fullshard.fully_shard(model, ignored_params={model.plain})
        of_shards = torch.optim.SGD([p for p in model.parameters() if isinstance(p, DTensor)], lr=0.1)
        of_all = torch.optim.SGD(model.parameters(), lr=0.1)
        if how == "to_empty":
            model.to_empty(device="cpu")
            for p in model.parameters():
                nn.init.ones_(p)
        else:
            fullshard.materialize(model, device="cpu")
        model(torch.ones(1, 3)).sum().backward()
        before = _whole(model)
        with pytest.raises(
            RuntimeError, match=r"found some that to_empty replaced: plain; .*Build the optimizer after"
        ):
            of_all.step()
        with pytest.raises(RuntimeError, match=r"found some that .*: (plain, )?linear\.weight, linear\.bias;"):
            unsharded.step()
        assert _equal(_whole(model), before)
        of_shards.step()
        assert [torch.equal(a, b) for a, b in zip(_whole(model), before, strict=True)].count(True) == 1
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(model.plain, torch.ones(3))

    run_ranks(WORLD, job)


# ---- synchronisation left off --------------------------------------------------------------------------------


class HalfWay(torch.optim.Optimizer):
    """Steps parameter by parameter, and asks of a gradient only whether it is there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"])
        return loss


@behaviour(
    "a step while a micro-batch is not reduced is refused, though earlier ones of the window were",
    area="gradients",
    torch="better",
    reason="torch's step leaves out what the last backward brought, silently, and adds it to a later step",
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, HalfWay])
def test_a_step_with_a_part_of_the_gradients(kind: Any, impl: Implementation) -> None:
    """The first micro-batch is reduced, the second is not; with the third the window is whole and trains as always."""

    def job(rank: int) -> None:
        model, reference = shard(_base(), impl), _base()
        optimizer, plain = kind(model.parameters()), kind(reference.parameters())
        before = _whole(model)
        for i, sync in enumerate((True, False, True)):
            if i:
                with pytest.raises(RuntimeError, match="set_requires_gradient_sync") if i == 2 else _nothing():
                    if i == 2:
                        optimizer.step()
            model.set_requires_gradient_sync(sync)
            _train_once(model, rank, seed=i)
            for r in range(WORLD):
                (_loss(reference, part(batch(WORLD, i), r)) / WORLD).backward()
        assert _equal(_whole(model), before)
        optimizer.step()
        plain.step()
        for ours, theirs in zip(_whole(model), reference.parameters(), strict=True):
            tolerance.assert_close(ours, theirs.detach())

    run_ranks(WORLD, job)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.sample(2)
@pytest.mark.parametrize("left_off", ["sync", "all-reduce"])
@pytest.mark.parametrize("first", [True, False])
def test_what_a_window_that_is_open_refuses_and_what_it_allows(left_off: str, first: bool) -> None:
    """`first`: an earlier micro-batch was reduced."""
    shape = (2, 2) if left_off == "all-reduce" else (2,)
    world = 4 if left_off == "all-reduce" else 2

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = shard(_base(), mesh=mesh)
        every = [kind(model.parameters()) for kind in (HalfWay, torch.optim.SGD)]
        every.append(fullshard.step_on_shards(torch.optim.AdamW(model.parameters())))
        head = HalfWay(model.head.parameters())
        layers = HalfWay(model.layers.parameters())

        def switch(on: bool, module: Any = model) -> None:
            if left_off == "sync":
                module.set_requires_gradient_sync(on)
            else:
                module.set_requires_all_reduce(on)

        if first:
            _train_once(model, rank, world, seed=1)
        for layer in model.layers:
            switch(False, layer)
        _train_once(model, rank, world)
        before = _whole(model)
        for optimizer in (*every, layers):
            with pytest.raises(RuntimeError, match=r"layers\.0\.norm\.weight.*(set_requires|accumulated)"):
                optimizer.step()
        assert _equal(_whole(model), before)
        # The root was reduced, and its parameters may be stepped.
        head.step()
        assert not _equal(_whole(model), before)
        # A closure may bring the rest.
        for layer in model.layers:
            switch(True, layer)
        layers.step(lambda: _train_once(model, rank, world, seed=2))
        assert all(p.grad is not None for p in model.parameters())
        # Given up: nothing is left to step, which is no fault.
        for layer in model.layers:
            switch(False, layer)
        _train_once(model, rank, world)
        model.zero_grad()
        before = _whole(model)
        for optimizer in every:
            optimizer.step()
        assert _equal(_whole(model), before)

    run_ranks(world, job)


# ---- edits and swaps between steps ---------------------------------------------------------------------------


def _rows(value: Tensor, like: Tensor) -> Tensor:
    """`value`, sharded as the parameter `like` where that is sharded."""
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def _values(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [_rows(torch.randn(p.shape, generator=generator) * 0.3, p) for p in model.parameters()]


def _data_copy(model: nn.Module, seed: int) -> None:
    for p, value in zip(model.parameters(), _values(model, seed), strict=True):
        p.data.copy_(value)


def _data_times(model: nn.Module, seed: int) -> None:
    for p in model.parameters():
        p.data *= 0.5 + 0.1 * seed


def _copy(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), _values(model, seed), strict=True):
            p.copy_(value)


def _swap(model: nn.Module, seed: int) -> None:
    for p, value in zip(model.parameters(), _values(model, seed), strict=True):
        torch.utils.swap_tensors(p, nn.Parameter(value))


def _foreach(model: nn.Module, seed: int) -> None:
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_mul_(locals_, 0.5 + 0.1 * seed)


def _load(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in model.state_dict().items()}
    # Assigned, too; an optimizer over a plain model would not follow.
    model.load_state_dict(values, assign=seed % 2 == 1 and isinstance(model, fullshard.FSDPModule))


EDITS: dict[str, Callable[[nn.Module, int], None]] = {
    "p.data.copy_": _data_copy,
    "p.data *=": _data_times,
    "p.copy_": _copy,
    "swap_tensors": _swap,
    "foreach": _foreach,
    "load_state_dict": _load,
}


class Average:
    """The usual moving average: taken after steps, put in the place of the weights for an evaluation, and back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for shadow, p in zip(self.shadow, self.model.parameters(), strict=True):
            shadow.lerp_(p.detach(), 0.3)

    @torch.no_grad()
    def exchange(self, *, by_data: bool) -> None:
        for i, p in enumerate(self.model.parameters()):
            kept = p.detach().clone()
            if by_data:
                p.data.copy_(self.shadow[i])
            else:
                p.copy_(self.shadow[i])
            self.shadow[i] = kept


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept full": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "a part is kept": {"reshard_after_forward": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_plain_tensor_assigned_to_data_is_refused(options: str, trained: bool) -> None:
    """Also one of another shape, before the first forward and after an evaluation; then the model is what it was."""
    world = 4 if options == "a part is kept" else WORLD

    def job(rank: int) -> None:
        model = shard(_base(), **OPTIONS[options])
        tokens = part(batch(world, 0), rank)
        if trained:
            _loss(model, tokens).backward()
            model.zero_grad()
        with torch.no_grad():
            expected = _base()(tokens)
            assert not trained or tolerance.close(model(tokens), expected)
            for value in (torch.zeros(13, 6), torch.zeros(2, 2)):
                model.layers[1].up.weight.data = value
                with pytest.raises(
                    RuntimeError, match=r"up\.weight: expected values that are written .*\.data.*p\.copy_"
                ):
                    model(tokens)
                assert model.layers[1].up.weight.shape == (13, 6)
                assert tolerance.close(model(tokens), expected)
            weight = model.layers[1].up.weight
            weight.copy_(_rows(torch.zeros(13, 6), weight))
            assert not tolerance.close(model(tokens), expected)

    run_ranks(world, job)


def test_a_write_that_no_version_shows_is_refused() -> None:
    """Full parameters that stay after a forward would be those from before it."""

    def job(rank: int) -> None:
        model = shard(_base(), reshard_after_forward=False)
        tokens = part(batch(WORLD, 0), rank)
        with torch.no_grad():
            model(tokens)
            for p in model.parameters():
                p.to_local().data.mul_(2)
            _is_refused(model, tokens)

    run_ranks(WORLD, job)


def _evaluates_alike(model: Any, reference: Any, tokens: Tensor, what: str) -> None:
    with torch.no_grad():
        found, expected = model(tokens), reference(tokens)
    assert tolerance.close(found, expected), f"{what}: off by {(found - expected).abs().max():g}"


def _is_refused(model: Any, tokens: Tensor) -> None:
    with pytest.raises(RuntimeError, match="found other values and no sign of a write"):
        model(tokens)
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            module.reshard()


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("edit", [*EDITS, "moving average", "moving average by data"])
def test_edits_between_steps_in_eval_train_eval(edit: str, options: str) -> None:
    """Evaluation, edit, evaluation, step, evaluation, three times: each like the plain model under the same edits, and
    so are parameters and AdamW's moments in the end. What leaves no sign is an error where parameters stay full."""
    unseen = "data" in edit and options in ("kept full", "a part is kept")
    world = 4 if options == "a part is kept" else WORLD

    def job(rank: int) -> None:
        model, reference = shard(_base(), **OPTIONS[options]), copy.deepcopy(_base())
        both = (model, reference)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in both]
        bounds = tolerance.watch(optimizers[1]).tolerance
        averages = [Average(m) for m in both] if edit.startswith("moving") else []
        by_data = edit.endswith("data")
        tokens = part(batch(world, 99), rank)
        for step in range(3):
            _evaluates_alike(model, reference, tokens, f"step {step}, before the edit")
            for average in averages:
                average.exchange(by_data=by_data)
            for m in both if not averages else ():
                EDITS[edit](m, step)
            if unseen and (step or not averages):
                _is_refused(model, tokens)
            _evaluates_alike(model, reference, tokens, f"step {step}, after the edit")
            for average in averages:
                average.exchange(by_data=by_data)
            if unseen and averages and step:  # at first they are equal
                _is_refused(model, tokens)
            _train_once(model, rank, world, seed=step)
            for r in range(world):
                (_loss(reference, part(batch(world, step), r)) / world).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for average in averages:
                average.update()
            _evaluates_alike(model, reference, tokens, f"step {step}, after the step")
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert tolerance.largest(ours.full_tensor(), theirs) <= bounds.of_parameter(theirs), name
            states = [o.state[p] for o, p in zip(optimizers, (ours, theirs), strict=True)]
            assert states[0]["step"] == states[1]["step"] == 3
            tolerance.assert_close(states[0]["exp_avg"].full_tensor(), states[1]["exp_avg"])

    run_ranks(world, job)
