"""Values of small tensors on the meta device: those of the batch, and what is computed from these alone.

A forward may ask for them: whether a mask hides anything, whether sequences are packed, which rows a mask picks. What
depends on parameters or on large tensors has no value, but for what is assumed: that numbers are finite, and that
routers pick experts in turn.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_write, operation_name, storage_key, written

# Where torch's own modules are.
_TORCH = torch.__path__[0]
# Elements of a storage that may have values.
MOST_NUMEL = 1 << 20
# Of one that an operation without inputs makes in a floating-point dtype: a mask, if it is small.
_MOST_CONSTANTS = 1 << 16


class UnknownValueError(Exception):
    """A step asks for a value that is not known; the message says where, and what to do."""


class Values:
    """Tells for each storage on the meta device what is in it, as a flat tensor on the CPU, if it is known. `assumed`:
    what was assumed for that, in words; `names`: of modules, by id."""

    def __init__(self) -> None:
        self._there: dict[int, Tensor] = {}
        self.assumed: dict[str, None] = {}
        self.names: dict[int, str] = {}

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
        reads = operation_name(func) not in _FILLED
        values = {id(tensor): self.of(tensor) if reads else _like(tensor) for tensor in given}
        if any(value is None for value in values.values()):
            return self._of_finite(func, args)
        args, named = _replaced(args, values), _replaced(dict(kwargs), values)
        if "device" in named:
            named["device"] = torch.device("cpu")
        try:
            with torch.no_grad():
                return func(*args, **named)
        except NotImplementedError:
            return None  # a device has what a CPU has not

    def _of_finite(self, func: Any, args: Any) -> Tensor | None:
        """Where a step asks whether unknown numbers are finite."""
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        name, other = operation_name(func), args[1] if len(args) > 1 else None
        infinite = isinstance(other, float) and math.isinf(other)
        compares = name in ("aten.eq", "aten.ne") and (infinite or other is args[0])
        found = (name == "aten.ne") == infinite if compares else _OF_FINITE.get(name)
        if found is None or args[0].numel() > MOST_NUMEL:
            return None
        self.assumed["numbers are finite where the step asks for it"] = None
        return torch.full(args[0].shape, found, device="cpu")

    def _picks(self, func: Any, args: Any, kwargs: Mapping[str, Any], made: list[Tensor]) -> None:
        """Numbers of unknown tensors that a router picks, a few of many: in turn, so that each gets as many rows."""
        place = _PICKING.get(operation_name(func))
        if place is None or not made or made[-1].is_floating_point() or args[0].ndim < 2:
            return
        picks, least = made[-1], operation_name(func) in ("aten.topk", "aten.sort")
        dim = args[place] if len(args) > place else kwargs.get("dim", -1 if least else None)
        if not isinstance(dim, int) or picks.numel() > MOST_NUMEL or not picks.numel():
            return
        dim, number = dim % args[0].ndim, args[0].shape[dim]
        kept = picks.ndim == args[0].ndim
        shape = [*picks.shape]
        last = shape.pop(dim) if kept else 1
        numbers = torch.arange(picks.numel(), device="cpu").remainder(number).reshape(*shape, last).movedim(-1, dim)
        self.set(picks, numbers if kept else numbers.squeeze(dim))
        self.assumed[f"where a step picks some of {number} by values that are not known, each is picked as often"] = (
            None
        )

    def keep(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], given: list[Tensor], made: list[Tensor], found: Any
    ) -> None:
        """After an operation that made tensors, or wrote: what is known of them. `found`: of `compute`."""
        if found is None:
            if is_write(func):
                for tensor in written(func, args, kwargs):
                    self.forget(storage_key(tensor.untyped_storage()))
            else:
                self._picks(func, args, kwargs, made)
            return
        for tensor, value in zip(made, _tensors([found]), strict=False):
            most = MOST_NUMEL if given or not tensor.is_floating_point() else _MOST_CONSTANTS
            if tensor.shape == value.shape and tensor.is_meta and tensor.numel() <= most:
                self.set(tensor, value)


_OF_FINITE = {"aten.isnan": False, "aten.isinf": False, "aten.isfinite": True}
# Operations that read shapes alone; those that pick numbers, with the place of their dim; and those that need a value.
_FILLED = frozenset(f"aten.{name}" for name in "zeros_like ones_like full_like new_zeros new_ones new_full".split())
_PICKING = {"aten.topk": 2, "aten.sort": 1, "aten.argmax": 1, "aten.argmin": 1, "aten.max": 1, "aten.min": 1}
_ASKING = frozenset(
    f"aten.{name}" for name in "_local_scalar_dense nonzero masked_select _unique2 unique_consecutive".split()
)


def _like(tensor: Tensor) -> Tensor | None:
    return (
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype) if tensor.numel() <= MOST_NUMEL else None
    )


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


def needs_value(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation on the meta device cannot be done without a value."""
    if operation_name(func) == "aten._to_copy":
        return str(kwargs.get("device")) == "cpu"
    if str(func) == _INDEXING[0]:
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return operation_name(func) in _ASKING


def unknown(func: Any, names: Mapping[int, str]) -> UnknownValueError:
    """The error for an operation that needs a value. `names`: of modules, by id."""
    frame, where = inspect.currentframe(), ""
    while frame is not None and not where:
        module, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(module, nn.Module) and id(module) in names and not file.startswith(_TORCH):
            line = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
            where = f"{names[id(module)] or 'the model'} ({type(module).__name__}, {line})"
        frame = frame.f_back
    asked = operation_name(func).removeprefix("aten.")
    return UnknownValueError(
        f"{where or 'the step'} asks for values that are not known before a run ({asked}): expected shapes that depend "
        f"on shapes, integers of the batch and masks alone; compute with a mask of all rows instead, or plan a model "
        f"without this module"
    )


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
