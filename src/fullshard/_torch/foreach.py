"""Operations on lists of tensors, which are one kernel on a device and not one for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Of each piece, so that kernels and messages can read whole words.
_ALIGNED_NBYTES = 16


def copied_into_one(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`tensors` of one device (at least one), in `dtype`: new, contiguous, and views of one new buffer. A kernel for
    each dtype that they have, if they are contiguous."""
    aligned = _ALIGNED_NBYTES // dtype.itemsize
    numels = [-(-tensor.numel() // aligned) * aligned for tensor in tensors]
    flat = torch.empty(sum(numels), dtype=dtype, device=tensors[0].device)
    pieces = flat.split(numels)
    made = [piece[: tensor.numel()].view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
    # Torch would take a kernel for each tensor of a list with several dtypes.
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        pairs = [(piece, tensor) for piece, tensor in zip(made, tensors, strict=True) if tensor.dtype is kind]
        torch._foreach_copy_([piece for piece, _ in pairs], [tensor for _, tensor in pairs])
    return made
