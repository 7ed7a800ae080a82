"""The programs of `everyday.py`, and loops of more than one model or step: they train as plain models do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
from tests.harness.threads import run_ranks
from tests.threads.everyday import EVERYDAY
from tests.threads.programs import WIDTH, Model, OnVectors, batch, compare_gradients, part, shard
from tests.threads.uses import check_use, vectors

TITLES = {
    "lstm": ("parameters", "LSTMs, which keep a list of their weights"),
    "weight_norm": ("parameters", "weights that are computed from parameters (`parametrizations.weight_norm`)"),
    "parameter_lists": ("parameters", "`ParameterList` and `ParameterDict`"),
    "one_module_two_names": ("parameters", "one module under two names"),
    "encoder_layer": ("training", "`TransformerEncoderLayer`, whose evaluation calls no module"),
    "weight_read_twice": ("parameters", "a weight of the root that is read by a function, too"),
    "deep_supervision": ("training", "a head that reads every block"),
    "checkpoint_sequential": ("recomputation", "`checkpoint_sequential` over the units"),
    "stopped_branches": ("autograd", "branches without gradients, and branches that are stopped"),
    "loss_inside": ("training", "a forward that returns its loss in a dict"),
    "contrastive": ("training", "a contrastive loss on two forwards"),
    "own_target": ("training", "a target that the same model made, detached"),
    "unused_input": ("autograd", "`torch.autograd.grad` with `allow_unused`"),
    "several_roots": ("autograd", "`torch.autograd.backward` of several tensors"),
    "abandoned_forwards": ("autograd", "forwards whose outputs are thrown away"),
    "row_by_row": ("autograd", "gradients of single outputs through one graph, then a backward"),
    "frozen_as_a_whole": ("autograd", "a backward through a frozen model, then training"),
}
WORLDS = [
    pytest.param(2, FULLSHARD, id="fullshard-2"),
    pytest.param(1, FULLSHARD, id="fullshard-1", marks=pytest.mark.slow),
    pytest.param(4, FULLSHARD, id="fullshard-4", marks=pytest.mark.slow),
    pytest.param(2, TORCH, id="torch-2", marks=pytest.mark.slow),
]
ignore_views = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def test_every_program_runs() -> None:
    assert set(TITLES) == set(EVERYDAY)


@pytest.mark.sample(2)
@ignore_views
@pytest.mark.parametrize(("world", "impl"), WORLDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=behaviour(f"trains as the plain model: {title}", area=area), id=name)
        for name, (area, title) in TITLES.items()
    ],
)
def test_equals_the_plain_model(name: str, world: int, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    check_use(EVERYDAY[name], world, impl=impl)


# ---- loops ---------------------------------------------------------------------------------------------------


def _parts(world: int, step: int) -> list[Tensor]:
    return [part(batch(world, step), rank) for rank in range(world)]


def _mean_square(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).pow(2).mean()


class _Pair:
    """A sharded model and the plain one beside it, each with an optimizer; what is done to one is done to both."""

    def __init__(self, base: nn.Module, impl: Implementation, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.models = [shard(copy.deepcopy(base), impl), copy.deepcopy(base)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in self.models]
        tolerance.watch(self.optimizers[1])

    def backward(self, loss: Callable[[int, Tensor], Tensor], step: int) -> None:
        """`loss(i, tokens)` of the i-th of both models: this rank's part, and the mean over all parts."""
        parts = _parts(self.world, step)
        loss(0, parts[self.rank]).backward()
        torch.stack([loss(1, tokens) for tokens in parts]).mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self, what: str) -> None:
        tolerance.assert_parameters_close(*self.models, self.optimizers[1], what)


