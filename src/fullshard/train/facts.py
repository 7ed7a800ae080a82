"""Figures about the machine and the model: memory, floating-point operations, peak rates."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from .model import LlamaShape

# Dense peak rates in TFLOP/s from the vendors' data sheets: (part of the device's name, bfloat16, float32 without
# TF32). The first match counts, so longer names come first.
_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("H200", 989.0, 67.0),
    ("GH200", 989.0, 67.0),
    ("B200", 2250.0, 75.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("A10G", 70.0, 35.0),
)


def flop_per_token(shape: LlamaShape, num_params: int) -> float:
    """Floating-point operations per trained token: 6·N + 6·L·T·D.

    N is the number of parameters that multiply activations (all but an untied token embedding, which is only looked
    up): 2 operations each in forward, 4 in backward. Attention adds, per layer and token, 2·T·D for the scores and
    2·T·D for the weighted sum, three times that with backward, and half of it because it is causal. Recomputed
    activations are not counted: this is the work that the model asks for, not the work that was done.
    """
    multiplied = num_params if shape.tie_embeddings else num_params - shape.vocab * shape.dim
    return 6.0 * multiplied + 6.0 * shape.layers * shape.context * shape.dim


def peak_flop_per_second(device: torch.device, dtype: torch.dtype) -> float | None:
    """What one device can do at best in `dtype`, or None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, bfloat16, float32 in _PEAK_TFLOPS:
        if part in name:
            return (bfloat16 if dtype == torch.bfloat16 else float32) * 1e12
    return None


def memory_nbytes(device: torch.device) -> int:
    """Memory in use now: the allocator's on an accelerator, resident pages of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except OSError:  # no /proc: the peak is the best that can be told
        return peak_memory_nbytes(device)


def peak_memory_nbytes(device: torch.device) -> int:
    """The highest value of `memory_nbytes` so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux, bytes on macOS


def in_units(nbytes: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> in_units(812), in_units(1536), in_units(3 * 2**20)
    ('812 B', '1.5 KiB', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
