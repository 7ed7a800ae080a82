"""Programs that use autograd and the API in every way: right as plain training is, or refused by name."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.actions import Action, evaluate, local, parameter
from tests.faults.cases import PLAIN, Case, Equal, Raises, Setup, at
from tests.faults.program import Run
from tests.threads.programs import PROGRAMS, WIDTH, Block, Model, batch, of_blocks

BF16 = Setup(
    options=lambda impl: {
        "mp_policy": impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
)
# bfloat16 has 8 bits; the plain run beside it computes in float32.
BF16_PLAIN = Equal("plain", bound=0.1)


def _program(name: str) -> Setup:
    """A program of tests/threads/programs.py."""
    program = PROGRAMS[name]
    return Setup(model=program.model, loss=lambda run, tokens: program.loss(run.model, tokens, max(run.step, 0)))


def _same(name: str, does: str, program: str, fast: bool = False) -> Case:
    return Case(f"misuse/{name}", does, PLAIN, setup=_program(program), fast=fast)


def _deed(name: str, does: str, step: int, event: str, action: Action, **more: Any) -> Case:
    """All ranks, and the plain run, do it."""
    return Case(f"misuse/{name}", does, more.pop("expected", PLAIN), (at(step, event, action),), **more)


# ---- programs that are legal ---------------------------------------------------------------------------------


def _backward_again(run: Run) -> None:
    for loss in run.kept["losses"]:
        (loss / len(run.kept["losses"])).backward(retain_graph=True)


def _by_keyword(run: Run, tokens: Tensor) -> Tensor:
    found: Tensor = run.model(tokens=tokens).pow(2).mean()
    return found


def _halve(name: str) -> Action:
    def action(run: Run) -> None:
        with torch.no_grad():
            local(parameter(run, name)).mul_(0.5)

    return action


def _halve_data(name: str) -> Action:
    def action(run: Run) -> None:
        p = parameter(run, name)
        p.data = p.data * 0.5

    return action


def _swap_after_evaluation(run: Run) -> None:
    """Held parameters get other values after an evaluation, are looked at, and get their own back."""
    held = dict(run.model.named_parameters())
    run.look()
    before = {name: local(p).detach().clone() for name, p in held.items()}
    with torch.no_grad():
        for p in held.values():
            local(p).mul_(0.25)
    run.look()
    with torch.no_grad():
        for name, p in held.items():
            local(p).copy_(before[name])
    run.look()


def _average(run: Run) -> None:
    """An exponential average takes the place of the weights for an evaluation."""
    held = dict(run.model.named_parameters())
    mine = {name: p.detach().clone() for name, p in held.items()}
    averaged = run.kept.setdefault("average", mine)
    for name, p in held.items():
        averaged[name] = averaged[name] * 0.9 + p.detach() * 0.1
    with torch.no_grad():
        for name, p in held.items():
            p.copy_(averaged[name])
    run.look()
    with torch.no_grad():
        for name, p in held.items():
            p.copy_(mine[name])
    run.kept.pop("average")


def _inference(run: Run) -> None:
    with torch.inference_mode():
        for tokens in run.batches(step=50):
            run.model(tokens)


def _freeze(name: str, value: bool) -> Action:
    return lambda run: run.model.get_submodule(name).requires_grad_(value) and None


def _state_dict(run: Run) -> None:
    run.model.state_dict()
    run.optimizer.state_dict()


def _unshard_twice(run: Run) -> None:
    if not run.plain:
        run.model.unshard()
        run.model.unshard()
        run.model.reshard()
        run.model.reshard()


def _load_plain(run: Run) -> None:
    """Full values, plain tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    state = {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def _gradient_by_hand(run: Run) -> None:
    p = parameter(run, "layers.1.up.weight")
    p.grad = p.grad * 2.0
    parameter(run, "head.bias").grad = None


def _torch_s_clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)


def _to_double(run: Run) -> None:
    run.model.double()


class _WithMethod(Block):
    def twice(self, x: Tensor) -> Tensor:
        return self.up(x) * 2.0


class _ModelWithMethod(Model):
    block = _WithMethod


