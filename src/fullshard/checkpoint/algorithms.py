"""Whether an optimizer can take stored state: an algorithm is known by its settings and by the names of its state."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of

# Settings of torch optimizers that say how one computes, in contrast to `foreach` or `maximize`: by them an algorithm
# is known, also in other versions of torch.
_ALGORITHM = frozenset(
    "alpha amsgrad beta2_decay betas centered dampening eps etas initial_accumulator_value lambd lr_decay momentum "
    "momentum_decay nesterov ns_steps rho step_sizes t0".split()
)


def other_algorithm(optimizer: Optimizer, group: dict[str, Any], stored: dict[str, Any]) -> str | None:
    """Why an optimizer cannot take the `stored` settings of a group: they are those of another one."""
    kind = type(optimizer)
    filled = dict(stored, params=[])
    with contextlib.suppress(Exception):  # of a class that is not torch's: then its settings are as they are
        # Settings that a newer version of the class has, it adds itself.
        probe = object.__new__(kind)
        probe.__setstate__({"defaults": dict(optimizer.defaults), "state": {}, "param_groups": [filled]})
    # torch adds `differentiable` to the defaults of any optimizer that loads a state.
    lacks, foreign = optimizer.defaults.keys() - filled.keys() - {"differentiable"}, set[str]()
    if kind.__module__.startswith("torch.optim"):
        lacks |= _ALGORITHM.intersection(optimizer.defaults).difference(stored)
        foreign = set(_ALGORITHM.intersection(stored).difference(optimizer.defaults, group))
    if not lacks and not foreign:
        return None
    said = [f"lacks {', '.join(sorted(lacks))}"] if lacks else []
    said += [f"has {', '.join(sorted(foreign))}"] if foreign else []
    return f"the state of {_algorithm(stored)}, for {kind.__name__}: it {' and '.join(said)}"


def _algorithm(stored: dict[str, Any]) -> str:
    """torch's class that has these settings."""
    known = _ALGORITHM.intersection(stored)
    found = [
        name
        for name, kind in sorted(vars(torch.optim).items())
        if isinstance(kind, type) and known and _ALGORITHM.intersection(inspect.signature(kind).parameters) == known
    ]
    if {"Adam", "AdamW"} <= set(found):
        return "AdamW" if stored.get("decoupled_weight_decay") else "Adam"
    return found[0] if found else f"an optimizer with the settings {', '.join(sorted(stored))}"


def other_state(optimizer: Optimizer, stored: dict[int, dict[str, Any]]) -> str | None:
    """Why an optimizer cannot take the `stored` state: it is none of its kind."""
    kind = type(optimizer)
    for number, parameter in enumerate([p for group in optimizer.param_groups for p in group["params"]]):
        own, new = optimizer.state.get(parameter, {}), stored.get(number, {})
        if own.keys() - new.keys() and new.keys() - own.keys():
            return f"state of {', '.join(sorted(new))}, for {kind.__name__}, which has {', '.join(sorted(own))}"
        for name, value in new.items() if kind.__module__.startswith("torch.optim") else ():
            inner = local_of(value) if isinstance(value, DTensor) else value
            if isinstance(inner, Tensor) and hasattr(type(inner), "__tensor_flatten__"):
                return f"{name} as {type(inner).__name__}, for {kind.__name__}, which computes with plain tensors"
    return None
