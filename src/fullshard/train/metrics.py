"""What each step leaves behind: a line of JSON always, TensorBoard files where that package is installed."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import optional


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, over all processes together."""

    step: int  # from 1
    loss: float  # nats per token, mean over the global batch, before the update
    bits_per_byte: float  # the same in bits per byte of text
    grad_norm: float  # global, before clipping
    lr: float
    tokens: int  # trained so far
    seconds: float  # this step, without validation
    tokens_per_second: float
    tflop_per_second: float  # see `facts.flop_per_token`
    mfu: float | None  # part of the devices' peak rate; None where the peak is not known
    memory_bytes: int  # rank 0, see `facts.memory_nbytes`
    micro_batch: int = 0  # most sequences in one forward pass of a process; with "auto", what was found
    samples: str = ""  # a digest of which windows of the corpus the step saw
    val_loss: float | None = None  # nats per token, after the update; None where this step does not validate
    val_bits_per_byte: float | None = None
    drift: str | None = None  # what ranks should have the same of and have not; None: nothing, or nobody looked
    nonfinite: str | None = None  # what had a NaN or inf, and on which rank; None where all was finite

    def to_json(self) -> str:
        """One line. Validation fields are there only where the step validated, `drift` and `nonfinite` only where
        something is to be told; figures that are not finite are null."""
        optional_fields = ("val_loss", "val_bits_per_byte", "drift", "nonfinite")
        fields = {k: v for k, v in asdict(self).items() if v is not None or k not in optional_fields}
        return json.dumps(without_nan(fields), allow_nan=False)


# What is null in a file where it is not finite.
_MAY_BE_NULL = ("loss", "bits_per_byte", "grad_norm", "val_loss", "val_bits_per_byte")


def without_nan(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` as JSON can say them: None in the place of NaN and inf."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def bits_per_byte(nats: float, nbytes: float) -> float:
    """`nats` of loss spent on `nbytes` of text, in bits per byte.

    >>> round(bits_per_byte(math.log(256) * 10, 10), 9)
    8.0
    """
    return nats / nbytes / math.log(2) if nbytes else 0.0


class MetricsFile:
    """`metrics.jsonl`: each record is one append of a whole line, so the file is whole whenever the process ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: StepRecord) -> None:
        os.write(self._descriptor, (record.to_json() + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


class TensorBoard:
    """The same figures as TensorBoard scalars."""

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        """Figures from `first_step` on that an earlier run left are dropped."""
        optional.silence_tensorboard()
        module = optional.find("torch.utils.tensorboard")
        assert module is not None
        self._writer: Any = module.SummaryWriter(log_dir=str(folder), purge_step=first_step)

    @staticmethod
    def installed() -> bool:
        return optional.find("tensorboard") is not None

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
