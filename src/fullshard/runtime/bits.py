"""The bits of a tensor as one number: a change of any one of its elements changes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import local_of

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of the elements of this rank's part, their bits taken as integers, modulo 2**64; waits for a device."""
    plain = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if plain.is_meta or not plain.numel():
        return 0
    return int(plain.reshape(-1).view(SAME_SIZE.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64))
