"""Tensors around other tensors, such as torchao's 8-bit optimizer state: saved as the plain tensors inside them.

A tensor subclass with `__tensor_flatten__` at `w.exp_avg`, of shape (7, 1024), with a scale for each 256 elements, on 2
ranks, of which the second holds 3 rows as plain numbers, because torchao leaves less than 4096 elements alone:

    w.exp_avg.codes                 (4, 1024) uint8, cut as the tensor is
    w.exp_avg.scale                 (16,)
    w.exp_avg.qmap                  (256,), the same on every rank
    w.exp_avg.__tensor_flatten__    class, context, dtype and shape; of each inner tensor its length per row, or None
    w.exp_avg.__rest__              (3, 1024), the plain rows
    w.exp_avg.__rows__              [(0, 4)], the others

Which inner tensors are cut with the rows is asked of the class, by its own `aten.slice`.

A load takes the same ranges out of the inner tensors, on any number of ranks. Where its rows begin or end inside of a
block, or are partly plain, it takes the blocks around them and makes a plain tensor of their values: exact, and larger.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import local_of, settled
from .manifest import Manifest, TensorEntry
from .plan import FLATTENED, REST, ROWS, Box, KeyPath, key_of, whole
from .state import Part, dtype_name, dtype_of, place_of

# By name of the inner tensor: whether it is cut with the rows.
Kinds = dict[str, bool]
# More than this many inner tensors are not tried out.
_MAX_INNER = 8


def is_wrapper(tensor: object) -> bool:
    """Whether `tensor`, or the local tensor of this DTensor, is a tensor around others."""
    inner = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return (
        isinstance(inner, Tensor)
        and not isinstance(inner, DTensor)
        and hasattr(type(settled(inner)), "__tensor_flatten__")
    )


# ---- saving ----------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """The parts that are saved for one leaf."""

    parts: list[tuple[KeyPath, Part]]
    # None where this rank has no rows.
    layout: dict[str, Any] | None


def _kinds(tensor: Tensor) -> Kinds | None:
    """The kinds of the tensors inside, found by a tensor of twice as many rows and no data, whose first half has to be
    like `tensor`."""
    names, shape = inner_names(tensor), tuple(tensor.shape)
    context = encode_context(tensor.__tensor_flatten__()[1], shape)  # type: ignore[attr-defined]
    if not shape or len(names) > _MAX_INNER or isinstance(context, str):
        return None
    rows, twice = shape[0], (2 * shape[0], *shape[1:])
    lengths = {name: tuple(getattr(tensor, name).shape) for name in names}
    for choice in itertools.product((True, False), repeat=len(names)):
        kinds = dict(zip(names, choice, strict=True))
        with contextlib.suppress(Exception):  # of the class: no such tensor, or no such slice
            inner = {
                name: torch.empty(
                    (2 * lengths[name][0], *lengths[name][1:]) if kinds[name] else lengths[name],
                    dtype=getattr(tensor, name).dtype,
                    device="meta",
                )
                for name in names
            }
            stride = torch.empty(twice, device="meta").stride()
            double: Any = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, decode_context(context, twice), torch.Size(twice), stride
            )
            half = torch.ops.aten.slice.Tensor(double, 0, 0, rows)
            if type(half) is type(tensor) and tuple(half.shape) == shape:
                if {name: tuple(getattr(half, name).shape) for name in names} == lengths:
                    return kinds
    return None


def inner_names(tensor: Tensor) -> list[str]:
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names


def saved(path: KeyPath, tensor: Tensor, known: dict[type, Kinds | None]) -> Saved | str:
    """The parts of the wrapper `tensor` at `path`; or why it cannot be saved. `known`: what is known about classes."""
    place = place_of(tensor)
    if isinstance(place, str):
        return place
    shape, box, local, _ = place
    if box is None or local is None:
        return Saved([(path, Part(dtype_name(tensor.dtype), shape, None, None))], None)
    if not local.numel():
        return Saved([(path, Part(dtype_name(tensor.dtype), shape, box, torch.empty(box.lengths)))], None)
    kind, shape_here = type(local), tuple(local.shape)
    name = f"{kind.__module__}.{kind.__qualname__}"
    context = encode_context(local.__tensor_flatten__()[1], shape_here)  # type: ignore[attr-defined]
    if isinstance(context, str):
        return f"expected a {name} of plain values, found {context} in its __tensor_flatten__"
    if kind not in known:
        known[kind] = _kinds(local)
    kinds = known[kind]
    cut = box.lengths != shape
    if cut and kinds is None:
        return (
            f"expected a {name} that can be sliced by rows (aten.slice), to know which of its inner tensors are cut "
            f"with them, found none; save it whole (full_tensor()), or dequantise it"
        )
    if cut and (box.offsets[1:], box.lengths[1:]) != ((0,) * (len(shape) - 1), shape[1:]):
        return f"expected a {name} that is cut by rows alone, found the part {box} of {shape}; dequantise it"
    parts, ratios = list[tuple[KeyPath, Part]](), dict[str, list[int] | None]()
    for inner_name in inner_names(local):
        inner: Tensor = getattr(local, inner_name).detach()
        dtype, lengths = dtype_name(inner.dtype), tuple(inner.shape)
        ratios[inner_name] = None
        if kinds is not None and kinds[inner_name]:
            ratios[inner_name] = list(Fraction(lengths[0], shape_here[0]).as_integer_ratio())
            around = (box.offsets[0], box.offsets[0] + shape_here[0]), shape
            parts.append(((*path, inner_name), Part(dtype, (0, *lengths[1:]), whole(lengths), inner, around)))
        else:
            parts.append(((*path, inner_name), Part(dtype, lengths, whole(lengths), inner)))
    layout = {
        "class": name,
        "context": context,
        "dtype": dtype_name(local.dtype),
        "shape": list(shape),
        "rows": None if kinds is None else ratios,
    }
    return Saved(parts, layout)


def encode_context(value: Any, shape: tuple[int, ...]) -> Any:
    """`value` of `__tensor_flatten__` as values of a manifest; a text that says what cannot be one. The shape of the
    tensor itself, which differs between ranks, is a mark."""
    if isinstance(value, torch.Size) or (isinstance(value, tuple) and value and value == shape):
        return {"shape": None if tuple(value) == shape else list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, (list, tuple)):
        items = [encode_context(item, shape) for item in value]
        flaw = next((item for item in items if isinstance(item, str)), None)
        return flaw or {type(value).__name__: items}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return {"str": value} if isinstance(value, str) else f"a {type(value).__qualname__}"


def decode_context(value: Any, shape: tuple[int, ...]) -> Any:
    """The opposite, for a tensor of `shape`. Raises `ValueError` for anything else."""
    match value:
        case None | bool() | int() | float():
            return value
        case {"shape": None}:
            return torch.Size(shape)
        case {"shape": [*sizes]}:
            return torch.Size(sizes)
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            return dtype_of(name)
        case {"str": str(text)}:
            return text
        case {"list": [*items]}:
            return [decode_context(item, shape) for item in items]
        case {"tuple": [*items]}:
            return tuple(decode_context(item, shape) for item in items)
    raise ValueError(f"a context that no save writes: {str(value)[:80]}")


# ---- loading ---------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A wrapper in a checkpoint. `wrapped`: the ranges of rows in its inner tensors; `rest`: the others."""

    path: KeyPath
    name: str
    context: Any
    dtype: str
    shape: tuple[int, ...]
    per_row: dict[str, Fraction | None] | None
    inner: dict[str, TensorEntry]
    wrapped: list[tuple[int, int]]
    rest: TensorEntry | None

    @property
    def key(self) -> str:
        return key_of(self.path)

    @property
    def keys(self) -> list[str]:
        """The keys of its parts in the checkpoint."""
        rest = [] if self.rest is None else [self.rest.key, key_of((*self.path, ROWS))]
        return [key_of((*self.path, FLATTENED)), *(entry.key for entry in self.inner.values()), *rest]

    def kind(self) -> type | str:
        """The class, which has to be imported; or what to do."""
        module, _, qualname = self.name.rpartition(".")
        found: Any = getattr(sys.modules.get(module), qualname, None)
        if isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__"):
            return found
        return (
            f"expected the class {self.name}, in which it was saved, found no such class imported; import its package"
        )


