"""The value that a parameter had when it was sharded, as 64 bits, and whether its shard was written since."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import local_of, version_of
from .digest import can_digest, digest
from .sharded import ShardedParam
from .swap import Found


class Initial(NamedTuple):
    """Digests are tensors without dims on the device of what they are of: `fully_shard` waits for no device."""

    # Of the full parameter (of a DTensor, what this rank had of it), and of the shard that was cut from it.
    full: Tensor
    shard: Tensor
    # Where the shard was and how often it had been written.
    local: weakref.ref[Tensor]
    versions: tuple[int, int]


def note_initial(params: Sequence[ShardedParam], found: Sequence[Found]) -> None:
    """Remember the values in `found`, of which `params` were made; not of those without data, and of subclasses."""
    for param, source in zip(params, found, strict=True):
        full = local_of(source.parameter) if isinstance(source.parameter, DTensor) else source.parameter
        if can_digest(full) and can_digest(param.local):
            param.initial = Initial(digest(full), digest(param.local), weakref.ref(param.local), _versions(param))


def note_loaded(param: ShardedParam, value: Tensor) -> None:
    """`param` was made of the full `value`, or loaded from it: that is what ranks compare now."""
    if can_digest(value) and can_digest(param.local):
        param.initial = Initial(digest(value), digest(param.local), weakref.ref(param.local), _versions(param))


def is_written(param: ShardedParam) -> bool:
    """Whether the shard was written, in whatever way, or replaced since. Of one without a noted value: True."""
    noted = param.initial
    if noted is None or noted.local() is not param.local or noted.versions != _versions(param):
        return True
    return bool((digest(param.local) != noted.shard).item())


def _versions(param: ShardedParam) -> tuple[int, int]:
    return version_of(param.sharded), version_of(param.local)


def full_digests(params: Sequence[ShardedParam]) -> list[int | None]:
    """The noted digests as numbers; None where none was noted. One synchronisation for each device."""
    values: list[int | None] = [None] * len(params)
    by_device: dict[torch.device, list[int]] = {}
    for i, param in enumerate(params):
        if param.initial is not None:
            by_device.setdefault(param.initial.full.device, []).append(i)
    for places in by_device.values():
        stacked = torch.stack([initial.full for i in places if (initial := params[i].initial) is not None])
        for i, value in zip(places, stacked.tolist(), strict=True):
            values[i] = value
    return values
