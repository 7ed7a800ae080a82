"""The tensors of a file that are made of tensors of a model: the names and shapes of `save_pretrained`.

transformers 5 keeps some models in memory otherwise than in files: the experts of a Mixtral are one tensor here and one
each there, the head of a GPT-NeoX is `lm_head` here and `embed_out` there. `readings` applies its table on loading.
This file applies it backwards, tensor by tensor, so that the files are those that `save_pretrained` of the plain model
writes, and that other programs read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api import original_classes
from ..companions import CONFIG
from ..plan import Box, whole
from ..state import dtype_name, dtype_of, named_tensors
from .readings import converted, pretrained_in
from .source import Source, TensorInfo, place


class _Group(NamedTuple):
    """Tensors of the model that become tensors of a file together. `converter` None: one, under another name."""

    first: str  # the name that the conversion begins with
    converter: Any
    sources: Mapping[str, Sequence[str]]  # names in the model, by pattern
    made: Mapping[str, str]  # {name in the file: name before renamings}

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]


class Published(Source):
    """`inner`, tensors under the names of a model of transformers, as its `save_pretrained` writes them.

    Tied tensors and those that the class leaves out of files are absent. `read` keeps what a conversion makes until it
    is read; each tensor can be read once.
    """

    def __init__(self, inner: Source, model: Any) -> None:
        self.inner, self.kind, self.path = inner, inner.kind, inner.path
        self.values = inner.values
        self._model = model
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        # In the order of the model: that of a checkpoint may be another.
        there = [name for name in named_tensors(model) if name in inner.tensors]
        names = [name for name in there if name not in inner.tied and name not in ignored]
        self.tensors: dict[str, TensorInfo] = {}
        self.memory: dict[str, tuple[int, int]] = {}
        self._group_of: dict[str, _Group] = {}
        self._made: dict[str, dict[str, Tensor]] = {}  # by the first name of a group
        storages: list[Any] = []  # so that each has an id of its own
        for group in _groups(model, names, inner.tensors):
            made = self._convert(group, lambda key: _shape_of(inner.tensors[key]))
            for name, value in made.items():
                self.tensors[name] = TensorInfo((name,), dtype_name(value.dtype), tuple(value.shape))
                self._group_of[name] = group
                if group.converter is not None:
                    storage = value.untyped_storage()
                    storages.append(storage)
                    self.memory[name] = id(storage), storage.nbytes()

    def inputs(self, order: Iterable[str]) -> list[str]:
        return self.inner.inputs(dict.fromkeys(key for name in order for key in self._group_of[name].keys))

    def read(self, key: str, box: Box | None = None) -> Tensor:
        group = self._group_of[key]
        if group.converter is None:
            return self.inner.read(group.keys[0], box)
        made = self._made.pop(group.first, None) or self._convert(group, self.inner.read)
        full = made.pop(key)
        if made:
            self._made[group.first] = made
        return full if box is None else place(full, whole(tuple(full.shape)), box)

    def _convert(self, group: _Group, read: Any) -> dict[str, Tensor]:
        if group.converter is None:
            return {name: read(group.keys[0]) for name in group.made}
        made = converted(group.converter, group.first, group.sources, read, self._model)
        return {name: made[before] for name, before in group.made.items()}

    def value(self, key: str) -> Any:
        return self.inner.value(key)

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        return self.inner.companions(model)

    def close(self) -> None:
        self.inner.close()


def _shape_of(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=dtype_of(info.dtype), device="meta")


def published(source: Source, model: nn.Module | None) -> Source:
    """`source`, the state of `model`, under the names of its files; itself if `model` is not one of transformers, or if
    `source` has other names."""
    inner, prefix = (None, "") if model is None else pretrained_in(model)
    if inner is None or prefix or not source.tensors.keys() <= named_tensors(inner).keys():
        return source
    return Published(source, inner)


def _groups(model: Any, names: Iterable[str], infos: Mapping[str, TensorInfo]) -> list[_Group]:
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    conversions = _conversions(model)
    if conversions is None:
        return [_Group(name, None, {name: [name]}, {name: name}) for name in names]
    backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [one for one in backwards if isinstance(one, WeightRenaming)]
    converters = [one for one in backwards if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(names, key=dot_natural_key):
        first, pattern = apply_converters(name, converters)
        converter = None if pattern is None else by_pattern[pattern]
        if pattern is None:
            first, pattern = apply_renamings(name, renamings), name
        found.setdefault(first, (converter, {}))[1].setdefault(pattern, []).append(name)
    groups = []
    for first, (converter, sources) in found.items():
        if converter is None:
            groups.append(_Group(first, None, sources, {first: first}))
            continue
        made = converted(converter, first, sources, lambda key: _shape_of(infos[key]), model)
        # Renamings are applied to the results: they may change what the converter's patterns match.
        groups.append(_Group(first, converter, sources, {apply_renamings(name, renamings): name for name in made}))
    return groups


def _conversions(model: Any) -> list[Any] | None:
    """The conversions that `save_pretrained` undoes: those that a load applied, else those of the table; None if it has
    none, in which case the order stays that of the state dict."""
    applied = getattr(model, "_weight_conversions", None)
    if applied is not None:
        return deepcopy(list(applied))
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    with original_classes(model):
        table = get_model_conversion_mapping(model, add_legacy=False)
    # Whether files of this model have a prefix is known only of one that was loaded.
    return [one for one in table if not isinstance(one, PrefixChange)] or None


def model_of(companions: Mapping[str, bytes]) -> nn.Module | None:
    """The model of transformers that a stored configuration describes, on the meta device; None without one, without
    transformers, or if its class is not of transformers, whose code alone is run."""
    if CONFIG not in companions or importlib.util.find_spec("transformers") is None:
        return None
    config = json.loads(companions[CONFIG])
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or "auto_map" in config:
        return None
    import transformers

    kind: Any = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    config.pop("quantization_config", None)
    with torch.device("meta"):
        settings: Any = kind.config_class
        model: nn.Module = kind(settings.from_dict(config))
    return model
