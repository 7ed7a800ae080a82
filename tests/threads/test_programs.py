"""Programs and uses of programs.py, uses.py and everyday.py, and loops of more than one model or step, train as plain
models do: gradients, their presence, and AdamW's parameters. What a forward must not do is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard
from tests.harness import threads, tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
from tests.harness.installed import fails_before
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.everyday import EVERYDAY
from tests.threads.programs import (
    PROGRAMS,
    WIDTH,
    Block,
    Model,
    OnVectors,
    batch,
    compare_gradients,
    of_blocks,
    part,
    shard,
)
from tests.threads.uses import USES, check_use, of_program, vectors

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks, accumulation": (2, {"accumulate": True}),
    "2 ranks, kept full": (2, {"reshard_after_forward": False}),
    "3 ranks, all freed": (3, {"reshard_after_forward": True}),
}
FOR_TORCH = "2 ranks, accumulation"  # one is enough: torch is here to show that the program is one that it runs
# One and four ranks in the full run.
WORLDS = [
    pytest.param(2, FULLSHARD, id="fullshard-2"),
    pytest.param(1, FULLSHARD, id="fullshard-1", marks=pytest.mark.slow),
    pytest.param(4, FULLSHARD, id="fullshard-4", marks=pytest.mark.slow),
    pytest.param(2, TORCH, id="torch-2"),
]
OUR_WORLDS = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
# torch says so of a root that ends in a linear layer on more than two dims; nothing here edits its output.
ignore_views = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

# What each program shows: (area, title); and where torch 2.13 fails, what makes the difference.
BOTH = {
    "plain": ("training", "a loss on the output"),
    "two_losses": ("autograd", "two losses on one output"),
    "two_forwards_one_backward": ("autograd", "two forwards, then one backward"),
    "loss_on_an_intermediate_too": ("autograd", "a loss on the output and on an intermediate of a unit"),
    "outputs_in_structures": ("autograd", "units that take and return named tuples of dicts of lists"),
    "inputs_without_gradient": ("autograd", "units whose inputs need no gradient"),
    "no_grad_first": ("autograd", "a forward under `torch.no_grad` before the one that trains"),
    "unused_layer": ("gradients", "a unit that some steps do not use"),
    "recompute_inside": ("recomputation", "checkpoint inside a unit"),
    "recompute_inside_reentrant": ("recomputation", "checkpoint inside a unit, reentrant"),
    "recompute_outside": ("recomputation", "checkpoint around a unit"),
    "recompute_outside_reentrant": ("recomputation", "checkpoint around a unit, reentrant"),
    "twice_in_one_reentrant_segment": ("recomputation", "a unit used twice inside one reentrant checkpoint"),
    "shared_blocks": ("autograd", "units used twice in one forward"),
    "tied_weights": ("parameters", "weights tied inside a unit"),
    "frozen": ("gradients", "frozen parameters beside trained ones, and a frozen unit"),
    "freeze_every_other_step": ("gradients", "parameters frozen in every other step"),
    "detached_weight": ("gradients", "a weight that is detached in forward, and gets no gradient"),
    "returns_a_parameter": ("autograd", "a forward that returns a parameter"),
}
OURS = {
    "loss_on_an_intermediate_only": (
        "autograd",
        "a loss on an intermediate of a unit alone",
        "weights are gathered when autograd asks for them, not when an output's gradient arrives",
    ),
    "intermediate_of_a_saved_view": (
        "autograd",
        "the same, where a function with a backward of its own saved a view of the weight",
        "a saved view is known by the weight it is a view of",
    ),
    "outputs_in_objects": (
        "autograd",
        "units that return objects of your own",
        "outputs need not be found: weights are gathered when autograd asks for them",
    ),
    "edited_view_outputs": (
        "autograd",
        "outputs that are views, and are edited in place",
        "weights are gathered when autograd asks for them; torch's hooks on the output are lost",
    ),
    "gradient_penalty": (
        "autograd",
        "double backward: a gradient penalty",
        "a backward with `create_graph=True` keeps the weights that the next backward reads",
    ),
    "inference_mode_first": (
        "autograd",
        "a forward under `torch.inference_mode` before the first that trains",
        "what the first forward makes is made as ordinary tensors",
    ),
    "two_dtypes_in_a_unit": (
        "mixed precision",
        "parameters of two dtypes in one unit",
        "a unit has a group for each dtype",
    ),
}
USES_BOTH = {
    "losses_apart": ("autograd", "two losses, a backward for each (`retain_graph`)"),
    "same_loss_twice": ("autograd", "one loss, two backwards (`retain_graph`)"),
    "forwards_and_backwards_crossed": ("autograd", "two forwards, then the backward of each"),
    "gradient_of_the_input_first": ("autograd", "`torch.autograd.grad` of the input, then a backward"),
    "adversarial_input": ("autograd", "inputs changed along their gradient"),
    "gradient_of_an_activation_first": ("autograd", "`torch.autograd.grad` of an activation, then a backward"),
    "backward_with_inputs": ("autograd", "`backward(inputs=...)`, then a backward"),
    "gradient_inside_a_block": ("autograd", "a block whose forward takes a gradient of its own weights' output"),
    "backward_inside_a_block": ("autograd", "a block whose forward runs a backward to its own parameters"),
    "accumulate_unused_held": ("gradients", "accumulation without synchronisation, other blocks unused each time"),
    "accumulate_unused_reduced": ("gradients", "accumulation, other blocks unused each time"),
    "hooks": ("autograd", "forward and full backward hooks that change what passes"),
    "hooks_on_activations": ("autograd", "tensor hooks and `retain_grad` on outputs and activations"),
    "functional_call": ("autograd", "`torch.func.functional_call` with the model's own parameters"),
    "vmap": ("autograd", "`torch.func.vmap` over the model"),
    "custom_function": ("autograd", "an autograd function that keeps a weight on its context"),
    "saved_elsewhere": ("autograd", "`save_on_cpu` around the model"),
    "anomaly": ("autograd", "`set_detect_anomaly`"),
    "autocast": ("mixed precision", "`torch.autocast` around the model"),
    "through_time": ("autograd", "one block at each step of a sequence, backward every two steps"),
    "chunked_loss": ("training", "a loss in chunks that call one module of a list unit"),
    "chunked_backward": ("training", "a loss in chunks, a backward for each"),
    "selective_inside": ("recomputation", "selective checkpoint inside a unit"),
    "selective_outside": ("recomputation", "selective checkpoint around a unit"),
    "nested": ("recomputation", "a checkpoint around all units and one around each"),
    "nested_reentrant": ("recomputation", "a checkpoint around all units and one around each, reentrant"),
    "inside_and_outside": ("recomputation", "a checkpoint around each unit and a selective one inside"),
    "pairs": ("recomputation", "a checkpoint around two units, which stops early"),
    "pairs_without_early_stop": ("recomputation", "a checkpoint around two units, without early stop"),
}
_GRAPH = "weights that a recorded graph holds stay in memory until its backward ran or the shards change"
USES_OURS = {
    "hessian_product": ("autograd", "double backward: `autograd.functional.hvp` in the loss", _GRAPH),
    "jacobian": ("autograd", "double backward: `autograd.functional.jacobian` in the loss", _GRAPH),
    "force": ("autograd", "double backward: a forward that returns a gradient of its input", _GRAPH),
    "force_in_evaluation": ("autograd", "a forward that takes a gradient of its input, in evaluation too", _GRAPH),
    "func_grad": ("autograd", "`torch.func.grad` of the input in the loss", _GRAPH),
    "func_vjp": ("autograd", "`torch.func.vjp` in the loss", _GRAPH),
    "func_jacrev": ("autograd", "`torch.func.jacrev` in the loss", _GRAPH),
}
# Forward mode has one level for all threads: ranks are processes.
FORWARD_MODE = {"func_jvp": ("autograd", "`torch.func.jvp` in the loss")}
FORWARD_MODE_OURS = {
    "forward_ad": (
        "autograd",
        "dual numbers (`torch.autograd.forward_ad`) in the loss",
        "nothing of ours is a part of the graph; torch's autograd function on the inputs has no forward mode",
    )
}
EVERYDAY_BOTH = {
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


def _named(name: str, area: str, title: str, reason: str = "") -> Any:
    mark = behaviour(
        f"trains as the plain model: {title}", area=area, torch="better" if reason else "same", reason=reason
    )
    return pytest.param(name, marks=mark, id=name)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command is checked."""
    monkeypatch.setenv("FULLSHARD_CHECK", "1")


