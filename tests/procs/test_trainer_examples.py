"""The quickstart, and the examples with other people's trainers, run as they are written, under torchrun on two
processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Imports of packages take longer than what is tested.
pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(name: str | Path, *arguments: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [*torchrun, EXAMPLES / name, *arguments], capture_output=True, text=True, env=environment, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_quickstart_of_the_readme_learns() -> None:
    """Nothing but the example's own lines is printed."""
    lines = [line.split() for line in _run("quickstart.py").splitlines()]
    assert [line[1] for line in lines] == ["50", "100", "150", "200"]
    losses = [float(line[3]) for line in lines]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.02  # the first loss is about 2


def test_the_trainer_of_transformers_learns_on_shards() -> None:
    printed = _run("hf_trainer.py")
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.e-]+)'", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 10  # it begins at log(64), about 4.2
    # Accelerate's units: the embedding, two blocks, norm and head, and the model; each rank holds half.
    assert re.search(
        r"^model\.layers\.0 \.\. model\.layers\.1 +LlamaDecoderLayer x2 +18 +73,984 +36,992 ", printed, re.M
    )
    assert "sharded as (Shard(dim=0),) on 2 ranks" in printed


def test_the_trainer_of_lightning_learns_and_saves_shards() -> None:
    printed = _run("lightning_trainer.py")
    loss, files = re.findall(r"^loss ([\d.]+), saved: (.*)$", printed, re.M)[0]
    assert float(loss) < 0.2  # of a variance of about 0.9
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= set(files.split(", "))
    assert "sharded as (Shard(dim=0),) on data_parallel=2" in printed


# What makes a program for torch's FSDP2 of it; and the line that shows what only fullshard tells.
_TORCH_S = {
    "hf_trainer.py": [
        ("fullshard.install()  #", "#"),
        ("            print(fullshard.report(trainer.model))\n", ""),
    ],
    "lightning_trainer.py": [
        ("from fullshard import fully_shard", "from torch.distributed.fsdp import fully_shard"),
        ("            print(fullshard.report(module.layers))\n", ""),
    ],
}


@pytest.mark.parametrize("name", _TORCH_S)
def test_they_come_to_what_torch_s_fsdp2_comes_to(name: str, tmp_path: Path) -> None:
    """Every loss that is printed, to the last digit."""
    text = (EXAMPLES / name).read_text()
    for ours, theirs in _TORCH_S[name]:
        assert text.count(ours) == 1
        text = text.replace(ours, theirs)
    (tmp_path / name).write_text(text)
    losses = [re.findall(r"loss'?:? '?([\d.e-]+)", _run(path)) for path in (name, tmp_path / name)]
    assert losses[0] == losses[1] and len(losses[0]) >= 1


def test_adapters_learn_on_a_base_in_4_bits(tmp_path: Path) -> None:
    printed = _run("qlora.py", "", str(tmp_path / "adapter"))
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", printed, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0] < 5.5  # it begins at log(256), about 5.5
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum("lora_" in name for name in saved) == 2 * 3 * 7 and any("lm_head" in name for name in saved)


@pytest.mark.parametrize("name", ["hf_trainer.py", "lightning_trainer.py", "qlora.py"])
def test_they_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
