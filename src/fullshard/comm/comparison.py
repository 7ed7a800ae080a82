"""Compares this rank's digest with those of the other ranks of a reduction, before its sum is used.

    way                                how the digest travels                                         further message
    gradients are exchanged            in each chunk after its flags (`ReduceLayout.facts_offset`);    none
                                       every rank compares the rows that it receives with its own
    the backend reduces them           minimum and maximum of it                                      16 bytes
    replicas                           minimum and maximum of it, and of what replicas alone share    32 bytes
    nothing is sharded (`replicate`)   minimum and maximum of it, and of what replicas alone share    32 bytes
    `communication="torch"`, custom    not sent: fullshard does not control these messages

A digest is 64 bits, of which the lowest is 0. In a chunk it is eight numbers from 0 to 255, which every floating dtype
represents exactly; their sums are finite and need no clearing. A rank that found a difference sends all ones from then
on, which is no valid digest. So all ranks of the mesh find the difference, whichever of them differ.

On a CPU the result is available when the messages arrive. On a device it is copied to pinned memory, followed by an
event, so that a check one step later does not wait.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions

from .._torch import backend_of
from ..layout import FACTS_NUMEL
from ..peers import Scope
from .data_group import DataGroup, Work, drain, with_op
from .group import ShardGroup

# Dtypes that represent all numbers from 0 to 255 exactly.
CARRIERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_MOST = (1 << 63) - 1


class HostCopy:
    """Flags on their way from a device to the host."""

    def __init__(self, source: Tensor) -> None:
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.accelerator.current_stream(source.device).record_event()

    def flags(self) -> list[bool]:
        """Whether each element is not zero. Waits, on the host, until the copy arrived."""
        self._event.synchronize()
        return [bool(flag) for flag in self._host.view(-1).unbind()]


class Comparison:
    """One digest that travels with one reduction on `device`. `shared`: a digest of values equal among this rank's
    replicas only; 0 without replicas. `rows`: a cache of the digest as message elements, by dtype, because a digest
    often stays the same from step to step."""

    def __init__(self, digest: int, device: torch.device, shared: int, rows: dict[torch.dtype, Tensor]) -> None:
        if digest & 1 or not 0 <= digest < 1 << 64:
            raise ValueError(f"digest: expected 64 bits of which the lowest is 0, found {digest:#x}")
        self._digest, self._device, self._shared, self._rows = digest, device, shared, rows
        # Whether ranks differ; on a device a tensor once something was compared.
        self._differs: bool | Tensor = False
        self._work: Work | None = None
        self._extremes: Tensor | None = None
        self._landed: HostCopy | None = None
        # Whether `differs` answers without waiting.
        self.is_here = True

    def _row(self, dtype: torch.dtype) -> Tensor:
        """Returns the digest as (FACTS_NUMEL,) in `dtype`."""
        found = self._rows.get(dtype)
        if found is None:
            values = list(self._digest.to_bytes(FACTS_NUMEL, "little"))
            with torch.inference_mode(False):
                found = self._rows[dtype] = brought(values, dtype, self._device)
        return found

    def write(self, rows: Tensor) -> None:
        """Write the digest, or the mark of a difference found before, into `rows` (n, FACTS_NUMEL) of the message."""
        if isinstance(self._differs, Tensor):
            rows.copy_(torch.where(self._differs, 255.0, self._row(rows.dtype)))
        elif self._differs:
            rows.fill_(255.0)
        else:
            rows.copy_(self._row(rows.dtype))

    def met(self, rows: Tensor) -> None:
        """Compare with the received `rows` (n, FACTS_NUMEL)."""
        own = self._row(rows.dtype)
        if rows.device.type == "cpu":
            self._differs = bool(self._differs) or not torch.equal(rows, own.expand_as(rows))
            return
        found = rows.ne(own).any()
        self._differs = found | self._differs if isinstance(self._differs, Tensor) else found

    def ask_sharers(self, shard: ShardGroup) -> None:
        """All-reduce the extremes over the shard ranks: the backend sums gradients, so no rank sees others' chunks."""
        self._ask(shard, [self._digest])

    def ask_replicas(self, replicate: ShardGroup) -> None:
        """All-reduce the extremes over the replicas; the shard ranks compared before."""
        self._ask(replicate, [self._digest, self._shared])

    def _ask(self, group: ShardGroup, digests: list[int]) -> None:
        halves = list(map(_signed, digests))
        values = brought([*halves, *(~half for half in halves)], torch.int64, self._device)
        if isinstance(self._differs, Tensor):
            values = torch.where(self._differs, _MOST, values)
        elif self._differs:
            values.fill_(_MOST)
        self._extremes = values
        self._work = group.all_reduce(values, dist.ReduceOp.MAX)

    def answered(self) -> None:
        """Wait for the extremes and compare them."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        extremes, self._extremes = self._extremes, None
        if extremes is not None:
            # The maxima, and the complements of the minima.
            greatest, least = extremes.view(2, -1)
            found = greatest.ne(least.bitwise_not()).any()
            self._differs = found if found.device.type != "cpu" else bool(found)

    def arrive(self) -> None:
        """After the reduction arrived: start copying the result to the host."""
        if self._extremes is not None:
            self.answered()
        if isinstance(self._differs, Tensor):
            self._landed, self.is_here = HostCopy(self._differs), False

    def abandon(self) -> None:
        """Wait for its own message, if any, and discard it."""
        work, self._work = self._work, None
        if work is not None:
            drain(work)

    def differs(self) -> bool:
        """Whether some rank has another digest. Call it after `arrive`; on a device, one step later."""
        if self._landed is not None:
            self._differs, self._landed, self.is_here = self._landed.flags()[0], None, True
        return bool(self._differs)


def brought(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on `device`, without blocking the host."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _signed(digest: int) -> int:
    """The same 64 bits as an int64; never its maximum, because the lowest bit is 0."""
    return digest - (1 << 64) if digest >> 63 else digest


def alike(scope: Scope, said: str) -> bool | None:
    """Whether `said` is the same on all ranks of `scope`; collective, 16 bytes over each axis of its mesh.

    None without connections for it: if the group has no backend for the CPU ("nccl" alone; torch's default is
    "cpu:gloo,cuda:nccl"), and before a root formed.
    """
    groups = [group for group in scope.groups.values() if isinstance(group, DataGroup) and group.purpose == "check"]
    if not groups:
        return None
    extremes = torch.tensor([number_of(said), -number_of(said)])
    options = with_op(AllreduceOptions(), dist.ReduceOp.MAX)
    # One axis after the other; data groups were opened in the order of the mesh's axes.
    for group in groups:
        # Call the backend directly, so that tools that count or trace collectives see only the model's.
        group.issue(backend_of(group.group, extremes.device).allreduce, [extremes], options).wait()
    most, least = extremes.tolist()
    return bool(most == -least)


def number_of(said: str) -> int:
    """62 bits of `said`: an int64 of either sign."""
    return int.from_bytes(hashlib.blake2s(said.encode(), digest_size=8).digest(), "big") >> 2
