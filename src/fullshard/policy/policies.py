"""Policies in the arguments of `fully_shard`: dtypes of a unit, and the device of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .._torch import TorchCPUOffloadPolicy, TorchMixedPrecisionPolicy, TorchOffloadPolicy

# ---- precision -------------------------------------------------------------------------------------------------------
# Dtypes of a unit: the user's policy, and the resulting dtypes.
#
# storage   the dtype of the original parameter; sharded parameters, gradients and optimizer state have it
# compute   the dtype of the gathered full parameters and of the gradients autograd makes
# reduce    the dtype in which gradients are held between micro-batches
# wire      the communication dtype of gradients: the narrower of compute and reduce, because widening before the
#           message adds bytes and no information; reduce, once gradients were accumulated
# sum       the dtype in which messages are added: reduce, but at least float32, so that a sum rounds once


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """Dtypes of one `fully_shard` call; names and meaning are those of torch's class (seeds 000 to 003).

    param_dtype: dtype of the full parameters in forward and backward; None keeps the original one.
    reduce_dtype: dtype in which gradients are reduced; None means that of the gradients.
    output_dtype: floating-point outputs of the unit's forward are cast to it; None leaves them.
    cast_forward_inputs: floating-point inputs of the unit's forward are cast to `param_dtype`.

    >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class MixedPrecisionLike(Protocol):
    """A policy of fullshard or torch, so that programs with mixed imports work."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


class Precision(NamedTuple):
    """The dtypes that a policy gives parameters of one storage dtype."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    sum: torch.dtype


def resolve_precision(policy: MixedPrecisionLike, storage: torch.dtype) -> Precision:
    """The dtypes of parameters stored in `storage` under `policy`.

    >>> resolve_precision(MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.float32).wire
    torch.bfloat16
    """
    if not storage.is_floating_point:
        # Integers and booleans have no gradient, and rounding them to a float dtype would change them.
        return Precision(storage, storage, storage, storage, storage)
    compute = policy.param_dtype or storage
    reduce = policy.reduce_dtype or compute
    wire = compute if compute.itemsize < reduce.itemsize else reduce
    return Precision(storage, compute, reduce, wire, sum_dtype(reduce))


def sum_dtype(reduce: torch.dtype) -> torch.dtype:
    """The dtype in which messages are summed for a reduction in `reduce`."""
    return torch.float32 if reduce.itemsize < 4 else reduce


# ---- offload ---------------------------------------------------------------------------------------------------------
# The device of shards between uses: that of the mesh, or the host.


@dataclass
class OffloadPolicy(TorchOffloadPolicy):
    """No offload: shards, gradients and optimizer state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy, TorchCPUOffloadPolicy):
    """Shards, gradients and optimizer state on the host; full parameters on the device of the mesh while they are used.

    Each unit takes one copy to the device before its all-gather, and one copy back for its reduced gradients. Has no
    effect on a CPU mesh. `pin_memory`: page-locked host memory, required for asynchronous copies; other processes
    cannot use that memory.
    """

    pin_memory: bool = True


class Offload(NamedTuple):
    """The effect of an offload policy on one device type."""

    to_host: bool = False
    pin: bool = False


def resolve_offload(policy: Any, device_type: str) -> Offload:
    """Resolve `policy`, of fullshard or torch, for compute on `device_type`.

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
