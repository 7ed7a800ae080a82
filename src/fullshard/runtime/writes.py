"""Writes to full parameters inside a forward: they reach no shard, so they are an error instead of being lost.

Two signs, each parameter by itself:

    versions     count writes through the parameter and its views (`add_`, `clamp_` under no_grad): in every forward
    sums         of the bits; also writes through `.data`, which no version counts: in the first forward of a unit, in
                 every one with FULLSHARD_CHECK=1. Not seen: a write that only permutes values, and one through `.data`
                 that begins later.

Nothing is looked at where full parameters are the shards (one rank, one dtype): there a write lasts.
"""

from __future__ import annotations

import torch

from .._torch_compat import in_transform, version_of, versions_of
from ..param import ExtensionGroup, ShardedParam
from .bits import sum_of_bits
from .unit import Unit

State = tuple[list[int], list[int] | None]


def state_before(unit: Unit, *, sums: bool) -> State | None:
    """How the full parameters are when a forward begins; None where nothing is to be compared."""
    if not unit.releases:
        return None
    return _versions(unit), _sums(unit) if sums and not in_transform() else None


def refuse_writes(unit: Unit, before: State) -> None:
    """Raise `RuntimeError` when the forward that began with `before` wrote to a full parameter."""
    versions, sums = before
    now = _versions(unit)
    written = [a != b for a, b in zip(versions, now, strict=True)] if now != versions else [False] * len(now)
    if sums is not None and not in_transform():
        written = [was or a != b for was, a, b in zip(written, sums, _sums(unit), strict=True)]
    names = [param.name for param, was in zip(_params(unit), written, strict=True) if was]
    if names:
        raise RuntimeError(
            f"{unit.record.name}: expected a forward that only reads its parameters, found {', '.join(names)} written: "
            f"what stands there is a gathered copy, and what is written to it is lost when it is freed; write the "
            f"sharded parameter between steps, or under fullshard.full_params(model, writeback=True), or keep what "
            f"forward changes in a buffer"
        )


def _params(unit: Unit) -> list[ShardedParam]:
    return [param for group in unit.groups if not group.shares_memory for param in group.params]


def _versions(unit: Unit) -> list[int]:
    fulls = [param.full for param in _params(unit)]
    try:
        return versions_of(fulls)
    except RuntimeError:  # some are of inference mode, and count nothing
        return [0 if full.is_inference() else version_of(full) for full in fulls]


def _sums(unit: Unit) -> list[int]:
    extended = {id(p) for group in unit.groups if isinstance(group, ExtensionGroup) for p in group.params}
    with torch.no_grad():
        return [0 if id(param) in extended else sum_of_bits(param.full) for param in _params(unit)]