def test_every_program_runs() -> None:
    assert {*BOTH, *OURS} == set(PROGRAMS) and {*EVERYDAY_BOTH} == set(EVERYDAY)
    assert {*USES_BOTH, *USES_OURS, *FORWARD_MODE, *FORWARD_MODE_OURS} == set(USES)


@ignore_views
@pytest.mark.parametrize(
    ("setting", "impl"),
    [
        pytest.param(setting, FULLSHARD, marks=pytest.mark.slow if setting == "2 ranks, kept full" else ())
        for setting in SETTINGS
    ]
    + [pytest.param(FOR_TORCH, TORCH)],
    ids=str,
)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in BOTH.items()])
@pytest.mark.sample(2)
@pytest.mark.usefixtures("checked")
def test_equals_the_plain_model(name: str, setting: str, impl: Implementation) -> None:
    world, options = SETTINGS[setting]
    check_use(of_program(PROGRAMS[name]), world, impl=impl, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in OURS.items()])
@pytest.mark.usefixtures("checked")
def test_equals_the_plain_model_where_torch_fails(name: str, setting: str, impl: Implementation) -> None:
    world, options = SETTINGS[setting]
    check_use(of_program(PROGRAMS[name]), world, impl=impl, **options)


@pytest.mark.sample(3)
@ignore_views
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a checkpoint in a checkpoint
@pytest.mark.parametrize(("world", "impl"), WORLDS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in (USES_BOTH | EVERYDAY_BOTH).items()])
@pytest.mark.usefixtures("checked")
def test_a_use_equals_the_plain_model(name: str, world: int, impl: Implementation) -> None:
    check_use((USES | EVERYDAY)[name], world, impl=impl)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", OUR_WORLDS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in USES_OURS.items()])
