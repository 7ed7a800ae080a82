"""Which format a path holds, found out by looking at names and first bytes; nothing is loaded."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, CheckpointNotFound
from .hf import INDEX

_STEPS = re.compile(r"(?:step-|step_|ep\d+-ba|checkpoint-|global_step)(\d+)")
_TORCH_FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt")
_RANK_FILE = re.compile(r"(?:^|.*[-_.])rank[-_]?\d+\.(?:pt|pth|bin|ckpt)")


class UnknownCheckpoint(CheckpointNotFound):
    """Nothing that is known is there."""


class RefusedCheckpoint(CheckpointError):
    """A format that is known and not read; the text says the way out."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint: `kind` is "fullshard", "dcp", "hf" or "torch"; `path` its own, which may lie below the one "
    "given."""

    kind: str
    path: Path
    says: str  # one line for people


def detect(path: Path) -> Found:
    """What `path` holds; of a folder of steps the newest. Raises `UnknownCheckpoint`, or `RefusedCheckpoint` for
    formats that are recognised and not read."""
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise UnknownCheckpoint(f"{path}: there is no such file or folder")
    for look in _LOOKS:
        found = look(path)
        if found is not None:
            return found
    names = sorted(child.name for child in path.iterdir())[:8]
    raise UnknownCheckpoint(
        f"{path}: no checkpoint that is known. Expected CURRENT (fullshard), .metadata (DCP, torchtitan, Composer), "
        f"{INDEX} or *.safetensors (Hugging Face), or a file of torch.save; found {', '.join(names) or 'nothing'}"
    )


def _file(path: Path) -> Found:
    if path.name == ".metadata":
        return Found("dcp", path.parent, f"a DCP checkpoint (torch.distributed.checkpoint) in {path.parent}")
    if path.suffix == ".safetensors":
        return Found("hf", path, f"a safetensors file, {path}")
    with path.open("rb") as file:
        head = file.read(2)
    if zipfile.is_zipfile(path):
        return Found("torch", path, f"a file of torch.save, {path}")
    if head[:1] == b"\x80":
        return Found("torch", path, f"a file of torch.save in the format before torch 1.6, {path}")
    raise UnknownCheckpoint(f"{path}: neither a safetensors file nor one of torch.save")


def _ours(path: Path) -> Found | None:
    return Found("fullshard", path, f"a fullshard checkpoint in {path}") if (path / "CURRENT").is_file() else None


def _dcp(path: Path) -> Found | None:
    if (path / ".metadata").is_file():
        return Found("dcp", path, f"a DCP checkpoint (torch.distributed.checkpoint) in {path}")
    if any(path.glob("__*.metadata")):
        raise RefusedCheckpoint(
            f"{path}: a DCP checkpoint that each rank saved by itself (use_collectives=False): there is no file that "
            "tells "
            "of all of it. Load it at the same number of ranks and save it with collectives"
        )
    if any(path.glob("__*.distcp")):
        raise UnknownCheckpoint(f"{path}: files of a DCP checkpoint without .metadata: the save never came to its end")
    return None


def _hf(path: Path) -> Found | None:
    if (path / INDEX).is_file():
        return Found("hf", path, f"a Hugging Face checkpoint with {INDEX} in {path}")
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 or (path / "model.safetensors") in files:
        return Found("hf", path, f"a safetensors file in {path}")
    if files:
        raise UnknownCheckpoint(
            f"{path}: {len(files)} safetensors files without {INDEX}, which would tell that none is missing; "
            "name one of the files"
        )
    return None


def _steps(path: Path) -> Found | None:
    """A folder of checkpoints by step, as torchtitan, Composer and our trainer write them: the newest that can be "
    "read."""
    steps = []
    for child in path.iterdir():
        match = _STEPS.fullmatch(child.name)
        if match and child.is_dir() and ((child / ".metadata").is_file() or (child / "CURRENT").is_file()):
            steps.append((int(match[1]), child))
    if not steps:
        return None
    newest = max(steps)[1]
    found = detect(newest)
    return Found(found.kind, newest, f"{found.says}, the newest of {len(steps)} in {path}")


def _torch(path: Path) -> Found | None:
    files = sorted({file for pattern in _TORCH_FILES for file in path.glob(pattern)})
    ranks = [file for file in files if _RANK_FILE.fullmatch(file.name)]
    if len(ranks) > 1:
        raise RefusedCheckpoint(
            f"{path}: {len(ranks)} files, one for each rank ({ranks[0].name}, ...): a LOCAL_STATE_DICT or "
            "SHARDED_STATE_DICT "
            "that each rank saved by itself. Load it with the program and the number of ranks that wrote it, and save "
            "it with torch.distributed.checkpoint"
        )
    if len(files) == 1:
        return _file(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise UnknownCheckpoint(f"{path}: {len(files)} files that torch.save may have written ({names}): name one")
    return None


_LOOKS: tuple[Callable[[Path], Found | None], ...] = (_ours, _dcp, _hf, _steps, _torch)
