"""URLs instead of directories: in the commands, in the trainer, and of a store that takes no parts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from fullshard.checkpoint import bucket
from fullshard.cli import main
from fullshard.train.config import CheckpointKeys, ConfigError, load_config
from fullshard.train.folder import Checkpoints, Line, make_run_dir
from tests.harness.bucket import Request, Requests
from tests.harness.threads import run_ranks
from tests.threads.test_checkpoint_buckets import RUN, STEP, named, no_pauses, requests, save, version_of

__all__ = ["no_pauses", "requests"]


def test_the_command_takes_a_url(requests: Requests, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: object, code: int = 0) -> str:
        assert main(["checkpoint", *map(str, words)]) == code
        out, errors = capsys.readouterr()
        assert errors.count("\n") <= 2
        return out + errors

    save(1)
    save(2, f"{RUN}/step-2")
    assert f"a fullshard checkpoint in {RUN}/step-2, the newest in {RUN}" in said("inspect", RUN)
    assert "m.w" in said("inspect", STEP) and "whole" in said("verify", STEP)
    assert "m.w  float32 [5, 3], 60 B, 1 part(s)" in said("show", STEP, "m.w")
    assert "step: number, 2" in said("show", RUN, "step")
    assert "already in schema" in said("upgrade", STEP)
    # Of a store to a directory, to another place of a store, and back; other formats are directories.
    said("convert", STEP, tmp_path / "ours")
    said("convert", tmp_path / "ours", f"{RUN}/step-9")
    assert version_of(str(tmp_path / "ours")) == version_of(f"{RUN}/step-9") == 1
    said("export", STEP, tmp_path / "torch.pt", "--to", "torch")
    assert torch.load(tmp_path / "torch.pt")["step"] == 1
    refused = said("export", STEP, f"{RUN}/torch.pt", "--to", "torch", code=2)
    assert "expected a directory for the format torch, found a URL" in refused
    for words in (("inspect", "bucket://b/none"), ("show", "bucket://b/none", "w"), ("list", "bucket://b/none")):
        assert "bucket://b/none: expected a" in said(*words, code=2)
    assert "expected a directory, or a URL as a string" in said("list", "bucket:/b/run", code=2)


@pytest.mark.parametrize("url", ["memory://b/run", "memory://run"])
def test_a_store_without_parts(url: str, no_pauses: None) -> None:
    """fsspec's own in memory: objects are sent whole."""
    for step in (1, 2, 3):
        run_ranks(2, lambda rank, step=step: save(step, f"{url}/step-{step}"))  # type: ignore[misc]
    assert checkpoint.latest(url) == f"{url}/step-3" and version_of(f"{url}/step-3") == 3
    save(4, f"{url}/step-3")
    assert version_of(f"{url}/step-3") == 4
    assert checkpoint.retain(url, keep_last=1) == [f"{url}/step-1", f"{url}/step-2"]
    assert [one.step for one in checkpoint.list_checkpoints(url)] == [3]
    assert checkpoint.set_aside(f"{url}/step-3") == f"{url}/step-3.damaged"
    assert version_of(f"{url}/step-3.damaged") == 4 and checkpoint.latest(url) is None


def test_a_trainer_saves_and_continues_there(requests: Requests, tmp_path: Path) -> None:
    keys = CheckpointKeys(folder=RUN, keep_last=2)
    alone: Any = SimpleNamespace(rank=0, size=1, largest=lambda values: values)

    def made(run_dir: Path) -> tuple[torch.nn.Module, Checkpoints]:
        model = torch.nn.Linear(2, 2)
        return model, Checkpoints(run_dir, keys, alone, model, torch.optim.AdamW(model.parameters()), {"seed": 0})

    model, checkpoints = made(tmp_path / "one")
    assert checkpoints.resume() == (0, None)
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        checkpoints.save(step, wait=step == 3)
    assert not (tmp_path / "one").exists()
    assert {name.split("/")[0] for name in named(requests)} == {"step-2", "step-3"}
    # A file of the newest is cut: another folder of a run continues from the one before.
    name = next(name for name in requests.objects if "step-3" in name and "data-" in name)
    requests.objects[name] = requests.objects[name][:-1]
    model, checkpoints = made(tmp_path / "two")
    assert checkpoints.resume() == (2, f"{RUN}/step-2") and (model.weight == 2).all()
    assert [path for path, _ in checkpoints.aside] == [f"{RUN}/step-3.damaged"]


def test_a_folder_of_a_run_that_cannot_be_written_is_refused_at_once(requests: Requests, tmp_path: Path) -> None:
    def make(folder: str) -> None:
        make_run_dir(load_config(None, [f"run.dir={tmp_path / 'run'}", f"checkpoint.folder={folder}"]))

    def fault(_: Request) -> None:
        raise PermissionError("Access Denied")

    make(RUN)
    bucket._proven.clear()
    requests.fault = fault
    with pytest.raises(ConfigError, match='checkpoint.folder = "bucket://b/run": .*no permission: Access Denied; look'):
        make(RUN)
    with pytest.raises(ConfigError, match="checkpoint.folder = .*expected a protocol of fsspec in nonsense://"):
        make("nonsense://b/run")
    with pytest.raises(ConfigError, match="checkpoint.folder = .*expected a directory, or a URL"):
        make("bucket:/b/run")
    with pytest.raises(ConfigError, match="run.dir = .*checkpoints alone go to a URL, checkpoint.folder"):
        load_config(None, ["run.dir=s3://b/run"])


def test_a_long_save_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = Line("step-1", said.append)
    for seconds in (1, 9, 11, 12, 20, 25):
        now[0] = seconds
        line(seconds * 10**6, 10**8)
    assert said == [
        "step-1: 11.0 of 100.0 MB of this process are saved",
        "step-1: 25.0 of 100.0 MB of this process are saved",
    ]
