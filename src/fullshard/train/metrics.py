"""The record of each step, and the sources of its figures: memory and the peak rates of devices.

Each step is a line of JSON, and TensorBoard scalars if that is installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


def installed(package: str) -> bool:
    """Whether an optional package is installed. A broken one raises when it is imported."""
    return importlib.util.find_spec(package) is not None


def missing(package: str, extra: str, consequence: str) -> str:
    """The one line about a missing package: `missing("rich", "ui", "plain lines instead of a progress bar")`."""
    return f'{package} is not installed, so {consequence}; to have it: pip install "fullshard[{extra}]"'


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, over all processes together."""

    step: int  # from 1
    loss: float  # nats per token, mean over the global batch, before the update
    bits_per_byte: float  # the same in bits per byte of text
    grad_norm: float  # global, before clipping
    lr: float
    tokens: int  # trained on so far
    seconds: float  # this step, without validation
    tokens_per_second: float
    tflop_per_second: float  # see `model.flop_per_token`
    mfu: float | None  # fraction of the devices' peak rate; None if the peak is not known
    memory_bytes: int  # rank 0, see `memory_nbytes`
    micro_batch: int = 0  # most sequences in one forward pass of a process; with "auto", the size found
    samples: str = ""  # a digest of the step's windows of the corpus
    val_loss: float | None = None  # nats per token, after the update; None if this step does not validate
    val_bits_per_byte: float | None = None
    perplexity: float | None = None  # e to the power of `loss`; None in a run of a version that had none
    val_perplexity: float | None = None
    drift: str | None = None  # replica divergence; None if there is none, or if it was not checked
    nonfinite: str | None = None  # the NaN or inf that was found, and its rank; None if all was finite
    checkpoint_seconds: float | None = None  # what the checkpoint before this step kept it waiting; None without one

    def to_json(self) -> str:
        """One line. Validation fields are present only if the step validated, `drift`, `nonfinite` and
        `checkpoint_seconds` only if they are not None; figures that are not finite are null."""
        optional_fields = (
            *("val_loss", "val_bits_per_byte", "perplexity", "val_perplexity"),
            *("drift", "nonfinite", "checkpoint_seconds"),
        )
        fields = {k: v for k, v in asdict(self).items() if v is not None or k not in optional_fields}
        return json.dumps(without_nan(fields), allow_nan=False)

    def metrics(self) -> dict[str, float]:
        """The metrics by which checkpoints can be compared; those of validation if the step validated."""
        found = {name: getattr(self, name) for name in ("loss", "bits_per_byte", "val_loss", "val_bits_per_byte")}
        return {name: value for name, value in found.items() if value is not None}


# Figures that are null in a file if they are not finite.
_MAY_BE_NULL = (
    *("loss", "bits_per_byte", "perplexity", "grad_norm"),
    *("val_loss", "val_bits_per_byte", "val_perplexity"),
)


def without_nan(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` in valid JSON: None in place of NaN and inf."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


class MetricsFile:
    """`metrics.jsonl`: each record is one append of a whole line, so the file is valid whenever the process ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, record: StepRecord) -> None:
        self._file.write((record.to_json() + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """The same figures as TensorBoard scalars."""

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        """Discard the figures from `first_step` on, left by an earlier run."""
        # Silence TensorBoard's replacement for the missing TensorFlow, and its C++ libraries.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=first_step)

    def write(self, record: StepRecord) -> None:
        for name, value in asdict(record).items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order; NaN for a figure that was not finite."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: math.nan if v is None and k in _MAY_BE_NULL else v for k, v in fields.items()} for fields in records]


# ---- the machine -----------------------------------------------------------------------------------------------

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


def peak_flop_per_second(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak rate of one device in `dtype`, or None if it is not known (every CPU)."""
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
    except OSError:  # without /proc the peak is the best estimate
        return peak_memory_nbytes(device)


def peak_memory_nbytes(device: torch.device) -> int:
    """The highest value of `memory_nbytes` so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes on Linux, bytes on macOS


def in_units(nbytes: float) -> str:
    """Bytes in powers of 1024, for people.

    >>> in_units(812), in_units(1536), in_units(3 * 2**20)
    ('812 B', '1.5 KiB', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
