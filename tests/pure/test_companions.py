"""What belongs beside exported weights: stored with a checkpoint, given at export, or named as missing."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import companions
from fullshard.checkpoint.formats import HfSource, convert, open_source
from fullshard.cli import main as command


class Saves:
    """A tokenizer, or a config, as far as a checkpoint knows one: an object that writes files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def save_pretrained(self, folder: str) -> None:
        for name, text in self.files.items():
            (Path(folder) / name).write_text(text)


class Config(Saves):
    """What a model of transformers has as its config."""

    def __init__(self) -> None:
        self.architectures: list[str] | None = None
        self.dtype: str | None = None

    def save_pretrained(self, folder: str) -> None:
        text = {"model_type": "tied", "architectures": self.architectures, "dtype": self.dtype}
        (Path(folder) / "config.json").write_text(json.dumps(text))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.config = Config()


TOKENIZER = Saves({"tokenizer.json": '{"a": 1}', "merges.txt": "a b\n", "weights.bin": "no companion"})


def saved(path: Path, **more: Any) -> None:
    model_state, _ = checkpoint.get_state_dict(Model())
    checkpoint.save({"model": model_state, "step": 3, **more}, checkpoint_id=path, no_dist=True)


def exported(*arguments: object, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert command(["checkpoint", "export", *map(str, arguments), "--json"]) == code
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Path]:
    saved(tmp_path / "ours", tokenizer=TOKENIZER)
    yield tmp_path / "ours"


def test_config_and_tokenizer_are_stored_and_exported(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = exported(ours, tmp_path / "out", "--to", "hf", capsys=capsys)
    assert said["missing"] == [] and said["from"]["num_tensors"] == 1
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"model.safetensors", "config.json", "tokenizer.json", "merges.txt"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "tied",
        "architectures": ["Model"],
        "dtype": "float32",
    }
    with HfSource(tmp_path / "out") as source:
        assert list(source.tensors) == ["embed.weight"]  # the first of the tied names, once
    assert checkpoint.verify(ours).tensors["__pretrained__.tokenizer.tokenizer.json"].dtype == "uint8"


def test_a_load_passes_over_what_is_stored_beside_the_state(ours: Path) -> None:
    model_state, _ = checkpoint.get_state_dict(Model())
    for more in ({}, {"tokenizer": TOKENIZER}, {"tokenizer": Saves({"other.json": "{}"})}):
        checkpoint.load({"model": model_state, "step": 0, **more}, checkpoint_id=ours, no_dist=True)
    with pytest.raises(checkpoint.CheckpointMismatch, match="unexpected: step"):
        checkpoint.load({"model": model_state}, checkpoint_id=ours, no_dist=True)


def test_without_them_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert command(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "hf"]) == 0
    text = capsys.readouterr().out
    assert "missing: config.json" in text and "--config FOLDER" in text and '"tokenizer": tokenizer' in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_folder_given_at_export_takes_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tmp_path / "given"
    given.mkdir()
    config = {
        "model_type": "x",
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16"},
        "quantization_config": {"dtype": "int4"},
    }
    (given / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors.index.json", "README.md"):
        (given / name).write_text("{}")
    saved(tmp_path / "ours")
    said = exported(tmp_path / "ours", tmp_path / "out", "--to", "hf", "--config", given, capsys=capsys)
    assert said["missing"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    # from_pretrained converts weights to what the config says; a quantiser's own dtype is its own.
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "x",
        "dtype": "float32",
        "text_config": {"dtype": "float32"},
        "quantization_config": {"dtype": "int4"},
    }
    said = exported(tmp_path / "ours", tmp_path / "no", "--to", "hf", "--config", tmp_path, capsys=capsys, code=2)
    assert "expected a folder with config.json" in said["message"] and not (tmp_path / "no").exists()
    said = exported(tmp_path / "ours", tmp_path / "no", "--to", "torch", "--config", given, capsys=capsys, code=2)
    assert "--to hf" in said["message"]


def test_of_several_models_the_one_that_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor, critic = Model(), Model()
    critic.config.save_pretrained = Saves({"config.json": '{"model_type": "critic"}'}).save_pretrained  # type: ignore[method-assign]
    state = {"actor": checkpoint.get_state_dict(actor)[0], "critic": checkpoint.get_state_dict(critic)[0]}
    checkpoint.save({**state, "tokenizer": TOKENIZER}, checkpoint_id=tmp_path / "ours", no_dist=True)
    for name, kind in (("actor", "tied"), ("critic", "critic")):
        chosen = ("--only", f"{name}.*", "--strip", f"{name}.")
        exported(tmp_path / "ours", tmp_path / name, "--to", "hf", *chosen, capsys=capsys)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == kind
        assert (tmp_path / name / "tokenizer.json").exists()


def test_they_go_through_a_conversion_and_back(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(ours, tmp_path / "hf", "--to", "hf", capsys=capsys)
    with open_source(tmp_path / "hf") as source:
        convert(source, tmp_path / "back")
    exported(tmp_path / "back", tmp_path / "again", "--to", "hf", capsys=capsys)
    for path in (tmp_path / "hf").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    # Other people's .json files are no companions: there is no config of a model among them.
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "model.safetensors").write_bytes((tmp_path / "hf" / "model.safetensors").read_bytes())
    (tmp_path / "loose" / "package.json").write_text("{}")
    with open_source(tmp_path / "loose") as source:
        assert source.companions() == {}


def test_a_config_that_cannot_be_saved_costs_no_checkpoint(tmp_path: Path) -> None:
    model = Model()
    model.config = None  # type: ignore[assignment]
    checkpoint.save({"model": model}, checkpoint_id=tmp_path / "none", no_dist=True)
    model.config = Saves({"no/such/folder": ""})  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="no files of Model: its save_pretrained raised FileNotFoundError.*--config"):
        checkpoint.save({"model": model}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert checkpoint.is_complete(tmp_path / "ours")


def test_a_model_s_state_is_copied_and_pickled_as_a_plain_dict() -> None:
    state, _ = checkpoint.get_state_dict(Model())
    assert isinstance(state, companions.ModelState)
    for made in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert type(made) is dict and made.keys() == state.keys()
