"""`grad_stats`: figures of the whole gradients, equal on every rank to those of plain training."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.observe.partial_reads import PartialReads
from tests.harness import experts
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.programs import Model, batch, part, shard

# The module: the package has the function under its name.
stats_room = importlib.import_module("fullshard.extras.grad_stats")

# Sums of float32 values in float64, of gradients that are sums over ranks in another order: 2^-24 for each addition of
# at most 64 summands, relative to the largest element.
BOUND = 64 * 2.0**-24


def _expected(gradient: Tensor) -> tuple[float, float, float, float, int]:
    wide = gradient.double()
    return (
        float(wide.norm()),
        float(wide.mean()),
        float(wide.abs().max()),
        float((~wide.isfinite()).double().mean()),
        wide.numel(),
    )


def _compare(found: Any, gradients: Tensor) -> None:
    norm, mean, largest, nonfinite, numel = _expected(gradients)
    assert (found.numel, found.nonfinite) == (numel, nonfinite)
    for value, wanted, slack in (
        (found.norm, norm, numel**0.5 * largest),
        (found.mean, mean, largest),
        (found.max, largest, largest),
    ):
        if math.isfinite(wanted):
            assert abs(value - wanted) <= BOUND * slack, (value, wanted)
        else:
            assert value == wanted or (math.isnan(value) and math.isnan(wanted))


def _compare_with(model: nn.Module, plain: nn.Module, units: dict[str, tuple[str, ...]]) -> Any:
    """`units`: by name, the beginnings of the names of their parameters."""
    found = fullshard.grad_stats(model)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert list(found.parameters) == list(wanted)
    for name, gradient in wanted.items():
        _compare(found.parameters[name], gradient)
    assert list(found.units) == list(units)
    for name, starts in units.items():
        own = [g.double().flatten() for key, g in wanted.items() if key.startswith(starts)]
        _compare(found.units[name], torch.cat(own))
    _compare(found.model, torch.cat([gradient.double().flatten() for gradient in wanted.values()]))
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, repr(found))
    assert len(set(said)) == 1
    return found


UNITS = {
    "": ("embedding", "head"), "layers.0": ("layers.0",), "layers.1": ("layers.1",), "layers.2": ("layers.2",),
}  # fmt: skip


def _trained(rank: int, scale: float = 1.0, **options: Any) -> tuple[Any, Any]:
    """A sharded model and a plain one after a backward of the same batch."""
    model, plain = seeded(Model), seeded(Model)
    for module in (*model.layers, model):
        fully_shard(module, **options)
    world = dist.get_world_size()
    for one, tokens in ((model, part(batch(world, 0), rank)), (plain, batch(world, 0))):
        (scale * one(tokens).square().mean()).backward()
    return model, plain


def test_a_shard_s_norm_is_not_the_gradient_s() -> None:
    """What `p.grad.norm()` read as a number is: smaller on each rank than the norm, which `grad_stats` has."""

    def run(rank: int) -> None:
        model, plain = _trained(rank)
        wanted = float(plain.layers[0].up.weight.grad.norm())
        read = model.layers[0].up.weight.grad.norm()
        assert isinstance(read, DTensor) and float(read.to_local()) < 0.9 * wanted
        assert fullshard.grad_stats(model).parameters["layers.0.up.weight"].norm == pytest.approx(wanted, rel=1e-5)

    run_ranks(2, run)


def test_figures_are_those_of_plain_training() -> None:
    run_ranks(WORLD, lambda rank: _compare_with(*_trained(rank), UNITS))


def _replicas() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


KINDS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "replicas": (4, _replicas),
    "columns": (2, lambda: {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
    "offload": (2, lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "more ranks than rows": (8, dict),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_gradients_are(kind: str) -> None:
    world, options = KINDS[kind]
    run_ranks(world, lambda rank: _compare_with(*_trained(rank, **options()), UNITS))


def test_replicas_beside_shards() -> None:
    """Two meshes in one model, and a unit that shards nothing."""

    def run(rank: int) -> None:
        model, plain = seeded(Model), seeded(Model)
        fullshard.replicate(model.layers[0])
        fully_shard(model.layers[1], **_replicas())
        for module in (model.layers[2], model):
            fully_shard(module)
        model(part(batch(4, 0), rank)).square().mean().backward()
        plain(batch(4, 0)).square().mean().backward()
        _compare_with(model, plain, UNITS)

    run_ranks(4, run)


class Wide(nn.Module):
    """Widths that two ranks share evenly, as torch's parallel layers want."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(3, 8), nn.Linear(8, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.down(torch.tanh(self.up(x))))
        return found


