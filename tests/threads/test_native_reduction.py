"""Gradients that the backend reduces: the plan that NCCL gets, forced on ranks that are threads, and ranks of several
nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.counting import nccl_plan
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.engine import unit_of
from fullshard.policy import use_options
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.parity import assert_same_bits, environment, on_nodes, train_alone, train_beside_oracle
from tests.harness.random_models import EXPLORING, BlockSpec, LeafSpec, ModelSpec, examples, model_specs
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 120)
TIMEOUT = 60.0


@examples(2, 60)
@given(spec=model_specs(), world=st.integers(2, 4), threshold=st.sampled_from([0, 64]))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, world: int, threshold: int) -> None:
    """64 bytes: small parameters are packed, and travel with the presence of all."""
    with use_options(**spec.options()), nccl_plan(threshold):
        run_ranks(world, partial(train_beside_oracle, by_backend=True), spec, world, 3, timeout=TIMEOUT)


def _limited(nbytes: int) -> Callable[[Any, int, int], None]:
    def limit(model: Any, step: int, rank: int) -> None:
        model.set_memory_budget(gradients=nbytes)

    return limit


@pytest.mark.slow
@examples(2, 40)
@given(spec=model_specs(), world=st.integers(2, 3), nbytes=st.sampled_from([0, 100, 700]), nccl=st.booleans())
def test_and_so_it_does_with_little_room_for_gradients(spec: ModelSpec, world: int, nbytes: int, nccl: bool) -> None:
    """Messages are waited for while the gradients of other units come."""
    train = partial(train_beside_oracle, by_backend=nccl, disturb=_limited(nbytes))
    with use_options(**spec.options()), nccl_plan(0) if nccl else nullcontext():
        run_ranks(world, train, spec, world, 3, timeout=TIMEOUT)


@examples(2, 30)
@given(spec=model_specs(), shape=st.sampled_from([(2, 2), (2, 1)]))
def test_and_so_it_does_on_a_mesh_that_replicates(spec: ModelSpec, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    with use_options(**spec.options()), nccl_plan(0):
        train = partial(train_beside_oracle, replicas=shape[0], by_backend=True, disturb=_limited(200))
        replicas = run_ranks(world, train, spec, world, 3, timeout=TIMEOUT)
    for trained in replicas[1:]:
        assert_same_bits(trained, replicas[0])


def test_large_float16_gradients_are_summed_without_overflow() -> None:
    """Each travels from where it is, in a message of its own."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Linear(4, 4, bias=False))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
        model(torch.full((1, 4), 30_000.0)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 30_000.0))

    with nccl_plan(0):
        run_ranks(4, rank_main)