def stored_in(manifest: Manifest) -> dict[str, Stored]:
    """The wrappers of a checkpoint, by key."""
    found, inside = {}, dict[KeyPath, dict[str, TensorEntry]]()
    for tensor in manifest.tensors.values():
        inside.setdefault(tensor.path[:-1], {})[str(tensor.path[-1])] = tensor
    for entry in manifest.values.values():
        value: Any = entry.value
        if entry.path[-1] != FLATTENED or len(entry.path) < 2 or not isinstance(value, dict):
            continue
        path = entry.path[:-1]
        match value:
            case {"class": str(name), "context": context, "dtype": str(dtype), "shape": [*shape], "rows": raw}:
                pass
            case _:
                continue
        inner = dict(inside.get(path, {}))
        rest, per_row = inner.pop(REST, None), None
        if isinstance(raw, dict):
            per_row = {n: Fraction(*ratio) if ratio else None for n, ratio in raw.items()}
        known = manifest.values.get(key_of((*path, ROWS)))
        wrapped: Any = [(0, shape[0] if shape else 1)] if known is None else known.value
        found[key_of(path)] = Stored(path, name, context, dtype, tuple(shape), per_row, inner, wrapped, rest)
    return found


class Segment(NamedTuple):
    """Rows `start` to `stop`. Of a wrapper: `blocks` are the rows that `inner` holds, which may be more; of plain rows:
    `inner` is the part of `rest` alone."""

    start: int
    stop: int
    blocks: tuple[int, int] | None
    inner: dict[str, Box]


class Taken(NamedTuple):
    """The segments that a load takes of a wrapper for `box`. `exact`: it is a wrapper of these rows alone."""

    box: Box
    segments: list[Segment]
    exact: bool


