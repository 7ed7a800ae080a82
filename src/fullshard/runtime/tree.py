"""Tensors inside arguments and outputs: tuples, lists, dicts, named tuples and dataclasses, nested; as FSDP2.

Sets and other objects are not looked into. What holds no tensor that changes is returned as it is, so that identity
and subclasses survive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 64


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, depth: int = 0) -> Any:
    """`value` with `function` applied to its tensors; the same object where nothing changed."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > _MAX_DEPTH:
        raise RuntimeError(
            f"arguments and outputs: expected at most {_MAX_DEPTH} levels of nesting, found more; flatten the structure"
        )
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item, depth + 1) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        made = _like_dict(value)
        for key, new in changed.items():
            if new is not value[key]:
                made[key] = new  # item by item: transformers' ModelOutput refuses `update`
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changes = {
            name: new for name, old in fields.items() if (new := map_tensors(function, old, depth + 1)) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _like_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    try:
        made = value.copy()  # keeps a subclass (OrderedDict, ModelOutput) and its defaults
    except Exception:
        made = dict(value)
    return made


def tensors_requiring_grad(value: Any) -> list[Tensor]:
    """The tensors in `value` that require a gradient, in order."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), value)
