"""Each optimizer of the trainer on two processes, stopped and continued on one, is that of one process: bit by bit,
with gradients summed in float64, where the order of a sum does not reach float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.train.config import ConfigError, load_config
from fullshard.train.optimizers import parts_of
from tests.harness.pool import pool
from tests.procs.test_train_world import TINY, checkpoints_of, full, trainer_of

STEPS = 4
CASES = {
    "muon": (),
    "adafactor": ("optimizer.lr=0.01",),
    "sgd": ("optimizer.momentum=0.5", "optimizer.lr=0.1"),
    "adamw": ("optimizer.schedule=linear",),
}


def ran(rank: int, overrides: tuple[str, ...], folder: str, last: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and what is left after step `last`: from the newest checkpoint in `folder`, with one at the end."""
    config = load_config(None, (*TINY, f"training.steps={STEPS}", "sharding.precision.reduce=float64", *overrides))
    trainer = trainer_of(rank, config)
    checkpoints = checkpoints_of(trainer, folder)
    after, _ = checkpoints.resume()
    losses = [trainer.step(step).loss for step in range(after + 1, last + 1)]
    checkpoints.save(last, wait=True)
    return losses, {name: full(p).clone() for name, p in trainer.model.named_parameters()}


def plain(rank: int, overrides: tuple[str, ...]) -> list[str]:
    """The classes that step, and the names of what the matrices' optimizer has."""
    trainer = trainer_of(rank, load_config(None, (*TINY, *overrides)))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    first = parts_of(trainer.optimizer)[0]
    held = [names[id(p)] for group in first.param_groups for p in group["params"]]
    return [*(type(part).__mro__[1].__name__ for part in parts_of(trainer.optimizer)), *held]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_and_one_that_continues_are_one_process(name: str, tmp_path: Path) -> None:
    overrides = (f"optimizer.name={name}", *CASES[name])
    whole: tuple[Any, Any] = pool(1).run(ran, overrides, str(tmp_path / "one"), STEPS)[0]
    first, _ = pool(2).run(ran, overrides, str(tmp_path / "two"), 2)[0]
    rest, left = pool(1).run(ran, overrides, str(tmp_path / "two"), STEPS)[0]
    assert [*first, *rest] == whole[0]
    assert len(set(whole[0])) == STEPS
    for key, expected in whole[1].items():
        assert torch.equal(left[key], expected), key


def test_optimizers_are_not_each_other(tmp_path: Path) -> None:
    """Each name trains something of its own."""
    left = [
        pool(1).run(ran, (f"optimizer.name={name}",), str(tmp_path / name), 2)[0][1]["norm.weight"] for name in CASES
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(left) for b in left[:i])


def test_muon_has_the_matrices_and_no_table() -> None:
    found = pool(1).run(plain, ("optimizer.name=muon",))[0]
    assert found[0] == "Muon"
    assert found[1] == "AdamW"
    assert {name.split(".")[0] for name in found[2:]} == {"layers"}
    assert not any("norm" in name for name in found[2:])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("optimizer.name=moun",), 'optimizer.name = "moun": expected one of "adamw", "sgd", "muon", "adafactor"'),
        (("optimizer.name=sgd", "optimizer.beta1=0.5"), "optimizer.beta1 = 0.5: has no effect with"),
        (("optimizer.momentum=0.5",), 'optimizer.momentum = 0.5: has no effect with optimizer.name = "adamw"'),
        (("optimizer.schedule=constant", "optimizer.min_lr_ratio=0.2"), "optimizer.min_lr_ratio = 0.2: has no effect"),
        (("optimizer.decay_steps=5",), 'has no effect with optimizer.schedule = "cosine"'),
        (("optimizer.schedule=wsd", "optimizer.decay_steps=281"), "nearest valid: 280"),
        (("optimizer.name=muon", "sharding.parallelism.tensor_parallel_degree=2"), "with data parallelism alone"),
    ],
)
def test_what_has_no_effect_is_refused(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert line in str(caught.value), caught.value
    assert "\n" not in str(caught.value)
