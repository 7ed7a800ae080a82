"""Plain modules of a unit that are called outside of its forward: the operators' complaint gets the module's name.

`model.embed(tokens)` of a sharded `model` whose `embed` is no unit of its own finds shards, and DTensor's operators
refuse to mix them with plain tensors. Gathering would be wrong here: a gather is a call of all ranks, and nothing says
that all of them make this one. What is called in the place of a module's own call costs a tenth of a microsecond; hooks
cost ten times as much, on every parameter's module and in every forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .._torch_compat import MIXED, call_instead, called_now, pass_by
from ..lifecycle import Full
from .names import clean_name
from .unit import Unit


class NotFull(RuntimeError):
    """A module was called while its parameters were sharded."""


def computes_with_shards(unit: Unit, error: RuntimeError) -> bool:
    """Whether `error` says that something computed with sharded parameters beside plain tensors, and it may be those of
    `unit`: not where they are full."""
    return unit.record.full is not Full.FULL and (isinstance(error, NotFull) or MIXED in str(error))


def name_direct_calls(unit: Unit) -> None:
    """From now on a call of a module that holds parameters of `unit`, but is not `unit`'s own, says so if it fails."""
    holders = dict.fromkeys(slot.module for param in unit.params for slot in param.slots)
    for module in holders:
        if module not in unit.modules:
            call_instead(module, _named(unit, module, called_now(module)))


def _named(unit: Unit, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if unit.record.full is Full.FULL or MIXED not in str(error):
                raise
            raise NotFull(_message(unit, module)) from error

    # Where compiled code calls modules as plain Python, this is no function to compile by itself.
    pass_by(named)
    return named


def _message(unit: Unit, module: nn.Module) -> str:
    model = unit.module if unit.root is None else unit.root.units[0].module
    name = next((clean_name(name) for name, found in model.named_modules() if found is module), type(module).__name__)
    around = f"{unit.record.name} ({type(unit.module).__name__})"
    return (
        f"{name}: expected a call inside the forward of {around}, which makes its parameters full, found one outside, "
        f"where they are sharded; apply fully_shard to {name} itself, before the module around it, so that its own "
        f"call gathers them; or put the call into a method of that module, which register_fsdp_forward_method is told "
        f"of; or call unshard() of that module before and reshard() after, or use fullshard.full_params"
    )
