"""Checkpoints that earlier versions wrote load with today's code, bitwise, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from tests.data.write_checkpoints import KINDS, build, digests, state_of
from tests.harness.threads import run_ranks

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("0.1.0",)
WRITTEN = [(version, kind) for version in VERSIONS for kind in KINDS]
# On which ranks they are loaded, and how those are laid out.
PLACES = [(1, "plain"), (2, "plain"), (4, "plain"), (4, "hsdp"), (2, "offload")]


def _loaded(rank: int, folder: str, layout: str) -> dict[str, str]:
    """What stands in model and optimizer after a load over values that are all wrong."""
    model, optimizer = build(layout)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(9)
    state = state_of(model, optimizer, 0)
    checkpoint.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    checkpoint.set_state_dict(model, optimizer, **parts)
    return digests(state_of(model, optimizer, state["step"]))


@pytest.mark.sample(10)
@pytest.mark.parametrize(("world", "layout"), PLACES)
@pytest.mark.parametrize(("version", "kind"), WRITTEN)
def test_what_earlier_versions_wrote_loads_bitwise(
    version: str, kind: str, world: int, layout: str, tmp_path: Path
) -> None:
    here = DATA / f"checkpoints_{version}" / kind
    expected = json.loads((here / "expected.json").read_text())
    assert expected["version"] == version and expected["world"] == KINDS[kind][0]
    shutil.copytree(here / "checkpoint", tmp_path / "checkpoint")
    for found in run_ranks(world, _loaded, str(tmp_path / "checkpoint"), layout):
        assert found == expected["state"]
    checkpoint.verify(tmp_path / "checkpoint")


@pytest.mark.parametrize(("version", "kind"), WRITTEN)
def test_what_they_wrote_is_not_trivial(version: str, kind: str) -> None:
    """Parameters, both moments and the largest of AdamW, steps, a buffer, groups."""
    state = json.loads((DATA / f"checkpoints_{version}" / kind / "expected.json").read_text())["state"]
    names = "\n".join(state)
    assert all(part in names for part in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "running_mean", "/step", "lr"))
    assert state["/step"] == "3" and len({v for k, v in state.items() if "exp_avg" in k}) > 10


def test_those_of_0_1_0_are_there() -> None:
    """Deleted data would be tests that pass."""
    folder = DATA / "checkpoints_0.1.0"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(KINDS)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 20
