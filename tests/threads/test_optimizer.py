"""`step_on_shards`: torch's optimizers give on local tensors what they give on DTensors, in values and state dicts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.api.optimizer import ELEMENTWISE
from fullshard.engine import state_dict
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
}
WAYS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
HAVE_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
# torch has no operators on DTensors for Rprop and for the fused kernels of SGD and Adagrad.
CASES = [
    (kind, way)
    for kind in ELEMENTWISE
    for way in WAYS
    if kind is not torch.optim.Rprop and (way != "fused" or kind.__name__ in ("Adam", "AdamW"))
]


def _model() -> nn.Module:
    """Uneven dims, dims smaller than the world, a frozen parameter."""
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 3)))
    model[0].bias.requires_grad_(False)
    return model


def _shard(model: nn.Module) -> nn.Module:
    for child in (model[0], model[2]):
        fullshard.fully_shard(child)
    return fullshard.fully_shard(model)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one of which decays nothing; frozen parameters are in them, as users leave them."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _content(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The state dict with DTensors spelled out: (placements, local tensor)."""

    def spell(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.placements, tuple(value.shape), value.to_local().clone()
        return value.clone() if isinstance(value, torch.Tensor) else value

    dict_ = optimizer.state_dict()
    return dict_["param_groups"], {i: {k: spell(v) for k, v in s.items()} for i, s in dict_["state"].items()}


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b) and a.dtype == b.dtype
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_same(x, y)
    else:
        assert a == b


@behaviour(
    "`fullshard.step_on_shards`: values and state dicts as without it",
    area="training",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "way"), CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_the_same_values_and_state_dicts_as_on_dtensors(kind: type[torch.optim.Optimizer], way: str) -> None:
    options = {"lr": 0.01} | OPTIONS.get(kind.__name__, {}) | WAYS[way]

    def rank_main(rank: int) -> None:
        results = []
        for local in (False, True):
            model = _shard(_model())
            optimizer = kind(_groups(model), **options)  # type: ignore[call-arg]
            if local:
                assert fullshard.step_on_shards(optimizer) is optimizer
                assert isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
            _train(model, optimizer, range(3), rank, 3)
            saved = copy.deepcopy(_content(optimizer))
            # Into a new optimizer, whose state is then that of the load.
            optimizer.load_state_dict(optimizer.state_dict())
            _train(model, optimizer, range(3, 5), rank, 3)
            parameters = [p.to_local().clone() if isinstance(p, DTensor) else p for p in model.parameters()]
            results.append((saved, _content(optimizer), parameters))
        # On DTensors the fused kernels of the CPU see other vectors of the same elements; each element is the same.
        _assert_same(results[1], results[0])

    run_ranks(3, rank_main)


