"""The public surface is what `fullshard.__all__` says: sorted, complete, and nothing beside it."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
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
    names = {name for name in fullshard.__all__ if not name.startswith("_")}
    public = importlib.import_module("fullshard._public")
    assert names == {name for name in vars(public) if not name.startswith("_")}
    assert all(getattr(fullshard, name) is getattr(public, name) for name in names)
    assert set(dir(fullshard)) >= names


def test_nothing_heavy_is_imported_before_a_name_is_asked_for() -> None:
    """And nothing hides the function `guard`."""
    code = """
import sys
import fullshard
assert fullshard.__version__ and "fully_shard" in dir(fullshard)
assert not {"torch", "numpy"} & set(sys.modules), "import fullshard"
import fullshard.peers.store
from fullshard import *
from fullshard import guard
assert callable(guard) and fullshard.guard is guard and callable(fully_shard)
assert fullshard.observe.record and fullshard.checkpoint.save
import unittest.mock
with unittest.mock.patch("fullshard.guard") as replaced:
    assert fullshard.guard is replaced
assert fullshard.guard is guard
try:
    fullshard.fully_sharded
except AttributeError as error:
    assert "fully_sharded" in str(error)
else:
    raise AssertionError("a name that is not there was found")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


def test_public_names_do_not_bring_the_compiler() -> None:
    """Half of a second of each process, and its memory, for what few programs use."""
    code = """
import sys
from fullshard import fully_shard, prepare_fully_shard
print(*{"torch._dynamo", "torch._inductor", "torch.distributed.pipelining"} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and run.stdout.split() == [], run.stdout + run.stderr


def test_the_promised_names_are_there() -> None:
    """What users of torch's FSDP2 import, plus ours. To take one away is a breaking change."""
    assert set(fullshard.__all__) >= {
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "GradientReductionHandle",
        "UnshardHandle",
        "clip_grad_norm_",
        "full_params",
        "fully_shard",
        "grad_stats",
        "mark_initialized",
        "materialize",
        "original_classes",
        "register_fsdp_forward_method",
        "replicate",
        "report",
        "share_comm_ctx",
        "unit_open",
    }


def test_a_former_place_gives_the_same_with_one_warning() -> None:
    """In a process of its own: the warning comes once."""
    former = {"extras": ("Drift", "NonFiniteError", "Turn"), "observe": ("Report", "UnitReport")}
    code = f"""
import warnings
import fullshard
for place, names in {former}.items():
    for name in names:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = getattr(fullshard, name), getattr(getattr(fullshard, place), name), getattr(fullshard, name)
        assert found[0] is found[1] is found[2]
        (warning,) = seen
        assert f"fullshard.{{name}} is fullshard.{{place}}.{{name}} from 0.3 on" in str(warning.message)
        assert warning.category is DeprecationWarning and warning.filename == "<string>"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert not set(sum(former.values(), ())) & set(fullshard.__all__)


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
