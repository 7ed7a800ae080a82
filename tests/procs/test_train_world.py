"""The same configuration gives the same run whatever the number of processes: losses, parameters, AdamW state."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.train.config import Config
from fullshard.train.config_load import load_config
from fullshard.train.data import read_corpus, tokenize
from fullshard.train.loop import Trainer
from fullshard.train.metrics import StepRecord
from fullshard.train.process import World
from fullshard.train.shard import adamw, sharded_model
from fullshard.train.tokenizer import ByteTokenizer
from tests.harness.pool import pool

STEPS = 20
TINY = (
    "model.layers=2",
    "model.dim=32",
    "training.global_batch=8",
    "training.sequence_length=32",
    "optimizer.warmup_steps=10",
    "metrics.eval_every=10",
    "metrics.eval_windows=9",  # a multiple of neither 2 nor 4: some ranks get windows that do not count
    "training.device=cpu",
)


class Run(NamedTuple):
    """Everything that must not depend on the world. Full tensors, on the CPU."""

    records: list[StepRecord]
    parameters: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]  # "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"
    steps_done: set[float]  # AdamW's own counters


def config_of(*overrides: str) -> Config:
    return load_config(None, (*TINY, f"training.steps={STEPS}", *overrides))


def trained(rank: int, config: Config) -> Run:
    """The whole run as one rank of it; needs the process group of the pool."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    world = World(rank, world_size, torch.device("cpu"), mesh, dist.HashStore())
    tokenizer = ByteTokenizer()
    split = tokenize(read_corpus(config.data), tokenizer, config.data.validation_fraction)
    model = sharded_model(config, tokenizer.vocab, mesh, world.device)
    optimizer = adamw(model, config.optimizer)
    trainer = Trainer(config, world, model, optimizer, split, tokenizer)
    records = [trainer.step(step) for step in range(1, config.training.steps + 1)]
    moments, steps_done = {}, set()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        steps_done.add(float(state["step"]))
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{name}.{key}"] = full(state[key])
    return Run(records, {n: full(p) for n, p in model.named_parameters()}, moments, steps_done)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run_on(world: int, config: Config) -> Run:
    config.check_world(world)
    results: list[Run] = pool(world).run(trained, config, timeout=60)
    return results[0]


def relative_to_maximum(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative_to_maximum(found[name], expected[name]), name) for name in expected)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], Run]:
    return {}


@pytest.mark.parametrize(
    "overrides", [(), ("training.micro_batch=2",), ("training.micro_batch=1", "training.accumulate=reduce")]
)
def test_same_run_on_any_number_of_processes(overrides: tuple[str, ...], subtests: Any) -> None:
    """1, 2 and 4 processes: losses, validation, gradient norm, parameters and both moments within 1e-6 relative."""
    config = config_of(*overrides)
    expected = run_on(1, config)
    assert expected.steps_done == {STEPS}
    assert expected.records[-1].loss < expected.records[0].loss - 0.5  # it did learn, so there is something to compare
    for world in (2, 4):
        found = run_on(world, config)
        print(
            overrides,
            world,
            worst(found.parameters, expected.parameters),
            worst(found.moments, expected.moments),
            max(abs(a.loss / b.loss - 1) for a, b in zip(found.records, expected.records)),
            max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(found.records, expected.records)),
        )