def _inner_first(run: Run) -> None:
    run.model.layers[0](torch.ones(2, WIDTH))


def _last_unused(run: Run, tokens: Tensor) -> Tensor:
    """The last micro-batch does not use layers.1."""
    model = run.model
    if run.micro < run.setup.micros - 1:
        found: Tensor = model(tokens).pow(2).mean()
        return found
    x: Tensor = model(tokens, depth=1).pow(2).mean()
    return x


def _doubling_hook(run: Run) -> None:
    run.model.layers[1].register_forward_hook(lambda module, args, output: output * 2.0)


def _zero_between(run: Run) -> None:
    run.model.zero_grad()


class _EditsItself(Block):
    """Counts in a parameter of its own, inside forward, as quantisation ranges do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1.0
        return super().forward(x)


def _average_call(run: Run) -> None:
    """torch.func.functional_call with halved weights."""
    weights = {name: (p.detach() * 0.5) for name, p in run.model.named_parameters()}
    with torch.no_grad():
        run.outputs.append(torch.func.functional_call(run.model, weights, (batch(run.setup.world, 60),)).clone())


# ---- programs that are refused -------------------------------------------------------------------------------


def _refused(
    name: str, does: str, event: str, action: Action, error: str, *words: str, step: int = 1, **more: Any
) -> Case:
    return Case(f"misuse/{name}", does, Raises(error, words), (at(step, event, action),), **more)


def _backward_of_a_spent_graph(run: Run) -> None:
    for loss in run.kept["losses"]:
        loss.backward()


def _call_method(run: Run) -> None:
    run.model.layers[1].twice(torch.ones(2, WIDTH))


def _call_linear(run: Run) -> None:
    run.model.layers[1].up(torch.ones(2, WIDTH))


def _use_weight(run: Run) -> None:
    F.linear(torch.ones(2, WIDTH), run.model.layers[1].up.weight)


def _copy(run: Run) -> None:
    copy.deepcopy(run.model)


def _pickle(run: Run) -> None:
    torch.save(run.model, io.BytesIO())


def _sync_left_off(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)


def _wrong_shape(run: Run) -> None:
    state = run.model.state_dict()
    state["layers.1.up.weight"] = torch.zeros(3, WIDTH)
    run.model.load_state_dict(state)


def _missing_key(run: Run) -> None:
    state = run.model.state_dict()
    del state["layers.1.up.weight"]
    run.model.load_state_dict(state)


def _prefetch_of_a_plain_module(run: Run) -> None:
    run.model.set_modules_to_forward_prefetch([run.model.layers[0].up])


def _reset_below(run: Run) -> None:
    run.model.layers[0].reset_iter_state()


def _method_that_is_not_there(run: Run) -> None:
    assert run.impl is not None
    run.impl.namespace.register_fsdp_forward_method(run.model, "generate")


def _grad_of_parameters(run: Run) -> None:
    loss = run.loss(run.batches()[0])
    torch.autograd.grad(loss, list(run.model.parameters()))


def _all_frozen(run: Run) -> None:
    run.model.requires_grad_(False)


def _computes(run: Run) -> None:
    """A weight read while its module is sharded, inside arithmetic of the user's own."""
    _ = torch.ones(2, WIDTH) @ run.model.head.weight.T


def _foreign(run: Run) -> None:
    run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


