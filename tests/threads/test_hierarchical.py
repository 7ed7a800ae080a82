"""Reductions in two hops, within nodes and between them: bits, every kind of parameter, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from benchmarks.counting import nccl_plan
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.comm.hierarchical import HierarchicalReduce
from fullshard.engine import unit_of
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.parity import assert_same_bits, environment, train_alone, train_beside_oracle
from tests.harness.random_models import EXPLORING, BlockSpec, LeafSpec, ModelSpec, examples, model_specs
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.hang_after(7200 if EXPLORING else 120)
TIMEOUT = 60.0


def _dials(local: int, **more: str) -> dict[str, str]:
    return {"FULLSHARD_COMMUNICATION": "hierarchical", "FULLSHARD_LOCAL_WORLD_SIZE": str(local), **more}


@examples(6, 50)
@given(spec=model_specs(), grid=st.sampled_from([(2, 2), (2, 3), (3, 2)]))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, grid: tuple[int, int]) -> None:
    nodes, local = grid
    with environment({**spec.environment(), **_dials(local)}):
        run_ranks(nodes * local, partial(train_beside_oracle, reordered=True), spec, nodes * local, 3, timeout=TIMEOUT)


@examples(2, 20)
@given(spec=model_specs(), nbytes=st.sampled_from([0, 200]))
def test_and_so_it_does_on_a_mesh_that_replicates(spec: ModelSpec, nbytes: int) -> None:
    """Three messages behind each other: within nodes, between them, between replicas."""
    dials = {**spec.environment(), **_dials(2, FULLSHARD_GRADIENT_BYTES=str(nbytes))}
    with environment(dials):
        replicas = run_ranks(8, partial(train_beside_oracle, replicas=2), spec, 8, 3, timeout=TIMEOUT)
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


@pytest.mark.parametrize("nccl", [False, True])
def test_two_runs_have_the_same_bits(nccl: bool) -> None:
    """Uneven rows, a parameter that some ranks do not use, gradients of an accumulation window, narrow partial sums.
    With the plan of NCCL sums are one operation; in float32 they are compared with plain training, too."""
    with environment(_dials(2, FULLSHARD_PARTIAL_SUMS="wire")), nccl_plan(0) if nccl else nullcontext():
        first, again = (run_ranks(4, train_alone, MODEL, 3, timeout=TIMEOUT)[0] for _ in range(2))
    assert_same_bits(first, again)
    with environment(_dials(2)), nccl_plan(0) if nccl else nullcontext():
        run_ranks(4, train_beside_oracle, MODEL, 4, 3, timeout=TIMEOUT)


# ---- the formula ---------------------------------------------------------------------------------------------


class _Odd(nn.Module):
    """In one unit: rows that do not divide, a single one, none for most ranks, a frozen weight, one cut along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(13, 3))
        self.one = nn.Parameter(torch.empty(1, 5))
        self.few = nn.Parameter(torch.empty(3))
        self.frozen = nn.Parameter(torch.empty(4, 2), requires_grad=False)
        self.across = nn.Parameter(torch.empty(2, 11))
        for p in self.parameters():
            # The ranks are threads, which share one random state.
            p.data.copy_(torch.linspace(-0.5, 1.0, p.numel()).view(p.shape))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        loss = self.frozen.sum() * 0
        for name, factor in factors.items():
            loss = loss + (getattr(self, name) * factor).sum()
        return loss


