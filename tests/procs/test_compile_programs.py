"""What programs do around compiled blocks: evaluation, failures, several forwards, batches of other sizes, inductor."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.compiled import STEPS, fresh_compiler, train
from tests.harness.implementations import for_each_implementation
from tests.harness.models import BY_NAME, Batch, Trained, assert_same_training, train_reference
from tests.harness.parity import environment
from tests.harness.pool import pool
from tests.procs.test_compile import (
    CASE,
    IMPLEMENTATIONS,
    PRODUCTS,
    _precision,
    _recomputed,
    _unannounced,
    compiled_model,
    reference,
    unannounced_reference,
)

pytestmark = pytest.mark.hang_after(600)
TIMEOUT = 560.0

RESIDUAL = BY_NAME["residual"]


# ---- programs: how a loss is made of a model and a batch, the same for a plain model ----------------------------


def _evaluated(model: nn.Module, batch: Batch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model.train()
    return RESIDUAL.loss(model, batch)


def _inferred(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        model(batch[0])
    return RESIDUAL.loss(model, batch)


def _two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    return RESIDUAL.loss(model, batch) + RESIDUAL.loss(model, (2 * batch[0], batch[1]))


def _two_backwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(batch[0])
    output.square().mean().backward(retain_graph=True)
    return F.mse_loss(output, batch[1])


def _two_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(batch[0])
    return output.square().mean() + F.mse_loss(output, batch[1])


def _failing_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    with pytest.raises(Exception, match=r"normalized_shape|shape"):
        model(batch[0][:, :5])
    return RESIDUAL.loss(model, batch)


def _failing_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """After the last gradient, before the end: all of them are discarded."""
    inputs = batch[0].clone().requires_grad_()

    def fail(_gradient: torch.Tensor) -> None:
        raise KeyError("on purpose")

    inputs.register_hook(fail)
    loss = RESIDUAL.loss(model, (inputs, batch[1]))
    with pytest.raises(KeyError, match="on purpose"):
        loss.backward()
    return RESIDUAL.loss(model, batch)


# Each with the loss that trains a plain model alike.
PROGRAMS = {
    "evaluated": (_evaluated, RESIDUAL.loss),
    "inferred": (_inferred, RESIDUAL.loss),
    "two forwards": (_two_forwards, _two_forwards),
    "two backwards": (_two_backwards, _two_losses),
    "failing forward": (_failing_forward, RESIDUAL.loss),
    "failing backward": (_failing_backward, RESIDUAL.loss),
}
# Functions that a program compiles; the rest is as it was.
FEW = ("evaluated", "inferred", "failing forward")


def _run_programs(rank: int, backend: str, names: tuple[str, ...]) -> dict[str, tuple[Trained, int]]:
    results = {}
    for name in names:
        program, _ = PROGRAMS[name]
        with fresh_compiler(backend) as graphs:
            model: Any = RESIDUAL.build()
            for block in model:
                block.compile(backend=graphs, fullgraph=True)
            RESIDUAL.shard(model, fullshard.fully_shard)
            # What does not compile is tried again each time.
            settled = STEPS if name == "failing forward" else 2
            results[name] = train(rank, model, program, RESIDUAL.batch, settled=settled), graphs.breaks
    return results


def _check_programs(backend: str, names: tuple[str, ...], **variables: str) -> None:
    with environment(variables):
        everyones = pool(2).run(_run_programs, backend, names, timeout=TIMEOUT)
    for results in everyones:
        for name, (trained, breaks) in results.items():
            batches = [[RESIDUAL.batch(step, rank) for rank in range(2)] for step in range(STEPS)]
            expected = train_reference(RESIDUAL.build(), PROGRAMS[name][1], batches)
            assert breaks == 0, name
            try:
                assert_same_training(trained, expected)
            except AssertionError as error:
                error.add_note(f"in the program: {name}")
                raise


@pytest.mark.slow
def test_programs() -> None:
    _check_programs("eager", FEW)


@pytest.mark.slow
def test_all_programs_with_graphs_of_autograd() -> None:
    _check_programs("aot_eager", tuple(PROGRAMS))


# ---- several kinds of models -----------------------------------------------------------------------------------


def _kinds(rank: int, backend: str, names: tuple[str, ...]) -> list[Trained]:
    results = []
    for name in names:
        case = BY_NAME[name]
        with fresh_compiler(backend) as graphs:
            model = case.build()
            for unit in case.units:
                model.get_submodule(unit).compile(backend=graphs)
            results.append(train(rank, case.shard(model, fullshard.fully_shard), case.loss, case.batch))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_nested_frozen_and_tied_models(world: int) -> None:
    names = ("uneven_mlp", "tiny_dims", "mixed_shapes", "frozen", "nested", "tied")
    for results in pool(world).run(_kinds, "aot_eager", names, timeout=TIMEOUT):
        for name, trained in zip(names, results, strict=True):
            case = BY_NAME[name]
            batches = [[case.batch(step, rank) for rank in range(world)] for step in range(STEPS)]
            assert_same_training(trained, train_reference(case.build(), case.loss, batches))


# ---- batches of other sizes ------------------------------------------------------------------------------------


def _sizes(step: int, rank: int) -> Batch:
    return RESIDUAL.batch(step, rank, size=2 + step % 3)


def _dynamic(rank: int, dynamic: bool | None) -> tuple[Trained, int]:
    with fresh_compiler() as graphs:
        model: Any = RESIDUAL.build()
        for block in model:
            block.compile(backend=graphs, fullgraph=True, dynamic=dynamic)
        trained = train(rank, RESIDUAL.shard(model, fullshard.fully_shard), RESIDUAL.loss, _sizes)
        return trained, len(graphs.products)


@pytest.mark.slow
def test_batches_of_other_sizes() -> None:
    """The second size makes a second graph, for all sizes; `dynamic=True` makes that at once. `train` says that no
    later step recompiles. The first block's input needs no gradient: it has a graph of its own."""
    batches = [[_sizes(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_reference(RESIDUAL.build(), RESIDUAL.loss, batches)
    for dynamic, graphs in ((None, 4), (True, 2)):
        for trained, made in pool(2).run(_dynamic, dynamic, timeout=TIMEOUT):
            assert_same_training(trained, expected)
            assert made == graphs


# ---- more than a forward in one compiled function ---------------------------------------------------------------


def _whole_step(model: Any, batch: Batch) -> torch.Tensor:
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def _by_hand(model: Any, batch: Batch) -> torch.Tensor:
    model[0].unshard(async_op=True)
    x = model[0](batch[0])
    model[1].unshard()
    x = model[1](x)
    model[1].reshard()
    return F.mse_loss(model[2](x), batch[1])


def _with_no_backward_left(_loss: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def _compiled_steps(rank: int) -> list[Trained]:
    """The backward in the compiled function; full parameters by hand in it."""
    results = []
    for function, then in ((_whole_step, _with_no_backward_left), (_by_hand, torch.clone)):
        with fresh_compiler() as graphs:
            run = torch.compile(function, backend=graphs)
            model = RESIDUAL.shard(RESIDUAL.build(), fullshard.fully_shard)
            results.append(train(rank, model, partial(_then, then, run), RESIDUAL.batch))
            assert graphs.products
    return results


def _then(then: Any, run: Any, model: nn.Module, batch: Batch) -> Any:
    return then(run(model, batch))


@pytest.mark.slow
def test_backward_and_gathers_by_hand_in_a_compiled_function() -> None:
    batches = [[RESIDUAL.batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_reference(RESIDUAL.build(), RESIDUAL.loss, batches)
    for results in pool(2).run(_compiled_steps, timeout=TIMEOUT):
        for trained in results:
            assert_same_training(trained, expected)


# ---- inductor: generated C++ -----------------------------------------------------------------------------------


@contextmanager
def own_cache(rank: int) -> Iterator[None]:
    """What inductor makes goes to a temporary directory, and with it."""
    with tempfile.TemporaryDirectory() as folder, environment({"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{rank}"}):
        yield


def _inductor(rank: int, name: str) -> dict[str, Trained]:
    results = {}
    with own_cache(rank):
        for how in ("before", "after, wrapped", "whole"):
            with fresh_compiler("inductor") as graphs:
                model = compiled_model(how, IMPLEMENTATIONS[name], graphs)
                results[how] = train(rank, model, CASE.loss, CASE.batch)
                assert graphs.products == [PRODUCTS] and graphs.breaks == 0
    return results


@behaviour("inductor: compiled blocks and compiled models train as plain ones", area="compile")
@for_each_implementation
@pytest.mark.slow
def test_inductor(impl: Any) -> None:
    for results in pool(2).run(_inductor, impl.name, timeout=TIMEOUT):
        for trained in results.values():
            assert_same_training(trained, reference(2))


def _inductor_with(rank: int) -> list[Any]:
    with own_cache(rank):
        return [_recomputed(rank, "fullshard", "inductor"), _precision(rank, "inductor")]


@pytest.mark.slow
def test_inductor_with_recomputation_and_mixed_precision() -> None:
    for recomputed, (theirs, *ours) in pool(2).run(_inductor_with, timeout=TIMEOUT):
        for trained, _, breaks in recomputed:
            assert_same_training(trained, reference(2))
            assert breaks == 0
        for trained in ours:
            # The same products and a sum of two: apart is what updates round, twice each (tolerance.py).
            assert_same_training(trained, theirs, 2 * STEPS)


def _inductor_unannounced(rank: int) -> list[Trained]:
    with own_cache(rank):
        return [_unannounced(rank, "fullshard", "inductor", broken) for broken in (False, True)]


@pytest.mark.slow
def test_inductor_and_a_loss_that_bypasses_the_output() -> None:
    for results in pool(2).run(_inductor_unannounced, timeout=TIMEOUT):
        for broken, trained in zip((False, True), results, strict=True):
            assert_same_training(trained, unannounced_reference(broken))
