"""Where shards live between uses. The engine keeps them on the mesh's device; other policies are refused so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadPolicy:
    """No offload: shards, gradients and optimizer state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state on the host. `pin_memory`: page-locked, for asynchronous copies.

    Not built yet: `fully_shard` refuses it with `NotImplementedError`.
    """

    pin_memory: bool = True
