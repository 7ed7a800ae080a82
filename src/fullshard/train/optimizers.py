"""The optimizers of a run by name, on the sharded parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fullshard
from fullshard.train.optimizer_keys import OptimizerKeys


class Optimizers:
    """Several optimizers of one model instead of one, each with parameters of its own."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all, as it is now. Their entries are those of the parts, the dict around them is not."""
        return {parameter: entries for part in self.parts for parameter, entries in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of torch that it consists of."""
    found: Any = optimizer
    return found.parts if isinstance(found, Optimizers) else (optimizer,)


def make_optimizer(model: nn.Module, keys: OptimizerKeys) -> Optimizer:
    """The optimizer that `optimizer.name` says, over the parameters of a sharded `model` that train.

    Muon and Adafactor are stepped on owners: each matrix is whole on one rank for the step (`step_on_owners`). Muon's
    updates have the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so one rate is for both.
    """
    if keys.name == "muon":
        found = fullshard.extras.matrices(model)
        options: dict[str, Any] = {"momentum": keys.momentum, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(
            [p for p in found if p.ndim == 2], lr=keys.lr, weight_decay=keys.weight_decay, **options
        )
        stacks = [p for p in found if p.ndim == 3]
        if stacks:  # experts, which torch's Muon takes on owners alone
            muon.add_param_group({"params": stacks})
        both = Optimizers([muon, adamw(fullshard.extras.matrices(model, rest=True), keys)])
        fullshard.step_on_owners(both.parts, model=model)
        # What has groups, state and a step is an optimizer to the loop and the library.
        return cast(Optimizer, both)
    if keys.name == "adafactor":
        adafactor = torch.optim.Adafactor(decayed(model.parameters(), keys), lr=keys.lr)
        fullshard.step_on_owners(adafactor, model=model)
        return adafactor
    return elementwise(model.parameters(), keys)


def elementwise(parameters: Iterable[nn.Parameter], keys: OptimizerKeys) -> Optimizer:
    """AdamW or SGD over the parameters that train."""
    if keys.name == "sgd":
        return torch.optim.SGD(decayed(parameters, keys), lr=keys.lr, momentum=keys.momentum, foreach=True)
    return adamw(parameters, keys)


def copies(keys: OptimizerKeys) -> int | None:
    """The number of values that the state has for each element of a parameter; None where that depends on shapes."""
    return {"adamw": 2, "sgd": int(keys.momentum > 0)}.get(keys.name)


def decayed(parameters: Iterable[nn.Parameter], keys: OptimizerKeys) -> list[dict[str, Any]]:
    """Groups of those that train: matrices are decayed, norm weights are not."""
    parameters = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": keys.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return groups


def adamw(parameters: Iterable[nn.Parameter], keys: OptimizerKeys) -> torch.optim.AdamW:
    """AdamW over the parameters that train."""
    # foreach: one call for all parameters of a kind; torch's default for the CPU is several per parameter.
    groups = decayed(parameters, keys)
    return torch.optim.AdamW(groups, lr=keys.lr, betas=(keys.beta1, keys.beta2), eps=keys.eps, foreach=True)