def _factors(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What becomes the gradient of each parameter, of very different sizes; of `few` on one rank alone."""
    generator = torch.Generator().manual_seed(rank)
    shapes = {"wide": (13, 3), "one": (1, 5), "few": (3,), "across": (2, 11)}
    made = {
        name: (torch.randn(shape, generator=generator) * 10.0 ** (3 * (rank % 3) - 3)).to(dtype)
        for name, shape in shapes.items()
    }
    if rank != 1:
        del made["few"]
    return made


def _oracle(nodes: int, local: int, dtype: torch.dtype, travels: torch.dtype, divisor: float) -> dict[str, Tensor]:
    """The formula of comm/hierarchical.py, of whole gradients."""
    expected = {}
    for name in ("wide", "one", "few", "across"):
        total: Any = None
        for node in range(nodes):
            part: Any = None
            for place in range(local):
                factor = _factors(node * local + place, dtype).get(name)
                one = torch.zeros(()) if factor is None else factor.float()
                part = one if part is None else part + one
            part = part.to(travels).float()
            total = part if total is None else total + part
        expected[name] = total / divisor
    return expected


FORMULAS = {
    "float32": (MixedPrecisionPolicy(), torch.float32, "sum", torch.float32),
    "bf16": (MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.bfloat16, "sum", torch.float32),
    "bf16 partials": (MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.bfloat16, "wire", torch.bfloat16),
    "float32 stays wide": (MixedPrecisionPolicy(), torch.float32, "wire", torch.float32),
}


@behaviour(
    "gradients reduced in two hops have the bits of the stated sum: {name}, {nodes} nodes of {local} ranks",
    area="communication",
    torch="none",
    reason="torch reduces by the backend",
)
@pytest.mark.parametrize(
    ("nodes", "local", "name"), [(2, 2, name) for name in FORMULAS] + [(2, 3, "bf16"), (3, 2, "bf16 partials")]
)
def test_the_formula(nodes: int, local: int, name: str) -> None:
    policy, dtype, partial_sums, travels = FORMULAS[name]
    world = nodes * local

    def rank_main(rank: int, divisor: float | None) -> dict[str, Tensor]:
        model: Any = fully_shard(
            _Odd(), mp_policy=policy, shard_placement_fn=lambda p: Shard(1) if p.shape == (2, 11) else None
        )
        model.set_gradient_divide_factor(divisor)
        model(_factors(rank, dtype)).backward()
        assert model.frozen.grad is None
        return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.requires_grad}

    with environment(_dials(local, FULLSHARD_PARTIAL_SUMS=partial_sums)):
        for divisor in (None, 3.0):
            expected = _oracle(nodes, local, dtype, travels, divisor or world)
            for found in run_ranks(world, rank_main, divisor, timeout=TIMEOUT):
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value), key


def test_the_error_of_narrow_partial_sums() -> None:
    """At most 2**-8 of the sum over nodes of their absolute values, divided."""
    wide, narrow = (_oracle(3, 2, torch.bfloat16, travels, 6) for travels in (torch.float32, torch.bfloat16))
    for name in wide:
        sizes = torch.zeros(wide[name].shape)
        for node in range(3):
            of_node = [_factors(2 * node + place, torch.bfloat16).get(name) for place in range(2)]
            sizes += sum((g.float() for g in of_node if g is not None), torch.zeros(())).abs()
        error = (wide[name] - narrow[name]).abs()
        assert (error <= (2.0**-8 + 1e-6) * sizes / 6).all() and (name == "few" or error.any())


# ---- what is chosen, and what is refused ---------------------------------------------------------------------


def _channels(model: nn.Module) -> list[Any]:
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return [channel for unit in units for known in unit._reduces for channel in known.values()]


def _step(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def _layers() -> Any:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
    for p in model.parameters():
        p.data.copy_(torch.linspace(-0.5, 1.0, p.numel()).view(p.shape))
    return model


@behaviour(
    "`set_communication`: two hops, one, or torch's messages from step to step",
    area="communication",
    torch="none",
    reason="not in torch",
)
def test_strategies_change_from_step_to_step() -> None:
    def rank_main(rank: int) -> None:
        model = _layers()
        fully_shard(model[0])
        fully_shard(model)
        x = torch.ones(2, 6) * (rank + 1)
        flat = None
        hops = {"auto": True, "all-to-all": False, "hierarchical": True, "torch": False}
        for strategy in [*hops, "hierarchical"]:
            model.set_communication(strategy)
            found = _step(model, x)
            assert [isinstance(c, HierarchicalReduce) for c in _channels(model)] == [hops[strategy]] * 2, strategy
            flat = found if flat is None else flat
            for a, b in zip(found, flat, strict=True):
                tolerance.assert_close(a, b)
        model.set_separate_reduce_scatter_group(True)
        for a, b in zip(_step(model, x), flat or [], strict=True):
            assert torch.equal(a, b)

    with environment({"LOCAL_WORLD_SIZE": "2"}):
        run_ranks(4, rank_main, timeout=TIMEOUT)


@pytest.mark.parametrize(("local", "shape"), [("4", (4,)), ("1", (4,)), ("2", (2, 2)), ("3", (4,))])
def test_where_one_hop_is_all_there_is(local: str, shape: tuple[int, ...]) -> None:
    """One node; one rank on each; a mesh that shards within nodes alone; nodes that do not divide, by `auto`."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = fully_shard(_layers(), mesh=mesh)
        _step(model, torch.ones(2, 6))
        assert not any(isinstance(channel, HierarchicalReduce) for channel in _channels(model))

    with environment({"FULLSHARD_LOCAL_WORLD_SIZE": local}):
        run_ranks(4, rank_main, timeout=TIMEOUT)


@behaviour(
    "two hops where nodes are not known, do not divide the ranks or differ: an error on every rank",
    area="communication",
    torch="none",
    reason="not in torch",
)
@pytest.mark.parametrize("how", ["environment", "method", "method later"])
@pytest.mark.parametrize(
    ("local", "words"),
    [(None, "FULLSHARD_LOCAL_WORLD_SIZE nor LOCAL_WORLD_SIZE"), ("3", "3 of node 0, 1 of node 1")],
)
def test_it_is_refused(local: str | None, words: str, how: str) -> None:
    def rank_main(rank: int) -> None:
        model: Any = fully_shard(_layers())
        if how == "method later":
            _step(model, torch.ones(2, 6))
        with pytest.raises(ValueError, match=words):
            if how != "environment":
                model.set_communication("hierarchical")
            _step(model, torch.ones(2, 6))
        if how == "method later":
            _step(model, torch.ones(2, 6))  # as before

    dials = {} if local is None else {"FULLSHARD_LOCAL_WORLD_SIZE": local}
    if how == "environment":
        dials["FULLSHARD_COMMUNICATION"] = "hierarchical"
    with environment(dials):
        run_ranks(4, rank_main, timeout=TIMEOUT)


def test_a_custom_reduce_scatter_goes_before_it() -> None:
    class Custom:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool) -> Any:
            torch.distributed.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op)

    def rank_main(rank: int) -> None:
        model: Any = fully_shard(_layers())
        custom: Any = Custom()
        x = torch.ones(2, 6) * (rank + 1)
        found = []
        for comm in (custom, None):
            model.set_custom_reduce_scatter(comm)
            found.append(_step(model, x))
            assert [isinstance(c, HierarchicalReduce) for c in _channels(model)] == [comm is None]
        for a, b in zip(*found, strict=True):
            tolerance.assert_close(a, b)

    with environment(_dials(2)):
        run_ranks(4, rank_main, timeout=TIMEOUT)


