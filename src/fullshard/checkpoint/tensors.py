"""Tensors as a checkpoint sees them: a dtype's name, a shape, and the part of it that is in this rank's memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import cut_dim, local_of, settled
from ..layout import itemsize, known_dtypes
from .plan import Box, Cut, local_box, whole

# Below it, memory comes from where all tensors have theirs.
_OWN_MAP_NBYTES = 4 << 20
# A multiple of every itemsize, and of a line of the cache.
_ALIGNMENT = 64


class Part(NamedTuple):
    """What this rank holds of a tensor: `local` is `box` of a tensor of `shape`. None and None: nothing, because the
    tensor is on a mesh of other ranks."""

    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    local: Tensor | None

    @property
    def nbytes(self) -> int:
        return 0 if self.local is None else self.local.numel() * self.local.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of it without `torch.`: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a manifest names."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def part_of(tensor: Tensor) -> Part | str:
    """What this rank holds of `tensor`, sharing its memory; or why it cannot be saved or loaded."""
    tensor = settled(tensor.detach())
    if isinstance(tensor, DTensor):
        return _part_of_dtensor(tensor)
    shape = tuple(tensor.shape)
    return _unusual(tensor) or Part(dtype_name(tensor.dtype), shape, whole(shape), tensor)


def _part_of_dtensor(tensor: DTensor) -> Part | str:
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    cuts = []
    for placement in tensor.placements:
        dim = cut_dim(placement)
        if dim is None and not placement.is_replicate():
            return f"expected Shard and Replicate, found placements {tensor.placements}; redistribute it first"
        # `split_factor`: of the placement that cuts after axes to its right.
        cuts.append(None if dim is None else Cut(dim % len(shape), getattr(placement, "split_factor", 1)))
    coordinate = mesh.get_coordinate()
    dtype = dtype_name(tensor.dtype)
    if coordinate is None:
        return Part(dtype, shape, None, None)
    local = settled(local_of(tensor)).detach()
    box = local_box(shape, tuple(mesh.shape), coordinate, cuts)
    if tuple(local.shape) != box.lengths:
        return (
            f"expected {box.lengths} of {shape} on this rank by placements {tensor.placements} on a mesh of "
            f"{tuple(mesh.shape)}, found a local tensor of {tuple(local.shape)}"
        )
    return _unusual(local) or Part(dtype, shape, box, local)


def _unusual(tensor: Tensor) -> str | None:
    """Why the bytes of `tensor` are not plain memory."""
    if tensor.is_meta:
        return "expected a tensor with memory, found one on the meta device; materialize the model first"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"expected a dense tensor, found {tensor.layout}{' quantized' if tensor.is_quantized else ''}"
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"expected a plain tensor or a DTensor, found {type(tensor).__name__}; unwrap it"
    if dtype_name(tensor.dtype) not in known_dtypes():
        return f"expected a dtype of whole bytes, found {tensor.dtype}"
    return None


def on_host(local: Tensor) -> Tensor:
    """`local` contiguous in host memory: itself where it is that already."""
    return local.resolve_conj().resolve_neg().to("cpu").contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, which the view keeps alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def staging(wanted: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Uninitialised tensors on the host, contiguous, one for each (name of dtype, shape), in one piece of memory that
    goes when the last of them does.

    New memory costs a fault for each page when it is touched first, in pages of 4 KiB a quarter of a load's CPU time;
    so it is asked for in huge ones where the system has them. Raises `OSError` when there is none left.
    """
    starts, nbytes = list[int](), 0
    for dtype, shape in wanted:
        starts.append(nbytes)
        nbytes += -(-whole(tuple(shape)).numel * itemsize(dtype) // _ALIGNMENT) * _ALIGNMENT
    memory = _mapped(nbytes) if nbytes >= _OWN_MAP_NBYTES else torch.empty(nbytes, dtype=torch.uint8)
    made = []
    for start, (dtype, shape) in zip(starts, wanted, strict=True):
        size = whole(tuple(shape)).numel * itemsize(dtype)
        made.append(memory[start : start + size].view(dtype_of(dtype)).view(tuple(shape)))
    return made


def _mapped(nbytes: int) -> Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(huge)
    return torch.frombuffer(pages, dtype=torch.uint8)
