"""Memory of tensors: how many hold it, and what held it alone."""

from __future__ import annotations

import gc
import threading
import time
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


def others_with_memory_of(tensor: Tensor) -> int:
    """How many other tensors, views of it for example, hold the memory of `tensor`."""
    return _uses(tensor) - _uses_of_one()


def collect_garbage() -> None:
    """Free what only cycles refer to. `gc.collect` does nothing while another thread collects, which may be for as long
    as finalizers run: this waits for that one, ten seconds at most."""
    own, collected = threading.get_ident(), list[str]()

    def note(phase: str, of: dict[str, int]) -> None:
        if threading.get_ident() == own and of["generation"] == 2:
            collected.append(phase)

    gc.callbacks.append(note)
    try:
        for _ in range(1000):
            gc.collect()
            if collected:
                return
            time.sleep(0.01)
    finally:
        gc.callbacks.remove(note)


def _uses(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(cast(Any, torch._C)._storage_Use_Count(storage._cdata))


@cache
def _uses_of_one() -> int:
    return _uses(torch.empty(1))
