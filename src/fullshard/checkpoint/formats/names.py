"""Names of parameters: conversion rules between programs, and the names of an optimizer's numbered parameters.

A rule renames every part of a key's path that is a parameter's name. So the optimizer's state of a parameter, at
`("optimizer", "state", name, "exp_avg")`, follows it.

torchtitan rotates neighbouring pairs of a head's elements, Hugging Face and our trainer its two halves. The rows of the
query and key weights are therefore in a different order, and are permuted on reading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointMismatch
from ..plan import Box, KeyPath, key_of, matches, whole
from ..state import Optimizers, all_of, names_in_order, parameter_names, plain_name
from .source import Source, TensorInfo, place

Style = Literal["fullshard", "hf", "titan"]
STYLES: tuple[Style, ...] = ("fullshard", "hf", "titan")

# One line per parameter of a Llama: its name in our trainer, in Hugging Face's files, in torchtitan.
_LLAMA = (
    ("embedding.weight", "model.embed_tokens.weight", "tok_embeddings.weight"),
    ("layers.#.attention_norm.weight", "model.layers.#.input_layernorm.weight", "layers.#.attention_norm.weight"),
    ("layers.#.attention.wq.weight", "model.layers.#.self_attn.q_proj.weight", "layers.#.attention.wq.weight"),
    ("layers.#.attention.wk.weight", "model.layers.#.self_attn.k_proj.weight", "layers.#.attention.wk.weight"),
    ("layers.#.attention.wv.weight", "model.layers.#.self_attn.v_proj.weight", "layers.#.attention.wv.weight"),
    ("layers.#.attention.wo.weight", "model.layers.#.self_attn.o_proj.weight", "layers.#.attention.wo.weight"),
    ("layers.#.ffn_norm.weight", "model.layers.#.post_attention_layernorm.weight", "layers.#.ffn_norm.weight"),
    ("layers.#.ffn.gate.weight", "model.layers.#.mlp.gate_proj.weight", "layers.#.feed_forward.w1.weight"),
    ("layers.#.ffn.up.weight", "model.layers.#.mlp.up_proj.weight", "layers.#.feed_forward.w3.weight"),
    ("layers.#.ffn.down.weight", "model.layers.#.mlp.down_proj.weight", "layers.#.feed_forward.w2.weight"),
    ("norm.weight", "model.norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight", "output.weight"),
)
# Other names of the same parameter in other versions of torchtitan.
_TITAN_TOO = {
    "output.weight": ("lm_head.weight",),
    **{f"layers.#.attention.{w}.weight": (f"layers.#.attention.qkv_linear.{w}.weight",) for w in ("wq", "wk", "wv")},
}
_ROTATED = (".attention.wq.weight", ".attention.wk.weight")  # names of the first column


class Rows(NamedTuple):
    """Rows in blocks of `head_dim`: row i of a block of the result is row `order[i]` of the source."""

    head_dim: int
    to_halves: bool

    def order(self) -> Tensor:
        """(head_dim,) int64"""
        half = self.head_dim // 2
        rows = torch.arange(self.head_dim)
        return rows.view(half, 2).t().reshape(-1) if self.to_halves else rows.view(2, half).t().reshape(-1)


@dataclass(frozen=True, slots=True)
class Renaming:
    """A mapping of names. `rename(name)` returns the new name and the permutation of its rows, or None for an unknown
    name."""

    title: str
    rename: Callable[[str], tuple[str, Rows | None] | None]
    strict: bool = True  # a tensor without a known name is an error


def strip_wrappers(name: str) -> str:
    """`name` without the parts that DDP, activation checkpointing, `torch.compile` and FSDP1 insert.

    >>> strip_wrappers("module.layers.0._checkpoint_wrapped_module._orig_mod.weight")
    'layers.0.weight'
    """
    return plain_name(name).removeprefix("module.")


UNWRAPPED = Renaming("without wrappers", lambda name: (strip_wrappers(name), None), strict=False)


def llama(source: Style, target: Style, *, head_dim: int | None = None) -> Renaming:
    """The renaming from the names of one program for a Llama to those of another. `head_dim`: elements of one
    attention head, needed if exactly one of the two is torchtitan.

    >>> llama("hf", "fullshard").rename("model.layers.3.mlp.up_proj.weight")
    ('layers.3.ffn.up.weight', None)
    """
    for style in (source, target):
        if style not in STYLES:
            raise ValueError(f"names: expected one of {', '.join(STYLES)}, found {style!r}")
    turns = (source == "titan") != (target == "titan")
    if turns and (head_dim is None or head_dim < 2 or head_dim % 2):
        raise ValueError(
            f"head_dim: from {source} to {target} the rows of query and key weights are permuted within a head; "
            f"expected the even number of elements of a head, found {head_dim}"
        )
    rows = Rows(head_dim, to_halves=source == "titan") if turns and head_dim else None
    table: dict[str, tuple[str, Rows | None]] = {}
    for line in _LLAMA:
        old, new = line[STYLES.index(source)], line[STYLES.index(target)]
        for spelling in (old, *(_TITAN_TOO.get(old, ()) if source == "titan" else ())):
            table[spelling] = (new, rows if line[0].endswith(_ROTATED) else None)

    def rename(name: str) -> tuple[str, Rows | None] | None:
        name = strip_wrappers(name)
        number = re.search(r"(?<=layers\.)\d+(?=\.)", name)
        found = table.get(name if number is None else name.replace(f"layers.{number[0]}.", "layers.#.", 1))
        if found is None or number is None:
            return found
        return found[0].replace("layers.#.", f"layers.{number[0]}.", 1), found[1]

    return Renaming(f"{source} to {target}", rename)


class Chosen(Source):
    """A selection of another source, under other names.

    `only`, `skip`: patterns (`model.*`) of keys to take and to leave out. `strip`: a prefix that all remaining keys
    must have, and that is removed. `renaming`: applied to the result. Raises `CheckpointMismatch` with all problems:
    patterns that match nothing, names without a rule, two keys that would become one.
    """

    def __init__(
        self,
        inner: Source,
        *,
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        strip: str = "",
        renaming: Renaming | None = None,
    ) -> None:
        self.inner, self.kind, self.path = inner, inner.kind, inner.path
        self.left_out = 0
        self.tensors: dict[str, TensorInfo] = {}
        self.values: dict[str, KeyPath] = {}
        self._inner_key: dict[str, str] = {}
        self._rows: dict[str, Rows] = {}
        self._names: dict[str, str] = {}
        paths = {key: info.path for key, info in inner.tensors.items()} | dict(inner.values)
        unused = [pattern for pattern in (*only, *skip) if not any(matches(key, [pattern]) for key in paths)]
        self._wrong = [f"no key matches the pattern {pattern!r}" for pattern in unused]
        for key, path in paths.items():
            if (only and not matches(key, only)) or matches(key, skip):
                self.left_out += 1
            else:
                self._take(key, path, strip, renaming)
        if self._wrong:
            raise CheckpointMismatch(f"{inner.path}: names do not fit", self._wrong)
        self._model = strip.removesuffix(".") if strip else None
        now = {old: new for new, old in self._inner_key.items()}
        self.tied = {now[old]: now[kept] for old, kept in inner.tied.items() if old in now and kept in now}

    def inputs(self, order: Iterable[str]) -> list[str]:
        return self.inner.inputs([self._inner_key[key] for key in order])

    def _take(self, key: str, path: KeyPath, strip: str, renaming: Renaming | None) -> None:
        short = _without(path, strip)
        if short is None:
            self._wrong.append(f"{key} does not begin with {strip!r}; leave it out with skip")
            return
        tensor = self.inner.tensors.get(key)
        rows = None
        if renaming is not None:
            short, rows, known = self._renamed(short, renaming)
            if tensor is not None and not known and renaming.strict:
                self._wrong.append(f"{key}: unknown to the rule {renaming.title}; leave it out with skip")
                return
        new = key_of(short)
        if new in self._inner_key:
            self._wrong.append(f"{self._inner_key[new]} and {key} would both be {new}")
            return
        self._inner_key[new] = key
        if tensor is None:
            self.values[new] = short
            return
        self.tensors[new] = TensorInfo(short, tensor.dtype, tensor.shape)
        if rows is not None and tensor.shape and tensor.shape[0] > 1:
            if tensor.shape[0] % rows.head_dim:
                self._wrong.append(f"{key} has {tensor.shape[0]} rows, not a multiple of a head's {rows.head_dim}")
            self._rows[new] = rows

    def _renamed(self, path: KeyPath, renaming: Renaming) -> tuple[KeyPath, Rows | None, bool]:
        parts, rows, known = list(path), None, False
        for i, part in enumerate(path):
            found = renaming.rename(part) if isinstance(part, str) else None
            if found is not None:
                parts[i], rows = found
                self._names[str(part)] = found[0]
                known = True
        return tuple(parts), rows, known

    def read(self, key: str, box: Box | None = None) -> Tensor:
        rows, old = self._rows.get(key), self._inner_key[key]
        if rows is None:
            return self.inner.read(old, box)
        wanted = whole(self.tensors[key].shape) if box is None else box
        # Rows are permuted within heads, so read whole heads around the wanted rows.
        first = wanted.offsets[0] // rows.head_dim * rows.head_dim
        last = -(-(wanted.offsets[0] + wanted.lengths[0]) // rows.head_dim) * rows.head_dim
        heads = Box((first, *wanted.offsets[1:]), (last - first, *wanted.lengths[1:]))
        turned = self.inner.read(old, heads).unflatten(0, (-1, rows.head_dim))[:, rows.order()].flatten(0, 1)
        return place(turned, heads, wanted).clone()

    def value(self, key: str) -> Any:
        value = self.inner.value(self._inner_key[key])
        # The optimizer's groups contain parameter names.
        return self._params_of(value) if self.values[key][-1] == "params" else self._params_in(value)

    def _params_in(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self._params_of(v) if k == "params" else self._params_in(v) for k, v in value.items()}
        return [self._params_in(item) for item in value] if isinstance(value, list) else value

    def _params_of(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [self._names.get(name, name) if isinstance(name, str) else name for name in value]

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        return self.inner.companions(self._model if model is None else model)

    def verify(self, progress: Callable[[str, int], object] | None = None) -> list[str]:
        return self.inner.verify(progress)

    def close(self) -> None:
        self.inner.close()


def _without(path: KeyPath, strip: str) -> KeyPath | None:
    """The path without the prefix `strip` ("state.model."); None if it does not begin with it."""
    while strip:
        if not path:
            return None
        first, rest = str(path[0]), path[1:]
        if first.startswith(strip):
            return (first.removeprefix(strip), *rest) if first != strip else rest
        if not rest or not strip.startswith(f"{first}."):
            return None
        strip, path = strip.removeprefix(f"{first}."), rest
    return path


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """The elements of a head according to a Hugging Face `config.json`; None if it does not say."""
    if isinstance(config.get("head_dim"), int):
        return int(config["head_dim"])
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` beside a checkpoint; empty if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}


# ---- optimizers that number their parameters -----------------------------------------------------------------

# {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
#
# A number is the position of a parameter in the optimizer, which only the program that built it knows. So the caller
# passes the names, and everything that can be checked is checked: their count, and shapes.

# State of torch's optimizers with one element per element of the parameter.
_PER_ELEMENT = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta grad_avg sum prev step_size "
    "ax".split()
)
HINT = (
    "the state of an optimizer whose parameters are numbered: pass their names in that order (optimizer_names=[...] of "
    "open_source and load_full, --optimizer-names FILE)"
)


def optimizer_names(model: nn.Module, optimizers: Optimizers) -> list[str]:
    """The names of the parameters of `optimizers`, in the order in which their `state_dict` numbers them, one optimizer
    after another. For a file saved by this program, or by one that builds the same optimizers."""
    optimizers = all_of(optimizers)
    names = parameter_names(model, optimizers)
    return [name for optimizer in optimizers for name in names_in_order(optimizer, names)]


def is_numbered(value: object) -> bool:
    """Whether `value` is torch's own state dict of an optimizer.

    >>> is_numbered({"state": {}, "param_groups": [{"params": [0, 1]}]})
    True
    >>> is_numbered({"state": {}, "param_groups": [{"params": ["a", "b"]}]})
    False
    """
    match value:
        case {"state": dict(), "param_groups": [_, *_] as groups}:
            numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
            return any(numbers) and all(isinstance(one, list) and all(map(_is_number, one)) for one in numbers)
    return False


def is_numbered_state(value: object) -> bool:
    """Whether `value` is the "state" entry of such an optimizer."""
    return isinstance(value, dict) and bool(value) and all(map(_is_number, value))


def with_names(root: Any, names: Sequence[str] | None, where: Path) -> Any:
    """`root`, a nested state dict, with names instead of numbers in each of its optimizers.

    `names`: of the parameters of all its optimizers, one optimizer after another in file order. None: the names that an
    optimizer of named parameters stored itself (`param_names`); without them it stays unchanged. Raises
    `CheckpointMismatch` with all problems.
    """
    nodes = list(_nodes(root))
    optimizers = [(path, value) for path, value in nodes if is_numbered(value)]
    # The shapes of tensors outside of optimizers, by name.
    shapes: dict[object, set[tuple[int, ...]]] = {}
    for path, value in nodes:
        if isinstance(value, Tensor) and path:
            shapes.setdefault(path[-1], set()).add(tuple(value.shape))
    problems: list[str] = []
    if names is not None:
        counts = [(path, len(_numbers(value))) for path, value in optimizers]
        count = sum(number for _, number in counts)
        if not optimizers:
            problems.append("no optimizer whose parameters are numbered")
        elif count != len(names):
            places = ", ".join(f"{key_of(path) or 'the file'} has {number}" for path, number in counts)
            problems.append(f"{len(names)} names for {count} numbered parameters: {places}")
        problems += [f"{name} is named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    names_of: dict[int, Sequence[str]] = {}
    left = iter(names or ())
    for path, value in optimizers if not problems else ():
        own = list(islice(left, len(_numbers(value)))) if names is not None else _stored_names(value)
        if own is not None:
            problems += _differences(key_of(path) or "the file", value, own, shapes)
            names_of[id(value)] = own
    if problems:
        raise CheckpointMismatch(f"{where}: names of the optimizer's parameters do not fit", problems)
    return _with_names(root, names_of) if names_of else root


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nodes(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every entry of a nested state dict, except the contents of its numbered optimizers."""
    yield path, value
    if isinstance(value, dict | list | tuple) and not is_numbered(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nodes(item, (*path, key))


def _numbers(value: dict[str, Any]) -> list[int]:
    return [number for group in value["param_groups"] for number in group["params"]]


def _stored_names(value: dict[str, Any]) -> list[str] | None:
    names = [group.get("param_names") for group in value["param_groups"]]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in names):
        return None
    flat = [str(name) for one in names for name in one]
    return flat if len(flat) == len(_numbers(value)) == len(set(flat)) else None


