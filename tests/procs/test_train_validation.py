"""Validation on files of its own, and perplexity."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fullshard.train.config import ConfigError, load_config
from fullshard.train.data import check_data
from fullshard.train.sample import load_run
from tests.harness import tolerance
from tests.procs.test_train_tokenizers import QUIET, run_on


def keys_of(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "a.txt").write_text("".join(f"rank {n} waits, é. " for n in range(100)))
    (tmp_path / "b.txt").write_text("".join(f"host {n} does not. " for n in range(20)))
    files = (f"data.corpus=path:{tmp_path}/a.txt", f"data.validation=path:{tmp_path}/b.txt")
    return (*QUIET, *files, "metrics.eval_windows=0", "training.steps=2")


def test_a_file_of_its_own_validates(tmp_path: Path) -> None:
    """All of the corpus trains; the loss is that of the trained model on all of the file, whatever the ranks."""
    keys = keys_of(tmp_path)
    one, two = (run_on(size, keys, tmp_path / f"run-{size}") for size in (1, 2))
    assert one[-1]["val_loss"] == two[-1]["val_loss"]
    manifest = json.loads((tmp_path / "run-2" / "manifest.json").read_text())
    assert manifest["corpus"]["training_tokens"] == len((tmp_path / "a.txt").read_bytes()) + 2

    model, _, config = load_run(tmp_path / "run-2")
    tokens = torch.tensor([256, *(tmp_path / "b.txt").read_bytes(), 257])
    length, losses = config.training.sequence_length, []
    for first in range(0, len(tokens) - 1, length):
        row = tokens[first : first + length + 1]
        with torch.no_grad():
            losses.append(F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="none"))
    loss = float(torch.cat(losses).mean())
    assert isinstance(model, torch.nn.Module)
    near = tolerance.terms_of(model, len(tokens)) * torch.finfo(torch.float32).eps
    assert two[-1]["val_loss"] == pytest.approx(loss, rel=near)
    assert two[-1]["val_perplexity"] == pytest.approx(math.exp(loss), rel=near * loss)
    assert "val_perplexity" not in two[0]
    for record in two:
        figures = record["loss"], record["perplexity"]
        assert isinstance(figures[0], float) and figures[1] == math.exp(figures[0])

    (tmp_path / "b.txt").write_text("another file")
    with pytest.raises(Exception, match="validation_sha256"):
        run_on(2, (*keys, "training.steps=3"), tmp_path / "run-2")


def test_what_cannot_validate_is_one_line(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    for setting, words in (
        ("data.validation=b.txt", r'data.validation = "b.txt".*nearest valid: "path:b.txt"'),
        ("data.validation_fraction=0.2", "data.validation_fraction.*has no effect with data.validation"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, (*keys, setting))
    missing = load_config(None, (*keys, f"data.validation=path:{tmp_path}/none.txt")).data
    with pytest.raises(ConfigError, match=r"data.validation = .*cannot read .*none.txt"):
        check_data(missing)


def test_windows_without_a_loss_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "q" * 100, "text": "answer " * 200}))
    files = (f"data.corpus=path:{tmp_path}/a.jsonl", f"data.validation=path:{tmp_path}/a.jsonl", "data.prompt_key=q")
    with pytest.raises(Exception, match="no validation token has a loss"):
        run_on(1, (*QUIET, *files, "metrics.eval_windows=1", "training.steps=1"), tmp_path / "run")
