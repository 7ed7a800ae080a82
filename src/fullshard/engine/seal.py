"""Whether somebody touched the parameters of a unit: one seal, taken at each gather and asked at each use.

    take             at a gather: what the shards are, in our memory and with these versions
    is_broken        full parameters are there: were shards written or replaced since? Then they are gathered again
    before_forward   a forward begins: what the full parameters are
    refuse_writes    it ends: a full parameter is a copy, and a write to it would be lost

Version counters show most writes, and steps of optimizers those of `foreach=True` and `fused=True`, which write
DTensors without bumping versions; steps are counted by thread, as ranks of a test may be threads. Writes through
`.data` and torch's list operations on DTensors show in neither (ADR 0007):

    shards             where full parameters are kept after a forward, a few thousand elements are summed at the gather,
                       and again before reuse. A difference raises instead of gathering again, because a rank whose rows
                       did not change would not take part. CPU only: elsewhere it would synchronise with the device
    full parameters    in the first forward of a unit, and in every one with FULLSHARD_CHECK=1, all bits are summed.
                       Misses permuted values, and writes that begin later

Changes of few elements may be missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import in_transform, local_of, version_of
from ..param import ExtensionGroup, ParamGroup, ShardedParam, holds_bits
from ..schedule import Full, UnitRecord
from .channels import UnitChannels
from .optimizer_steps import optimizer_steps

# How many elements of the shards are summed.
_ELEMENTS = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# Versions of the full parameters, and sums of their bits.
State = tuple[list[int], list[int] | None]


class Seal:
    """Notes what the shards of one unit were when its full parameters were gathered. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord, channels: UnitChannels) -> None:
        self._groups, self._record, self._channels = groups, record, channels
        # Versions of the shards, by group; and the optimizer steps until then, -1 if no optimizer may write them.
        self.versions: list[tuple[int, ...]] = []
        self._steps = -1
        # None if full parameters are not kept for later forwards.
        self._sample: list[int] | None = None
        # The full parameters that are copies of shards.
        self._fulls: list[Tensor] = []

    # ---- shards --------------------------------------------------------------------------------------------

    def take(self, thread: int) -> bool:
        """The full parameters are gathered from the shards as they are now. `thread`: whose optimizer steps count.

        Returns whether the shards are in our memory; else `Unit.repair` comes first, and then this again. Raises
        `RuntimeError` for what `ParamGroup.refuse_ignored` refuses."""
        self.versions, self._steps, self._fulls, whole = [], -1, [], True
        for group in self._groups:
            ours, may_be_stepped, versions = group.look()
            whole = whole and ours
            self.versions.append(versions)
            if may_be_stepped:
                self._steps = optimizer_steps(thread)
            if not group.shares_memory:
                self._fulls += group.fulls
        plan = self._record.plan
        kept = plan.keeps_in_evaluation and not plan.reshard_after_forward
        kept = kept or plan.keeps_secondary or not plan.reshard_after_backward
        self._sample = self._sums() if kept else None
        return whole

    def is_broken(self, thread: int) -> bool:
        """Whether shards were written or replaced since `take`. Raises `RuntimeError` for a write that neither versions
        nor steps show."""
        full, whole, steps, written = self._record.full, True, -1, len(self.versions) != len(self._groups)
        for group, before in zip(self._groups, self.versions, strict=False):
            ours, may_be_stepped, versions = group.look(group.swap.fulls if full is Full.FULL else None)
            whole = whole and ours
            written = written or versions != before
            if may_be_stepped:
                steps = optimizer_steps(thread)
        if written or steps != self._steps:
            return True
        if self._sample is not None and self._sample != self._sums():
            raise RuntimeError(
                f"{self._record.name}: expected that its sharded parameters are what they were when they were "
                f"gathered, found other values and no sign of a write: full parameters are kept after a forward here "
                f"(reshard_after_forward=False or a number), and a write through .data or by torch._foreach is not "
                f"seen. Write with p.copy_() and the like under no_grad, or call reshard() of each sharded module "
                f"afterwards"
            )
        secondary = self._channels.secondary
        if secondary is not None and (
            full is Full.SECONDARY or (full is Full.PENDING and self._channels.arriving is secondary.gathers)
        ):
            return not secondary.is_whole()
        return not whole

    def _sums(self) -> list[int]:
        """The sums of sampled shard elements, by group."""
        found = []
        for group in self._groups:
            flat = group.flat
            if not group.shares_memory and flat.device.type == "cpu":
                found.append(sum_of_bits(flat[:: max(1, flat.numel() // _ELEMENTS)]))
        return found

    # ---- full parameters -----------------------------------------------------------------------------------
    # Not where they are the shards (one rank, one dtype): there a write persists.

    def before_forward(self, *, sums: bool) -> State | None:
        """The state of the full parameters; None if they need no check. `sums`: with their bits."""
        fulls = self._fulls
        if not fulls:
            return None
        try:
            versions = list(map(version_of, fulls))
        except RuntimeError:
            versions = _versions_in_inference(fulls)
        return versions, self._bits() if sums and not in_transform() else None

    def refuse_writes(self, before: State) -> None:
        """Raise `RuntimeError` if the forward that began with `before` wrote to a full parameter."""
        versions, sums = before
        try:
            now = list(map(version_of, self._fulls))
        except RuntimeError:
            now = _versions_in_inference(self._fulls)
        if now == versions and sums is None:
            return
        written = [a != b for a, b in zip(versions, now, strict=True)]
        if sums is not None and not in_transform():
            written = [was or a != b for was, a, b in zip(written, sums, self._bits(), strict=True)]
        params = [param for param, was in zip(self._copied(), written, strict=True) if was]
        if params:
            remedy = (
                "write the sharded parameter between steps, or under fullshard.full_params(model, writeback=True), or "
                "keep state that forward changes in a buffer"
            )
            if holds_bits(params[0].sharded):
                remedy = (
                    "bitsandbytes packs 4-bit weights anew in eval() on this CPU: call model.train() to train, or set "
                    "support_avx512bf16_for_cpu = False on each Linear4bit before its first forward"
                )
            raise RuntimeError(
                f"{self._record.name}: expected a forward that only reads its parameters, found "
                f"{', '.join(param.name for param in params)} written: a full parameter is a gathered copy, and the "
                f"write is lost when it is freed; {remedy}"
            )

    def _copied(self) -> list[ShardedParam]:
        """The parameters of `_fulls`."""
        return [param for group in self._groups if not group.shares_memory for param in group.params]

    def _bits(self) -> list[int]:
        extended = {id(p) for group in self._groups if isinstance(group, ExtensionGroup) for p in group.params}
        with torch.no_grad():
            return [0 if id(param) in extended else sum_of_bits(param.full) for param in self._copied()]


def _versions_in_inference(fulls: Iterable[Tensor]) -> list[int]:
    """Inference tensors have no version."""
    return [0 if full.is_inference() else version_of(full) for full in fulls]


def sum_of_bits(tensor: Tensor) -> int:
    """The sum modulo 2**64 of the local elements, with their bits read as integers: a change of any single element
    changes it. Synchronises with the device."""
    plain = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if plain.is_meta or not plain.numel():
        return 0
    return int(plain.reshape(-1).view(_INTEGERS.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64))