class _OnClones:
    """The oracle: the optimizer on plain clones of the shards, whose values go back into the shards."""

    def __init__(self, model: nn.Module, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.pairs = [
            (p, nn.Parameter((p.to_local() if isinstance(p, DTensor) else p).detach().clone()))
            for p in model.parameters()
        ]
        clones = [clone for _, clone in self.pairs]
        self.optimizer = kind([{"params": clones[::2]}, {"params": clones[1::2], "weight_decay": 0.0}], **options)

    def step(self) -> None:
        for p, clone in self.pairs:
            clone.grad = p.grad.to_local().clone() if isinstance(p.grad, DTensor) else None
        self.optimizer.step()
        with torch.no_grad():
            for p, clone in self.pairs:
                (p.to_local() if isinstance(p, DTensor) else p).copy_(clone)

    def zero_grad(self) -> None:
        for p, _ in self.pairs:
            p.grad = None


@pytest.mark.sample(3)
@behaviour(
    "`fullshard.step_on_shards`: optimizers for which DTensor has no operator",
    area="training",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize(
    ("kind", "way"),
    [(k, w) for k in ELEMENTWISE for w in WAYS if w != "fused" or k.__name__ in HAVE_FUSED],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_the_same_values_as_on_plain_tensors(kind: type[torch.optim.Optimizer], way: str) -> None:
    """Also where torch has no operator for DTensors: Rprop, and the fused kernels of SGD and Adagrad."""
    options = {"lr": 0.01} | OPTIONS.get(kind.__name__, {}) | WAYS[way]

    def rank_main(rank: int) -> None:
        results = []
        for oracle in (False, True):
            model = _shard(_model())
            optimizer: Any
            if oracle:
                optimizer = _OnClones(model, kind, options)
            else:
                optimizer = fullshard.step_on_shards(kind(_groups(model), **options))  # type: ignore[call-arg]
            _train(model, optimizer, range(4), rank, 3)
            results.append([p.to_local().clone() if isinstance(p, DTensor) else p for p in model.parameters()])
        _assert_same(results[0], results[1])

    run_ranks(3, rank_main)


def test_hooks_schedulers_closures_and_plain_parameters_see_what_they_always_see() -> None:
    def rank_main(rank: int) -> None:
        model = _shard(_model())
        plain = nn.Parameter(torch.ones(3))
        optimizer = fullshard.step_on_shards(torch.optim.AdamW([*model.parameters(), plain], lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        seen: list[str] = []

        def note(name: str) -> Any:
            def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                assert {type(p) for p in optimizer.state} <= {DTensor, nn.Parameter}
                assert sum(isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"]) == 6
                seen.append(name)

            return hook

        optimizer.register_step_pre_hook(note("pre"))
        optimizer.register_step_post_hook(note("post"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).sum() + (plain * plain).sum()
            loss.backward()
            assert all(isinstance(p, DTensor) for p in model.parameters())
            return loss

        for _ in range(2):
            loss = optimizer.step(closure)
            assert isinstance(loss, torch.Tensor)
            scheduler.step()
        assert seen == ["pre", "post"] * 2
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert not torch.equal(plain, torch.ones(3)) and type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
        for p in model.parameters():
            if p.requires_grad:
                assert isinstance(optimizer.state[p]["exp_avg"], DTensor)

    run_ranks(WORLD, rank_main)


def test_full_parameters_that_are_kept_are_gathered_again_after_a_step() -> None:
    """The engine learns of the step as of every other."""

    def rank_main(rank: int) -> None:
        model = _model()
        fullshard.fully_shard(model, reshard_after_forward=False)
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        optimizer = fullshard.step_on_shards(torch.optim.SGD(model.parameters(), lr=0.5, foreach=True))
        x = torch.ones(2, 5)
        outputs = []
        for _ in range(2):
            output = model(x)
            outputs.append(output.detach())
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(*outputs)

    run_ranks(WORLD, rank_main)


def test_a_compiled_step_is_run_as_it_is() -> None:
    """Not a graph, and no error of the compiler's."""

    def ranks(rank: int, compiled: bool) -> Any:
        model = _shard(_model())
        optimizer: Any = fullshard.step_on_shards(torch.optim.AdamW(model.parameters(), lr=0.01))
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        _train(model, optimizer, range(3), rank, WORLD)
        return [p.to_local() for p in model.parameters()], _content(optimizer)

    for found, expected in zip(run_ranks(WORLD, ranks, True), run_ranks(WORLD, ranks, False), strict=True):
        assert all(map(torch.equal, found[0], expected[0]))
        _assert_same(found[1], expected[1])


def test_a_failing_step_puts_everything_back() -> None:
    def rank_main(rank: int) -> None:
        model = _shard(_model())
        optimizer = fullshard.step_on_shards(torch.optim.AdamW(model.parameters(), lr=0.1))
        _train(model, optimizer, range(1), rank, 2)
        before = list(optimizer.param_groups[0]["params"])
        state = optimizer.state
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(RuntimeError, match="only accumulated"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == before or all(
            a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True)
        )
        assert optimizer.state is state and all(isinstance(p, DTensor) for p in state)
        optimizer.zero_grad()
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        _train(model, optimizer, range(1, 2), rank, 2)

    run_ranks(WORLD, rank_main)


def test_others_are_refused_by_name() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ValueError, match=kind.__name__):
            fullshard.step_on_shards(kind([weight]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Linear"):
        fullshard.step_on_shards(nn.Linear(1, 1))  # type: ignore[type-var]

    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="Mine"):
        fullshard.step_on_shards(Mine([weight], lr=0.1))
    assert isinstance(fullshard.step_on_shards(Mine([weight], lr=0.1), elementwise=True), Mine)


@behaviour(
    "An optimizer built before `fully_shard` is refused at its first step, with the names of its parameters",
    area="training",
    torch="better",
    reason="torch's steps train nothing, and say nothing",
)
@pytest.mark.parametrize("trained_before", [False, True])
def test_an_optimizer_from_before_is_refused(trained_before: bool, impl: Implementation) -> None:
    def job(rank: int) -> None:
        model = _model()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        frozen = torch.optim.SGD([model[0].bias], lr=0.1)
        x = torch.linspace(-1.0, 1.0, 20).view(4, 5)
        if trained_before:  # and what it left is no gradient of the sharded model
            model(x).sum().backward()
            early.step()
        for child in (model[0], model[2]):
            impl.fully_shard(child)
        impl.fully_shard(model)
        before = [p.full_tensor().clone() for p in model.parameters()]
        model(x).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"SGD\.step: .*: 0\.weight, 2\.weight, 2\.bias, 3\.weight and 1 more; .*"
        ):
            early.step()
        if impl is FULLSHARD:
            with pytest.raises(RuntimeError, match="expected parameters that are on the model"):
                fullshard.step_on_shards(early).step()
        assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
        frozen.step()  # trains nothing, as it says
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(model[3].weight.full_tensor(), before[-2])

    with warnings.catch_warnings():  # of the process, so around all ranks: each would end the others' filter
        warnings.filterwarnings("ignore", "fully_shard: expected parameters without gradients")
        run_ranks(WORLD, job)


def test_a_parameter_from_before_that_another_model_trains_is_left_alone() -> None:
    def job(rank: int) -> None:
        model, other = _model(), nn.Linear(5, 7)
        other.weight = model[0].weight
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        _shard(model)
        before = other.weight.detach().clone()
        other(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        assert not torch.equal(other.weight, before)

    run_ranks(WORLD, job)


def test_nothing_is_remembered_of_parameters_that_nobody_holds() -> None:

    def job(rank: int) -> None:
        known = set(state_dict._replaced)
        model = _model()
        ours = {id(p) for p in model.parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _shard(model)
        assert ours - known <= set(state_dict._replaced)
        del optimizer
        assert not ours & set(state_dict._replaced)

    run_ranks(1, job)


def test_a_norm_is_the_same_however_many_ranks_share_the_gradients() -> None:
    """To the last bit, so that one run is the same at any number of processes."""
    from fullshard.api.clip import _norm

    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 300), (64, 64), (129, 70), (5, 9000), (1, 5000), (300,), (4, 3, 40), (65, 3)]
    for _ in range(20):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        found = set()
        for world in (1, 2, 3, 4, 8):
            powers = torch.zeros((), dtype=torch.float64)
            for rank in range(world):
                chunks = [g.chunk(world) for g in gradients]
                mine = [c[rank].clone() for c in chunks if rank < len(c)]
                powers += _norm(mine, 2.0, torch.device("cpu")).square()
            found.add(powers.sqrt().float().item())
        assert len(found) == 1
        exact = torch.cat([g.double().view(-1) for g in gradients]).norm()
        # Of squares in float64: the result is rounded once.
        assert abs(found.pop() - exact.item()) <= 2 * tolerance.unit(torch.float32) * exact.item()


# ---- compiled steps ------------------------------------------------------------------------------------------


@behaviour(
    "`torch.compile(optimizer.step)` of an optimizer over sharded parameters takes the steps that it takes by itself",
    area="compile",
    torch="same",
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_a_compiled_step_of_an_optimizer_of_torchs(impl: Implementation) -> None:
    def ranks(rank: int, compiled: bool) -> Any:
        model: Any = _model()
        for module in (model[0], model[2], model):
            impl.fully_shard(module)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        _train(model, optimizer, range(3), rank, 1)
        return [p.to_local() for p in model.parameters()]

    # The compiler is not meant for several threads.
    for mine, plain in zip(run_ranks(1, ranks, True)[0], run_ranks(1, ranks, False)[0], strict=True):
        tolerance.assert_close(mine, plain)
