"""Recomputed activations: keep a block's input, run the block again in backward.

Applied before `fully_shard`, so the recomputation happens inside the unit: while backward works on a block its full
parameters are there anyway, and the second run needs no second gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make each block's forward keep only its inputs (non-reentrant). Parameter names and classes stay as they are."""
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        # An attribute of the instance goes before the class's method, also after a later change of the class.
        # The blocks draw no random numbers, so there is no generator state to keep and restore.
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
