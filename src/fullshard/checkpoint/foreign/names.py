"""Names of parameters: those of other programs, and rules from one to another.

A rule renames whichever part of a key's path is a parameter's name, so the optimizer's state of a parameter, at
`("optimizer", "state", name, "exp_avg")`, follows it.

torchtitan rotates neighbouring pairs of a head's elements, Hugging Face and our trainer its two halves; the rows of the
query and key weights are therefore in another order, and are put into the right one as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import CheckpointMismatch
from ..plan import Box, whole
from .source import KeyPath, Source, TensorInfo, place

Style = Literal["fullshard", "hf", "titan"]
STYLES: tuple[Style, ...] = ("fullshard", "hf", "titan")

# One line for each parameter of a Llama: its name in our trainer, in Hugging Face's files, in torchtitan.
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
# Names that torchtitan had for the same parameter at other times.
_TITAN_TOO = {
    "output.weight": ("lm_head.weight",),
    **{f"layers.#.attention.{w}.weight": (f"layers.#.attention.qkv_linear.{w}.weight",) for w in ("wq", "wk", "wv")},
}
_ROTATED = (".attention.wq.weight", ".attention.wk.weight")  # names of the first column

# What wrappers put into names: DDP in front of them, the others anywhere.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_DDP = re.compile(r"^module\.")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in blocks of `head_dim`: row `order[i]` of a block in the source is row i in what is read."""

    head_dim: int
    to_halves: bool

    def order(self) -> Tensor:
        """(head_dim,) int64"""
        half = self.head_dim // 2
        rows = torch.arange(self.head_dim)
        return rows.view(half, 2).t().reshape(-1) if self.to_halves else rows.view(2, half).t().reshape(-1)


@dataclass(frozen=True, slots=True)
class Renaming:
    """How names of a source become others. `rename(name)` is the new name and what happens to its rows, None where it
    knows no such name."""

    title: str
    rename: Callable[[str], tuple[str, Rows | None] | None]
    strict: bool = True  # a tensor without a known name is an error


def strip_wrappers(name: str) -> str:
    """`name` without what DDP, activation checkpointing, `torch.compile` and FSDP1 put into it.

    >>> strip_wrappers("module.layers.0._checkpoint_wrapped_module._orig_mod.weight")
    'layers.0.weight'
    """
    return _DDP.sub("", _WRAPPERS.sub("", name))


UNWRAPPED = Renaming("without wrappers", lambda name: (strip_wrappers(name), None), strict=False)


def llama(source: Style, target: Style, *, head_dim: int | None = None) -> Renaming:
    """From the names of one program for a Llama to those of another. `head_dim`: elements of one attention head, wanted
    where torchtitan is one of the two and not both.

    >>> llama("hf", "fullshard").rename("model.layers.3.mlp.up_proj.weight")
    ('layers.3.ffn.up.weight', None)
    """
    for style in (source, target):
        if style not in STYLES:
            raise ValueError(f"names: expected one of {', '.join(STYLES)}, found {style!r}")
    turns = (source == "titan") != (target == "titan")
    if turns and (head_dim is None or head_dim < 2 or head_dim % 2):
        raise ValueError(
            f"head_dim: from {source} to {target} the rows of query and key weights change their order within a head; "
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
    """Some of another source, under other names.

    `only`, `skip`: patterns (`model.*`) of keys that are wanted and that are not. `strip`: what is taken off the front
    of every key that is left, which all must have. `renaming`: applied to what is then left. Raises
    `CheckpointMismatch` with everything that does not fit: patterns that match nothing, names without a rule, two keys
    that would become one.
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
        self._wrong = [*_unused(only, inner), *_unused(skip, inner)]
        everything = [(key, info.path) for key, info in inner.tensors.items()]
        for key, path in [*everything, *inner.values.items()]:
            wanted = not only or any(fnmatchcase(key, pattern) for pattern in only)
            if not wanted or any(fnmatchcase(key, pattern) for pattern in skip):
                self.left_out += 1
                continue
            self._take(key, path, strip, renaming)
        if self._wrong:
            raise CheckpointMismatch(f"{inner.path}: names do not fit", self._wrong)

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
                self._wrong.append(f"{key}: no name of {renaming.title}; leave it out with skip")
                return
        new = ".".join(map(str, short))
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
                self._wrong.append(f"{key} has {tensor.shape[0]} rows, no multiple of a head's {rows.head_dim}")
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
        # The rows of whole heads around those that are wanted, since a head's rows are mixed.
        first = wanted.offsets[0] // rows.head_dim * rows.head_dim
        last = -(-(wanted.offsets[0] + wanted.lengths[0]) // rows.head_dim) * rows.head_dim
        heads = Box((first, *wanted.offsets[1:]), (last - first, *wanted.lengths[1:]))
        turned = self.inner.read(old, heads).unflatten(0, (-1, rows.head_dim))[:, rows.order()].flatten(0, 1)
        return place(turned, heads, wanted).clone()

    def value(self, key: str) -> Any:
        value = self.inner.value(self._inner_key[key])
        # The optimizer's groups name their parameters.
        return self._params_of(value) if self.values[key][-1] == "params" else self._params_in(value)

    def _params_in(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self._params_of(v) if k == "params" else self._params_in(v) for k, v in value.items()}
        return [self._params_in(item) for item in value] if isinstance(value, list) else value

    def _params_of(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [self._names.get(name, name) if isinstance(name, str) else name for name in value]

    def verify(self) -> list[str]:
        return self.inner.verify()

    def close(self) -> None:
        self.inner.close()


def _without(path: KeyPath, strip: str) -> KeyPath | None:
    """The path without `strip` ("state.model.") at its front; None where it does not begin so."""
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


def _unused(patterns: Iterable[str], source: Source) -> list[str]:
    keys = [*source.tensors, *source.values]
    return [
        f"no key matches the pattern {pattern!r}"
        for pattern in patterns
        if not any(fnmatchcase(k, pattern) for k in keys)
    ]


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """The elements of a head that a Hugging Face `config.json` tells of, None where it does not."""
    if isinstance(config.get("head_dim"), int):
        return int(config["head_dim"])
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` beside a checkpoint, empty where there is none."""
    import json

    path = folder / "config.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}
