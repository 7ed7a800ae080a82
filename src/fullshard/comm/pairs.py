"""Messages from one rank to another, straight from the memory where something lies into the memory where it is needed.

For backends whose collectives copy what they carry once more, and want it in one contiguous buffer (gloo). A collective
there is work for a pool of threads; a send or a receive is a system call here and now, and its bytes move in the
background, of whatever dtype. Whether that pays is a matter of size: `layout.gather`.

Ranks issue the same messages in the same order, as they do with collectives; between two ranks those of equal tag match
in that order. The tags are ours, so that a user's own `send` and `recv` on the same group are not mistaken for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

PARAMETERS_TAG = 0x66736864
GRADIENTS_TAG = PARAMETERS_TAG + 1


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


def gather_each(group: dist.ProcessGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
    """Every rank's `pieces[i]` (n,) into `outs[i]` (world * n,) on every rank; all contiguous, of one dtype. A piece
    may be this rank's part of its `outs[i]` itself."""
    rank, world = group.rank(), group.size()
    chunks = [out.view(world, -1) for out in outs]
    arriving = {peer: [chunk[peer] for chunk in chunks] for peer in range(world) if peer != rank}
    works = exchange_each(group, arriving, dict.fromkeys(arriving, pieces), PARAMETERS_TAG)
    # While the messages are on their way.
    own = [chunk[rank] for chunk in chunks]
    if own[0].data_ptr() != pieces[0].data_ptr():
        torch._foreach_copy_(own, list(pieces))
    return works


def exchange_each(
    group: dist.ProcessGroup,
    arriving: Mapping[int, Sequence[Tensor]],
    leaving: Mapping[int, Sequence[Tensor]],
    tag: int,
) -> list[Work]:
    """`leaving[r][i]` of this rank into `arriving[this rank][i]` of rank r. Tensors are contiguous, and stay as they
    are until the works were waited for; empty ones are not sent."""
    rank, world = group.rank(), group.size()
    works: list[Work] = []
    # All receives first: bytes that arrive before their receive is posted wait in the sender's socket.
    for peer, tensors in arriving.items():
        works += [group.recv([tensor], peer, tag) for tensor in tensors if tensor.numel()]
    # Rank r begins with r + 1, so that not everybody sends to rank 0 first.
    for step in range(1, world):
        peer = (rank + step) % world
        works += [group.send([tensor], peer, tag) for tensor in leaving[peer] if tensor.numel()]
    return works
