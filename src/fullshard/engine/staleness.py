"""Detects stale full parameters: by version counters, optimizer steps, and a sample of the shards for other writes."""

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
# A checksum of a tensor's bits: a change of any single element changes it.

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_of_bits(tensor: Tensor) -> int:
    """The sum modulo 2**64 of the local elements, with their bits read as integers. Synchronises with the device."""
    plain = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if plain.is_meta or not plain.numel():
        return 0
    return int(plain.reshape(-1).view(SAME_SIZE.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64))


# ---- samples ---------------------------------------------------------------------------------------------------------
# Detects unnoticed writes to shards while full parameters are kept.
#
# Kept full parameters are reused unless versions or optimizer steps show a write to the shards. Writes through `.data`
# and torch's list operations on DTensors show in neither. So a few thousand elements of the shards are summed at the
# gather, and again before reuse. A difference raises instead of gathering again, because a rank whose rows did not
# change would not take part.
#
# CPU only: elsewhere it would synchronise with the device. Changes of few elements may be missed.

_ELEMENTS = 4096


class Staleness:
    """The shard versions from which the full parameters of one unit were gathered. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord) -> None:
        self._groups, self._record = groups, record
        self.versions: tuple[tuple[int, ...], ...] = ()
        # None if full parameters are not kept for later forwards.
        self._sample: tuple[int, ...] | None = None

    def note(self, thread: int) -> None:
        """The full parameters are gathered from the current shards. `thread`: whose optimizer steps count."""
        self.versions = self._versions_now(thread)
        record = self._record
        keeps = record.plan.keeps_in_evaluation and not record.plan.reshard_after_forward
        kept = keeps or record.plan.keeps_secondary or not record.plan.reshard_after_backward
        self._sample = self._sums() if kept else None

    def is_written(self, thread: int) -> bool:
        """Whether shards were written since `note`. Raises `RuntimeError` on a write that versions do not show."""
        if self.versions != self._versions_now(thread):
            return True
        self.refuse_unseen_writes()
        return False

    def refuse_unseen_writes(self) -> None:
        """Raise `RuntimeError` if the shards changed since `note` although versions and steps did not."""
        for group in self._groups:
            group.refuse_ignored()
        if self._sample is not None and self._sample != self._sums():
            raise RuntimeError(
                f"{self._record.name}: expected that its sharded parameters are what they were when they were "
                f"gathered, found other values and no sign of a write: full parameters are kept after a forward here "
                f"(reshard_after_forward=False or a number), and a write through .data or by torch._foreach is not "
                f"seen. Write with p.copy_() and the like under no_grad, or call reshard() of each sharded module "
                f"afterwards"
            )

    def _versions_now(self, thread: int) -> tuple[tuple[int, ...], ...]:
        steps, versions = -1, []
        for group in self._groups:
            may_be_stepped, counts = group.versions()
            versions.append(counts)
            if may_be_stepped and steps == -1:
                steps = optimizer_steps(thread)
        return ((steps,), *versions)

    def _sums(self) -> tuple[int, ...]:
        """The sums of sampled shard elements, by group."""
        found = []
        for group in self._groups:
            flat = group.flat
            if group.shares_memory or flat.device.type != "cpu":
                continue
            step = max(1, flat.numel() // _ELEMENTS)
            found.append(sum_of_bits(flat[::step]))
        return tuple(found)
