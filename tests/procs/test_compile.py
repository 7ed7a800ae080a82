"""torch.compile of blocks and of whole models over gloo: the numbers of plain training, graphs, breaks, recompilations.

Backends: `eager` is dynamo alone (what is traced, where it breaks, guards), `aot_eager` adds autograd over graphs (what
is saved for backward), `inductor` generates C++ and is slow to do so. Ranks count the graphs that reach the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.harness import installed
from tests.harness.behaviours import behaviour
from tests.harness.compiled import STEPS, Graphs, compiled, fresh_compiler, train
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation
from tests.harness.models import (
    BY_NAME,
    Batch,
    Case,
    Trained,
    assert_same_training,
    train_reference,
)
from tests.harness.pool import pool

# The first graph of a process costs seconds of imports.
pytestmark = pytest.mark.hang_after(400)
TIMEOUT = 360.0

CASE = BY_NAME["transformer"]
# Matrix products of one of its blocks: qkv, attention, out, up, down.
PRODUCTS = 5
IMPLEMENTATIONS = {impl.name: impl for impl in (TORCH, FULLSHARD)}


def compiled_model(how: str, impl: Implementation, graphs: Graphs, **policy: Any) -> nn.Module:
    """The case's model: blocks compiled `before` or `after` they are sharded, in place or wrapped; or the `whole`."""
    model: Any = CASE.build()
    wrap = how.endswith("wrapped")
    for i, layer in enumerate(model.layers):
        if how.startswith("before"):
            model.layers[i] = layer = compiled(layer, graphs, wrap=wrap, fullgraph=True)
        impl.fully_shard(layer, **policy)
        if how.startswith("after"):
            model.layers[i] = compiled(layer, graphs, wrap=wrap, fullgraph=True)
    impl.fully_shard(model, **policy)
    return compiled(model, graphs, wrap=wrap) if how.startswith("whole") else model


BLOCKS = ("before", "before, wrapped", "after", "after, wrapped")
WAYS = (*BLOCKS, "whole", "whole, wrapped")


def reference(world: int, case: Case = CASE, batch: Callable[[int, int], Batch] | None = None) -> Trained:
    batches = [[(batch or case.batch)(step, rank) for rank in range(world)] for step in range(STEPS)]
    return train_reference(case.build(), case.loss, batches)


# ---- blocks and whole models ---------------------------------------------------------------------------------


def _ways(rank: int, name: str, backend: str, ways: tuple[str, ...]) -> list[tuple[str, Trained, list[int], int]]:
    results = []
    for how in ways:
        with fresh_compiler(backend) as graphs:
            model = compiled_model(how, IMPLEMENTATIONS[name], graphs)
            trained = train(rank, model, CASE.loss, CASE.batch)
            results.append((how, trained, list(graphs.products), graphs.breaks))
    return results


def _check_ways(impl: Implementation, world: int, backend: str, ways: tuple[str, ...]) -> None:
    expected = reference(world)
    for results in pool(world).run(_ways, impl.name, backend, ways, timeout=TIMEOUT):
        for how, trained, products, breaks in results:
            assert_same_training(trained, expected)
            # One graph serves all three blocks: nothing about a single one's parameters is guarded.
            assert products == [PRODUCTS], f"{how}: {products}"
            # Torch 2.10 counts one where the hooks of a wrapped model begin, though it makes the same graph.
            counted = int(how == "whole, wrapped" and installed.release() < (2, 11))
            assert breaks == counted, f"{how}: {breaks}"


@pytest.mark.slow
@behaviour("compiled blocks train as plain ones: one graph without a break, no recompilation", area="compile")
@for_each_implementation
def test_blocks(impl: Implementation) -> None:
    _check_ways(impl, 2, "aot_eager", ("before", "after, wrapped"))


@behaviour("compiled models train as plain ones, their blocks in graphs", area="compile")
@for_each_implementation
def test_whole_models(impl: Implementation) -> None:
    _check_ways(impl, 2, "eager", ("whole, wrapped",))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_way_in_every_world(world: int) -> None:
    _check_ways(FULLSHARD, world, "aot_eager", WAYS)


class _Straight(nn.Module):
    """Its own weight between units: each unit called inside is a place where a graph may break."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10) * 0.3)
        self.first, self.second, self.third = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(torch.tanh(x @ self.weight)) @ self.weight)
        x = torch.sin(self.second(x) @ self.weight)
        return torch.cos(self.third(x) @ self.weight)


STRAIGHT = Case("straight", _Straight, ("first", "second", "third"), (10,), (10,))


def _straight(rank: int) -> list[tuple[Trained, int, int]]:
    results = []
    for impl in (TORCH, FULLSHARD):
        with fresh_compiler() as graphs:
            model = STRAIGHT.shard(STRAIGHT.build(), impl.fully_shard)
            model.compile(backend=graphs)
            trained = train(rank, model, STRAIGHT.loss, STRAIGHT.batch)
            results.append((trained, sum(graphs.products), graphs.breaks))
    return results


@pytest.mark.slow
@behaviour("a compiled model breaks at its units, no more often than FSDP2", area="compile", torch="equal")
def test_breaks_of_a_whole_model() -> None:
    """At each unit once; and no less of the model is in graphs: its own four products at least."""
    for theirs, ours in pool(2).run(_straight, timeout=TIMEOUT):
        assert ours[2] <= theirs[2] == 3
        assert ours[1] >= theirs[1] >= 4
        for trained, _, _ in (theirs, ours):
            assert_same_training(trained, reference(2, STRAIGHT))


# ---- recomputation and mixed precision -----------------------------------------------------------------------


class _Outside(nn.Module):
    """Recomputation around a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class _Inside(_Outside):
    """Recomputation of the halves of a block."""

    def forward(self, x: torch.Tensor) -> Any:
        block: Any = self.inner
        x = x + checkpoint(lambda y: block.attention(block.attention_norm(y)), x, use_reentrant=False)
        return checkpoint(block.mlp, x, use_reentrant=False)