LEGAL = (
    _same("two_losses", "two losses of one output", "two_losses"),
    _same("two_forwards", "two forwards, one backward", "two_forwards_one_backward"),
    _same("double_backward", "a gradient penalty: backward of a gradient", "gradient_penalty", fast=True),
    _same("view_edited", "a block returns a view, which is edited in place", "edited_view_outputs", fast=True),
    _same("opaque_output", "a block returns an object that no traversal looks into", "outputs_in_objects"),
    _same("intermediate", "the loss is made of an intermediate alone", "loss_on_an_intermediate_only", fast=True),
    _same("intermediate_too", "the loss is made of the output and an intermediate", "loss_on_an_intermediate_too"),
    _same("saved_view", "a function of one's own saves a view of a weight", "intermediate_of_a_saved_view"),
    _same("structured_outputs", "blocks return named tuples with dicts of lists", "outputs_in_structures"),
    _same("inputs_without_gradient", "inputs that need no gradient", "inputs_without_gradient"),
    _same("no_grad_first", "a forward without gradients before each step's", "no_grad_first"),
    _same("inference_first", "a forward in inference mode before each step's", "inference_mode_first"),
    _same("unused_layer", "every other step leaves the last layer out", "unused_layer"),
    _same("recompute_reentrant", "reentrant checkpoints around blocks", "recompute_outside_reentrant"),
    _same("recompute_inside", "checkpoints inside of blocks", "recompute_inside"),
    _same("twice_in_a_segment", "a block runs twice inside one reentrant checkpoint", "twice_in_one_reentrant_segment"),
    _same("shared_blocks", "blocks run twice in a forward", "shared_blocks"),
    _same("tied", "embedding and head are one parameter", "tied_weights"),
    _same("frozen", "a unit, and parts of others, are frozen", "frozen"),
    _same("freeze_every_other_step", "weights are frozen and thawed between steps", "freeze_every_other_step"),
    _same("detached_weight", "a weight is used detached", "detached_weight"),
    _same("two_dtypes", "parameters of two dtypes in one unit", "two_dtypes_in_a_unit"),
    _same("returns_a_parameter", "the model returns one of its parameters", "returns_a_parameter"),
    _deed("backward_twice", "backward twice, the first with retain_graph", 1, "loss", _backward_again),
    Case("misuse/by_keyword", "inputs are given by keyword", PLAIN, setup=Setup(loss=_by_keyword)),
    _deed(
        "edited_weight", "a held parameter is edited in place between steps", 1, "step", _halve("layers.1.up.weight")
    ),
    _deed(
        "edited_root_weight",
        "the root's head is edited behind an evaluation",
        1,
        "step",
        lambda run: (run.look(), _halve("head.weight")(run), run.look()) and None,
    ),
    _deed("assigned_data", "`p.data = ...` between steps", 1, "step", _halve_data("layers.1.up.weight")),
    _deed(
        "swapped_after_evaluation",
        "weights are swapped behind an evaluation, and back",
        1,
        "step",
        _swap_after_evaluation,
        fast=True,
    ),
    _deed("average", "an average of weights is evaluated in their place", 1, "step", _average),
    _deed("functional_call", "functional_call with other weights", 1, "step", _average_call),
    _deed(
        "optimizer_after_evaluation",
        "an evaluation runs before the optimizer is built",
        -1,
        "wrapped",
        evaluate,
        fast=True,
    ),
    _deed("inference_before_training", "inference mode runs before the first step", -1, "ready", _inference),
    _deed("inference_between_steps", "inference mode runs between steps", 1, "step", _inference),
    _deed("evaluation_between", "an evaluation between forward and backward", 1, "loss", evaluate),
    Case(
        "misuse/thawed_bf16",
        "a unit is frozen in the first step and thawed, in mixed precision",
        BF16_PLAIN,
        (at(-1, "ready", _freeze("layers.1", False)), at(1, "step", _freeze("layers.1", True))),
        BF16,
    ),
    Case(
        "misuse/thawed",
        "a unit is frozen in the first step and thawed",
        PLAIN,
        (at(-1, "ready", _freeze("layers.1", False)), at(1, "step", _freeze("layers.1", True))),
    ),
    Case(
        "misuse/unused_last_micro_batch",
        "layers are unused in the last micro-batch of a held window, bfloat16",
        BF16_PLAIN,
        setup=replace(BF16, micros=2, hold=True, loss=_last_unused),
    ),
    Case("misuse/window", "two micro-batches, the first held", PLAIN, setup=Setup(micros=2, hold=True)),
    _deed("state_dict_in_between", "a state dict is taken between forward and backward", 1, "loss", _state_dict),
    _deed("frozen_in_between", "a block is frozen between forward and backward", 1, "loss", _freeze("layers.1", False)),
    _deed("unshard_twice", "unshard and reshard, each twice", 1, "step", _unshard_twice),
    _deed("load_plain", "a state dict of plain full tensors is loaded between steps", 1, "step", _load_plain),
    _deed("gradient_by_hand", "gradients are scaled and taken away by hand", 1, "gradients", _gradient_by_hand),
    _deed("torch_clip", "torch's clip_grad_norm_ between backward and update", 1, "gradients", _torch_s_clip),
    _deed("double", "the model is converted to float64 behind fully_shard", -1, "ready", _to_double),
    _deed("hook_that_changes", "a forward hook of the user's changes a block's output", -1, "ready", _doubling_hook),
    _deed("zero_grad_in_between", "model.zero_grad() between forward and backward", 1, "loss", _zero_between),
)

