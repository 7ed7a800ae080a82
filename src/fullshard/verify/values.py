"""Tensors in what modules take and return: in lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor


class Casts:
    """Values with their floating tensors in `dtype`. Containers in which something was cast are copies; `carry_back`
    writes to the originals what a callee put into the copies, since `MixedPrecisionPolicy` promises that."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # The original, its copy, and the items of either when the copy was made.
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, tuple):
            items = [self(item) for item in value]
            if all(item is old for item, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not _is_container(value):
            return value
        before = _items(value)
        after = {key: self(item) for key, item in before.items()}
        if all(after[key] is item for key, item in before.items()):
            return value
        made = copy.copy(value)
        _update(made, after)
        self._copies.append((value, made, before, after))
        return made

    def carry_back(self) -> None:
        for original, made, before, after in self._copies:
            now = _items(made)
            changed = {key: item for key, item in now.items() if key not in after or item is not after[key]}
            if len(now) < len(after) or changed:
                kept = {key: before[key] if key in before and key not in changed else item for key, item in now.items()}
                if isinstance(original, (list, MutableMapping)):
                    original.clear()
                _update(original, kept)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`."""
    return Casts(dtype)(value)


def casting(function: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `function` with its floating arguments in `dtype`."""
    casts = Casts(dtype)
    args, kwargs = [casts(item) for item in args], {key: casts(item) for key, item in kwargs.items()}
    try:
        return function(*args, **kwargs)
    finally:
        casts.carry_back()


def floats_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in `value`, with their places: ("[0]['loss']", tensor)."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from floats_in(item, f"{path}[{index}]")
    elif _is_container(value):
        for key, item in _items(value).items():
            yield from floats_in(item, f"{path}[{key!r}]")


def _is_container(value: Any) -> bool:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, (list, MutableMapping))


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, MutableMapping):
        return dict(container)
    if isinstance(container, list):
        return dict(enumerate(container))
    return {each.name: getattr(container, each.name) for each in dataclasses.fields(container)}


def _update(container: Any, items: dict[Any, Any]) -> None:
    if isinstance(container, MutableMapping):
        for key, item in items.items():
            container[key] = item
    elif isinstance(container, list):
        container[:] = items.values()
    else:
        for key, item in items.items():
            object.__setattr__(container, key, item)
