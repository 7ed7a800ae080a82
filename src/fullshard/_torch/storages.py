"""Memory of tensors: how many hold it."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


def others_with_memory_of(tensor: Tensor) -> int:
    """How many other tensors, views of it for example, hold the memory of `tensor`."""
    return _uses(tensor) - _uses_of_one()


def _uses(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(cast(Any, torch._C)._storage_Use_Count(storage._cdata))


@cache
def _uses_of_one() -> int:
    return _uses(torch.empty(1))
