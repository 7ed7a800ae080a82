"""The public surface is what `fullshard.__all__` says: sorted, complete, and nothing beside it."""

from __future__ import annotations

import importlib
import importlib.metadata
import types
from pathlib import Path

import pytest

import fullshard
from tests.harness.source import SRC

# Rooms that are reachable as attributes once imported; not part of the surface, but not hidden either.
ROOMS = {path.name for path in (SRC / "fullshard").iterdir() if path.is_dir()}


def test_all_is_sorted_and_has_no_duplicates() -> None:
    names = list(fullshard.__all__)
    assert names == sorted(set(names))


def test_all_equals_what_is_exported() -> None:
    public = {
        name
        for name, value in vars(fullshard).items()
        if not name.startswith("_") and not (isinstance(value, types.ModuleType) and name in ROOMS)
    }
    assert public == {name for name in fullshard.__all__ if not name.startswith("_")}
    assert all(hasattr(fullshard, name) for name in fullshard.__all__)


def test_the_promised_names_are_there() -> None:
    """What users of torch's FSDP2 import, plus ours. To take one away is a breaking change."""
    assert set(fullshard.__all__) >= {
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnitInfo",
        "UnshardHandle",
        "clip_grad_norm_",
        "full_params",
        "fully_shard",
        "inspect_units",
        "mark_initialized",
        "materialize",
        "register_fsdp_forward_method",
        "replicate",
        "report",
        "share_comm_ctx",
    }


def test_public_objects_say_what_they_are() -> None:
    undocumented = [name for name in fullshard.__all__ if name[0] != "_" and not getattr(fullshard, name).__doc__]
    assert not undocumented


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (SRC / "fullshard").glob("*/__init__.py")))
def test_every_room_lists_its_exports_in_order(room: str) -> None:
    module = importlib.import_module(f"fullshard.{room}")
    assert module.__doc__, f"fullshard.{room} does not say what lives there"
    names = list(getattr(module, "__all__", []))
    assert names == sorted(set(names))
    assert all(hasattr(module, name) for name in names)


def test_the_version_is_one() -> None:
    namespace: dict[str, str] = {}
    exec((SRC / "fullshard" / "_version.py").read_text(), namespace)
    assert fullshard.__version__ == namespace["__version__"]
    try:
        installed = importlib.metadata.version("fullshard")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the source tree, without an installation
    if Path(fullshard.__file__).is_relative_to(SRC):
        assert installed == fullshard.__version__