def test_tensor_parallel_parameters_beside_sharded_ones() -> None:
    """Of the norm, plain beside DTensors of both axes, each counts once."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, plain = seeded(Wide), seeded(Wide)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        inputs = torch.linspace(-1, 1, 12).reshape(4, 3)
        model(inputs.chunk(2)[rank // 2]).pow(3).mean().backward()
        plain(inputs).pow(3).mean().backward()
        _compare_with(model, plain, {"": ("",)})

    run_ranks(4, run)


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def test_frozen_unused_and_ignored_parameters() -> None:
    """Without a gradient a parameter has no figures, and is named; a plain one counts once."""

    def run(rank: int) -> None:
        model, plain = seeded(Model), seeded(Model)
        for one in (model, plain):
            one.layers[1].requires_grad_(False)
            one.layers[0].extra = nn.Parameter(torch.ones(3))
        bias = model.head.bias
        bias.register_post_accumulate_grad_hook(_average)
        for module in (*model.layers, model):
            fully_shard(module, ignored_params={bias})
        model(part(batch(2, 0), rank)).square().mean().backward()
        plain(batch(2, 0)).square().mean().backward()
        units = {"": ("embedding", "head.weight"), "layers.0": ("layers.0",), "layers.2": ("layers.2",)}
        found = _compare_with(model, plain, {**units, "in no unit": ("head.bias",)})
        assert "layers.0.extra" in found.without and "layers.1.up.weight" in found.without
        model.zero_grad()
        assert fullshard.grad_stats(model).model == fullshard.grad_stats(nn.Linear(1, 1)).model

    run_ranks(2, run)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("owner", [0, 1])
def test_values_that_are_not_finite(value: float, owner: int) -> None:
    """On one rank alone: figures of all ranks have it, so an `if` of theirs goes one way."""

    def run(rank: int) -> None:
        model, plain = _trained(rank)
        row = 0 if owner == 0 else 12
        plain.layers[2].up.weight.grad[row, 1] = value
        if rank == owner:
            model.layers[2].up.weight.grad.to_local()[0 if owner == 0 else -1, 1] = value
        found = _compare_with(model, plain, UNITS)
        assert found.parameters["layers.2.up.weight"].nonfinite == 1 / (13 * 6)
        assert found.parameters["layers.2.down.weight"].nonfinite == 0

    run_ranks(2, run)


def test_both_infinities_have_no_mean() -> None:
    def run(rank: int) -> None:
        model, plain = _trained(rank)
        plain.head.weight.grad[0, 0], plain.head.weight.grad[-1, 0] = math.inf, -math.inf
        model.head.weight.grad.to_local()[0 if rank == 0 else -1, 0] = math.inf if rank == 0 else -math.inf
        _compare_with(model, plain, UNITS)

    run_ranks(2, run)


def test_bfloat16_gradients_are_summed_wider() -> None:
    """2 ** 12 ones and a half each: a sum in bfloat16 ends at 256."""

    def run(rank: int) -> None:
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        model.weight.grad = torch.full_like(model.weight, 1.5)
        found = fullshard.grad_stats(model).model
        assert (found.norm, found.mean, found.max) == (pytest.approx(96.0, rel=1e-12), 1.5, 1.5)

    run_ranks(2, run)


def test_experts_on_fewer_ranks_count_with_their_counterparts() -> None:
    """The figures of an expert are of all experts of its name, and the model's norm is that of clipping."""
    oracle = experts.Oracle()
    gradients = oracle.gradients(0)

    def run(rank: int) -> None:
        whole, pairs = experts.meshes()
        expert: Any = lambda placement: fullshard.ShardPlacementResult(placement, pairs["expert"])  # noqa: E731
        model = experts.sharded(fullshard, experts.model_of(rank // 2), whole, expert, 1)
        experts.loss(model, experts.batch(0, rank)).backward()
        found = fullshard.grad_stats(model)
        for name in gradients[0]:
            both = [gradients[pair][name] for pair in range(2 if experts.is_expert(name) else 1)]
            _compare(found.parameters[name], torch.cat(both))
        assert abs(found.model.norm - float(oracle.norm(gradients))) <= BOUND * found.model.norm

    run_ranks(4, run)


def test_stages_of_a_pipeline_count_in_the_figures_of_the_model() -> None:
    """Each of two stages on two ranks: `groups` names the axis, and other names on other stages are no harm."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
        stages = [nn.Linear(3, 5 + stage) for stage in range(2)]
        for stage, one in enumerate(stages):
            one.weight.grad, one.bias.grad = torch.full((5 + stage, 3), stage + 1.0), torch.full((5 + stage,), -3.0)
        wanted = torch.cat([p.grad.flatten() for one in stages for p in one.parameters() if p.grad is not None])
        model: Any = fully_shard(nn.Linear(3, 5 + rank // 2), mesh=mesh["dp"])
        for p in model.parameters():
            p.grad = torch.full_like(p, rank // 2 + 1.0 if p.ndim == 2 else -3.0)
        found = fullshard.grad_stats(model, groups=[mesh["stage"]])
        _compare(found.model, wanted)
        assert found.parameters["weight"].numel == 3 * (5 + rank // 2)

    run_ranks(4, run)


def test_a_gradient_on_some_ranks_alone_is_an_error_of_all() -> None:
    def run(rank: int) -> None:
        model, _ = _trained(rank)
        if rank == 1:
            model.head.weight.grad = None
        with pytest.raises(RuntimeError, match=r"grad_stats: expected a gradient of head.weight on all 2 ranks .* 1"):
            fullshard.grad_stats(model)

    run_ranks(2, run)


def test_gradients_that_are_not_reduced_are_an_error() -> None:
    def run(rank: int) -> None:
        model = fully_shard(seeded(Model))
        model.set_requires_gradient_sync(False)
        model(part(batch(2, 0), rank)).square().mean().backward()
        with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
            fullshard.grad_stats(model)

    run_ranks(2, run)


@pytest.mark.threads_only("counts the messages of all ranks in one process")
def test_one_sum_and_one_maximum_for_each_mesh(monkeypatch: Any) -> None:
    """However many parameters there are."""
    sent: list[int] = []
    original = stats_room.all_reduce_over

    def counted(tensor: Tensor, *args: Any) -> None:
        sent.append(tensor.numel())
        original(tensor, *args)

    monkeypatch.setattr(stats_room, "all_reduce_over", counted)
    world = several()
    run_ranks(world, lambda rank: fullshard.grad_stats(_trained(rank)[0]))
    count = len(list(Model().parameters()))
    assert sorted(sent) == world * [count] + world * [6 * count]


# ---- what users compute of a gradient as a number ------------------------------------------------------------


def _gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


USES: dict[str, Callable[[Any], Any]] = {
    # of all gradients, in ways that logs and clippings of projects have
    "get_total_norm": lambda m: nn.utils.get_total_norm(_gradients(m)).item(),
    "norms stacked": lambda m: torch.stack([g.norm() for g in _gradients(m)]).norm().item(),
    "norms as numbers, added": lambda m: math.sqrt(sum(g.norm().item() ** 2 for g in _gradients(m))),
    "norms as tensors, added": lambda m: float(sum(g.norm() ** 2 for g in _gradients(m)) ** 0.5),
    "_foreach_norm": lambda m: torch.stack(torch._foreach_norm(_gradients(m))).norm().item(),
    "the largest of all": lambda m: max(g.abs().max() for g in _gradients(m)).item(),
    "concatenated": lambda m: torch.cat([g.flatten() for g in _gradients(m)]).norm().item(),
    "a number of bad ones": lambda m: (
        sum(int(torch.isnan(g).sum()) for g in _gradients(m)) + int(_gradients(m)[0].numel())
    ),
    # of one
    "norm": lambda m: float(m.head.weight.grad.norm()),
    "matrix norm": lambda m: torch.linalg.matrix_norm(m.head.weight.grad).item(),
    "the largest row": lambda m: m.head.weight.grad.norm(dim=1).max().item(),
    "the largest column": lambda m: m.head.weight.grad.norm(dim=0).max().item(),
    "mean": lambda m: m.head.weight.grad.mean().item(),
    "std": lambda m: m.head.weight.grad.std().item(),
    "sum": lambda m: m.head.weight.grad.sum().item(),
    "smallest": lambda m: m.head.weight.grad.min().item(),
    "count_nonzero": lambda m: int(m.head.weight.grad.count_nonzero()),
    "a share that is small": lambda m: (m.head.weight.grad.abs() < 0.05).float().mean().item(),
    "an element": lambda m: m.head.weight.grad[9, 3].item(),
    "a row": lambda m: m.head.weight.grad[9].sum().item(),
    "formatted": lambda m: float(f"{m.head.weight.grad.norm():.6f}"),
    "tolist": lambda m: m.head.weight.grad.norm().tolist(),
    "numpy": lambda m: m.head.weight.grad.norm().numpy().item(),
    # with the weight
    "ratio to the weight": lambda m: (m.head.weight.grad.norm() / m.head.weight.norm()).item(),
    "product with the weight": lambda m: (m.head.weight.grad * m.head.weight).sum().item(),
    "distance to the weight": lambda m: torch.dist(m.head.weight.grad, m.head.weight).item(),
    "a comparison": lambda m: float(m.head.weight.grad.norm() > 0.5),
}


def _used(model: Any) -> dict[str, tuple[Any, bool]]:
    """What each use gives, or the exception; and whether it was seen."""
    found: dict[str, tuple[Any, bool]] = {}
    for name, use in USES.items():
        watch = PartialReads(model.named_parameters())
        try:
            with watch:
                value = use(model)
        except (RuntimeError, TypeError) as error:
            value = RuntimeError(str(error))  # without the frames, which hold the model
        found[name] = value, bool(watch.found)
    return found


def _look(rank: int) -> dict[str, tuple[Any, bool]]:
    model = shard(seeded(Model))
    model(part(batch(2, 0), rank)).square().mean().backward()
    return _used(model)


@pytest.fixture(scope="module")
def looked() -> list[dict[str, tuple[Any, bool]]]:
    return run_ranks(2, _look)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Any, bool]]:
    model = seeded(Model)
    model(batch(2, 0)).square().mean().backward()
    return _used(model)


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", USES)
def test_a_number_is_right_or_seen_or_an_error(name: str, looked: Any, plain: Any) -> None:
    wanted = plain[name][0]
    for value, seen in (ranks[name] for ranks in looked):
        assert not isinstance(wanted, Exception)
        right = not isinstance(value, Exception) and value == pytest.approx(wanted, rel=1e-4)
        assert right or seen or isinstance(value, Exception), f"{value} where {wanted} is right, and nothing saw it"


def test_what_is_right_is_not_seen(looked: Any) -> None:
    """Sums that DTensor makes before the read are whole."""
    for name in ("get_total_norm", "norms stacked", "norms as tensors, added", "an element", "ratio to the weight"):
        assert not any(ranks[name][1] for ranks in looked), name
    for name in ("norm", "norms as numbers, added", "product with the weight"):
        assert all(ranks[name][1] for ranks in looked), name
