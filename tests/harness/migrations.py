"""Runs the programs of tests/migrations before and after `fullshard migrate`, in the same processes.

A program is a file, or a folder whose first file is `train.py` or `main.py`, there or in `scripts`. Its `main()` runs
in a process group and returns what is compared: tensors and numbers in lists and dicts. A notebook has `RESULT`.
"""

from __future__ import annotations

import importlib
import random
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel

from fullshard.migrate.code import Migration, migrate_code
from tests.harness import programs

FOLDER = Path(__file__).parents[1] / "migrations"


_init = FullyShardedDataParallel.__init__
_optimizer_state = FullyShardedDataParallel._optim_state_dict_impl


def _on_device(*args: Any, **kwargs: Any) -> Any:
    """On the CPU, FSDP1 frees what it offloads before it is read."""
    return _optimizer_state(*args, **{**kwargs, "cpu_offload": False})


def _on_cpu(self: FullyShardedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """FSDP1 trains on the CPU only if it is told to, which no user's program does, and has no offload and no
    synchronisation of values there."""
    if kwargs.get("device_id") is None:
        kwargs["device_id"] = torch.device("cpu")
    kwargs.pop("cpu_offload", None)
    if kwargs.pop("sync_module_states", False):
        if any(p.is_meta for p in module.parameters()):
            module.to_empty(device="cpu")
        for parameter in module.parameters():
            torch.distributed.broadcast(parameter.detach(), 0)
    _init(self, module, *args, **kwargs)


def names() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "programs").iterdir() if not path.name.startswith("_"))


def entry(name: str) -> Path:
    """The first file of a program."""
    folder = FOLDER / "programs" / name
    if not folder.is_dir():
        return folder.with_suffix(".py")
    return next(folder / each for each in ("train.py", "main.py", "scripts/train.py") if (folder / each).exists())


def told() -> list[Path]:
    """Programs in which lines are left to a person. Each has `# told` on it."""
    return sorted((FOLDER / "told").glob("*.py"))


def uses_fsdp1(name: str) -> bool:
    folder = FOLDER / "programs" / name
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return any("FullyShardedDataParallel" in path.read_text() for path in files)


def _root(path: Path) -> Path:
    """The folder of a program: of its copies too."""
    return path.parent.parent if path.parent.name == "scripts" else path.parent


def migrated(name: str, folder: Path, *, adapter: bool = False) -> tuple[Migration, Path]:
    """The migration of a program, and the first file of its new form, written below `folder`."""
    first = entry(name)
    root = _root(first)
    found = migrate_code(first, adapter=adapter)
    if root.name == name:
        shutil.copytree(root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        folder.mkdir(exist_ok=True)
        shutil.copy(first, folder)
    for path, (_, new) in found.texts.items():
        (folder / Path(path).relative_to(root)).write_text(new)
    return found, folder / first.relative_to(root)


def run(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """What a program returns, flat."""
    torch.manual_seed(0)
    random.seed(0)
    before, modules = torch.get_default_dtype(), set(sys.modules)
    torch.set_default_dtype(dtype)
    paths = list(sys.path)
    sys.path[:0] = [str(path.parent), str(FOLDER / "standins")]
    sys.dont_write_bytecode = True
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(FullyShardedDataParallel, "__init__", _on_cpu),
            mock.patch.object(FullyShardedDataParallel, "_optim_state_dict_impl", staticmethod(_on_device)),
            mock.patch("torch.distributed.fsdp.FullStateDictConfig", lambda **_: FullStateDictConfig()),
        ):
            warnings.simplefilter("ignore")  # of what torch says about FSDP1, none is about what is tested
            flat: dict[str, Any] = {}
            module = importlib.import_module(path.stem)
            programs._flatten(flat, "", module.main() if hasattr(module, "main") else module.RESULT)
            return flat
    finally:
        torch.set_default_dtype(before)
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith((str(_root(path)), str(FOLDER))):
                del sys.modules[name]


def compare(rank: int, old: str, new: str) -> list[str]:
    """On each rank: what the two programs return differently, by more than half of the digits: rounding that grew that
    much, where any other fault is visible. FSDP1 can only clip in float32."""
    narrow = any("clip_grad_norm_" in path.read_text() for path in _root(Path(old)).rglob(_pattern(Path(old))))
    dtype, allowed = (torch.float32, 2.0**-12) if narrow else (torch.float64, 2.0**-26)
    found, expected = run(Path(new), dtype), run(Path(old), dtype)
    assert found, "the program returned nothing"
    return programs.differences(found, expected, allowed)


def _pattern(path: Path) -> str:
    return path.name if path.parent.name == "programs" else "*.py"
