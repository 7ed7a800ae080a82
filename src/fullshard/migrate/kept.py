"""Modules that compute in the dtype of their parameters, by `precision.keep_float32`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..policy import MixedPrecisionPolicy
from ..program import BATCH_NORM, OwnDtype, modules_of
from .tree import Tree, class_of, nearest
from .wrapping import UnitPlan


def kept_modules(
    tree: Tree,
    plans: Iterable[UnitPlan],
    arguments: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    masters: Mapping[nn.Parameter, torch.dtype],
) -> dict[str, list[nn.Module]]:
    """Returns of each unit the modules below it that compute in the dtype of their parameters, where the unit would
    cast these. Raises `ValueError` for a name of no class of the model."""
    for name in names:
        if name != BATCH_NORM and not modules_of(tree.model, (name,)):
            raise ValueError(
                f"precision.keep_float32: expected names of classes in {class_of(tree.model)}, found {name!r}, which "
                f"is none of them{nearest(name, tree.classes())}"
            )
    chosen = {below: None for module in modules_of(tree.model, names) for below in module.modules()}
    found: dict[str, list[nn.Module]] = {}
    for plan in plans:
        compute = arguments[plan.name]["mp_policy"].param_dtype
        # A tied parameter is below its unit, perhaps in an inner one.
        below = dict.fromkeys(module for name in plan.modules for module in tree.modules[name].modules())
        found[plan.name] = [
            module
            for module in below
            if module in chosen
            and any(_is_cast(p, masters.get(p, p.dtype), compute) for p in module.parameters(recurse=False))
        ]
    return found


def kept_names(tree: Tree, plans: Iterable[UnitPlan], kept: Mapping[str, list[nn.Module]]) -> tuple[str, ...]:
    """Names of the modules of `kept` that are in the unit itself."""
    unit_of = {tree.modules[name]: plan.name for plan in plans for name in plan.modules}
    inner: dict[nn.Module, str] = {}
    for plan in plans:  # inner ones first
        for name in plan.modules:
            for module in tree.modules[name].modules():
                inner.setdefault(module, unit_of[tree.modules[name]])
    return tuple(name for module, name in tree.names.items() if module in kept[inner[module]])


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype, compute: torch.dtype | None) -> bool:
    return compute is not None and parameter.is_floating_point() and dtype != compute


def policy_that_keeps(policy: Any, modules: list[nn.Module]) -> dict[str, Any]:
    """The changed argument, if any; a function that the user chose stays."""
    if not modules or getattr(policy, "param_dtype_override_fn", None) is not None:
        return {}
    policies = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return {"mp_policy": MixedPrecisionPolicy(**{**policies, "param_dtype_override_fn": OwnDtype(modules)})}
