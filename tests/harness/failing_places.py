"""Every place of a step at which something of the user's may raise, as data: a name, and how to arm it on a module.

    handle = PLACES["after"].arm(module, error)      the next micro-batch raises `error()` there
    ...
    handle()                                         disarmed

A place strikes every time until it is disarmed; those of recomputation strike at the second call alone, which is in
backward. `PLACES` says for each place which modules have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Error = Callable[[], BaseException]
Disarm = Callable[[], None]


class Fault(RuntimeError):
    """Raised on purpose."""


class _Explode(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Error) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.error()


def raising(error: Error) -> Callable[..., Any]:
    """A function of any arguments that raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error()

    return fail


def _with_body(module: nn.Module, body: Callable[..., Any]) -> Disarm:
    """`body(forward, *args)` in the place of the module's forward."""
    forward = module.forward
    module.forward = lambda *args: body(forward, *args)

    def disarm() -> None:
        del module.forward

    return disarm


def _in_body(module: nn.Module, error: Error) -> Disarm:
    """Behind everything that the forward does."""

    def body(forward: Any, *args: Any) -> Any:
        forward(*args)
        raise error()

    return _with_body(module, body)


def _at_second_call(module: nn.Module, error: Error) -> Disarm:
    calls = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error()

    return module.register_forward_pre_hook(count).remove


def _behind_second_call(module: nn.Module, error: Error) -> Disarm:
    calls = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error()

    return module.register_forward_hook(count).remove


def _of_output(change: Callable[[Tensor], Any]) -> Callable[[nn.Module], Disarm]:
    """`change(output)` in a forward hook; with re-entrant recomputation in the forward that is repeated."""

    def hook(_module: nn.Module, _args: Any, out: Tensor) -> Any:
        return change(out) if out.requires_grad else None

    return lambda module: module.register_forward_hook(hook).remove


def _explode(module: nn.Module, error: Error) -> Disarm:
    return _of_output(lambda out: _Explode.apply(out, error))(module)


def _explode_input(module: nn.Module, error: Error) -> Disarm:
    """Behind the module in backward."""
    return module.register_forward_pre_hook(
        lambda _module, args: tuple(_Explode.apply(a, error) if a.requires_grad else a for a in args)
    ).remove


def _tensor_hook(module: nn.Module, error: Error) -> Disarm:
    def hook(out: Tensor) -> None:
        out.register_hook(raising(error))

    return _of_output(hook)(module)


def _node_hook(module: nn.Module, error: Error) -> Disarm:
    def hook(out: Tensor) -> None:
        # A module that returns what it was given may return a leaf, whose node outlives this backward.
        (out if out.grad_fn is None else out.grad_fn).register_hook(raising(error))

    return _of_output(hook)(module)


def _weight(module: nn.Module) -> Any:
    return next(module.parameters(recurse=False))


def _same(value: Any) -> Any:
    return value


def _saved(module: nn.Module, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Disarm:
    """Saved-tensor hooks of the user's around the forward."""

    def body(forward: Any, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args)

    return _with_body(module, body)


@dataclass(frozen=True)
class Place:
    """`arm(module, error)` makes it raise, and returns what disarms it."""

    arm: Callable[[nn.Module, Error], Disarm]
    # Which modules have it. "all"; "inner": those whose input requires a gradient; "weights": those with parameters of
    # their own, "saving": whose forward saves tensors; "recomputed": inside of a checkpoint; "recomputed to its end":
    # recomputation without re-entrance ends as soon as it has what it needs.
    modules: str = "all"
    in_forward: bool = False
    # Only a backward that sends comes there.
    sent: bool = False


PLACES: dict[str, Place] = {
    # in forward
    "before": Place(lambda m, e: m.register_forward_pre_hook(raising(e)).remove, in_forward=True),
    "before all": Place(lambda m, e: m.register_forward_pre_hook(raising(e), prepend=True).remove, in_forward=True),
    "body": Place(_in_body, in_forward=True),
    "after": Place(lambda m, e: m.register_forward_hook(raising(e)).remove, in_forward=True),
    "after, first": Place(lambda m, e: m.register_forward_hook(raising(e), prepend=True).remove, in_forward=True),
    "saving": Place(lambda m, e: _saved(m, raising(e), _same), "saving", in_forward=True),
    # in backward
    "gradient of the output": Place(_explode),
    "tensor hook": Place(_tensor_hook),
    "node hook": Place(_node_hook),
    "gradient of the input": Place(_explode_input, "inner"),
    "full backward pre-hook": Place(lambda m, e: m.register_full_backward_pre_hook(raising(e)).remove, "inner"),
    "full backward hook": Place(lambda m, e: m.register_full_backward_hook(raising(e)).remove, "inner"),
    "unpacking": Place(lambda m, e: _saved(m, _same, raising(e)), "saving"),
    # hooks of sharded parameters, which run with their reduced gradients
    "parameter hook": Place(lambda m, e: _weight(m).register_hook(raising(e)).remove, "weights", sent=True),
    "post-accumulate hook": Place(
        lambda m, e: _weight(m).register_post_accumulate_grad_hook(raising(e)).remove, "weights", sent=True
    ),
    # in recomputation
    "before, again": Place(_at_second_call, "recomputed"),
    "after, again": Place(_behind_second_call, "recomputed to its end"),
}


def points(modules: dict[str, set[str]]) -> Iterable[tuple[str, str]]:
    """(module, place) of a model; `modules`: what each module is, by the words of `Place.modules`."""
    return [(name, place) for name, has in modules.items() for place in PLACES if PLACES[place].modules in has]
