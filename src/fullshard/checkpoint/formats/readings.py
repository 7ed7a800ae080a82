"""The stored tensors that make a tensor of a model: equal names, transformers' renamings, and its conversions.

transformers 5 keeps a table of conversions by architecture: the experts of a Mixtral are separate tensors in its files
and one tensor in the model. The same table is used here, tensor by tensor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api import original_classes
from ..plan import Box, whole
from ..state import dtype_name, dtype_of, plain_name
from .source import Source, TensorInfo, place

# What PEFT inserts into the names of a base model.
_PEFT = re.compile(r"\.base_layer(?=\.)|\.original_module(?=\.)|\.modules_to_save\.[^.]+(?=\.)")


class Stored(NamedTuple):
    """A tensor that is stored as it is."""

    key: str
    info: TensorInfo

    @property
    def keys(self) -> Sequence[str]:
        return (self.key,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.dtype

    def read(self, source: Source, box: Box, dtype: torch.dtype) -> Tensor:
        return source.read(self.key, box)


class Made(NamedTuple):
    """A tensor that a conversion of transformers makes of stored ones, `sources` by pattern.

    Experts that are stacked along dim 0 are read one by one, those of `box` alone. Others are made whole: a rank then
    holds the stored tensors and the result for a moment.
    """

    name: str
    converter: Any
    first: str  # the name that the conversion begins with
    sources: Mapping[str, Sequence[str]]
    shape: tuple[int, ...]
    dtype: str
    model: Any

    @property
    def keys(self) -> Sequence[str]:
        return [key for keys in self.sources.values() for key in keys]

    def read(self, source: Source, box: Box, dtype: torch.dtype) -> Tensor:
        if not self._stacks():
            made = self.convert(lambda key: source.read(key).to(dtype), self.sources)
            return place(made, whole(self.shape), box)
        start, stop = box.offsets[0], box.offsets[0] + box.lengths[0]
        experts = {pattern: keys[start:stop] for pattern, keys in self.sources.items()}
        made = self.convert(lambda key: source.read(key).to(dtype), experts)
        rest = Box((0, *box.offsets[1:]), box.lengths)
        return place(made, whole((stop - start, *self.shape[1:])), rest)

    def convert(self, read: Callable[[str], Tensor], sources: Mapping[str, Sequence[str]]) -> Tensor:
        return converted(self.converter, self.first, sources, read, self.model)[self.name]

    def _stacks(self) -> bool:
        first, *others = self.converter.operations
        return _kind(first) == "MergeModulelist" and first.dim == 0 and all(map(_keeps_rows, others))


Reading = Stored | Made


def converted(
    converter: Any, name: str, sources: Mapping[str, Sequence[str]], read: Callable[[str], Tensor], model: Any
) -> dict[str, Tensor]:
    """The tensors that `converter`, of a table of `model`, makes of those that `read` gives, by name."""
    once = deepcopy(converter)
    for pattern, keys in sources.items():
        for key in keys:
            once.add_tensor(name, key, pattern, read(key))
    found: dict[str, Any] = once.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _kind(operation: object) -> str:
    return type(operation).__name__


def _keeps_rows(operation: Any) -> bool:
    """Whether row i of the result comes from row i alone."""
    if _kind(operation) == "Concatenate":
        return bool(operation.dim > 0)
    return _kind(operation) == "Transpose" and operation.dim0 > 0 and operation.dim1 > 0


class Fit(NamedTuple):
    """`readings`: by name in the model. `unexpected`: stored keys for which the model has no place. `optional`: names
    that the package itself initialises if they are not stored."""

    readings: dict[str, Reading]
    unexpected: list[str]
    optional: set[str]
    conversions: list[Any] | None


def fit(model: nn.Module, names: Iterable[str], source: Source) -> Fit:
    """Find what is stored for each of `names`, those of the model's state dict without wrappers."""
    names = list(names)
    inner, prefix = pretrained_in(model)
    adapters = _adapter_names(model)
    # Several names may stand for one: PEFT keeps the original of a module beside its trained copy.
    known: dict[str, list[str]] = {}
    for name in names:
        short = name if name in source.tensors else _PEFT.sub("", name) if adapters else name
        known.setdefault(short.removeprefix(prefix) if short not in source.tensors else short, []).append(name)
    grouped: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    readings: dict[str, Reading] = {}
    unexpected = []
    table = _table(inner)
    for key, (target, converter, pattern) in _targets(inner, table, known, source.tensors).items():
        if converter is not None:
            grouped.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(key)
        elif target in known:
            readings.update(dict.fromkeys(known[target], Stored(key, source.tensors[key])))
        else:
            unexpected.append(key)
    for first, (converter, sources) in grouped.items():
        made = converted(converter, first, sources, lambda key: _shape_of(source.tensors[key]), inner)
        for target, value in made.items():
            shape, dtype = tuple(value.shape), dtype_name(value.dtype)
            reading = Made(target, converter, first, sources, shape, dtype, inner)
            readings.update(dict.fromkeys(known.get(target, ()), reading))
        if not any(target in known for target in made):
            unexpected += [key for keys in sources.values() for key in keys]
    ignored = _ignored(inner, model, "unexpected")
    optional = {name for name in names if name in adapters and name not in readings}
    optional |= {name for name in names if _ignored(inner, model, "missing")(name.removeprefix(prefix))}
    used = None if table is None else [one for one in table if one.was_used()]
    return Fit(readings, [key for key in unexpected if not ignored(key)], optional, used)


