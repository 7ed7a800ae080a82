"""What the planner predicts against what is counted on the engine: storages of a whole step, messages and commands."""

from __future__ import annotations

import pytest

from fullshard.plan import Strategy
from fullshard.plan.strategy import OPTIMIZERS as PLANNED
from tests.harness.planned import MODELS, OPTIMIZERS, count, predict, step_of

# Of what the library holds, and of activations: the planner's promise.
LIBRARY, ACTIVATIONS = 0.02, 0.05

STRATEGIES = {
    "one rank": Strategy(),
    "one rank, bf16": Strategy(compute="bfloat16", reduce="float32"),
    "ZeRO-3": Strategy(ranks=2),
    "ZeRO-2": Strategy(ranks=4, reshard=False),
    "ZeRO-3, bf16": Strategy(ranks=4, compute="bfloat16", reduce="float32"),
    "ZeRO-3, bf16 reduced in bf16": Strategy(ranks=2, compute="bfloat16"),
    "recomputation": Strategy(ranks=2, recompute="whole"),
    "selective recomputation": Strategy(ranks=2, recompute="selective"),
    "every second product kept": Strategy(ranks=2, recompute="alternate"),
    "named results kept": Strategy(ranks=2, recompute="keep:aten.mm,aten.bmm"),
    "activations on the host": Strategy(ranks=2, recompute="none+host"),
    "inputs on the host": Strategy(ranks=2, recompute="whole+host"),
    "inputs on the host, some results kept": Strategy(ranks=2, recompute="keep:aten.mm,aten.bmm+host"),
    "micro-batches": Strategy(ranks=2, accumulate=2),
    "micro-batches, bf16": Strategy(ranks=2, accumulate=3, compute="bfloat16", reduce="float32"),
    "micro-batches, each reduced": Strategy(ranks=2, accumulate=2, send_each=True),
    "HSDP": Strategy(ranks=4, replicas=2),
    "HSDP, bf16": Strategy(ranks=4, replicas=2, compute="bfloat16", reduce="float32"),
    "replicated": Strategy(ranks=2, replicas=2),
    "a part kept": Strategy(ranks=4, reshard=2),
}
# In `make test`: each strategy once, on models of different kinds.
QUICK = {
    ("llama", "ZeRO-3"),
    ("llama, tied", "ZeRO-3, bf16"),
    ("transformer", "recomputation"),
    ("written-out attention", "selective recomputation"),
    ("llama", "every second product kept"),
    ("mlp", "HSDP"),
    ("experts", "micro-batches"),
    ("convolutions, group norm", "ZeRO-2"),
    ("frozen base", "a part kept"),
    ("mixed dtypes", "one rank"),
    ("mlp, tanh", "replicated"),
    ("mlp, relu", "micro-batches, each reduced"),
    ("written-out attention", "activations on the host"),
    ("llama", "inputs on the host"),
    ("convolutions, batch norm in float32", "micro-batches, bf16"),
    ("convolutions, batch norm in float32", "ZeRO-3"),
    ("mlp, norms in float32", "ZeRO-3, bf16"),
}


@pytest.mark.sample(1, full=32)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=() if (name, strategy) in QUICK else pytest.mark.slow)
        for name in MODELS
        for strategy in STRATEGIES
    ],
)
def test_bytes_of_a_step_are_what_is_counted(name: str, strategy: str) -> None:
    _expect_counted(name, strategy)


@pytest.mark.slow
def test_gradients_of_a_window_are_summed_one_after_the_other() -> None:
    _expect_counted("frozen first", "micro-batches, bf16")


def _expect_counted(name: str, strategy: str) -> None:
    model, chosen = MODELS[name], STRATEGIES[strategy]
    chosen = Strategy(**{**vars(chosen), "backend": "fake"})
    if name == "mixed dtypes" and chosen.compute:
        pytest.skip("a policy makes one dtype of them")
    for size in (2, 16):
        counted, simulation = count(model, chosen, size), predict(model, chosen, size)
        kept = sum(nbytes for (_, what), nbytes in simulation.bytes.there.items() if what.startswith("kept from"))
        there = dict(zip(simulation.bytes.kinds, simulation.found.peak.nbytes, strict=True))
        # At rest, exactly.
        assert (there["parameters"] + there["buffers"], there["optimizer"], kept) == counted[:3]
        peak = max(counted.step, counted.optimizer) + sum(counted[:3])
        activations = there["activations"] + there["loss"] + there["batch"]
        allowed = LIBRARY * (peak - activations) + ACTIVATIONS * activations
        assert abs(simulation.found.peak.total - peak) <= allowed, (
            f"{size} samples: counted {peak:,}, predicted {simulation.found.peak.total:,.0f} in "
            f"{simulation.found.peak.phase}: {there}"
        )
        assert step_of(model, chosen, size).hosted == counted.host


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["llama", "frozen base", "mixed dtypes"])
def test_state_and_temporaries_of_an_optimizer_are_what_is_counted(name: str, optimizer: str) -> None:
    strategy = Strategy(ranks=2, optimizer=optimizer, backend="fake")
    counted, simulation = count(MODELS[name], strategy, 2), predict(MODELS[name], strategy, 2)
    moments = [moment for moment in simulation.found.moments if moment.phase == "optimizer"]
    there = dict(zip(simulation.bytes.kinds, max(moments, key=lambda moment: moment.total).nbytes, strict=True))
    assert there["optimizer"] == counted.state
    # Beside the gradients; what is left is the batch, and numbers of steps that become floats.
    made = counted.optimizer - there["gradients of shards"] - there["batch"]
    assert abs(made - there["optimizer step"]) <= 1024


def test_every_optimizer_that_is_said_to_be_counted_is() -> None:
    assert {name for name, optimizer in PLANNED.items() if optimizer.counted} == {*OPTIMIZERS, "none"}
