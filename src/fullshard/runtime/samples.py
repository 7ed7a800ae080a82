"""Shards that changed without a sign while full parameters were kept.

Full parameters that stay after an evaluation are used again unless shards were written since, which versions and
optimizer steps tell (unit.py). A write through `.data`, and torch's list operations on DTensors, leave no such sign. So
a few thousand elements of the shards are added up when they are gathered, and again before what was gathered is used
once more. It is no reason to gather anew: a rank whose rows did not change would not. It is an error.

On a CPU alone: on another device it would wait for what is under way. What changes few elements may be missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bits import sum_of_bits

if TYPE_CHECKING:
    from .unit import Unit

_ELEMENTS = 4096


def sample_of(unit: Unit) -> tuple[int, ...] | None:
    """What to compare later; None where full parameters are not kept for later forwards."""
    record = unit.record
    keeps = record.keeps_in_evaluation and not record.reshard_after_forward
    return _sums(unit) if keeps or record.narrows or not record.reshard_after_backward else None


def _sums(unit: Unit) -> tuple[int, ...]:
    """Over elements of the shards, by group."""
    found = []
    for group in unit.groups:
        flat = group.flat
        if group.shares_memory or flat.device.type != "cpu":
            continue
        step = max(1, flat.numel() // _ELEMENTS)
        found.append(sum_of_bits(flat[::step]))
    return tuple(found)


def refuse_unseen_writes(unit: Unit) -> None:
    """Raise `RuntimeError` when the shards are not those of which the full parameters were made, though nothing says
    so."""
    for group in unit.groups:
        group.refuse_assigned_data()
    if unit.gathered_sample is not None and unit.gathered_sample != _sums(unit):
        raise RuntimeError(
            f"{unit.record.name}: expected that its sharded parameters are what they were when they were gathered, "
            f"found other values and no sign of a write: full parameters are kept after a forward here "
            f"(reshard_after_forward=False or a number), and a write through .data or by torch._foreach is not seen. "
            f"Write with p.copy_() and the like, without gradients, or call reshard() of each sharded module afterwards"
        )