def _differences(
    where: str, value: dict[str, Any], names: Sequence[str], shapes: Mapping[object, set[tuple[int, ...]]]
) -> Iterator[str]:
    """Evidence that the names do not belong to these numbers."""
    if sorted(_numbers(value)) != list(range(len(names))):
        yield f"{where}: expected the numbers 0 to {len(names) - 1}, found {str(sorted(_numbers(value)))[:80]}"
        return
    for number, entries in value["state"].items():
        if number not in range(len(names)):
            yield f"{where}: state of {number!r}, which is in no group of parameters"
            continue
        known = shapes.get(names[number], set())
        for item, tensor in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(tensor, Tensor) or not known or tuple(tensor.shape) in known:
                continue
            # For unknown state, only tensors with as many dims as the parameter count; counters and factors have fewer.
            if item in _PER_ELEMENT or (tensor.dim() and tensor.dim() in map(len, known)):
                yield f"{where}: {item} of number {number} is {tuple(tensor.shape)}, {names[number]} is {min(known)}"


def _with_names(value: Any, names_of: Mapping[int, Sequence[str]]) -> Any:
    names = names_of.get(id(value))
    if names is not None:
        groups = [{**group, "params": [names[n] for n in group["params"]]} for group in value["param_groups"]]
        return {**value, "state": {names[n]: entries for n, entries in value["state"].items()}, "param_groups": groups}
    if isinstance(value, dict):
        return {key: _with_names(item, names_of) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_names(item, names_of) for item in value)
    return value
