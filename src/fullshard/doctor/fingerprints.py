"""Fingerprints of values, by which two batches or two models are held against each other without keeping both."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def of_model(model: nn.Module) -> dict[str, object]:
    """Returns the fingerprint of each parameter and buffer that has values, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: of_tensor(tensor) for name, tensor in tensors if not is_lazy(tensor)}


def of_value(value: object, name: str) -> dict[str, object]:
    """Returns the fingerprints of everything in `value` that can be compared, by where it is: `batch(0)["x"][1]`.
    Tensors, numbers, texts and arrays are, in mappings, sequences and objects with fields; anything else is left
    out."""
    return dict(_leaves(value, name, set()))


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Where two of them differ, in order; what only one has differs."""
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name, ()) != after.get(name, ())]


def _leaves(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        yield name, repr(value)  # so that NaN equals NaN
        return
    if isinstance(value, Tensor):
        yield name, of_tensor(value)
        return
    if id(value) in seen:
        return
    inner = seen | {id(value)}
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        yield f"len({name})", len(value)
        for place, each in enumerate(value):
            yield from _leaves(each, f"{name}[{place}]", inner)
    elif isinstance(value, (set, frozenset)):
        yield name, sorted(map(repr, value))
    elif hasattr(value, "__array_interface__") and hasattr(value, "tobytes"):
        yield name, (str(value.dtype), tuple(value.shape), _digest(value.tobytes()))
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        for field, each in vars(value).items() if hasattr(value, "__dict__") else ():
            if not callable(each):
                yield from _leaves(each, f"{name}.{field}", inner)


def of_tensor(tensor: Tensor) -> object:
    """Shape, dtype and a digest of the bits; without the bits where there are none or torch cannot show them."""
    kind = str(tensor.dtype), tuple(tensor.shape)
    if tensor.is_meta:
        return kind
    try:
        dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return (*kind, _digest(flat.view(torch.uint8).numpy().data))
    except (RuntimeError, TypeError, NotImplementedError):
        return kind


def _digest(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
