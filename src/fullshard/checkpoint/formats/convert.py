"""Conversion between formats, tensor by tensor: detecting the format of a path, and the work of `fullshard checkpoint`
as functions."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..adapters import FILE as ADAPTERS
from ..companions import CONFIG, GENERATION, ROOM, TIED
from ..directory import POINTER_NAME, generations, pointer_number, reach
from ..errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from ..files import doing
from ..manifest import encode
from ..plan import KeyPath, TensorSpec, key_of
from ..retention import numbered
from ..saving import stored_part
from ..state import flatten, nested
from ..store import is_url, location
from ..writing import CheckpointWriter
from .adapter_checkpoints import AdapterSource, as_files
from .adapters import write_adapters
from .dcp import DcpSource, write_dcp
from .hf import DEFAULT_MAX_NBYTES, INDEX, SINGLE, HfSource, write_folder
from .names import HINT, is_numbered_state
from .source import OursSource, Source
from .torch_file import TorchSource, write_torch

Format = Literal["fullshard", "dcp", "hf", "torch"]
FORMATS: tuple[Format, ...] = get_args(Format)
Progress = Callable[[str, int], None]  # (key of a written tensor, its bytes)

# ---- detecting the format: looks at names and first bytes, loads nothing -------------------------------------

_STEPS = re.compile(r"(?:step-|step_|ep\d+-ba|checkpoint-|global_step)(\d+)")
_TORCH_FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt")
_RANK_FILE = re.compile(r"(?:^|.*[-_.])rank[-_]?\d+\.(?:pt|pth|bin|ckpt)")


class UnknownCheckpoint(CheckpointNotFound):
    """No known checkpoint is there."""


class RefusedCheckpoint(CheckpointError):
    """A format that is recognised but not read; the text names the remedy."""


class Found(NamedTuple):
    """A checkpoint: `kind` is "fullshard", "dcp", "hf" or "torch"; `path` is its own, possibly below the given one; of
    an object store a string."""

    kind: str
    path: Path | str
    says: str  # one line for people


def detect(given: str | os.PathLike[str]) -> Found:
    """The checkpoint in `given`, a path or a URL; in a folder of steps the newest. Raises `UnknownCheckpoint`, or
    `RefusedCheckpoint` for formats that are recognised but not read."""
    url = location(given)
    if is_url(url):
        return _detect_in_store(url)
    # Errors have the path as it was given.
    path = Path(url if "://" in os.fspath(given) else given)
    if path.is_file():
        return _detect_file(path)
    if not path.is_dir():
        raise UnknownCheckpoint(f"{path}: there is no such file or folder")
    if (path / "CURRENT").is_file():
        return Found("fullshard", path, f"a fullshard checkpoint in {path}")
    if (path / ".metadata").is_file():
        return _detect_file(path / ".metadata")
    if any(path.glob("__*.metadata")):
        raise RefusedCheckpoint(
            f"{path}: a DCP checkpoint that each rank saved by itself (use_collectives=False), so no file describes "
            "all of it. Load it at the same number of ranks and save it with collectives"
        )
    if any(path.glob("__*.distcp")):
        raise UnknownCheckpoint(f"{path}: files of a DCP checkpoint without .metadata: the save never completed")
    if (path / INDEX).is_file():
        return Found("hf", path, f"a Hugging Face checkpoint with {INDEX} in {path}")
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 or (path / SINGLE) in files:
        return Found("hf", path, f"a safetensors file in {path}")
    if files:
        raise UnknownCheckpoint(
            f"{path}: {len(files)} safetensors files without {INDEX}, so a missing file would not be noticed; "
            "name one of the files"
        )
    # Checkpoints by step, as torchtitan, Composer and our trainer write them: the newest readable one.
    matches = [(child, match) for child in path.iterdir() if (match := _STEPS.fullmatch(child.name))]
    whole = [one for one in matches if any((one[0] / name).is_file() for name in (".metadata", "CURRENT"))]
    if whole:
        newest, _ = max(whole, key=lambda one: (int(one[1][1]), one[0]))
        found = detect(newest)
        return Found(found.kind, newest, f"{found.says}, the newest of {len(whole)} in {path}")
    files = sorted({file for pattern in _TORCH_FILES for file in path.glob(pattern)})
    ranks = [file for file in files if _RANK_FILE.fullmatch(file.name)]
    if len(ranks) > 1:
        raise RefusedCheckpoint(
            f"{path}: {len(ranks)} files, one for each rank ({ranks[0].name}, ...): a LOCAL_STATE_DICT or "
            "SHARDED_STATE_DICT that each rank saved by itself. Load it with the program and the number of ranks that "
            "wrote it, and save it with torch.distributed.checkpoint"
        )
    if len(files) == 1:
        return _detect_file(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise UnknownCheckpoint(f"{path}: {len(files)} files that torch.save may have written ({names}); name one")
    found_names = ", ".join(sorted(child.name for child in path.iterdir())[:8])
    raise UnknownCheckpoint(
        f"{path}: no known checkpoint. Expected CURRENT (fullshard), .metadata (DCP, torchtitan, Composer), "
        f"{INDEX} or *.safetensors (Hugging Face), or a file of torch.save; found {found_names or 'nothing'}"
    )


def _detect_in_store(url: str) -> Found:
    def is_one(path: str) -> bool:
        return any(name == POINTER_NAME or pointer_number(name) is not None for name in reach(path).names())

    with doing(f"looking at {url}"):
        if is_one(url):
            return Found("fullshard", url, f"a fullshard checkpoint in {url}")
        steps = [path for _, path in numbered(url)]
        newest = next((path for path in reversed(steps) if is_one(path)), None)
    if newest is None:
        raise UnknownCheckpoint(
            f"{url}: expected a checkpoint of fullshard, alone or in a folder of steps, found none; copy one of "
            f"another format to a directory"
        )
    return Found("fullshard", newest, f"a fullshard checkpoint in {newest}, the newest in {url}")


def _detect_file(path: Path) -> Found:
    if path.name == ".metadata":
        return Found("dcp", path.parent, f"a DCP checkpoint (torch.distributed.checkpoint) in {path.parent}")
    if path.suffix == ".safetensors":
        return Found("hf", path, f"a safetensors file, {path}")
    if zipfile.is_zipfile(path):
        return Found("torch", path, f"a file of torch.save, {path}")
    with path.open("rb") as file:
        if file.read(1) == b"\x80":
            return Found("torch", path, f"a file of torch.save in the format before torch 1.6, {path}")
    raise UnknownCheckpoint(f"{path}: neither a safetensors file nor one of torch.save")


# ---- opening and converting ----------------------------------------------------------------------------------


def open_source(
    path: str | os.PathLike[str], *, allow_torch_save: bool = False, optimizer_names: Sequence[str] | None = None
) -> Source:
    """Open the checkpoint at `path` in any format; in a folder of steps the newest.

    `allow_torch_save`: also read files of `torch.save`, which are pickles, through `weights_only`. `optimizer_names`:
    for such a file, the names of the optimizer's parameters in the order of their numbers, one optimizer after another.
    Raises `CheckpointError` for unknown, damaged or rejected checkpoints, `CheckpointMismatch` for names that do not
    fit, `ValueError` for names where parameters are not numbered.

        with open_source("outputs/checkpoint/step-100") as source:
            rows = source.read("model.w", Box((0, 0), (16, 512)))
    """
    return open_found(detect(path), allow_torch_save=allow_torch_save, optimizer_names=optimizer_names)


def open_found(found: Found, *, allow_torch_save: bool = False, optimizer_names: Sequence[str] | None = None) -> Source:
    """`open_source` for a result of `detect`."""
    if optimizer_names is not None and found.kind != "torch":
        raise ValueError(
            f"optimizer_names (--optimizer-names): expected a file of torch.save, whose optimizers number their "
            f"parameters, found {found.says}; leave them out"
        )
    match found.kind:
        case "fullshard":
            return OursSource(found.path)
        case "dcp":
            return DcpSource(Path(found.path))
        case "hf":
            return HfSource(Path(found.path))
    return TorchSource(Path(found.path), allow=allow_torch_save, optimizer_names=optimizer_names)


def convert(
    source: Source,
    target: str | os.PathLike[str],
    format: Format = "fullshard",
    *,
    max_file_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress | None = None,
    companions: Mapping[str, bytes] | None = None,
    merge_adapters: bool = False,
    model: nn.Module | None = None,
) -> Sequence[Path | str]:
    """Write all of `source` to `target`; returns the files written.

    | format | target | memory |
    |---|---|---|
    | `fullshard` | a fullshard checkpoint, also a URL; a new generation if there is one already | the largest tensor |
    | `dcp` | a folder that `torch.distributed.checkpoint` loads, which must be new | the largest tensor |
    | `hf` | a folder with safetensors files of at most `max_file_nbytes`, without a model in it | the largest tensor |
    | `torch` | a file that `torch.load(weights_only=True)` reads, which must be new | the largest tensor |

    `companions`: files for "hf" and "fullshard", by name; None: those of the source (config, tokenizer). Of a model of
    transformers that its `config.json` describes, "hf" writes the names and shapes of `save_pretrained`. Of a model
    under PEFT it writes the adapters alone, all of them in memory at once, for `PeftModel.from_pretrained`; or with
    `merge_adapters=True` the base with the active adapters merged. `model`: the model whose state `source` is, on the
    meta device, where its class is not of transformers or the checkpoint does not describe it.
    Raises `CheckpointMismatch` with everything that the format cannot hold, before anything is written, and
    `FileExistsError`.
    """
    ready = prepared(source, format, companions, merge_adapters=merge_adapters, model=model)
    return write(ready, target, format, max_file_nbytes=max_file_nbytes, progress=progress)


class Prepared(NamedTuple):
    """The contents that `write` writes: tensors and values, and the files beside them."""

    source: Source
    companions: dict[str, bytes]


def prepared(
    source: Source,
    format: Format,
    companions: Mapping[str, bytes] | None = None,
    *,
    merge_adapters: bool = False,
    model: nn.Module | None = None,
) -> Prepared:
    """The first half of `convert`: everything that can be refused before anything is written."""
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, found {format!r}")
    if format != "hf" and (merge_adapters or model is not None):
        raise ValueError(f'merge_adapters and model: expected the format "hf", found {format!r}')
    refuse_what_has_no_place(source, format)
    files = dict(source.companions() if companions is None else companions) if format in ("hf", "fullshard") else {}
    if format != "hf":
        return Prepared(source, files)
    ready = as_files(source, files, merge=merge_adapters, model=model)
    files.pop(ADAPTERS, None)
    if isinstance(ready, AdapterSource):
        files = {name: data for name, data in files.items() if name not in (CONFIG, GENERATION)}
    return Prepared(ready, files)


def write(
    ready: Prepared,
    target: str | os.PathLike[str],
    format: Format,
    *,
    max_file_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress | None = None,
) -> Sequence[Path | str]:
    """The second half of `convert`."""
    source, files = ready
    place = location(target)
    if format != "fullshard" and is_url(place):
        raise ValueError(
            f"{place}: expected a directory for the format {format}, found a URL; write to one, and copy it"
        )
    target = Path(place if "://" in os.fspath(target) else target)

    def read(key: str) -> Tensor:
        tensor = source.read(key)
        if progress is not None:
            progress(key, tensor.nbytes)
        return tensor

    match format:
        case "fullshard":
            return write_ours(place if is_url(place) else target, source, read, files)
        case "dcp":
            return write_dcp(target, source, read)
        case "torch":
            return write_torch(target, source, read)
    if isinstance(source, AdapterSource):
        return write_adapters(target, source.model, {key: read(key) for key in source.tensors}, files)
    return write_folder(target, source, read, files, max_nbytes=max_file_nbytes)


def reason(error: Exception, value: object) -> str:
    """Why `value` cannot be stored, with the remedy if there is one."""
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
            f"{source.path}: cannot all be stored as {format}",
            problems,
            "Choose what to take with only=[...] and skip=[...] of `Chosen` (--only, --skip)",
        )


def regrouped(source: Source, values: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
    """`values` of `source` as our own save would have stored them. DCP splits every list, we only those that contain
    tensors, so `param_groups.0.lr` and its neighbours become one value again."""
    leaves: dict[KeyPath, Any] = {info.path: torch.empty(0) for info in source.tensors.values()}
    tree = flatten(nested({**leaves, **values}))
    if tree.problems:
        raise CheckpointMismatch(f"{source.path}: cannot all be stored", tree.problems)
    return {leaf.path: leaf.value for leaf in tree.values.values()}


def write_ours(
    folder: Path | str, source: Source, read: Callable[[str], Tensor], companions: Mapping[str, bytes] | None = None
) -> Sequence[Path | str]:
    """Write all of `source` as a fullshard checkpoint, one tensor in memory at a time."""
    values = regrouped(source, {path: source.value(key) for key, path in source.values.items()})
    files = {(ROOM, name): stored_part(data) for name, data in (companions or {}).items()}
    if files:
        values[(ROOM, TIED)] = dict(source.tied)
    specs = [TensorSpec(path, part.dtype, part.shape) for path, part in files.items()]
    with CheckpointWriter(folder, [*source.tensors.values(), *specs], values) as writer:
        for key in source.tensors:
            writer.write(key, read(key))
        for path, part in files.items():
            assert part.local is not None
            writer.write(key_of(path), part.local)
    if is_url(str(folder)):
        with reach(str(folder)) as objects:
            return [f"{folder}/{inner}/{name}" for inner in generations(objects) for name in objects.sub(inner).names()]
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())
