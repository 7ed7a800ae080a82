"""Random state that is a function of (seed, step, rank): defined at any world, and nothing of it has to be stored.

    random = RandomState(seed=0)
    for step in range(start, steps):
        random.begin(step)            # dropout, augmentation, ... of this step on this rank
        ...
    save({..., "random": random}, checkpoint_id=...)

What generators hold in the middle of a step means nothing on another number of ranks, so a step begins by seeding them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
import torch.distributed as dist


def derived_seed(seed: int, step: int, rank: int, purpose: str = "") -> int:
    """A number of 63 bits that depends on all arguments and on nothing else: neither processes nor versions.

    >>> derived_seed(0, 1, 0) == derived_seed(0, 0, 1)
    False
    """
    text = f"fullshard {seed} {step} {rank} {purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class RandomState:
    """The generators of this process, by step. It has `state_dict` and `load_state_dict`, and is saved as it is.

    `rank`: which stream this process has; by default its rank in the default process group. Ranks that have to draw
    the same numbers (those of one tensor-parallel group) are given the same.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed: expected an int, found {seed!r}")
        self.seed, self._rank = seed, rank
        self.step: int | None = None

    def begin(self, step: int) -> None:
        """Seed the generators of torch (the host's and all CUDA devices'), of `random`, and of numpy when it is in use,
        for `step` on this rank."""
        self.step = step
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        torch.manual_seed(derived_seed(self.seed, step, rank))
        random.seed(derived_seed(self.seed, step, rank, "random"))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(derived_seed(self.seed, step, rank, "numpy") % 2**32)

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the step that began last; the same on all ranks."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the stored seed. The stored step is seeded again; the next `begin` says which one comes."""
        self.seed, step = state["seed"], state["step"]
        if step is not None:
            self.begin(step)