def taken(stored: Stored, box: Box) -> Taken:
    start, stop = (box.offsets[0], box.offsets[0] + box.lengths[0]) if stored.shape else (0, 1)
    segments, row, wrapped, plain = list[Segment](), 0, 0, 0  # rows before: all, those in the inner tensors, the others
    for first, last in [*stored.wrapped, (stored.shape[0] if stored.shape else 1, 0)] if box.numel else ():
        if row < first:
            begin, end = max(start, row), min(stop, first)
            if begin < end:
                offset = plain + begin - row
                there = Box((offset, *box.offsets[1:]), (end - begin, *box.lengths[1:]))
                segments.append(Segment(begin, end, None, {REST: there}))
            plain += first - row
        if max(start, first) < min(stop, last):
            segments.append(_blocks(stored, max(start, first), min(stop, last), (first, last), wrapped))
        wrapped += last - first
        row = last
    columns = box.lengths[1:] == stored.shape[1:]
    exact = columns and [segment.blocks for segment in segments] == [(start, stop)]
    return Taken(box, segments, exact)


def _blocks(stored: Stored, start: int, stop: int, within: tuple[int, int], before: int) -> Segment:
    """The blocks of rows `start` to `stop`. `within`: the range of rows around them in the inner tensors; `before`: how
    many of those are before it."""
    first, last = within
    if stored.per_row is None:
        return Segment(start, stop, within, {name: whole(entry.shape) for name, entry in stored.inner.items()})
    unit = math.lcm(*(ratio.denominator for ratio in stored.per_row.values() if ratio is not None))
    begin = first + (start - first) // unit * unit
    end = min(first - (first - stop) // unit * unit, last)
    inner = {}
    for name, entry in stored.inner.items():
        inner[name], ratio = whole(entry.shape), stored.per_row[name]
        if ratio is not None:
            offset, length = int((before + begin - first) * ratio), int((end - begin) * ratio)
            inner[name] = Box((offset, *inner[name].offsets[1:]), (length, *entry.shape[1:]))
    return Segment(start, stop, (begin, end), inner)


def destinations(stored: Stored, what: Taken, local: Tensor) -> list[tuple[TensorEntry, Box, Tensor]] | str:
    """Where to read what `what` takes so that it is in `local`, in place; or what `local` is and would have to be."""
    if not local.numel():
        return []
    if not is_wrapper(local):
        plain = len(what.segments) == 1 and what.segments[0].blocks is None
        if plain and stored.rest is not None and dtype_name(local.dtype) == stored.rest.dtype:
            return [(stored.rest, what.segments[0].inner[REST], local)]
        return f"{dtype_name(local.dtype)} here, {stored.name} in the checkpoint; load it into an optimizer's state"
    name = f"{type(local).__module__}.{type(local).__qualname__}"
    context = encode_context(local.__tensor_flatten__()[1], tuple(local.shape))  # type: ignore[attr-defined]
    if name != stored.name or context != stored.context:
        return f"{name} with {context} here, {stored.name} with {stored.context} in the checkpoint"
    inner: dict[str, Tensor] = {one: getattr(local, one).detach() for one in inner_names(local)}
    there = what.segments[0].inner if what.exact else {}
    if {one: tuple(tensor.shape) for one, tensor in inner.items()} != {one: box.lengths for one, box in there.items()}:
        return f"the part {what.box} here, whose rows are not between blocks of {stored.name} in the checkpoint"
    return [(stored.inner[one], there[one], tensor) for one, tensor in inner.items()]


def put_together(stored: Stored, what: Taken, read: list[dict[str, Tensor]], device: torch.device) -> Tensor:
    """The tensor of `what.box` on `device`, made of what was `read` for each segment: of its class, or plain with the
    same values."""
    if what.exact:
        return _wrapper(stored, what.segments[0], read[0], device)
    dtype = dtype_of(stored.dtype)
    if any(segment.blocks for segment in what.segments):
        dtype = torch.promote_types(dtype, torch.float32)
    made = torch.empty(what.box.lengths, dtype=dtype, device=device)
    columns = [slice(o, o + n) for o, n in zip(what.box.offsets[1:], what.box.lengths[1:], strict=True)]
    for segment, found in zip(what.segments, read, strict=True):
        if segment.blocks is None:
            values = found[REST]
        else:
            one = _wrapper(stored, segment, found, device)
            values = torch.empty(one.shape, dtype=dtype, device=device)
            values.copy_(one)
            first = segment.blocks[0]
            values = values[(slice(segment.start - first, segment.stop - first), *columns)]
        made[segment.start - what.box.offsets[0] : segment.stop - what.box.offsets[0]] = values.to(device)
    return made


def _wrapper(stored: Stored, segment: Segment, inner: dict[str, Tensor], device: torch.device) -> Tensor:
    assert segment.blocks is not None
    first, last = segment.blocks
    shape = (last - first, *stored.shape[1:]) if stored.shape else ()
    kind: Any = stored.kind()
    copies = {name: tensor.to(device, copy=True) for name, tensor in inner.items()}
    stride = torch.empty(shape, device="meta").stride()
    made = kind.__tensor_unflatten__(copies, decode_context(stored.context, shape), torch.Size(shape), stride)
    assert isinstance(made, Tensor)
    return made