def _shape_of(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=dtype_of(info.dtype), device="meta")


def _table(inner: Any) -> list[Any] | None:
    """transformers' conversions for the model `inner`, which it looks up by the names of classes."""
    if inner is None or "transformers.core_model_loading" not in sys.modules:
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping

    with original_classes(inner):
        return list(get_model_conversion_mapping(inner))


def _targets(
    inner: Any, table: list[Any] | None, known: Mapping[str, object], stored: Mapping[str, TensorInfo]
) -> dict[str, tuple[str, Any, str]]:
    """(name in the model, converter or None, its pattern) of each stored key."""
    if table is None:
        return {key: (key, None, "") for key in stored}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    there, prefix = dict.fromkeys(known, True), inner.base_model_prefix or None
    found = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, there)
        if name not in there:
            plain, _ = rename_source_key(key, [], [], prefix, there)
            if plain in there:
                name, pattern = plain, None
        found[key] = (name, by_pattern[pattern] if pattern is not None else None, pattern or "")
    return found


def pretrained_in(model: nn.Module) -> tuple[Any, str]:
    """The outermost model of transformers in `model`, and the prefix of its names there."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    for name, module in model.named_modules() if kind is not None else ():
        if isinstance(module, kind):
            plain = plain_name(f"{name}.") if name else ""
            return module, plain
    return None, ""


def _adapter_names(model: nn.Module) -> set[str]:
    """Parameters that PEFT put beside those of the base model."""
    kind: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    found = set()
    for prefix, module in model.named_modules() if kind is not None else ():
        if isinstance(module, kind):
            own = {name for name, _ in module.named_parameters() if not name.startswith("base_layer.")}
            found |= {plain_name(f"{prefix}.{name}") for name in own}
    return found


def _ignored(inner: Any, model: nn.Module, what: str) -> Callable[[str], bool]:
    """The keys that transformers itself passes over: its lists, and buffers that older versions stored."""
    patterns = set(getattr(inner, f"_keys_to_ignore_on_load_{what}", None) or ())
    if what == "unexpected" and inner is not None:
        patterns |= {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    search = re.compile("|".join(f"({pattern})" for pattern in patterns)).search if patterns else None
    return lambda key: search is not None and search(key) is not None