@pytest.mark.usefixtures("checked")
def test_a_use_equals_the_plain_model_where_torch_fails(name: str, world: int, impl: Implementation) -> None:
    check_use(USES[name], world, impl=impl)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch, for forward mode
@fails_before((2, 13), "FSDP2 all-gathers inside of functorch's transforms")
@pytest.mark.parametrize("impl", [FULLSHARD, TORCH], ids=repr)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in FORWARD_MODE.items()])
def test_forward_mode_equals_the_plain_model(name: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RANKS", "gloo")
    check_use(USES[name], 2, impl=impl)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in FORWARD_MODE_OURS.items()])
def test_forward_mode_equals_the_plain_model_where_torch_fails(
    name: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "RANKS", "gloo")
    check_use(USES[name], 2, impl=impl)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("communication", "world", "watch"),
    [
        ("auto", 3, "always"),
        ("torch", 3, "auto"),
        # The other half of the pairs.
        pytest.param("auto", 3, "auto", marks=pytest.mark.slow),
        pytest.param("torch", 3, "always", marks=pytest.mark.slow),
    ],
)
def test_strategies_and_watching_change_no_result(
    communication: str, world: int, watch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMMUNICATION", communication)
    monkeypatch.setenv("FULLSHARD_WATCH", watch)
    for name in ("plain", "two_forwards_one_backward", "recompute_outside", "frozen"):
        check_use(of_program(PROGRAMS[name]), world, accumulate=True)


# ---- errors --------------------------------------------------------------------------------------------------


class Writes(Block):
    """Writes to a weight in forward, from its `begins`-th on."""

    def __init__(self, how: Callable[[Tensor], object], begins: int) -> None:
        super().__init__()
        self.how, self.left = how, begins

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            with torch.no_grad():
                self.how(self.up.weight)
        return super().forward(x)


WRITES: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "`add_` under no_grad": (lambda weight: weight.add_(1.0), 1),
    "`clamp_` of a view": (lambda weight: weight[1:].clamp_(-0.01, 0.01), 1),
    "`.data.mul_` in the first forward": (lambda weight: weight.data.mul_(0.5), 0),
}


