"""Every use of `uses.py` trains as its plain model does: gradients, their presence, and AdamW's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import fully_shard
from tests.harness import threads
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
from tests.harness.installed import fails_before
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.programs import WIDTH, Block, batch, compare_gradients, of_blocks, part, shard
from tests.threads.uses import USES, check_use

# What each use shows: (area, title).
BOTH = {
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
# The same, where torch 2.13 fails; and what makes the difference.
_GRAPH = "weights that a recorded graph holds stay in memory until its backward ran or the shards change"
OURS = {
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

# One and four ranks in the full run; for torch one world is enough, which shows that it runs the program.
WORLDS = [
    pytest.param(2, FULLSHARD, id="fullshard-2"),
    pytest.param(1, FULLSHARD, id="fullshard-1", marks=pytest.mark.slow),
    pytest.param(4, FULLSHARD, id="fullshard-4", marks=pytest.mark.slow),
    pytest.param(2, TORCH, id="torch-2"),
]


def _named(name: str, area: str, title: str, reason: str = "") -> Any:
    mark = behaviour(
        f"trains as the plain model: {title}", area=area, torch="better" if reason else "same", reason=reason
    )
    return pytest.param(name, marks=mark, id=name)


def test_every_use_runs() -> None:
    assert {*BOTH, *OURS, *FORWARD_MODE, *FORWARD_MODE_OURS} == set(USES)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a checkpoint in a checkpoint
@pytest.mark.parametrize(("world", "impl"), WORLDS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in BOTH.items()])
def test_equals_the_plain_model(name: str, world: int, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    check_use(USES[name], world, impl=impl)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in OURS.items()])
def test_equals_the_plain_model_where_torch_fails(
    name: str, world: int, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
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
    """And the steps behind it are right."""
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
