"""From one format to another, tensor by tensor: what `fullshard checkpoint` does, as functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from ..errors import CheckpointMismatch
from ..values import encode
from .dcp import DcpSource
from .dcp_write import write_dcp
from .detect import Found, detect
from .hf import DEFAULT_MAX_NBYTES, HfSource, entries_of, write_hf
from .numbered import HINT, is_numbered_state
from .ours import OursSource, write_ours
from .source import Source
from .torch_file import TorchSource
from .torch_write import write_torch

Format = Literal["fullshard", "dcp", "hf", "torch"]
FORMATS: tuple[Format, ...] = get_args(Format)
Progress = Callable[[str, int], None]  # (key of a tensor that was written, its bytes)


def open_source(
    path: str | os.PathLike[str], *, allow_torch_save: bool = False, optimizer_names: Sequence[str] | None = None
) -> Source:
    """Open the checkpoint at `path`, whatever its format; of a folder of steps the newest.

    `allow_torch_save`: also files of `torch.save`, which are pickles, through `weights_only`. `optimizer_names`: for
    such a file, the names of the optimizer's parameters in the order of their numbers, of several optimizers one behind
    the other. Raises `CheckpointError` for what is unknown, damaged, or recognised and refused, `CheckpointMismatch`
    for names that do not fit, `ValueError` for names where there are no numbers.

        with open_source("outputs/checkpoint/step-100") as source:
            rows = source.read("model.w", Box((0, 0), (16, 512)))
    """
    return open_found(detect(Path(path)), allow_torch_save=allow_torch_save, optimizer_names=optimizer_names)


def open_found(found: Found, *, allow_torch_save: bool = False, optimizer_names: Sequence[str] | None = None) -> Source:
    """`open_source` of what `detect` found."""
    if optimizer_names is not None and found.kind != "torch":
        raise ValueError(
            f"optimizer_names (--optimizer-names): expected a file of torch.save, whose optimizers number their "
            f"parameters, found {found.says}; leave them out"
        )
    match found.kind:
        case "fullshard":
            return OursSource(found.path)
        case "dcp":
            return DcpSource(found.path)
        case "hf":
            return HfSource(found.path)
    return TorchSource(found.path, allow=allow_torch_save, optimizer_names=optimizer_names)


def convert(
    source: Source,
    target: str | os.PathLike[str],
    format: Format = "fullshard",
    *,
    max_file_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress | None = None,
) -> list[Path]:
    """Write all of `source` to `target`; returns the files written.

    | format | target | memory |
    |---|---|---|
    | `fullshard` | a checkpoint of ours; a new generation where there is one already | the largest tensor |
    | `dcp` | a folder that `torch.distributed.checkpoint` loads, which must be new | the largest tensor |
    | `hf` | a folder with safetensors files of at most `max_file_nbytes`, without a model in it | the largest tensor |
    | `torch` | a file that `torch.load(weights_only=True)` reads, which must be new | the largest tensor |

    Raises `CheckpointMismatch` with everything that the format has no place for, before anything is written, and
    `FileExistsError`.
    """
    target = Path(target)
    refuse_what_has_no_place(source, format)

    def read(key: str) -> Tensor:
        tensor = source.read(key)
        if progress is not None:
            progress(key, tensor.nbytes)
        return tensor

    match format:
        case "fullshard":
            return write_ours(target, source, read)
        case "dcp":
            return write_dcp(target, source, read)
        case "hf":
            return write_hf(target, entries_of(source), read, max_nbytes=max_file_nbytes)
        case "torch":
            return write_torch(target, source, read)
    raise ValueError(f"format: expected one of {', '.join(FORMATS)}, found {format!r}")


def reason(error: Exception, value: object) -> str:
    """Why `value` has no place, with the way out where there is one."""
    return HINT if is_numbered_state(value) else str(error)


def refuse_what_has_no_place(source: Source, format: Format) -> None:
    """Raise `CheckpointMismatch` with all entries of `source` that a checkpoint of `format` cannot hold."""
    problems = []
    for key in source.values:
        if format == "hf":
            problems.append(f"{key}: no tensor, and safetensors files hold nothing else")
            continue
        value = None
        try:
            value = source.value(key)
            if format == "fullshard":
                encode(value)
        except (TypeError, ValueError, RuntimeError) as error:  # also CheckpointError, which is a RuntimeError
            problems.append(f"{key}: {reason(error, value)}")
    if problems:
        raise CheckpointMismatch(
            f"{source.path}: not all of it fits into {format}",
            problems,
            "Choose what to take with only=[...] and skip=[...] of `Chosen` (--only, --skip)",
        )
