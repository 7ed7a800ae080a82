"""Every use of `uses.py` trains as its plain model does: gradients, their presence, and AdamW's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import threads
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation
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


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # a checkpoint in a checkpoint
@pytest.mark.parametrize(("world", "impl"), WORLDS)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in BOTH.items()])
def test_equals_the_plain_model(name: str, world: int, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    check_use(USES[name], world, impl=impl)


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in OURS.items()])
def test_equals_the_plain_model_where_torch_fails(
    name: str, world: int, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    check_use(USES[name], world, impl=impl)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch, for forward mode
@pytest.mark.parametrize("impl", [FULLSHARD, TORCH], ids=repr)
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in FORWARD_MODE.items()])
def test_forward_mode_equals_the_plain_model(name: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "RANKS", "gloo")
    check_use(USES[name], 2, impl=impl)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [_named(name, *said) for name, said in FORWARD_MODE_OURS.items()])
def test_forward_mode_equals_the_plain_model_where_torch_fails(
    name: str, impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "RANKS", "gloo")
    check_use(USES[name], 2, impl=impl)
