"""Messages from one rank to another, straight from the memory where something lies into the memory where it is needed.

For backends whose collectives copy what they carry once more, and want it in one contiguous buffer (gloo). A collective
there is work for a pool of threads; a send or a receive is a system call here and now, and its bytes move in the
background. Whether that pays is a matter of size: `layout.gather`.

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


# Dtypes that every backend knows; others (float8 and int16 weights, complex numbers on NCCL) travel as bytes.
_KNOWN = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


def carried(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and only to be moved, in a dtype that backends know."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(torch.uint8)


def gather_each(group: dist.ProcessGroup, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Work]:
    """Every rank's `pieces[i]` (n,) into `outs[i]` (world * n,) on every rank; all contiguous, of one dtype."""
    rank, world = group.rank(), group.size()
    chunks = [out.view(world, -1) for out in outs]
    arriving = {peer: [chunk[peer] for chunk in chunks] for peer in range(world) if peer != rank}
    works = exchange_each(group, arriving, dict.fromkeys(arriving, pieces), PARAMETERS_TAG)
    # While the messages are on their way.
    torch._foreach_copy_([chunk[rank] for chunk in chunks], list(pieces))
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
        works += [group.recv([carried(tensor)], peer, tag) for tensor in tensors if tensor.numel()]
    # Rank r begins with r + 1, so that not everybody sends to rank 0 first.
    for step in range(1, world):
        peer = (rank + step) % world
        works += [group.send([carried(tensor)], peer, tag) for tensor in leaving[peer] if tensor.numel()]
    return works
