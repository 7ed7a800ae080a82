"""What counts as out of memory, and what to say where nothing is left to try."""

from __future__ import annotations

import torch
from torch import nn

from ..observe import report
from ..observe.table import human

# Of the RuntimeErrors by which allocators speak that have no exception of their own.
_CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")
_SHOWN_TERMS = 6


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory was not to be had: `torch.OutOfMemoryError`, `MemoryError`, and the RuntimeError
    of the CPU allocator, of cuBLAS, cuDNN and cuSOLVER."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in (*_CPU_ALLOCATOR, *_LIBRARIES))


def nothing_fits(model: nn.Module, said: str) -> str:
    """The text for a model that does not run with one sample: what the allocator said, and what takes memory."""
    try:
        found = report(model)
    except ValueError:  # nothing is sharded
        return f"{said}\na micro-batch of 1 sample does not fit"
    terms = sorted((term for term in found.peak_terms if term.nbytes), key=lambda term: -term.nbytes)
    rest = sum(term.nbytes for term in terms[_SHOWN_TERMS:])
    listed = [f"  {human(term.nbytes):>10}  {term.name}" for term in terms[:_SHOWN_TERMS]]
    if rest:
        listed.append(f"  {human(rest):>10}  the rest")
    return "\n".join(
        [
            said,
            f"A micro-batch of 1 sample does not fit on rank {found.rank}. Parameters, gradients and messages take at "
            f"most {human(found.peak_nbytes)} there, in {found.peak_moment}; activations and optimizer come on top:",
            *listed,
            "Less of them: more ranks, reshard_after_forward=True, set_gradient_bytes, CPUOffloadPolicy "
            "(docs/memory.md); less activations: recomputation, shorter samples",
        ]
    )
