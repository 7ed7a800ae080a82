"""Tensors of one rank to all others, through one buffer of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .group import broadcast_from

BUFFER_NBYTES = 16 << 20


def broadcast_over(
    mesh: DeviceMesh, tensors: Sequence[Tensor], source: int, what: str = "a broadcast", *, nbytes: int = BUFFER_NBYTES
) -> None:
    """Write `tensors` of one rank of `mesh` into those of all others: plain, with data, alike in number and sizes.

    source: its position in `mesh`, in row-major order. The buffer, of at most `nbytes` bytes, is on the device of the
    mesh. `what`: for an error. Finished on return; collective.
    """
    (coordinate,) = (torch.arange(mesh.size()).view(mesh.mesh.shape) == source).nonzero().tolist()
    # Along one axis after the other: behind the last one, every rank has what the source had.
    axes = [(mesh.get_group(axis), at) for axis, at in enumerate(coordinate) if mesh.size(axis) > 1]
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    buffer = torch.empty(min(nbytes, total), dtype=torch.uint8, device=mesh.device_type)
    filled: list[tuple[Tensor, Tensor]] = []
    used = 0

    def flush() -> None:
        nonlocal used
        for place, piece in filled:
            place.copy_(piece)
        for group, at in axes:
            broadcast_from(buffer[:used], group, at, what)
        for place, piece in filled:
            piece.copy_(place)
        filled.clear()
        used = 0

    with torch.no_grad():
        for tensor in tensors:
            written = tensor.detach()
            bytes_of = written.contiguous().as_strided((written.numel(),), (1,)).view(torch.uint8)
            left = bytes_of
            while left.numel():
                taken = min(left.numel(), buffer.numel() - used)
                filled.append((buffer[used : used + taken], left[:taken]))
                used, left = used + taken, left[taken:]
                if used == buffer.numel():
                    flush()
            if not written.is_contiguous():
                if filled:
                    flush()
                written.copy_(bytes_of.view(written.dtype).view(written.shape))
        if filled:
            flush()
