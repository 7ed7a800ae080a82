"""Memory that nobody has written yet, made recognisable.

A tensor that `to_empty` made holds whatever was in memory. Nothing tells later whether it was initialised: much code
initialises through `.data`, which no version counter sees. So such memory is filled with a pattern that no program
writes, and a tensor that still is that pattern from end to end was not written.

    floating point   a quiet NaN with a payload of our own. Quiet, because hardware changes signalling ones in copies. A
                     computation with it is NaN, so what slips through is loud.
    bool             a byte that is neither true nor false
    integers         bytes 0xA5. Those of fewer than four bytes in all could be a value that somebody wrote: they are
                     zeroed and not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch_compat import local_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Quiet NaNs: exponent all ones, the highest bit of the fraction, and a payload. That of torch's own NaN is 0.
_NAN = {
    torch.float64: 0x7FFD_5A3C_96E1_0F5A,
    torch.float32: 0x7FED_5A3C,
    torch.float16: 0x7F5A,
    torch.bfloat16: 0x7FED,
}
# float8 formats without a sign of zero have one NaN, in the place of -0; in the others it is all ones.
_NAN_8 = {False: 0xFF, True: 0x80}
_BYTES = {1: 0xA5, 2: -0x5A5B, 4: -0x5A5A_5A5B, 8: -0x5A5A_5A5A_5A5A_5A5B}
_LEAST_INTEGER_NBYTES = 4


def local_data(tensor: Tensor) -> Tensor:
    """The tensor itself, or of a DTensor what this rank has of it."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def poison(tensor: Tensor) -> bool:
    """Fill `tensor` with the pattern; whether that could be done. What has no plain memory of its own (meta, sparse,
    subclasses) is left alone."""
    local = local_data(tensor)
    if not _is_plain(local):
        return False
    with torch.no_grad():
        bits = _bits(local)
        bits.fill_(_pattern(local.dtype, bits.dtype) if _is_judged(local) else 0)
    return True


def are_poisoned(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor still is the pattern as a whole. False of those without elements and those never judged.

    Reads every tensor once, without a temporary of its size; on an accelerator one synchronisation for all.
    """
    flags: list[bool] = []
    judged: list[tuple[int, Tensor]] = []
    with torch.no_grad():
        for tensor in tensors:
            local = local_data(tensor)
            flags.append(False)
            if _is_plain(local) and local.numel() and _is_judged(local):
                bits = _bits(local)
                low, high = torch.aminmax(bits)
                pattern = _pattern(local.dtype, bits.dtype)
                judged.append((len(flags) - 1, (low == pattern) & (high == pattern)))
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, flag in judged:
            by_device.setdefault(flag.device, []).append((index, flag))
        for found in by_device.values():
            values = torch.stack([flag for _, flag in found]).tolist()
            for (index, _), value in zip(found, values, strict=True):
                flags[index] = value
    return flags


def is_poisoned(tensor: Tensor) -> bool:
    """`are_poisoned` of one."""
    return are_poisoned([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor that changes when it is written: the sum of its bits, read as integers."""
    with torch.no_grad():
        return [int(_bits(t).sum(dtype=torch.int64)) if _is_plain(t) else 0 for t in map(local_data, tensors)]


def _is_plain(local: Tensor) -> bool:
    return (
        type(local) in (Tensor, nn.Parameter)
        and not (local.is_meta or local.is_quantized)
        and local.layout is torch.strided
    )


def _is_judged(local: Tensor) -> bool:
    dtype = local.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return True
    return local.numel() * local.element_size() >= _LEAST_INTEGER_NBYTES


def _bits(local: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    local = local.detach()
    if local.dtype.is_complex:
        local = torch.view_as_real(local)
    return local.view(_BITS[local.element_size()])


def _pattern(dtype: torch.dtype, bits: torch.dtype) -> int:
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype in _NAN:
        return _NAN[dtype]
    if str(dtype).startswith("torch.float8"):
        return _NAN_8["fnuz" in str(dtype)]
    return _BYTES[bits.itemsize]
