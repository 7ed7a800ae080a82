"""Values of small tensors on the meta device: those of the batch, and what is computed from these alone.

A forward may ask for them: whether a mask hides anything, whether sequences are packed, which rows a mask picks. What
depends on parameters or on large tensors has no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch import is_write, storage_key

# Elements of a storage that may have values.
MOST_NUMEL = 1 << 20
# Of one that an operation without inputs makes in a floating-point dtype: a mask, if it is small.
_MOST_CONSTANTS = 1 << 16


class Values:
    """Tells for each storage on the meta device what is in it, as a flat tensor on the CPU, if it is known."""

    def __init__(self) -> None:
        self._there: dict[int, Tensor] = {}

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """`value` becomes what is in all of the storage of `tensor`, which has its shape and dtype."""
        flat = value.new_zeros(tensor.untyped_storage().nbytes() // max(tensor.element_size(), 1))
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        self._there[storage_key(tensor.untyped_storage())] = flat

    def forget(self, key: int) -> None:
        self._there.pop(key, None)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns what is in `tensor`, None if it is not known. Who writes to it changes that."""
        if not tensor.is_meta:
            return tensor if tensor.numel() <= MOST_NUMEL and type(tensor) is Tensor else None
        flat = self._there.get(storage_key(tensor.untyped_storage()))
        if flat is None or flat.dtype != tensor.dtype:
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def compute(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation on the CPU, where all that it reads is known; else None. Random
        numbers are not known."""
        given = list(_tensors([*args, *kwargs.values()]))
        if torch.Tag.nondeterministic_seeded in func.tags or not (given or _is_small(args)):
            return None
        values = {id(tensor): self.of(tensor) for tensor in given}
        if any(value is None for value in values.values()):
            return None
        args, named = _replaced(args, values), _replaced(dict(kwargs), values)
        if "device" in named:
            named["device"] = torch.device("cpu")
        with torch.no_grad():
            return func(*args, **named)

    def keep(self, func: Any, given: list[Tensor], made: list[Tensor], found: Any) -> None:
        """After an operation that made tensors, or wrote: what is known of them. `found`: of `compute`."""
        if found is None:
            if is_write(func):
                for tensor in given:
                    self.forget(storage_key(tensor.untyped_storage()))
            return
        for tensor, value in zip(made, _tensors([found]), strict=False):
            most = MOST_NUMEL if given or not tensor.is_floating_point() else _MOST_CONSTANTS
            if tensor.shape == value.shape and tensor.is_meta and tensor.numel() <= most:
                self.set(tensor, value)


def picked(values: Values, func: Any, args: Any) -> Any:
    """The arguments of an operation that indexes, with numbers of rows instead of masks whose values are known."""
    if str(func) not in _INDEXING or not any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
        return args
    indices: list[Any] = []
    for index in args[1]:
        value = values.of(index) if isinstance(index, Tensor) and index.dtype == torch.bool else None
        if value is None:
            indices.append(index)
        else:
            indices += [row.to("meta") for row in value.nonzero(as_tuple=True)]
    return (args[0], indices, *args[2:])


_INDEXING = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")


def _is_small(args: Any) -> bool:
    """Whether an operation without tensors makes few elements, by its first argument where that is a shape."""
    numel = 1
    for size in args[0] if args and isinstance(args[0], list | tuple) else args[:1]:
        numel *= max(size, 1) if isinstance(size, int) else 1
    return numel <= MOST_NUMEL


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _replaced(value: Any, values: Mapping[int, Tensor | None]) -> Any:
    if isinstance(value, Tensor):
        return values[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, values) for key, item in value.items()}
    return value
