"""Checkpoints that earlier versions wrote load with today's code, bitwise, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint.upgrade import upgrade
from fullshard.cli import main
from fullshard.cli.checkpoint import Numbers
from tests.data.write_checkpoints import KINDS, build, digests, state_of
from tests.harness.threads import run_ranks

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ("0.1.0", "0.2.0")
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


@pytest.mark.sample(5)
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


@pytest.mark.sample(6)
@pytest.mark.parametrize(("version", "kind"), WRITTEN)
def test_what_they_wrote_is_not_trivial(version: str, kind: str) -> None:
    """Parameters, both moments and the largest of AdamW, steps, a buffer, groups."""
    state = json.loads((DATA / f"checkpoints_{version}" / kind / "expected.json").read_text())["state"]
    names = "\n".join(state)
    assert all(part in names for part in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "running_mean", "/step", "lr"))
    assert state["/step"] == "3" and len({v for k, v in state.items() if "exp_avg" in k}) > 10


@pytest.mark.parametrize("version", VERSIONS)
def test_those_of_each_version_are_there(version: str) -> None:
    """Deleted data would be tests that pass."""
    folder = DATA / f"checkpoints_{version}"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(KINDS)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 20


# ---- from schema 1 to schema 2 -----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", [None, "other"])
def test_upgraded_checkpoints_are_what_they_were(out: str | None, tmp_path: Path) -> None:
    """In place, or elsewhere; tensor by tensor, and by a load."""
    for version, kind in WRITTEN:
        here, folder = DATA / f"checkpoints_{version}" / kind, tmp_path / version / kind
        shutil.copytree(here / "checkpoint", folder / "c")
        with checkpoint.open_checkpoint(folder / "c") as before:
            old = {key: before.tensor(key) for key in before.manifest.tensors}
            assert before.manifest.schema == 1
            values = before.manifest.values
        target = folder / (out or "c")
        assert upgrade(folder / "c", None if out is None else target)
        manifest = checkpoint.verify(target)
        assert manifest.schema == 2 and manifest.values == values and manifest.tensors.keys() == old.keys()
        with checkpoint.open_checkpoint(target) as after:
            for key, value in old.items():
                found = after.tensor(key)
                assert found.dtype is value.dtype and torch.equal(found, value), key
        assert checkpoint.inspect(folder / "c").schema == (1 if out else 2)
        assert not upgrade(target), "it is of today's schema"


def test_an_upgrade_does_not_replace_what_is_there(tmp_path: Path) -> None:
    """A file, a link, another checkpoint, someone's directory. What a killed upgrade left is none of these."""
    shutil.copytree(DATA / "checkpoints_0.1.0" / "1-rank" / "checkpoint", tmp_path / "c")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    shutil.copytree(tmp_path / "c", tmp_path / "checkpoint")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    for name in ("file", "link", "checkpoint", "notes"):
        with pytest.raises(checkpoint.CheckpointMismatch, match="expected a place that is free"):
            upgrade(tmp_path / "c", tmp_path / name)
    assert upgrade(tmp_path / "c", tmp_path / "empty")
    checkpoint.verify(tmp_path / "empty")


def test_a_damaged_checkpoint_is_not_upgraded(tmp_path: Path) -> None:
    """And stays as it is, to be restored."""
    shutil.copytree(DATA / "checkpoints_0.1.0" / "1-rank" / "checkpoint", tmp_path / "c")
    (file,) = tmp_path.glob("c/g*/data-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointDamaged):
        upgrade(tmp_path / "c")
    assert checkpoint.inspect(tmp_path / "c").schema == 1 and file.exists()
    assert sorted(path.name[:1] for path in (tmp_path / "c").iterdir()) == ["C", "L", "g"]


def test_the_commands_upgrade_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(DATA / "checkpoints_0.1.0" / "2-ranks" / "checkpoint", tmp_path / "step-3")
    for arguments, says in [
        (["show", "step-3", "model.second.weight"], ["float32 [3, 7]", "2 part(s)", "elements 21", "not_finite 0"]),
        (["upgrade", "step-3"], ["in schema 2"]),
        (["upgrade", "step-3"], ["already in schema 2"]),
        (["upgrade", "step-3", "other"], ["other", "in schema 2"]),
        (["show", ".", "model.second.weight"], ["1 part(s)", "[0:3, 0:7]  data-00000.safetensors"]),
        (["show", "step-3", "step"], ["step: number, 3"]),
        (["show", "step-3", "step", "--json"], ['"value": 3']),
        (["show", "step-3", "model.scale", "--json"], ['"shape": [1]', '"min": ', '"rank": 0']),
    ]:
        paths = [str(tmp_path / one) if one in ("step-3", "other", ".") else one for one in arguments]
        assert main(["checkpoint", *paths]) == 0
        printed = capsys.readouterr().out
        assert all(text in printed for text in says), printed
    assert main(["checkpoint", "show", str(tmp_path / "step-3"), "model.second.wait"]) == 2
    assert "model.second.weight" in capsys.readouterr().err, "the nearest"
    assert main(["checkpoint", "show", str(DATA), "x"]) != 0


def test_numbers_of_parts_are_those_of_the_whole() -> None:
    value = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    value[3, 3], value[0, 0], value[7, 1] = float("nan"), 0.0, float("inf")
    numbers = Numbers()
    for part in (value[:7], value[7:8], value[8:]):
        numbers.add(part)
    finite = value[value.isfinite()].double()
    found = numbers.facts()
    assert (found["elements"], found["zeros"], found["not_finite"]) == (200, 1, 2)
    assert found["mean"] == pytest.approx(float(finite.mean()), rel=1e-5)
    assert found["std"] == pytest.approx(float(finite.std(unbiased=False)), rel=1e-5)
    assert found["min"] == pytest.approx(float(finite.min()), rel=1e-5)
    empty = Numbers()
    empty.add(torch.zeros(0))
    assert empty.facts() == {"elements": 0, "zeros": 0, "not_finite": 0}
