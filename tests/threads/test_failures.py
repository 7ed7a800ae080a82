"""A step that raises, on all ranks, leaves nothing: what follows is bitwise what it would have been without it.

The fault is an exception in the forward, or in the backward, of one module. The caller catches it and goes on, with no
reset. Compared: parameters and optimizer state after the steps that follow.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fullshard
from benchmarks.counting import nccl_plan
from fullshard._torch import top_saved_tensor_hooks
from fullshard.engine import unit_of
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.threads import run_ranks
from tests.threads.programs import PROGRAMS, Model, batch, part, recomputed, shard

WORLD = 2


class Fault(RuntimeError):
    """Raised on purpose."""


class _Explode(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise Fault("backward")


def _break(module: nn.Module, where: str, exception: type[BaseException]) -> Any:
    """Make `module` fail once it is reached; the handle mends it."""
    if where == "before":

        def before(*_: Any) -> None:
            raise exception("forward")

        return module.register_forward_pre_hook(before)
    if where == "after":

        def after(*_: Any) -> None:
            raise exception("forward")

        return module.register_forward_hook(after)
    return module.register_forward_hook(lambda _module, _args, output: _Explode.apply(output))


MODULES = ("", "embedding", "layers.0", "layers.0.norm", "layers.1", "layers.1.up", "layers.2.down", "head")


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).pow(2).mean()


Step = Callable[[Any, torch.optim.Optimizer, int], None]


def _train(
    rank: int, base: nn.Module, script: Callable[[Any, Any, int], None], impl: Implementation = FULLSHARD
) -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    model = shard(copy.deepcopy(base), impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    script(model, optimizer, rank)
    assert impl is not FULLSHARD or not any(unit.full_nbytes_live for unit in fullshard.report(model).units)
    state = [p.full_tensor().detach() for p in model.parameters()]
    for p in model.parameters():
        entry = optimizer.state[p]
        state += [entry["step"].clone(), entry["exp_avg"].full_tensor(), entry["exp_avg_sq"].full_tensor()]
    return state


def _good_step(model: Any, optimizer: Any, rank: int, step: int) -> None:
    _loss(model, part(batch(WORLD, step), rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _failing(model: Any, rank: int, name: str, where: str, exception: type[BaseException] = Fault) -> None:
    """One forward and backward that fail; the exception reaches the caller as it was raised."""
    handle = _break(model.get_submodule(name), where, exception)
    with pytest.raises(exception):
        _loss(model, part(batch(WORLD, 77), rank)).backward()
    handle.remove()


def _compare(
    base: nn.Module, script: Callable[..., None], expected: Callable[..., None], impl: Implementation = FULLSHARD
) -> None:
    got, wanted = (run_ranks(WORLD, _train, base, s, impl)[0] for s in (script, expected))
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max():g}"


def _undisturbed(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        _good_step(model, optimizer, rank, step)


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@behaviour(
    "a step that raised leaves nothing of itself: the next ones are bitwise what they would have been",
    area="failures",
    torch="better",
    reason="the next step discards what the failed one left; torch wants `reset_iter_state()`, not called here",
)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "where"), list(itertools.product(MODULES, ["before", "after", "backward"])))
def test_a_failed_step_leaves_nothing(base: nn.Module, name: str, where: str, impl: Implementation) -> None:
    """The very first one, one between good ones, and two in a row."""

    def script(model: Any, optimizer: Any, rank: int) -> None:
        _failing(model, rank, name, where)
        _good_step(model, optimizer, rank, 0)
        _failing(model, rank, name, where)
        _good_step(model, optimizer, rank, 1)
        _failing(model, rank, name, where)
        _failing(model, rank, name, where)
        _good_step(model, optimizer, rank, 2)

    _compare(base, script, _undisturbed, impl)


@pytest.mark.sample(2)
@pytest.mark.parametrize("exception", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["before", "after"])
def test_any_exception(base: nn.Module, exception: type[BaseException], where: str) -> None:
    """KeyboardInterrupt passes by the hooks that run after ordinary exceptions, also while weights are watched."""

    def script(model: Any, optimizer: Any, rank: int) -> None:
        _failing(model, rank, "layers.1.up", where, exception)
        loss = _loss(model, part(batch(WORLD, 77), rank))
        # Of the forward that was interrupted nothing runs any more: what is used is freed, and nothing is watched.
        live = {row.name: row.full_nbytes_live for row in fullshard.report(model).units}
        assert not any(nbytes for name, nbytes in live.items() if name.startswith("layers.")), live
        assert top_saved_tensor_hooks() is None
        loss.backward()
        optimizer.zero_grad()
        _undisturbed(model, optimizer, rank)
        _failing(model, rank, "layers.0.norm", where, exception)
        model.reset_iter_state()

    _compare(base, script, _undisturbed)


@pytest.mark.sample(2)
@behaviour(
    "a micro-batch that raised may be tried again; the good ones of the window stay",
    area="failures",
    torch="better",
    reason="what a failed micro-batch left is discarded, and that alone",
)
@pytest.mark.parametrize("where", ["before", "backward"])
@pytest.mark.parametrize("synchronised", [True, False])
def test_good_micro_batches_of_a_window_stay(
    base: nn.Module, where: str, synchronised: bool, impl: Implementation
) -> None:
    """The second micro-batch fails and is tried again; `synchronised`: whether the first one was reduced."""

    def window(fails: bool) -> Callable[[Any, Any, int], None]:
        def script(model: Any, optimizer: Any, rank: int) -> None:
            for step in range(2):
                model.set_requires_gradient_sync(synchronised)
                _loss(model, part(batch(WORLD, step), rank)).backward()
                model.set_requires_gradient_sync(True)
                if fails:
                    _failing(model, rank, "layers.1.up", where)
                _loss(model, part(batch(WORLD, step + 50), rank)).backward()
                optimizer.step()
                optimizer.zero_grad()

        return script

    _compare(base, window(True), window(False), impl)


@pytest.mark.sample(2)
@behaviour(
    "`zero_grad` clears a window of accumulation that is given up",
    area="failures",
    torch="better",
    reason="gradients that were not reduced yet are where `zero_grad` finds them",
)
@pytest.mark.parametrize("clear", ["optimizer", "model", "optimizer to zero"])
def test_zero_grad_clears_an_abandoned_window(base: nn.Module, clear: str, impl: Implementation) -> None:
    def script(model: Any, optimizer: Any, rank: int) -> None:
        _good_step(model, optimizer, rank, 0)
        model.set_requires_gradient_sync(False)
        _loss(model, part(batch(WORLD, 77), rank)).backward()
        model.set_requires_gradient_sync(True)
        if clear == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "optimizer")
        _good_step(model, optimizer, rank, 1)
        _good_step(model, optimizer, rank, 2)

    _compare(base, script, _undisturbed, impl)


@behaviour(
    "after a step that raised, its caller finds sharded parameters: names, gradients to clear, an optimizer to build",
    area="failures",
    torch="better",
    reason="full parameters are put aside as soon as the exception leaves forward or backward",
)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}], ids=["freed", "part kept"])
def test_sharded_parameters_are_found_after_a_failure(
    base: nn.Module, options: dict[str, Any], impl: Implementation
) -> None:
    """Before the next forward, and though nothing was called to clean up."""

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base), impl, **options)
        _loss(model, part(batch(4, 0), rank)).backward()
        names = [name for name, _ in model.named_parameters()]
        for where in ("before", "after", "backward"):
            # The root's own hooks are behind those of fully_shard: for it that forward went well.
            for name in MODULES if where == "before" else MODULES[1:]:
                _failing(model, rank, name, where)
                full = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
                assert not full, f"{where} {name}: {full} are full"
                assert [n for n, _ in model.named_parameters()] == names
                assert all(p.placements == (Shard(0),) for p in model.parameters()), f"{where} {name}"
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [p.full_tensor() for p in model.parameters()]
        _loss(model, part(batch(4, 0), rank)).backward()
        optimizer.step()
        moved = [not torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(moved)

    run_ranks(4, rank_main)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_loss_from_before_a_failed_forward_has_its_backward(base: nn.Module, where: str) -> None:
    """The forward of another batch fails between the forward and the backward of a good one."""

    def script(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            loss = _loss(model, part(batch(WORLD, step), rank))
            handle = _break(model.get_submodule(MODULES[step + 2]), where, Fault)
            with pytest.raises(Fault):
                model(part(batch(WORLD, 77), rank))
            handle.remove()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    _compare(base, script, _undisturbed)


@behaviour(
    "`model.zero_grad()` between forward and backward clears all gradients",
    area="gradients",
    torch="better",
    reason="torch's misses those of the root, whose parameters are full then: they add up from step to step, silently",
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward(base: nn.Module, set_to_none: bool, impl: Implementation) -> None:
    def script(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            loss = _loss(model, part(batch(WORLD, step), rank))
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()

    _compare(base, script, _undisturbed, impl)


def test_a_backward_after_a_failed_one_without_a_forward_between(base: nn.Module) -> None:
    """Two losses were computed; the backward of the first fails; that of the second is right."""

    def script(model: Any, optimizer: Any, rank: int) -> None:
        bad = _Explode.apply(_loss(model, part(batch(WORLD, 77), rank)))
        handle = _break(model.layers[1], "backward", Fault)
        worse = _loss(model, part(batch(WORLD, 78), rank))
        handle.remove()
        good = _loss(model, part(batch(WORLD, 0), rank))
        for loss in (worse, bad):
            with pytest.raises(Fault):
                loss.backward()
        good.backward()
        optimizer.step()
        optimizer.zero_grad()
        for step in (1, 2):
            _good_step(model, optimizer, rank, step)

    _compare(base, script, _undisturbed)


@pytest.mark.parametrize("where", ["before", "backward"])
def test_failures_in_recomputation(where: str) -> None:
    torch.manual_seed(0)
    base = recomputed(False)()

    def script(model: Any, optimizer: Any, rank: int) -> None:
        _good_step(model, optimizer, rank, 0)
        calls = 0

        def second_call(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Fault("recomputation")

        handle = model.layers[1].up.register_forward_pre_hook(second_call)
        with pytest.raises(Fault):
            _loss(model, part(batch(WORLD, 77), rank)).backward()
        handle.remove()
        for step in (1, 2):
            _good_step(model, optimizer, rank, step)

    _compare(base, script, _undisturbed)


def test_reset_iter_state_is_harmless(base: nn.Module) -> None:
    def script(model: Any, optimizer: Any, rank: int) -> None:
        model.reset_iter_state()
        for step in range(3):
            _good_step(model, optimizer, rank, step)
            model.reset_iter_state()

    _compare(base, script, _undisturbed)


def test_a_late_intermediate_is_an_error_and_then_right(base: nn.Module) -> None:
    """A loss on an intermediate that begins after the watched steps: one loud error; the retry is right."""
    program = PROGRAMS["loss_on_an_intermediate_only"]

    def script(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            _good_step(model, optimizer, rank, step)
        tokens = part(batch(WORLD, 9), rank)
        with pytest.raises(RuntimeError, match="out of bounds|weights"):
            program.loss(model, tokens, 0).backward()
        program.loss(model, tokens, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    def expected(model: Any, optimizer: Any, rank: int) -> None:
        for unit in model.modules():
            if isinstance(unit, fullshard.FSDPModule):
                unit._unit().reads.left = 100
        for step in range(3):
            _good_step(model, optimizer, rank, step)
        program.loss(model, part(batch(WORLD, 9), rank), 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    _compare(base, script, expected)


def test_a_late_intermediate_of_weights_that_are_arriving_is_an_error(base: nn.Module) -> None:
    """Where parameters are gathered into their final memory, a gather under way has memory already."""
    tokens = batch(WORLD, 9)

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base), FULLSHARD)
        for step in range(3):
            _loss(model, part(batch(WORLD, step), rank)).backward()
        early: list[Tensor] = []
        model.layers[0].up.register_forward_hook(lambda _module, _args, output: early.append(output))
        loss = _loss(model, part(tokens, rank))
        model.layers[0].unshard(async_op=True)
        with pytest.raises(RuntimeError, match="while its weights were being gathered"):
            early[0].sum().backward()
        del loss

    with nccl_plan(0):
        run_ranks(WORLD, rank_main)


def test_failed_backwards_lose_no_buffers(base: nn.Module) -> None:
    """Of reductions that were under way when it failed."""

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base), FULLSHARD)
        for step in range(2):
            _loss(model, part(batch(WORLD, step), rank)).backward()
        pool = unit_of(model).root.shared.pool  # type: ignore[union-attr]
        nbytes = pool.nbytes
        for _ in range(3):
            _failing(model, rank, "embedding", "backward")
        _loss(model, part(batch(WORLD, 2), rank)).backward()
        assert pool.nbytes == nbytes > 0

    run_ranks(WORLD, rank_main)


def test_a_step_in_an_except_block_is_a_step(base: nn.Module) -> None:
    """The exception that is being handled is not one of its forwards."""

    def script(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            try:
                raise Fault("handled")
            except Fault:
                _good_step(model, optimizer, rank, step)
            unit = unit_of(model)
            assert unit is not None and unit.root is not None and unit.root.run.generation == 0

    _compare(base, script, _undisturbed)