MODEL = ModelSpec(
    (
        BlockSpec((LeafSpec("dense", 7), LeafSpec("norm"))),
        BlockSpec((LeafSpec("dense_no_bias", 4, use="by_rank"), LeafSpec("table", 2))),
    ),
    width=5,
    policy="bf16_reduced_in_fp32",
    sync=(False, True),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_two_runs_have_the_same_bits(world: int) -> None:
    """Uneven rows, a parameter that some ranks do not use, and gradients of an accumulation window."""
    with nccl_plan(0):
        first, again = (run_ranks(world, train_alone, MODEL, 3, timeout=TIMEOUT)[0] for _ in range(2))
        run_ranks(world, partial(train_beside_oracle, by_backend=True), MODEL, world, 3, timeout=TIMEOUT)
    assert_same_bits(first, again)


def _two_layers(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
    for p in model.parameters():
        # The ranks are threads, which share one random state.
        p.data.copy_(torch.linspace(-0.5, 1.0, p.numel()).view(p.shape))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # then torch fills what `empty` makes
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world", [2, 5])
def test_what_a_hook_sees_has_zeros_for_padding(world: int, new_memory_is_nan: None) -> None:
    """Five rows on two ranks, on five, and alignment: a norm of the flat gradients is not that of old memory."""

    def rank_main(rank: int) -> None:
        seen: list[Tensor] = []
        model = _two_layers()
        model[0].set_all_reduce_hook(lambda gradients: seen.append(gradients.clone()))
        model(torch.ones(2, 6) * (rank + 1)).sum().backward()
        (gradients,) = seen
        expected = sum(p.grad.to_local().pow(2).sum() for p in model[0].parameters())
        tolerance.assert_close(gradients.pow(2).sum(), expected)

    with nccl_plan(64):
        run_ranks(world, rank_main)


def test_a_failed_backward_leaves_nothing_under_way() -> None:
    """The first reduction is under way when the backward raises; the step after it is that of a model never broken."""

    def rank_main(rank: int) -> None:
        def train(disturb: Callable[[Any], None]) -> list[Tensor]:
            model = _two_layers()
            disturb(model)
            model(torch.ones(2, 6) * (rank + 1)).sum().backward()
            return [p.grad.full_tensor() for p in model.parameters()]

        def fail(model: Any) -> None:
            broken = torch.ones(2, 6, requires_grad=True).clone()
            broken.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
            with pytest.raises(RuntimeError, match="broken"):
                model(broken).sum().backward()

        for found, expected in zip(train(fail), train(lambda model: None), strict=True):
            assert torch.equal(found, expected)

    with nccl_plan(0):
        run_ranks(2, rank_main)


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _ways(model: nn.Module) -> set[str]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return {type(channel).__name__ for unit in units for known in unit.channels.reduces for channel in known.values()}


@pytest.mark.sample(4)
@pytest.mark.threads_only("gloo sends in two levels there: tests/procs/test_levels.py")
@pytest.mark.parametrize(
    ("shape", "nodes", "way"),
    [
        ((4,), 1, "ExchangeReduce"),
        ((4,), 2, "NativeReduce"),
        # The ranks that share are on one node each; on several; and of both kinds, where all do what they can all do.
        ((2, 2), 2, "ExchangeReduce"),
        ((2, 2), 4, "NativeReduce"),
        ((2, 2), 3, "NativeReduce"),
    ],
)
def test_between_nodes_the_backend_reduces(shape: tuple[int, ...], nodes: int, way: str) -> None:
    def rank_main(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = _two_layers(mesh=mesh)
        model(torch.ones(2, 6) * (rank + 1)).sum().backward()
        assert _ways(model) == {way}
        return [p.grad.full_tensor() for p in model.parameters()]

    with on_nodes(4, nodes):
        found = run_ranks(4, rank_main, timeout=TIMEOUT)
    for gradient, expected in zip(found[0], run_ranks(4, rank_main_alone, timeout=TIMEOUT)[0], strict=True):
        tolerance.assert_close(gradient, expected)


def rank_main_alone(rank: int) -> list[Tensor]:
    """The same mean by a model of one rank."""
    layers: Any = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
    for p in layers.parameters():
        p.data.copy_(torch.linspace(-0.5, 1.0, p.numel()).view(p.shape))
    sum(layers(torch.ones(2, 6) * (each + 1)).sum() / 4 for each in range(4)).backward()
    return [p.grad for p in layers.parameters()]


@pytest.mark.threads_only("gloo exchanges between two ranks on two nodes; refused there: tests/procs/test_levels.py")
@pytest.mark.parametrize("how", ["method", "method after a step", "environment"])
def test_an_exchange_between_nodes_is_refused_on_all_ranks(how: str) -> None:
    def rank_main(rank: int) -> None:
        model = _two_layers()
        if how == "method after a step":
            model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(ValueError, match=r'"all-to-all".*one node, found several; use "auto"'):
            if how != "environment":
                model.set_communication("all-to-all")
            model(torch.ones(2, 6))
        model.set_communication("auto")
        model(torch.ones(2, 6)).sum().backward()
        assert _ways(model) == {"NativeReduce"}

    dials = {"FULLSHARD_COMMUNICATION": "all-to-all"} if how == "environment" else {}
    with environment(dials), on_nodes(2, 2):
        run_ranks(2, rank_main, timeout=TIMEOUT)


def test_gradients_are_exchanged_on_request_where_the_backend_reduces_by_default() -> None:
    def rank_main(rank: int) -> None:
        model = _two_layers()
        for strategy, way in (("auto", "NativeReduce"), ("all-to-all", "ExchangeReduce"), ("auto", "NativeReduce")):
            model.set_communication(strategy)
            model(torch.ones(2, 6)).sum().backward()
            assert _ways(model) == {way}

    with nccl_plan(0):
        run_ranks(2, rank_main, timeout=TIMEOUT)


def test_a_removed_strategy_names_what_to_do_instead() -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match="found 'hierarchical'"):
            _two_layers().set_communication("hierarchical")

    run_ranks(2, rank_main)
