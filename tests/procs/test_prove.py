"""`fullshard migrate --prove`: FSDP1 and DDP come to what plain training comes to, and so does fullshard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.cli import main
from fullshard.verify.subject import Step
from tests.harness.verified import compare, record

QUICK = [("fsdp1", "zero3+bf16+pure"), ("ddp", "zero3+micro=2")]
SLOW = [
    ("fsdp1", "zero3"),
    ("fsdp1", "zero2+micro=2"),
    ("fsdp1", "zero3+bf16"),
    ("fsdp1", "zero2+recompute"),
    ("fullshard", "zero2+bf16+pure"),
    ("ddp", "zero3"),
]


@pytest.mark.parametrize(
    ("library", "strategy"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_where_people_come_from(library: str, strategy: str, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, strategy, library=library))
    assert result.verdict == "equal", result.difference
    assert result.compared > 100


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", ["zero3+hsdp=2", "zero2+hsdp=2"])
def test_hybrid_sharding(hybrid: str, tmp_path: Path) -> None:
    result = compare(tmp_path, record(tmp_path, hybrid, 4, library="fsdp1"))
    assert result.verdict == "equal", result.difference


@pytest.mark.slow
def test_a_fault_of_the_old_training_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record in which FSDP1 sent a tenth too much."""
    import torch

    setting = record(tmp_path, "zero3", library="fsdp1")
    path = tmp_path / "step-0" / "rank-0.pt"
    step = Step(*torch.load(path, weights_only=False))
    step.gradients["blocks.0.3.weight"] *= 1.1
    torch.save(tuple(step), path)
    result = compare(tmp_path, setting)
    assert result.difference is not None
    assert (result.difference.phase, result.difference.name) == ("backward", "blocks.0.3.weight")


CONFIG = "distributed_type: FSDP\nmixed_precision: '{}'\nfsdp_config:\n  fsdp_version: 2\n"


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_command_proves_a_configuration(tmp_path: Path) -> None:
    """In a process of its own: its ranks write to the process's own output."""
    path = tmp_path / "acc.yaml"
    path.write_text(CONFIG.format("bf16"))
    command = [sys.executable, "-m", "fullshard", "migrate", "--prove", str(path), "--steps", "2", "--json"]
    command += ["--program", "tests.harness.verified:program"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["verdict"] == "equal" and [each["library"] for each in said["results"]] == ["fsdp1", "fullshard"]
    assert {each["strategy"] for each in said["results"]} == {"zero3+bf16+pure"}
    assert said["not_proved"]
    assert [each.name for each in tmp_path.iterdir()] == ["acc.yaml"]


BAD = {
    "a program": ("x.py", "", "expected a configuration"),
    "DDP in low precision": ("x.yaml", "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "in which DDP trains"),
    "a degree that does not fit": (
        "x.toml",
        "[parallelism]\ndata_parallel_shard_degree = 3\n",
        "data_parallel_shard_degree",
    ),
    "an unknown key": ("x.yaml", "distributed_type: FSDP\nx: 1\n", "has no such key"),
    "no such module": ("x.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n", "found no module absent"),
}


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_stand_in_is_equal_under_fsdp1_too(tmp_path: Path) -> None:
    """From what migrate wrote. FSDP1's flat pieces have no shapes by which an optimizer could divide them."""
    path = tmp_path / "a.fullshard.toml"
    path.write_text("[sharding]\nreshard_after_forward = false\n")
    command = [sys.executable, "-m", "fullshard", "migrate", "--prove", str(path), "--steps", "1", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert (said["verdict"], said["not_proved"]) == ("equal", [])


def test_a_policy_that_names_an_absent_class_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(CONFIG.format("no") + "  fsdp_transformer_layer_cls_to_wrap: Conted\n")
    assert main(["migrate", "--prove", str(path), "--program", "tests.harness.verified:program"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"fullshard migrate: {path}: wrap.classes: expected classes of modules in Net, found no Conted; the nearest is "
        "Counted\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["acc.yaml"]


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_proved_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text, part = BAD[name]
    (tmp_path / file).write_text(text)
    assert main(["migrate", "--prove", str(tmp_path / file), "--program", "absent:program"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and part in said.err
