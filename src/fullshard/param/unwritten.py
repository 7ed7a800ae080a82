"""Memory that nobody has written yet, made recognisable.

A tensor from `to_empty` holds whatever was in memory, and nothing tells later whether it was initialised: much code
initialises through `.data`, which no version counter sees. So such memory is filled with a pattern that no program
writes. A tensor that still consists of that pattern from end to end was not written.

    floating point   a quiet NaN with our own payload. Quiet, because hardware changes signalling NaNs in copies.
                     Any computation with it gives NaN, so an unnoticed use is visible.
    bool             a byte that is neither true nor false
    integers         bytes 0xA5. Tensors of fewer than four bytes in total could hold that value legitimately: they
                     are zeroed and not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .sharded import local_data

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Quiet NaNs: exponent all ones, the highest bit of the fraction, and a payload. torch's own NaN has payload 0.
_NAN = {
    torch.float64: 0x7FFD_5A3C_96E1_0F5A,
    torch.float32: 0x7FED_5A3C,
    torch.float16: 0x7F5A,
    torch.bfloat16: 0x7FED,
}
# float8 formats without negative zero have a single NaN, in place of -0; in the others NaN is all ones.
_NAN_8 = {False: 0xFF, True: 0x80}
_BYTES = {1: 0xA5, 2: -0x5A5B, 4: -0x5A5A_5A5B, 8: -0x5A5A_5A5A_5A5A_5A5B}
_LEAST_INTEGER_NBYTES = 4


def poison(tensor: Tensor) -> bool:
    """Fill `tensor` with the pattern. Returns whether that was possible: tensors without plain memory (meta, sparse,
    subclasses) are left alone."""
    local = local_data(tensor)
    if not _is_plain(local):
        return False
    with torch.no_grad():
        bits = _bits(local)
        bits.fill_(_pattern(local.dtype, bits.dtype) if _is_judged(local) else 0)
    return True


def are_poisoned(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor still consists of the pattern. False for empty tensors and for those never judged.

    Reads every tensor once, without a temporary of its size; one synchronisation per accelerator.
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
    """`are_poisoned` for one tensor."""
    return are_poisoned([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number per tensor that changes when it is written: the sum of its bits, read as integers."""
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
