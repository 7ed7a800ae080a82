"""`fullshard train --model` with axes beside data parallelism: as transformers in one process, and on other axes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fullshard.train.config import ConfigError
from fullshard.train.pretrained import check_pretrained_folder
from tests.harness.pool import pool
from tests.procs.test_train_pretrained import (
    ATTENTION,
    LORA,
    QLORA,
    STEPS,
    TIMEOUT,
    config_of,
    make_folder,
    odd,
    sitting,
    steps,
)

TP, CP, EP = (f"sharding.parallelism.{name}_parallel_degree=2" for name in ("tensor", "context", "expert"))
HSDP = "sharding.data_parallel_replicate_degree=2"
ETP = "sharding.parallelism.expert_tensor_parallel_degree=2"
LP = "sharding.parallelism.enable_loss_parallel=true"
HEAD = 'sharding.parallelism.styles={"lm_head" = "column->whole"}'


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("family", "world", "settings"),
    [
        ("mixtral", 2, (TP, EP)),
        slow("llama", 2, (TP,)),
        slow("llama", 2, (CP,)),
        slow("llama", 2, (TP, LP)),
        slow("qwen3", 4, (TP, CP)),
        slow("gemma3", 4, (TP, HSDP)),
        slow("phi", 4, (TP, "sharding.activation_checkpointing.at=units")),
        slow("mixtral", 4, (EP,)),
        slow("mixtral", 4, (CP, EP)),
        slow("mixtral", 4, (TP, LP, HEAD)),
        slow("mixtral", 4, (TP, EP, ETP)),
        slow("gpt_oss", 4, (EP, HEAD)),
        slow("gpt_oss", 4, (TP, EP, ETP, HEAD)),
        slow("llama", 4, (LORA, CP)),
        slow("mixtral", 4, (LORA, ATTENTION, EP)),
    ],
)
def test_steps_are_those_of_one_process(family: str, world: int, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, norms and parameters, from files of which each rank reads its part."""
    ranks = pool(world).run(steps, family, str(tmp_path), settings, torch.float32, timeout=TIMEOUT)
    assert not odd(ranks[0]), odd(ranks[0])
    for other in ranks[1:]:
        assert other["losses"] == ranks[0]["losses"] and other["val"] == ranks[0]["val"]
        for name, value in ranks[0]["parameters"].items():
            assert torch.equal(value.view(torch.uint8), other["parameters"][name].view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.hang_after(600)
@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        ("", (2, TP), (4, CP)),
        ("", (4, CP), (1,)),
        ("", (1,), (4, TP)),
        *((method, (2,), (4,)) for method in ("", LORA, QLORA)),
    ],
)
def test_a_run_is_taken_up_on_other_axes_and_ranks(
    method: str, first: tuple[Any, ...], second: tuple[Any, ...], tmp_path: Path
) -> None:
    """Half of the steps on some axes, the others on other ones: losses, and the exported model, as of one process."""
    for name in ("one", "axes"):
        (tmp_path / name).mkdir()
    both, run = (method,) if method else (), tmp_path / "axes" / "run"
    expected = pool(1).run(sitting, str(tmp_path / "one"), both, timeout=TIMEOUT)[0]
    pool(first[0]).run(sitting, str(tmp_path / "axes"), (*both, *first[1:]), timeout=TIMEOUT)
    whole = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "failed"}))
    found = pool(second[0]).run(sitting, str(tmp_path / "axes"), (*both, *second[1:]), timeout=TIMEOUT)[0]
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for mine, one in zip(found, expected, strict=True):
        # As docs/trainer.md promises for another number of processes.
        assert mine["samples"] == one["samples"] and abs(mine["loss"] - one["loss"]) < 1e-5
    plain = load_file(tmp_path / "one" / "run" / "model" / "model.safetensors")
    again = load_file(run / "model" / "model.safetensors")
    assert plain.keys() == again.keys() == whole.keys()
    for name, value in plain.items() if not method else ():
        for other in (again[name], whole[name]):
            # Four steps of AdamW at a rate of 1e-3 move an element by at most 4e-3; rounding by far less.
            assert other.shape == value.shape and float((other - value).abs().max()) < 4e-4, name


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        (
            "llama",
            ("sharding.parallelism.tensor_parallel_degree=4",),
            "must divide the key and value heads, 2; nearest",
        ),
        ("llama", (EP,), "expected experts in LlamaForCausalLM, found none"),
        ("mixtral", (EP, TP, 'sharding.parallelism.styles={"model.norm" = "sequence->whole"}'), "whole sequences"),
    ],
)
def test_degrees_that_do_not_fit_are_one_line(
    family: str, settings: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Before processes start."""
    make_folder(tmp_path / "model", family)
    with pytest.raises(ConfigError) as raised:
        check_pretrained_folder(config_of(tmp_path / "model", *settings, world=4), 4)
    assert said in str(raised.value) and "\n" not in str(raised.value)
