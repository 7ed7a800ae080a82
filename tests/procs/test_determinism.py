"""The same seed twice is the same training, bit by bit: over gloo, where messages arrive when they do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.pool import pool

BF16, F32 = torch.bfloat16, torch.float32
# 257 * 257 elements go from rank to rank on gloo, in three pieces of another order each time if they may.
WIDTH = 257


class Layer(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(x + F.dropout(torch.tanh(self.up(x)), 0.2))


# Each of these has a way of its own through gathers and reductions.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bfloat16": {"mp_policy": fullshard.MixedPrecisionPolicy(BF16, F32)},
    "bfloat16 sums": {"mp_policy": fullshard.MixedPrecisionPolicy(BF16, BF16), "reshard_after_forward": False},
    "replicated": {"replicate": True, "mp_policy": fullshard.MixedPrecisionPolicy(BF16, F32)},
    "native": {"communication": "torch"},
    "accumulated": {"accumulate": True, "mp_policy": fullshard.MixedPrecisionPolicy(BF16, F32)},
    "steps in backward": {"in_backward": True},
    "recomputed": {"recompute": True},
}


def _model(rank: int, world: int, options: dict[str, Any], delays: Any) -> Any:
    options = dict(options)
    recompute = options.pop("recompute", False)
    made = seeded(lambda: nn.Sequential(*(Layer(recompute=recompute) for _ in range(3))))
    replicate, communication = options.pop("replicate", False), options.pop("communication", None)
    if replicate:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for layer in made:
        fullshard.fully_shard(layer, **options)
    model: Any = fullshard.fully_shard(made, **options)
    if communication is not None:
        model.set_communication(communication)
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: delays())
        layer.register_forward_hook(lambda _module, _args, output: output.register_hook(lambda _: delays()) and None)
    return model


def _train(rank: int, world: int, options: dict[str, Any], seconds: float) -> list[Tensor]:
    """Losses, gradient norms, this rank's parameters and AdamW's state. One rank waits `seconds` now and then."""
    late = torch.Generator().manual_seed(3)

    def delays() -> None:
        if seconds and int(torch.randint(world, (), generator=late)) == rank:
            time.sleep(seconds)

    options = dict(options)
    last_rate = options.pop("last_rate", 1e-2)
    micros, in_backward = 2 if options.pop("accumulate", False) else 1, options.pop("in_backward", False)
    model = _model(rank, world, options, delays)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if in_backward:
        fullshard.step_in_backward(model, optimizer)
    torch.manual_seed(100 + rank)
    told = []
    for step in range(3):
        if step == 2:
            optimizer.param_groups[0]["lr"] = last_rate
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            told.append(loss.detach())
        if not in_backward:
            told.append(fullshard.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    return [*told, *((t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors)]


def twice(rank: int, world: int, names: list[str]) -> dict[str, int]:
    """How many tensors of two runs differ in a bit, by setting."""
    differ = {}
    for name in names:
        first, second = (_train(rank, world, SETTINGS[name], seconds) for seconds in (0.0, 0.01))
        assert len(first) == len(second) > 20 and all(tensor.isfinite().all() for tensor in first)
        differ[name] = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return differ


@pytest.mark.slow
@behaviour(
    "the same seed twice is the same training, bit by bit, whichever rank is late",
    area="training",
    torch="none",
    reason="not compared: torch's own depends on its backend's reductions",
)
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, [name for name in SETTINGS if name != "replicated"]),
        pytest.param(3, ["default", "bfloat16", "native"], marks=pytest.mark.slow),
        pytest.param(4, ["default", "replicated"], marks=pytest.mark.slow),
    ],
)
def test_two_runs_are_equal(world: int, names: list[str]) -> None:
    for differ in pool(world).run(twice, world, names, timeout=60):
        assert differ == dict.fromkeys(names, 0)


def with_another_rate(rank: int) -> int:
    """How many tensors differ when one learning rate of three differs in the last bits of a float32."""
    first, second = _train(rank, 2, {}, 0.0), _train(rank, 2, {"last_rate": 1e-2 * (1 + 2**-22)}, 0.0)
    return sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_comparison_sees_a_bit() -> None:
    assert all(differ > 0 for differ in pool(2).run(with_another_rate, timeout=60))
