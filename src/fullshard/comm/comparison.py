"""A digest of this rank, compared with those of the ranks that a reduction goes to, before its sum is used.

    way                                how the digest travels                                         further message
    gradients are exchanged            in each chunk after presence (`ReduceLayout.facts_offset`);    none
                                       every rank compares the rows that it receives with its own
    the backend reduces them           minimum and maximum of it                                      16 bytes
    ranks that replicate               minimum and maximum of it, and of what replicas alone share    32 bytes
    one rank shares (`replicate`)      likewise                                                       32 bytes
    `communication="torch"`, custom    not: what would carry it is not ours

A digest is 64 bits, of which the lowest is 0. In a chunk it is eight numbers from 0 to 255, which every floating dtype
has exactly: sums of them are finite, so nobody has to clear them. A rank that found a difference sends only ones from
then on, which is no digest. So all ranks of the mesh find it, whichever of them differ.

On a host the answer is there when the messages are. On a device it is copied to pinned memory, after which an event is
recorded: whoever asks a step later does not wait.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import FACTS_NUMEL
from .data_group import drain
from .group import ShardGroup, Work

# Dtypes that have all numbers from 0 to 255.
CARRIERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_MOST = (1 << 63) - 1


class Digits:
    """One digest as elements of messages; made once for a digest, which often stays the same from step to step."""

    def __init__(self, digest: int, device: torch.device) -> None:
        if digest & 1 or not 0 <= digest < 1 << 64:
            raise ValueError(f"digest: expected 64 bits of which the lowest is 0, found {digest:#x}")
        self.digest, self.device = digest, device
        self._by_dtype: dict[torch.dtype, Tensor] = {}

    def of(self, dtype: torch.dtype) -> Tensor:
        """(FACTS_NUMEL,) in `dtype`."""
        found = self._by_dtype.get(dtype)
        if found is None:
            values = list(self.digest.to_bytes(FACTS_NUMEL, "little"))
            with torch.inference_mode(False):
                found = self._by_dtype[dtype] = _brought(values, dtype, self.device)
        return found


class Comparison:
    """One digest under way with one reduction. `shared`: of what the ranks that replicate this rank's shards have the
    same of, besides; 0 where there are none."""

    def __init__(self, digits: Digits, shared: int = 0) -> None:
        self._digits = digits
        self._shared = shared
        # On a host a bool; on a device None or what will say it.
        self._differs: bool | Tensor = False
        self._work: Work | None = None
        self._extremes: Tensor | None = None
        self._landed: tuple[Tensor, Any] | None = None

    def write(self, rows: Tensor) -> None:
        """Put the digest into `rows` (n, FACTS_NUMEL) of what is sent; once a difference was found, that."""
        digits = self._digits.of(rows.dtype)
        if isinstance(self._differs, Tensor):
            digits = torch.where(self._differs, 255.0, digits)
        elif self._differs:
            rows.fill_(255.0)
            return
        rows.copy_(digits)

    def met(self, rows: Tensor) -> None:
        """Compare with what arrived in `rows` (n, FACTS_NUMEL)."""
        own = self._digits.of(rows.dtype)
        if rows.device.type == "cpu":
            self._differs = bool(self._differs) or not torch.equal(rows, own.expand_as(rows))
            return
        found = rows.ne(own).any()
        self._differs = found | self._differs if isinstance(self._differs, Tensor) else found

    def ask_sharers(self, shard: ShardGroup) -> None:
        """Send what decides to the ranks that share, whose gradients the backend sums: nobody sees what each sent."""
        half = _signed(self._digits.digest)
        self._extremes = _brought([half, ~half], torch.int64, self._digits.device)
        self._work = shard.all_reduce(self._extremes, dist.ReduceOp.MAX)

    def answered(self) -> None:
        """The answer of those who were asked arrived."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        extremes, self._extremes = self._extremes, None
        if extremes is not None:
            # The greatest ones, and the complements of the least.
            greatest, least = extremes.view(2, -1)
            found = greatest.ne(least.bitwise_not()).any()
            self._differs = found if found.device.type != "cpu" else bool(found)

    def ask_replicas(self, replicate: ShardGroup) -> None:
        """Send what decides for the ranks that replicate; those that share compared before."""
        halves = [_signed(self._digits.digest), _signed(self._shared)]
        values = _brought([*halves, *(~half for half in halves)], torch.int64, self._digits.device)
        if isinstance(self._differs, Tensor):
            values = torch.where(self._differs, _MOST, values)
        elif self._differs:
            values.fill_(_MOST)
        self._extremes = values
        self._work = replicate.all_reduce(values, dist.ReduceOp.MAX)

    def arrive(self) -> None:
        """Everything was sent, and what it goes with arrived: let the answer come to the host."""
        self.answered()
        if isinstance(self._differs, Tensor):
            device = torch.get_device_module(self._differs.device)
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(self._differs, non_blocking=True)
            event = device.Event()
            event.record()
            self._landed = host, event

    def abandon(self) -> None:
        """Wait for a message of its own, and throw it away."""
        work, self._work = self._work, None
        if work is not None:
            drain(work)

    @property
    def is_here(self) -> bool:
        """Whether `differs` answers without waiting."""
        return self._landed is None

    def differs(self) -> bool:
        """Whether some rank has another digest. Behind `arrive`; on a device, a step later."""
        if self._landed is not None:
            host, event = self._landed
            event.synchronize()
            self._differs, self._landed = bool(host), None
        return bool(self._differs)


def _brought(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` on `device`; the host does not wait for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _signed(digest: int) -> int:
    """The same 64 bits as a number of int64; never the greatest one, because the lowest bit is 0."""
    return digest - (1 << 64) if digest >> 63 else digest