@behaviour(
    "a write to a parameter inside forward is an error that names it: {how}",
    area="errors",
    torch="better",
    reason="torch drops what was written when it frees the gathered copy, without a word",
)
@pytest.mark.parametrize("how", WRITES)
def test_writes_inside_forward(how: str, impl: Implementation) -> None:
    """And the steps after it are right."""
    torch.manual_seed(0)
    base = of_blocks(lambda: Writes(*WRITES[how]))()

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base), impl)
        tokens = part(batch(WORLD, 0), rank)
        with pytest.raises(RuntimeError, match=r"layers\.0.* up\.weight written"):
            for _ in range(2):
                model(tokens)
        reference: Any = copy.deepcopy(base)
        for module in (model, reference):
            for layer in module.layers:
                layer.left = 100
        model(tokens).pow(2).mean().backward()
        for r in range(WORLD):
            (reference(part(batch(WORLD, 0), r)).pow(2).mean() / WORLD).backward()
        compare_gradients(model, reference, 0)

    run_ranks(several(), rank_main)


def test_writes_last_where_full_parameters_are_the_shards() -> None:
    """One rank: as in the plain model."""

    def rank_main(rank: int) -> None:
        model = shard(seeded(of_blocks(lambda: Writes(lambda weight: weight.fill_(0.25), 0))))
        model(batch(1, 0))
        assert bool((model.layers[0].up.weight.full_tensor() == 0.25).all())

    run_ranks(1, rank_main)


class Encoder(Block):
    def encode(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x))

    def describe(self) -> str:
        raise RuntimeError("nothing about tensors")


@behaviour(
    "a method that computes with sharded parameters is an error that names it and says what to call",
    area="errors",
    torch="better",
    reason="torch's operators speak of mixed tensors, and of no module",
)
def test_a_method_that_was_not_registered(impl: Implementation) -> None:
    def rank_main(rank: int) -> None:
        model = shard(seeded(of_blocks(Encoder)), impl)
        x = torch.ones(2, WIDTH)
        expected = r"FSDPEncoder\.encode: .*register_fsdp_forward_method\(module, 'encode'\)"
        with pytest.raises(RuntimeError, match=expected):
            model.layers[0].encode(x)
        with pytest.raises(RuntimeError, match=r"^nothing about tensors$"):
            model.layers[0].describe()
        impl.namespace.register_fsdp_forward_method(model.layers[0], "encode")
        model.layers[1].unshard()
        for layer in model.layers[:2]:
            assert layer.encode(x).shape == (2, 2 * WIDTH + 1)

    run_ranks(WORLD, rank_main)


def test_a_frozen_weight_is_there_until_its_inputs_have_gradients() -> None:
    """Also after the gradients of all trained weights of its unit came, and in steps in which nothing is watched."""

    def plain() -> nn.Sequential:
        model: nn.Sequential = seeded(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(*map(nn.Linear, [4, 4], [4, 4])))
        )
        model[1][0].requires_grad_(False)
        return model

    def step(model: nn.Module, number: int) -> None:
        model(torch.full((2, 4), 1.0 + number)).square().sum().backward()

    def rank_main(rank: int) -> None:
        alone, model = plain(), plain()
        fully_shard(model[1])
        fully_shard(model)
        for number in range(4):
            step(alone, number)
            step(model, number)
        for a, b in zip(alone.parameters(), model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(b.grad.full_tensor(), a.grad)  # type: ignore[union-attr]

    run_ranks(2, rank_main)


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
@pytest.mark.parametrize("world", OUR_WORLDS)
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
    """A gradient could not flow on from the shards. (FSDP2 ignores the weights it is given.) Training continues."""
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
