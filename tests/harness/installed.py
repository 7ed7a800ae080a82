"""What the installed torch has. Tests know versions by what is there; by a number only where behaviour alone differs.

    from tests.harness.installed import DataParallelMeshDims, needs

    @needs("torch.distributed.fsdp.DataParallelMeshDims")                    # the whole test
    @needs("torch.distributed.fsdp.DataParallelMeshDims", half="torch")      # its run for torch's FSDP2
    @fails_before((2, 12), "outputs in a dataclass have no hook")            # its run for torch's FSDP2 fails there

A test whose needs are not met is skipped, with a reason that begins with `LACKS`; one that fails with an older torch is
expected to, with a reason that begins with `DIFFERS`, and is red where it passes. The torch that constraints.txt pins
has everything: there such a skip fails the run (tests/conftest.py).
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import fullshard

LACKS = "the installed torch lacks"
DIFFERS = "the installed torch differs:"


@cache
def pinned() -> str:
    """The version in constraints.txt."""
    text = (Path(__file__).parents[2] / "constraints.txt").read_text()
    (found,) = re.findall(r"^torch==(\S+)$", text, flags=re.M)
    return str(found)


def version() -> str:
    """That of the installed torch, without its local part."""
    return torch.__version__.split("+")[0]


def is_pinned() -> bool:
    return version() == pinned()


def release() -> tuple[int, int]:
    """(2, 13)"""
    major, minor = version().split(".")[:2]
    return int(major), int(minor)


@cache
def has(name: str) -> bool:
    """Whether torch has `name`, a dotted name below `torch`."""
    parts = name.split(".")
    found: Any = torch
    for position, part in enumerate(parts[1:], start=1):
        try:
            found = importlib.import_module(".".join(parts[: position + 1]))
        except ModuleNotFoundError:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
    return True


def needs(*names: str, half: Literal["both", "torch"] = "both") -> pytest.MarkDecorator:
    """Mark a test that is skipped where torch lacks one of `names`; `half`: "torch" skips its run for torch alone."""
    return pytest.mark.needs(*names, half=half)


def fails_before(
    release: tuple[int, int], reason: str, *, half: Literal["both", "torch"] = "torch"
) -> pytest.MarkDecorator:
    """Mark a test, or one case of it, that fails before `release`, (2, 12) meaning up to 2.11; `half`: "torch" is its
    run for torch's FSDP2 alone."""
    return pytest.mark.fails_before(release, reason, half=half)


# Torch's class where it has one, for what takes torch's and ours; else ours.
DataParallelMeshDims: Any = getattr(importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims", None)
if DataParallelMeshDims is None:
    DataParallelMeshDims = fullshard.DataParallelMeshDims
TorchPlacementResult: Any = getattr(
    importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common"), "ShardPlacementResult", None
)
if TorchPlacementResult is None:

    def TorchPlacementResult(placement: Any, info: Any) -> Any:
        return fullshard.ShardPlacementResult(placement, None if info is None else info.mesh)


PLACEMENT_RESULT = "torch.distributed.fsdp._fully_shard._fsdp_common.ShardPlacementResult"
MESH_DIMS = "torch.distributed.fsdp.DataParallelMeshDims"


def clear_redistribution_cache() -> None:
    """Forget how DTensor goes from one placement to another, in all threads: by a mesh, which it knows by the number of
    its thread, it notes the shapes of one rank."""
    from torch.distributed.tensor import _redistribute

    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def clear_sharding_cache() -> None:
    """Forget what DTensor remembers of operations, in this thread."""
    from torch.distributed.tensor import debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.10
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
