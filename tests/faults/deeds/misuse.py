"""What the cases of misuse do with autograd and the API."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.actions import Action, local, parameter
from tests.faults.program import Run
from tests.threads.programs import WIDTH, Block, Model, batch


def backward_again(run: Run) -> None:
    for loss in run.kept["losses"]:
        (loss / len(run.kept["losses"])).backward(retain_graph=True)


def by_keyword(run: Run, tokens: Tensor) -> Tensor:
    found: Tensor = run.model(tokens=tokens).pow(2).mean()
    return found


def halve(name: str) -> Action:
    def action(run: Run) -> None:
        with torch.no_grad():
            local(parameter(run, name)).mul_(0.5)

    return action


def halve_data(name: str) -> Action:
    def action(run: Run) -> None:
        p = parameter(run, name)
        p.data = p.data * 0.5

    return action


def halve_data_in_place(name: str) -> Action:
    def action(run: Run) -> None:
        parameter(run, name).data *= 0.5

    return action


def halve_data_behind_evaluation(run: Run) -> None:
    """The root's parameters, which may stay full."""
    run.look()
    halve_data("head.weight")(run)
    run.look()


def average_by_data(run: Run) -> None:
    """All parameters, averaged with what they were, by the `.data` of each."""
    before = run.kept.setdefault("before", {n: p.data.clone() for n, p in run.model.named_parameters()})
    for name, p in run.model.named_parameters():
        p.data = 0.5 * p.data + 0.5 * before[name]


def plain_data(run: Run) -> None:
    p = parameter(run, "layers.1.up.weight")
    p.data = torch.zeros(p.shape)


def adds(run: Run) -> None:
    _ = torch.ones(WIDTH) + run.model.layers[1].norm.weight


def swap_after_evaluation(run: Run) -> None:
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


def average(run: Run) -> None:
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


def inference(run: Run) -> None:
    with torch.inference_mode():
        for tokens in run.batches(step=50):
            run.model(tokens)


def freeze(name: str, value: bool) -> Action:
    return lambda run: run.model.get_submodule(name).requires_grad_(value) and None


def state_dict(run: Run) -> None:
    run.model.state_dict()
    run.optimizer.state_dict()


def unshard_twice(run: Run) -> None:
    if not run.plain:
        run.model.unshard()
        run.model.unshard()
        run.model.reshard()
        run.model.reshard()


def load_plain(run: Run) -> None:
    """Full values, plain tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    state = {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def gradient_by_hand(run: Run) -> None:
    p = parameter(run, "layers.1.up.weight")
    p.grad = p.grad * 2.0
    parameter(run, "head.bias").grad = None


def torch_s_clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)


def to_double(run: Run) -> None:
    run.model.double()


class WithMethod(Block):
    def twice(self, x: Tensor) -> Tensor:
        return self.up(x) * 2.0


class ModelWithMethod(Model):
    block = WithMethod


def inner_first(run: Run) -> None:
    run.model.layers[0](torch.ones(2, WIDTH))


def last_unused(run: Run, tokens: Tensor) -> Tensor:
    """The last micro-batch does not use layers.1."""
    model = run.model
    if run.micro < run.setup.micros - 1:
        found: Tensor = model(tokens).pow(2).mean()
        return found
    x: Tensor = model(tokens, depth=1).pow(2).mean()
    return x


def doubling_hook(run: Run) -> None:
    run.model.layers[1].register_forward_hook(lambda module, args, output: output * 2.0)


def zero_between(run: Run) -> None:
    run.model.zero_grad()


class EditsItself(Block):
    """Counts in a parameter of its own, inside forward, as quantisation ranges do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1.0
        return super().forward(x)


def average_call(run: Run) -> None:
    """torch.func.functional_call with halved weights."""
    weights = {name: (p.detach() * 0.5) for name, p in run.model.named_parameters()}
    with torch.no_grad():
        run.outputs.append(torch.func.functional_call(run.model, weights, (batch(run.setup.world, 60),)).clone())


def backward_of_a_spent_graph(run: Run) -> None:
    for loss in run.kept["losses"]:
        loss.backward()


def call_method(run: Run) -> None:
    run.model.layers[1].twice(torch.ones(2, WIDTH))


def call_linear(run: Run) -> None:
    run.model.layers[1].up(torch.ones(2, WIDTH))


def use_weight(run: Run) -> None:
    F.linear(torch.ones(2, WIDTH), run.model.layers[1].up.weight)


def copied(run: Run) -> None:
    copy.deepcopy(run.model)


def pickle(run: Run) -> None:
    torch.save(run.model, io.BytesIO())


def sync_left_off(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)


def wrong_shape(run: Run) -> None:
    state = run.model.state_dict()
    state["layers.1.up.weight"] = torch.zeros(3, WIDTH)
    run.model.load_state_dict(state)


def missing_key(run: Run) -> None:
    state = run.model.state_dict()
    del state["layers.1.up.weight"]
    run.model.load_state_dict(state)


def prefetch_of_a_plain_module(run: Run) -> None:
    run.model.set_modules_to_forward_prefetch([run.model.layers[0].up])


def reset_below(run: Run) -> None:
    run.model.layers[0].reset_iter_state()


def method_that_is_not_there(run: Run) -> None:
    assert run.impl is not None
    run.impl.namespace.register_fsdp_forward_method(run.model, "generate")


def grad_of_parameters(run: Run) -> None:
    loss = run.loss(run.batches()[0])
    torch.autograd.grad(loss, list(run.model.parameters()))


class ForParameters:
    """A loss whose backward is asked for the gradients of the parameters that the optimizer has, and of no others."""

    def __init__(self, loss: Tensor, run: Run) -> None:
        self.loss, self.run = loss, run

    def __truediv__(self, number: float) -> ForParameters:
        return ForParameters(self.loss / number, self.run)

    def backward(self) -> None:
        self.loss.backward(inputs=self.run.optimizer.param_groups[0]["params"])


def backward_for_parameters(run: Run) -> None:
    run.kept["losses"] = [ForParameters(loss, run) for loss in run.kept["losses"]]


def weight_of_another_unit(run: Run) -> None:
    """The output layer reads the weight of a layer that is a unit of its own."""
    handle = run.model.head.register_forward_pre_hook(
        lambda module, args: F.linear(args[0], run.model.layers[1].up.weight)
    )
    try:
        run.loss(run.batches()[0])
    finally:
        handle.remove()


def all_frozen(run: Run) -> None:
    run.model.requires_grad_(False)


def computes(run: Run) -> None:
    """A weight read while its module is sharded, inside arithmetic of the user's own."""
    _ = torch.ones(2, WIDTH) @ run.model.head.weight.T


def foreign(run: Run) -> None:
    run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
