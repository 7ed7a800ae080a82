"""Tensors in what modules take and return: in lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`; containers are copied."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, MutableMapping):
        made: Any = copy.copy(value)
        for key, item in value.items():
            made[key] = cast(item, dtype)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(made, each.name, cast(getattr(value, each.name), dtype))
        return made
    return value


def floats_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in `value`, with their places: ("[0].loss", tensor)."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, MutableMapping):
        for key, item in value.items():
            yield from floats_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from floats_in(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from floats_in(getattr(value, each.name), f"{path}.{each.name}")
