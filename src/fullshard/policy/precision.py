"""Dtypes of a unit: what the user asks for, and what follows for storage, compute, wire and sum.

storage   the dtype of the original parameter; sharded parameters, gradients and optimizer state have it
compute   the dtype of the gathered full parameters and of the gradients autograd makes
reduce    the dtype in which gradients are kept between micro-batches
wire      the dtype in which gradients travel: the narrower of compute and reduce, because widening before the
          message adds bytes and no information; reduce, once gradients were accumulated
sum       the dtype in which messages are added: reduce, but at least float32, so that a sum rounds once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .._torch_compat import TorchMixedPrecisionPolicy


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
    """Our policy or torch's: programs with mixed imports work."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


class Precision(NamedTuple):
    """What a policy means for parameters of one storage dtype."""

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
    """The dtype in which messages are added when they are to be reduced in `reduce`."""
    return torch.float32 if reduce.itemsize < 4 else reduce
