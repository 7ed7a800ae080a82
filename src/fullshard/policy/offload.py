"""Where shards live between uses: on the device of the mesh, or on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .._torch_compat import TorchCPUOffloadPolicy, TorchOffloadPolicy


@dataclass
class OffloadPolicy(TorchOffloadPolicy):
    """No offload: shards, gradients and optimizer state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy, TorchCPUOffloadPolicy):
    """Shards, gradients and optimizer state on the host; full parameters on the device of the mesh while they are used.

    Each unit is copied to the device in one copy before its gather, and its reduced gradients back in one. On a mesh of
    CPUs it changes nothing. `pin_memory`: page-locked host memory, without which copies are not asynchronous; it cannot
    be used by other processes.
    """

    pin_memory: bool = True


class Offload(NamedTuple):
    """What an offload policy means on one device."""

    to_host: bool = False
    pin: bool = False


def resolve_offload(policy: Any, device_type: str) -> Offload:
    """What `policy`, ours or torch's of the same name, means where compute is on `device_type`.

    >>> resolve_offload(CPUOffloadPolicy(), "cuda"), resolve_offload(CPUOffloadPolicy(), "cpu").to_host
    (Offload(to_host=True, pin=True), False)

    Raises `TypeError` for anything but an offload policy.
    """
    names = {kind.__name__ for kind in type(policy).__mro__}
    if "OffloadPolicy" not in names:
        raise TypeError(f"offload_policy: expected an OffloadPolicy, found {policy!r}; leave it out for none")
    if "CPUOffloadPolicy" not in names or device_type == "cpu":
        return Offload()
    return Offload(to_host=True, pin=bool(policy.pin_memory))
