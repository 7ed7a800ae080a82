"""The same configuration gives the same run whatever the number of processes: losses, parameters, AdamW state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.train.config import Config, load_config
from fullshard.train.data import ByteTokenizer, read_corpus, tokenize
from fullshard.train.folder import Checkpoints
from fullshard.train.loop import Trainer
from fullshard.train.metrics import StepRecord
from fullshard.train.model import Llama, llama_shape, sharded_model
from fullshard.train.optimizers import make_optimizer
from fullshard.train.pipeline import Stages
from fullshard.train.process import world_of
from tests.harness import tolerance
from tests.harness.pool import pool

STEPS = 20
TP = "sharding.parallelism.tensor_parallel_degree=2"
CP = "sharding.parallelism.context_parallel_degree=2"
# The vocabulary of 259 divides by neither 2 nor 4, and 9 validation windows do not either.
TINY = (
    "model.layers=2",
    "model.dim=32",
    "training.global_batch=8",
    "training.micro_batch=2",
    "training.sequence_length=32",
    "optimizer.warmup_steps=10",
    "metrics.eval_every=10",
    "metrics.eval_windows=9",
    "training.device=cpu",
)


class Run(NamedTuple):
    """Everything that must not depend on the world. Full tensors, on the CPU."""

    records: list[StepRecord]
    initial: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]  # "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"
    steps_done: set[float]  # AdamW's own counters
    terms: int


def config_of(*overrides: str) -> Config:
    return load_config(None, (*TINY, f"training.steps={STEPS}", *overrides))


def trainer_of(rank: int, config: Config) -> Trainer:
    """Model, optimizer and data as `fullshard train` makes them, on the process group that is there."""
    world = world_of(config, rank, dist.get_world_size(), torch.device("cpu"), dist.HashStore())
    tokenizer = ByteTokenizer()
    split = tokenize(read_corpus(config.data), tokenizer, config.data.validation_fraction)
    stages = Stages(config, world) if config.sharding.parallelism.pipeline_parallel_degree > 1 else None
    cut = None if stages is None else stages.cut
    model = sharded_model(config, tokenizer.vocab, world.mesh, world.device, world.whole, world.sequences, cut)
    return Trainer(config, world, model, make_optimizer(model, config.optimizer), split, tokenizer, stages)


def trained(rank: int, config: Config, sign: float = 0.0, divisor: float = 0.0) -> Run:
    """`sign`: of what gradients are off by, as rounding is; 0 leaves them alone. `divisor`: one gradient of the last
    step is divided by it once more.
    """
    trainer = trainer_of(rank, config)
    # Sums of gradients are over all tokens of a step, and those of a norm over all elements of a parameter.
    rows = config.training.global_batch * config.training.sequence_length
    rows += max(p.numel() for p in trainer.model.parameters())
    settle = tolerance.disturb(trainer.optimizer, sign, rows) if sign else lambda: None
    initial = {name: full(p).clone() for name, p in trainer.model.named_parameters()}
    if divisor:

        def divide(*_: Any) -> None:
            if len(records) == STEPS - 1:
                trainer.model.norm.weight.grad.div_(divisor)

        trainer.optimizer.register_step_pre_hook(divide)
    records: list[StepRecord] = []
    for step in range(1, config.training.steps + 1):
        records.append(trainer.step(step))
    settle()
    moments, steps_done, terms = {}, set(), tolerance.terms_of(trainer.model, rows)
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        steps_done.add(float(state["step"]))
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{name}.{key}"] = full(state[key])
    parameters = {name: full(p) for name, p in trainer.model.named_parameters()}
    return Run(records, initial, parameters, moments, steps_done, terms)


# What a checkpoint knows of the run that it is of.
FACTS = {"corpus_sha256": "x", "vocab": 259, "seed": 0}


def checkpoints_of(trainer: Trainer, folder: Path | str, *micro: Any, **facts: str) -> Checkpoints:
    """The checkpoints of a run in `folder`; `facts`: those in which it is another run."""
    keys = trainer.config.checkpoint
    return Checkpoints(Path(folder), keys, trainer.world, trainer.model, trainer.optimizer, FACTS | facts, *micro)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of parameters, and of the optimizer's state by "<parameter>.<key>", full."""
    tensors = {name: full(p).clone() for name, p in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        tensors |= {f"{name}.{key}": full(value).clone() for key, value in trainer.optimizer.state[parameter].items()}
    return tensors


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@cache
def run_on(world: int, *overrides: str, sign: float = 0.0, divisor: float = 0.0) -> Run:
    config = config_of(*overrides)
    config.check_world(world)
    results: list[Run] = pool(world).run(trained, config, sign, divisor, timeout=240)
    return results[0]


def differences(found: Run, *overrides: str) -> list[str]:
    """What rounding does not explain in `found`, beside the same run on one process and two whose gradients are off."""
    return unexplained(found, run_on(1, *overrides), [run_on(1, *overrides, sign=sign) for sign in (1.0, -1.0)], STEPS)


def unexplained(found: Run, expected: Run, ends: Sequence[Run], steps: int) -> list[str]:
    """The same of runs that are given, of `steps`; `ends`: those whose gradients are off."""
    odd = []
    for kind in ("parameters", "moments"):
        for name, value in getattr(expected, kind).items():
            allowed = tolerance.updates(value, steps)
            allowed += max(tolerance.largest(getattr(end, kind)[name], value) for end in ends)
            difference = tolerance.largest(getattr(found, kind)[name], value)
            if not difference <= allowed:
                odd.append(f"{name}: off by {difference:.3g}, allowed {allowed:.3g}")
    for step, (ours, theirs, *others) in enumerate(
        zip(*(figures(r.records) for r in (found, expected, *ends)), strict=True)
    ):
        for mine, figure, *far in zip(ours, theirs, *others, strict=True):
            # A figure is a sum too, of the step's tokens or of all elements.
            allowed = tolerance.sums(torch.float32, found.terms) * abs(figure) + max(abs(one - figure) for one in far)
            if not abs(mine - figure) <= allowed:
                odd.append(f"step {step + 1}: {mine}, expected {figure}, allowed {allowed:.3g}")
    return odd


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def figures(records: list[StepRecord]) -> list[tuple[float, ...]]:
    """What a step reports, but for times and memory; 0 where it did not validate."""
    return [(r.loss, r.bits_per_byte, r.grad_norm, r.lr, r.val_loss or 0, r.val_bits_per_byte or 0) for r in records]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_initial_values_are_those_of_the_plain_model(world: int) -> None:
    """Meta device, shards, `to_empty`, `init_weights` give bitwise what the unsharded model gets from the same seed."""
    model = Llama(llama_shape(config_of(), ByteTokenizer.vocab))
    model.init_weights(seed=0)
    assert_equal(run_on(world).initial, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.hang_after(300)
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "world, overrides",
    [
        (2, ()),
        pytest.param(4, (), marks=pytest.mark.slow),
        (4, ("training.micro_batch=0",)),
        pytest.param(4, ("sharding.data_parallel_replicate_degree=2",), marks=pytest.mark.slow),
        (4, ("sharding.data_parallel_replicate_degree=4", "training.accumulate=reduce")),
        (2, ("training.accumulate=reduce", "sharding.activation_checkpointing.at=units")),
        pytest.param(4, (TP, "training.micro_batch=0"), marks=pytest.mark.slow),
        pytest.param(4, (TP, "sharding.parallelism.enable_sequence_parallel=false"), marks=pytest.mark.slow),
        pytest.param(4, (TP, "sharding.activation_checkpointing.at=units", "training.micro_batch=0")),
        pytest.param(2, (CP, "training.micro_batch=4"), marks=pytest.mark.slow),
        pytest.param(4, (CP, "sharding.activation_checkpointing.at=units"), marks=pytest.mark.slow),
        pytest.param(
            4,
            (CP, "sharding.parallelism.context_parallel_variant=ring", "sharding.data_parallel_replicate_degree=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(4, (CP, TP, "training.micro_batch=0"), marks=pytest.mark.slow),
    ],
)
def test_same_run_on_any_number_of_processes(world: int, overrides: tuple[str, ...]) -> None:
    """Losses, validations, gradient norms, parameters and both moments after 20 steps, within what rounding makes."""
    of_one = tuple(o for o in overrides if "replicate" not in o and "sharding.parallelism" not in o)
    expected = run_on(1, *of_one)
    found = run_on(world, *overrides)
    assert expected.records[-1].loss < expected.records[0].loss - 0.5  # it did learn: there is something to compare
    assert found.steps_done == expected.steps_done == {STEPS}
    assert not differences(found, *of_one)


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_two_steps_with_cut_sequences() -> None:
    """Losses, validations and norms where two processes have parts of each sequence."""
    expected, found = (run_on(world, *more, "training.steps=2") for world, more in ((1, ()), (2, (CP,))))
    for mine, its in zip(figures(found.records), figures(expected.records), strict=True):
        assert mine == pytest.approx(its, rel=tolerance.figure(found.terms, steps=2))
    assert found.records[-1].val_loss and found.records[-1].bits_per_byte


@pytest.mark.slow
def test_a_wrong_divisor_in_one_of_twenty_steps_is_found() -> None:
    """Of one gradient of the last step: 256 tokens counted as 264, one micro-batch of another length."""
    odd = differences(run_on(2, divisor=264 / 256))
    assert [line.partition(":")[0] for line in odd if line.startswith("norm.weight.exp_avg")] == [
        "norm.weight.exp_avg",
        "norm.weight.exp_avg_sq",
    ]
    assert all(line.startswith("norm.weight") for line in odd)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bitwise_same_run_with_sums_in_float64(world: int) -> None:
    """With gradients summed in float64 and micro-batches of one size, nothing differs in a single bit."""
    expected, found = run_on(1, "sharding.precision.reduce=float64"), run_on(world, "sharding.precision.reduce=float64")
    assert_equal(found.parameters, expected.parameters)
    assert_equal(found.moments, expected.moments)
    assert figures(found.records) == figures(expected.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (
            "sharding.reshard_after_forward=2",
            "sharding.cpu_offload=true",
            "sharding.activation_checkpointing.at=units",
            "sharding.activation_checkpointing.every=2",
            'sharding.activation_checkpointing.save=["aten.mm"]',
        ),
        pytest.param(
            ("sharding.data_parallel_shard_degree=2", "sharding.data_parallel_replicate_degree=-1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_decides_memory_and_messages_changes_no_bit(settings: tuple[str, ...]) -> None:
    exact = "sharding.precision.reduce=float64"
    found, expected = run_on(4, exact, *settings), run_on(4, exact)
    assert_equal(found.parameters, expected.parameters)
    assert_equal(found.moments, expected.moments)
    assert figures(found.records) == figures(expected.records)


def not_finite(rank: int, config: Config) -> tuple[str, bool]:
    """What the step says whose gradient is not finite, and whether a parameter changed."""
    trainer = trainer_of(rank, config)
    first = next(trainer.model.parameters())
    with torch.no_grad():
        full_value = torch.full(first.shape, torch.inf)
        first.copy_(distribute_tensor(full_value, trainer.world.mesh, first.placements, src_data_rank=None))
    before = [full(p).clone() for p in trainer.model.parameters()]
    with pytest.raises(FloatingPointError) as caught:
        trainer.step(1)
    return str(caught.value), all(map(torch.equal, before, map(full, trainer.model.parameters())))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    """Every rank refuses the same update, and says which step it was and what may help."""
    for message, unchanged in pool(2).run(not_finite, config_of(), timeout=60):
        assert message.startswith("step 1: loss is nan") and "optimizer.lr" in message
        assert unchanged