# ---- what a hook sees, and failures --------------------------------------------------------------------------


def test_what_a_hook_sees_has_zeros_for_padding() -> None:
    def rank_main(rank: int) -> None:
        seen: list[Tensor] = []
        model: Any = fully_shard(_layers())
        model.set_all_reduce_hook(lambda gradients: seen.append(gradients.clone()))
        _step(model, torch.ones(2, 6) * (rank + 1))
        (gradients,) = seen
        expected = sum(p.grad.to_local().pow(2).sum() for p in model.parameters())
        tolerance.assert_close(gradients.pow(2).sum(), expected)

    torch.use_deterministic_algorithms(True)  # then torch fills what `empty` makes
    try:
        with environment(_dials(2)):
            run_ranks(4, rank_main)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reductions", ["1", "2"])
def test_a_failed_backward_leaves_nothing_under_way(reductions: str) -> None:
    """Reductions are under way in both hops when the backward raises; the step after it is that of a model that never
    failed, bit by bit."""

    def rank_main(rank: int) -> None:
        def train(disturb: Callable[[Any], None]) -> list[Tensor]:
            model: Any = nn.Sequential(*(_layers() for _ in range(5)), nn.Flatten())
            for i in range(5):
                model[i].append(nn.Linear(4, 6, bias=False))
                model[i][3].weight.data.copy_(torch.linspace(-1, 1, 24).view(6, 4))
                fully_shard(model[i])
            fully_shard(model)
            disturb(model)
            return _step(model, torch.ones(2, 6) * (rank + 1))

        def fail(model: Any) -> None:
            broken = torch.ones(2, 6, requires_grad=True).clone()
            broken.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("broken")))
            with pytest.raises(RuntimeError, match="broken"):
                model(broken).sum().backward()
            executor = unit_of(model).root.executor  # type: ignore[union-attr]
            assert all(executor.shared.hops[hop] for hop in (0, 1))

        for found, expected in zip(train(fail), train(lambda model: None), strict=True):
            assert torch.equal(found, expected)

    with environment(_dials(2, FULLSHARD_REDUCTIONS=reductions)):
        run_ranks(4, rank_main, timeout=TIMEOUT)