def _recomputed(rank: int, name: str, backend: str) -> list[tuple[Trained, int, int]]:
    results = []
    impl = IMPLEMENTATIONS[name]
    for how in ("inside", "wrapper", "outside"):
        with fresh_compiler(backend) as graphs:
            model: Any = CASE.build()
            for i, layer in enumerate(model.layers):
                if how != "outside":
                    layer = _Inside(layer) if how == "inside" else checkpoint_wrapper(layer)
                layer = impl.fully_shard(compiled(layer, graphs, wrap=False, fullgraph=True))
                model.layers[i] = _Outside(layer) if how == "outside" else layer
            trained = train(rank, impl.fully_shard(model), CASE.loss, CASE.batch)
            results.append((trained, sum(graphs.products), graphs.breaks))
    return results


def _check_recomputed(impl: Implementation, backend: str) -> None:
    for results in pool(2).run(_recomputed, impl.name, backend, timeout=TIMEOUT):
        for trained, products, breaks in results:
            assert_same_training(trained, reference(2))
            assert (products, breaks) == (PRODUCTS, 0)


@pytest.mark.slow
@behaviour("compiled blocks with recomputation inside or outside of the graph train as plain ones", area="compile")
@for_each_implementation
def test_recomputation(impl: Implementation) -> None:
    _check_recomputed(impl, "aot_eager")


def _precision(rank: int, backend: str) -> list[Trained]:
    results = []
    for impl, how in ((TORCH, "before"), (FULLSHARD, "before"), (FULLSHARD, "whole")):
        with fresh_compiler(backend) as graphs:
            policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = compiled_model(how, impl, graphs, mp_policy=policy)
            if impl is FULLSHARD and installed.release() >= (2, 15):
                # FSDP2 reduces the gradient of a norm as autograd makes it, in float32; here that is asked for.
                for parameter in model.parameters():
                    parameter.grad_dtype = torch.float32
            results.append(train(rank, model, CASE.loss, CASE.batch))
            assert graphs.products == [PRODUCTS] and graphs.breaks == 0
    return results


@pytest.mark.slow
@behaviour("compiled blocks in mixed precision: the numbers of FSDP2's", area="compile", torch="equal")
def test_mixed_precision() -> None:
    for theirs, *ours in pool(2).run(_precision, "aot_eager", timeout=TIMEOUT):
        for trained in ours:
            # The same products and a sum of two: apart is what updates round, twice each (tolerance.py).
            assert_same_training(trained, theirs, 2 * STEPS)


# ---- programs ------------------------------------------------------------------------------------------------


class _Aux(nn.Module):
    """Its loss is not made from its output: that needs no gradient, and nothing announces the backward."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 17), nn.Linear(17, 10)
        self.aux: torch.Tensor | None = None
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.broken:
            dynamo.graph_break()
        self.aux = self.down(hidden).square().mean()
        return x.detach() + hidden.detach().mean()


def _aux_loss(model: Any, batch: Batch) -> torch.Tensor:
    model(batch[0])
    losses = [block.aux for block in model]
    return torch.stack(losses).sum()


def _aux_case(broken: bool) -> Case:
    def make() -> nn.Module:
        return nn.Sequential(*(_Aux(broken=broken) for _ in range(3)))

    return Case("aux", make, ("0", "1", "2"), (10,), (10,))


def _unannounced(rank: int, name: str, backend: str, broken: bool) -> Trained:
    case = _aux_case(broken)
    with fresh_compiler(backend) as graphs:
        model: Any = case.build()
        for block in model:
            block.compile(backend=graphs)
        return train(rank, case.shard(model, IMPLEMENTATIONS[name].fully_shard), _aux_loss, case.batch)


def unannounced_reference(broken: bool) -> Trained:
    case = _aux_case(broken)
    batches = [[case.batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    return train_reference(case.build(), _aux_loss, batches)


@pytest.mark.sample(1)
@behaviour(
    "a compiled block whose loss bypasses its output trains as a plain one",
    area="compile",
    torch="better",
    reason="its weights are not gathered in backward, or its gradients not reduced",
)
@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "two graphs"])
def test_loss_that_bypasses_the_output(impl: Implementation, broken: bool) -> None:
    expected = unannounced_reference(broken)
    for trained in pool(2).run(_unannounced, impl.name, "aot_eager", broken, timeout=TIMEOUT):
        assert_same_training(trained, expected)
