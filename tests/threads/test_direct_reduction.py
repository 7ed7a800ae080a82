"""The plan that NCCL gets, forced on ranks that are threads: gradients leave from where autograd put them."""

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

from benchmarks.counting import nccl_plan
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm.direct import DirectReduce
from fullshard.engine import unit_of
from tests.harness import tolerance
from tests.harness.parity import assert_same_bits, environment, train_alone, train_beside_oracle
from tests.harness.random_models import EXPLORING, BlockSpec, LeafSpec, ModelSpec, examples, model_specs
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 120)
TIMEOUT = 60.0


@examples(8, 60)
@given(spec=model_specs(), world=st.integers(2, 4), threshold=st.sampled_from([0, 64]))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, world: int, threshold: int) -> None:
    """64 bytes: small parameters are packed, and travel with the presence of all."""
    with environment(spec.environment()), nccl_plan(threshold):
        run_ranks(world, train_beside_oracle, spec, world, 3, timeout=TIMEOUT)


@examples(4, 40)
@given(spec=model_specs(), world=st.integers(2, 3), nbytes=st.sampled_from([0, 100, 700]), nccl=st.booleans())
def test_and_so_it_does_with_little_room_for_gradients(spec: ModelSpec, world: int, nbytes: int, nccl: bool) -> None:
    """Messages are waited for while the gradients of other units come."""
    dials = {**spec.environment(), "FULLSHARD_GRADIENT_BYTES": str(nbytes)}
    with environment(dials), nccl_plan(0) if nccl else nullcontext():
        run_ranks(world, train_beside_oracle, spec, world, 3, timeout=TIMEOUT)


@examples(3, 30)
@given(spec=model_specs(), shape=st.sampled_from([(2, 2), (2, 1)]))
def test_and_so_it_does_on_a_mesh_that_replicates(spec: ModelSpec, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    room = {"FULLSHARD_GRADIENT_BYTES": "200"}
    with environment({**spec.environment(), **room}), nccl_plan(0):
        replicas = run_ranks(world, partial(train_beside_oracle, replicas=shape[0]), spec, world, 3, timeout=TIMEOUT)
    for trained in replicas[1:]:
        assert_same_bits(trained, replicas[0])


MODEL = ModelSpec(
    (
        BlockSpec((LeafSpec("dense", 7), LeafSpec("norm"))),
        BlockSpec((LeafSpec("dense_no_bias", 4, use="by_rank"), LeafSpec("table", 2))),
    ),
    width=5,
    policy="bf16_reduced_in_fp32",
    sync=(False, True),
)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_two_runs_have_the_same_bits(world: int) -> None:
    """Uneven rows, a parameter that some ranks do not use, and gradients of an accumulation window."""
    with nccl_plan(0):
        first, again = (run_ranks(world, train_alone, MODEL, 3, timeout=TIMEOUT)[0] for _ in range(2))
        run_ranks(world, train_beside_oracle, MODEL, world, 3, timeout=TIMEOUT)
    assert_same_bits(first, again)


def _channels(model: nn.Module) -> list[Any]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return [channel for unit in units for known in unit._reduces for channel in known.values()]


def _two_layers(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
    for p in model.parameters():
        # The ranks are threads, which share one random state.
        p.data.copy_(torch.linspace(-0.5, 1.0, p.numel()).view(p.shape))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def test_what_travels_how() -> None:
    """A weight of 120 bytes directly, its bias of 20 packed; all of it in one message where the user asks for that."""

    def rank_main(rank: int) -> None:
        model = _two_layers()
        for strategy, expected in (("auto", [(0,), (0,)]), ("torch", None)):
            model.set_communication(strategy)
            model(torch.ones(2, 6)).sum().backward()
            channels = _channels(model)
            if expected is None:
                assert not any(isinstance(channel, DirectReduce) for channel in channels)
            else:
                assert sorted(channel.layout.direct for channel in channels) == expected

    with nccl_plan(64):
        run_ranks(2, rank_main)


def test_the_gradient_itself_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy: of float32, and of bfloat16 that will be summed in float32."""
    sent: list[int] = []
    ends_of = DirectReduce._ends

    def noting(self: Any, run: Any, gradient: Tensor | None, dtype: torch.dtype, key: int) -> Any:
        ends = ends_of(self, run, gradient, dtype, key)
        assert gradient is not None and ends.sent.data_ptr() == gradient.data_ptr()
        sent.append(run.numel)
        return ends

    monkeypatch.setattr(DirectReduce, "_ends", noting)

    def rank_main(rank: int) -> None:
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            _two_layers(mp_policy=policy)(torch.ones(2, 6)).float().sum().backward()

    with nccl_plan(0):
        run_ranks(2, rank_main)
    assert sorted(set(sent)) == [5, 20, 30] and len(sent) == 2 * 2 * 3


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


def test_other_backends_send_one_message() -> None:
    """Without the plan of NCCL nothing is sent directly: not even by a unit of one parameter."""

    def rank_main(rank: int) -> None:
        model = _two_layers()
        model(torch.ones(2, 6)).sum().backward()
        assert len(_channels(model)) == 2
        assert not any(isinstance(channel, DirectReduce) for channel in _channels(model))

    run_ranks(2, rank_main)
