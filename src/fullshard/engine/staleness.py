"""Whether full parameters that were kept are still those of the shards: by version counters, optimizer steps, and a
sample of the shards for writes that leave no sign."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import local_of
from ..param import ParamGroup
from ..schedule import UnitRecord
from .optimizer_steps import optimizer_steps

# ---- bits ------------------------------------------------------------------------------------------------------------
# The bits of a tensor as one number: a change of any one of its elements changes it.

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of the elements of this rank's part, their bits taken as integers, modulo 2**64; waits for a device."""
    plain = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if plain.is_meta or not plain.numel():
        return 0
    return int(plain.reshape(-1).view(SAME_SIZE.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64))


# ---- samples ---------------------------------------------------------------------------------------------------------
# Shards that changed without a sign while full parameters were kept.
#
# Full parameters that stay after an evaluation are used again unless shards were written since, which versions and
# optimizer steps tell. A write through `.data`, and torch's list operations on DTensors, leave no such sign.
# So a few thousand elements of the shards are added up when they are gathered, and again before what was gathered is
# used once more. It is no reason to gather anew: a rank whose rows did not change would not. It is an error.
#
# On a CPU alone: on another device it would wait for what is under way. What changes few elements may be missed.

_ELEMENTS = 4096


class Staleness:
    """Of which shards the full parameters of one unit were made. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord) -> None:
        self._groups, self._record = groups, record
        self.versions: tuple[tuple[int, ...], ...] = ()
        # None where full parameters are not kept for later forwards.
        self._sample: tuple[int, ...] | None = None

    def note(self, thread: int) -> None:
        """The full parameters are made of the shards as they are now. `thread`: whose optimizer steps count."""
        self.versions = self._versions_now(thread)
        record = self._record
        keeps = record.keeps_in_evaluation and not record.reshard_after_forward
        kept = keeps or record.narrows or not record.reshard_after_backward
        self._sample = self._sums() if kept else None

    def is_written(self, thread: int) -> bool:
        """Whether shards were written since. Raises `RuntimeError` when they were written without a sign."""
        if self.versions != self._versions_now(thread):
            return True
        self.refuse_unseen_writes()
        return False

    def refuse_unseen_writes(self) -> None:
        """Raise `RuntimeError` when the shards are not those of which the full parameters were made, though nothing
        says so."""
        for group in self._groups:
            group.refuse_assigned_data()
        if self._sample is not None and self._sample != self._sums():
            raise RuntimeError(
                f"{self._record.name}: expected that its sharded parameters are what they were when they were "
                f"gathered, found other values and no sign of a write: full parameters are kept after a forward here "
                f"(reshard_after_forward=False or a number), and a write through .data or by torch._foreach is not "
                f"seen. Write with p.copy_() and the like, without gradients, or call reshard() of each sharded module "
                f"afterwards"
            )

    def _versions_now(self, thread: int) -> tuple[tuple[int, ...], ...]:
        steps, versions = -1, []
        for group in self._groups:
            versions.append(group.versions())
            if steps == -1 and group.may_be_stepped:
                steps = optimizer_steps(thread)
        return ((steps,), *versions)

    def _sums(self) -> tuple[int, ...]:
        """Over elements of the shards, by group."""
        found = []
        for group in self._groups:
            flat = group.flat
            if group.shares_memory or flat.device.type != "cpu":
                continue
            step = max(1, flat.numel() // _ELEMENTS)
            found.append(sum_of_bits(flat[::step]))
        return tuple(found)