def _adversaries(rank: int, impl: Implementation, world: int, base: nn.Module) -> None:
    """A generator and a critic with a gradient penalty, each frozen while the other is trained."""
    generator, critic = _Pair(base, impl, rank, world), _Pair(base, impl, rank, world)

    def of_critic(i: int, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            made = generator.models[i](vectors(tokens))[..., :WIDTH]
        real = vectors(tokens).detach()
        between = (0.3 * real + 0.7 * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic.models[i](between).sum(), between, create_graph=True)
        penalty: Tensor = (slope.norm(dim=-1) - 1.0).pow(2).mean()
        return critic.models[i](made).mean() - critic.models[i](real).mean() + 10.0 * penalty

    def of_generator(i: int, tokens: Tensor) -> Tensor:
        return -critic.models[i](generator.models[i](vectors(tokens))[..., :WIDTH]).mean()

    for step in range(3):
        critic.backward(of_critic, step)
        critic.step()
        for model in critic.models:
            model.requires_grad_(False)
        generator.backward(of_generator, step)
        generator.step()
        for model in critic.models:
            model.requires_grad_(True)
        generator.compare(f"generator, step {step}")
        critic.compare(f"critic, step {step}")


def _averaged_weights(rank: int, impl: Implementation, world: int, base: nn.Module) -> None:
    """Evaluation with other weights, given to `functional_call`, between steps."""
    pair = _Pair(base, impl, rank, world)
    average = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in pair.models]
    for step in range(3):
        pair.backward(lambda i, tokens: _mean_square(pair.models[i], tokens), step)
        pair.step()
        outs = []
        with torch.no_grad():
            for model, weights in zip(pair.models, average, strict=True):
                for name, p in model.named_parameters():
                    weights[name].lerp_(p, 0.3)
                outs.append(torch.func.functional_call(model, weights, (_parts(world, step)[rank],)))
        tolerance.assert_close(*outs)
        pair.compare(f"step {step}")


LOOPS = {
    "adversaries": (
        _adversaries,
        OnVectors,
        "a generator and a critic with a gradient penalty",
        "a backward with `create_graph=True` keeps the weights that the next backward reads",
    ),
    "averaged_weights": (
        _averaged_weights,
        Model,
        "`functional_call` with averaged weights for evaluation",
        "torch's computes with the model's own weights, and says nothing",
    ),
}


@ignore_views
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=behaviour(f"trains as plain models: {title}", area="training", torch="better", reason=reason),
            id=name,
        )
        for name, (_, _, title, reason) in LOOPS.items()
    ],
)
def test_loops_equal_those_of_plain_models(name: str, world: int, impl: Implementation) -> None:
    loop, model, _, _ = LOOPS[name]
    torch.manual_seed(0)
    run_ranks(world, loop, impl, world, model())


def test_functional_call_with_computed_weights_is_refused() -> None:
    """A gradient could not go on from the shards. (torch's ignores the weights it is given.) Training goes on."""
    torch.manual_seed(0)
    base = Model()

    def rank_main(rank: int) -> None:
        pair = _Pair(base, FULLSHARD, rank, 2)
        for step in range(2):
            weights = {name: 1.5 * p for name, p in pair.models[0].named_parameters()}
            with pytest.raises(RuntimeError, match=r"embedding\.weight: .*computed tensor"):
                torch.func.functional_call(pair.models[0], weights, (_parts(2, step)[rank],))
            pair.backward(lambda i, tokens: _mean_square(pair.models[i], tokens), step)
            compare_gradients(pair.models[0], pair.models[1], step)
            pair.step()

    run_ranks(2, rank_main)


# ---- freezing in mixed precision -----------------------------------------------------------------------------


@pytest.mark.sample(1)
@behaviour(
    "parameters frozen and unfrozen between steps, in mixed precision",
    area="mixed precision",
    torch="better",
    reason="gradients are in the reduce dtype whatever was frozen before; torch assigns one of another dtype",
)
@pytest.mark.parametrize(
    "order", [(True, False, True, False), (False, False, True, True)], ids=["in turn", "in halves"]
)
@pytest.mark.parametrize("world", [2, 4])
def test_freezing_in_mixed_precision(world: int, order: tuple[bool, ...], impl: Implementation) -> None:
    """Four ranks: two copies of two shards. The plain model computes with casts of its weights."""
    torch.manual_seed(0)
    base = Model()

    def rank_main(rank: int) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if world == 4 else None
        model = shard(copy.deepcopy(base), impl, mp_policy=policy, mesh=mesh)
        reference = copy.deepcopy(base)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        tolerance.watch(optimizers[1])
        for step, frozen in enumerate(order):
            for each in (model, reference):
                for layer in each.layers:
                    layer.up.weight.requires_grad_(not frozen)
                each.layers[1].requires_grad_(frozen)
                each.head.bias.requires_grad_(frozen)
            parts = _parts(world, step)
            model(parts[rank]).float().pow(2).mean().backward()
            for tokens in parts:
                weights = {name: p.to(torch.bfloat16) for name, p in reference.named_parameters()}
                out: Any = torch.func.functional_call(reference, weights, (tokens,))
                (out.float().pow(2).mean() / world).backward()
            compare_gradients(model, reference, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        tolerance.assert_parameters_close(model, reference, optimizers[1])

    run_ranks(world, rank_main)
