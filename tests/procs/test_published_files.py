"""Files as `save_pretrained` of the plain model writes them: read into a sharded model, and written from one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

import fullshard
from fullshard import checkpoint, fully_shard
from fullshard.checkpoint.formats import export_full
from fullshard.cli import main as command
from tests.harness.behaviours import behaviour
from tests.harness.families import EVERYDAY, FAMILIES, MORE, family
from tests.harness.pool import pool
from tests.procs.test_pretrained import equal_values

TIMEOUT = 110.0
FILE_NBYTES = 20_000  # so that there are several


def meta_of(whole: Any) -> Any:
    with torch.device("meta"):
        return type(whole)(whole.config).to(whole.dtype).eval()


def shard(model: Any) -> Any:
    """Each layer of a list a unit, each model of transformers below the root, then the root."""
    import transformers

    for module in reversed(list(model.modules())):
        if isinstance(module, nn.ModuleList):
            for child in module:
                if any(True for _ in child.parameters()):
                    try:
                        fully_shard(child)
                    except (ValueError, AssertionError):  # one without a forward, or in two lists
                        continue
        elif isinstance(module, transformers.PreTrainedModel) and module is not model:
            if not model.all_tied_weights_keys:
                fully_shard(module)
    return fully_shard(model)


def tensors_in(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """{name: (file, tensor)} of all safetensors files in `folder`."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                found[name] = (path.name, file.get_tensor(name))
    return found


def differences(found: Path, expected: Path) -> list[str]:
    """What differs between two folders, in words: names, files, shapes, dtypes, bits, the index, the architecture."""
    ours, theirs = tensors_in(found), tensors_in(expected)
    said = [f"{name} on one side" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        (our_file, our), (their_file, their) = ours[name], theirs[name]
        if our_file != their_file:
            said.append(f"{name} in {our_file}, not {their_file}")
        if our.shape != their.shape or our.dtype != their.dtype or not torch.equal(our, their):
            said.append(
                f"{name}: {our.dtype} {tuple(our.shape)} for {their.dtype} {tuple(their.shape)}, or other values"
            )
    index = "model.safetensors.index.json"
    if (found / index).exists() != (expected / index).exists():
        said.append("an index on one side")
    elif (found / index).exists():
        one, other = (json.loads((path / index).read_text()) for path in (found, expected))
        if one["weight_map"] != other["weight_map"] or one["metadata"]["total_size"] != other["metadata"]["total_size"]:
            said.append("the index")
    names = [json.loads((path / "config.json").read_text())["architectures"] for path in (found, expected)]
    return said if names[0] == names[1] else [*said, f"architectures {names}"]


def _both_ways(rank: int, kind: str, folder: str, dtype: torch.dtype) -> dict[str, Any]:
    path, whole = Path(folder), family(kind, dtype)
    if rank == 0:
        whole.save_pretrained(path / "plain", max_shard_size=FILE_NBYTES)
    dist.barrier()
    # The documented order: on the meta device, sharded, then loaded.
    model = shard(meta_of(whole))
    fullshard.load_pretrained(model, path / "plain", progress=False)
    found: dict[str, Any] = {"loaded": equal_values(model, whole)}
    if rank == 0:
        # Once more: what was loaded is saved in another order than what was built.
        back = type(whole).from_pretrained(path / "plain").eval()
        back.save_pretrained(path / "again", max_shard_size=FILE_NBYTES)
    model_state, _ = checkpoint.get_state_dict(model)
    export_full(model_state, path / "live", "hf", max_file_nbytes=FILE_NBYTES)
    checkpoint.save({"model": model_state}, checkpoint_id=path / "ours")
    with fullshard.full_params(model, rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            model.save_pretrained(path / "own", max_shard_size=FILE_NBYTES)
    if rank == 0:
        words = ["--to", "hf", "--json", "--max-file-size", str(FILE_NBYTES)]
        assert command(["checkpoint", "export", str(path / "ours"), str(path / "stored"), *words]) == 0
        for name, expected in (("live", "again"), ("own", "again"), ("stored", "plain")):
            found[name] = differences(path / name, path / expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = type(whole).from_pretrained(path / "live").eval()
        # Not `whole`: transformers keeps tables of angles in float32, whatever the dtype is that it loads.
        found["back"] = ours.dtype is whole.dtype and equal_values(ours, back)
    dist.barrier()
    return found


def assert_both_ways(world: int, kind: str, folder: Path, dtype: torch.dtype) -> None:
    first, *others = pool(world).run(_both_ways, kind, str(folder), dtype, timeout=TIMEOUT)
    assert first == {"loaded": True, "live": [], "own": [], "stored": [], "back": True}
    assert all(other == {"loaded": True} for other in others)


@pytest.mark.sample(1)
@behaviour(
    "transformers: models whose weights are in files under other names or in other shapes than in memory are loaded "
    "after sharding, and exported to the files of the plain model's `save_pretrained`, names, shapes, bits and index",
    area="packages",
    torch="none",
    reason="with torch a rank holds the whole model, and its class has another name",
)
@pytest.mark.parametrize("kind", [*EVERYDAY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_files_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    assert_both_ways(2, kind, tmp_path, torch.float32)


# Their files have tables of angles, which transformers keeps in float32 where it loads a model and not where it casts
# one: the plain model's own round trip differs.
ANGLES_IN_FILES = ("esm",)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ANGLES_IN_FILES])
def test_files_at_other_worlds_in_bfloat16(kind: str, world: int, tmp_path: Path) -> None:
    assert_both_ways(world, kind, tmp_path, torch.bfloat16)