REFUSED = (
    Case(
        "misuse/edited_in_forward",
        "a module edits a parameter of its own inside forward",
        Raises("RuntimeError", (r"layers\.0", "seen", "buffer|forward")),
        setup=Setup(model=of_blocks(_EditsItself)),
    ),
    _refused(
        "unit_by_itself_first",
        "a block runs by itself before the model does",
        "ready",
        _inner_first,
        "RuntimeError",
        "root",
        "forward",
        step=-1,
    ),
    _refused(
        "spent_graph",
        "backward of a graph that is spent",
        "gradients",
        _backward_of_a_spent_graph,
        "RuntimeError",
        "second time",
        "retain_graph",
    ),
    _refused(
        "nothing_trainable",
        "backward though everything is frozen",
        "step",
        _all_frozen,
        "RuntimeError",
        "does not require grad",
    ),
    _refused(
        "method",
        "a method of a block is called beside forward",
        "step",
        _call_method,
        "RuntimeError",
        r"layers\.1",
        "register_fsdp_forward_method|fully_shard",
        setup=Setup(model=_ModelWithMethod),
        fast=True,
    ),
    _refused(
        "plain_part",
        "a linear inside of a block is called beside forward",
        "step",
        _call_linear,
        "RuntimeError",
        r"layers\.1\.up",
        "register_fsdp_forward_method|fully_shard",
    ),
    _refused(
        "weight_in_linear",
        "a weight is used outside of forward: F.linear",
        "step",
        _use_weight,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        "forward|full_params|unshard",
    ),
    _refused(
        "weight_in_arithmetic",
        "a weight is used outside of forward: x @ w.T",
        "step",
        _computes,
        "RuntimeError",
        r"head\.weight",
        "forward|full_params|unshard",
    ),
    _refused(
        "deepcopy", "the model is copied by copy.deepcopy", "step", _copy, "AssertionError", "deepcopy|copy", "state"
    ),
    _refused(
        "pickle", "the model is pickled by torch.save", "step", _pickle, "Exception", "pickle|process group", "state"
    ),
    _refused(
        "sync_left_off",
        "synchronisation is left off at optimizer.step()",
        "step",
        _sync_left_off,
        "RuntimeError",
        "set_requires_gradient_sync",
        fast=True,
    ),
    _refused(
        "wrong_shape",
        "a state dict has another shape",
        "step",
        _wrong_shape,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        "size mismatch|shape",
    ),
    _refused(
        "missing_key",
        "a state dict lacks a key",
        "step",
        _missing_key,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        "missing",
    ),
    _refused(
        "prefetch_of_a_plain_module",
        "a prefetch list names a module that is no unit",
        "step",
        _prefetch_of_a_plain_module,
        "ValueError",
        "Linear",
        "FSDPModule|fully_shard",
    ),
    _refused(
        "reset_below_root", "reset_iter_state() is called below the root", "step", _reset_below, "RuntimeError", "root"
    ),
    _refused(
        "method_that_is_not_there",
        "a forward method is registered that does not exist",
        "step",
        _method_that_is_not_there,
        "ValueError",
        "generate",
    ),
    _refused(
        "grad_of_parameters",
        "torch.autograd.grad for sharded parameters",
        "step",
        _grad_of_parameters,
        "RuntimeError",
        r"embedding\.weight|parameters",
        "backward",
    ),
)

CASES: tuple[Case, ...] = (*LEGAL, *REFUSED)
