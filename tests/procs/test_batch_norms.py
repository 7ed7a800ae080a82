"""BatchNorm under mixed precision: what comes from FSDP1 and its configurations keeps it in float32, as FSDP1 does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.compat import fsdp1
from fullshard.compat.composer import prepare_fsdp_module
from fullshard.migrate.settings.conversion import convert
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.pool import pool

BF16 = torch.bfloat16
WORLD, RATE = 2, 1.0
COMPOSER = {"mixed_precision": {"param_dtype": "bf16"}, "sync_module_states": False}
ACCELERATE = {
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.first(x)).mean((2, 3))))
        return out


def _theirs(model: Net) -> Any:
    precision = torch_fsdp.MixedPrecision(param_dtype=BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is FSDP1, and that BatchNorm is wrapped by itself
        return torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block)),
            mixed_precision=precision,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


def _compat(model: Net) -> Any:
    wrap = fsdp1.ModuleWrapPolicy({Block})
    return fsdp1.FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, mixed_precision=fsdp1.MixedPrecision(param_dtype=BF16)
    )


def _composer(model: Net) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that prefetching differs
        return prepare_fsdp_module(model, None, COMPOSER, "amp_bf16").model


def _accelerate(model: Net) -> Any:
    return fullshard.prepare_fully_shard(model, None, convert(ACCELERATE, "x.yaml", ".yaml").config, show=False).model


def _prepared(model: Net) -> Any:
    return fullshard.prepare_fully_shard(model, None, {"precision": "DEFAULT"}, show=False).model


def _trained(rank: int, prepare: Callable[[Net], Any], steps: int) -> dict[str, Tensor]:
    """Parameters and running statistics, whole. All ranks take the same batches: the mean of their gradients is each of
    them, in whatever dtype it is made."""
    model = seeded(Net)
    assert isinstance(model, Net)
    made = prepare(model)
    dtypes: set[torch.dtype] = set()
    model.layers[0].norm.register_forward_pre_hook(lambda module, _: dtypes.add(module.weight.dtype))
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    for step in range(steps):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        made(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == {torch.float32}
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if isinstance(made, torch_fsdp.FullyShardedDataParallel):
        with torch_fsdp.FullyShardedDataParallel.summon_full_params(made, writeback=False):
            found |= {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in made.named_parameters()}
    else:
        full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in made.named_parameters()}
        found |= {name: tensor.detach() for name, tensor in full.items()}
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()}


def test_batch_norms_of_the_call_shape_train_as_under_fsdp1() -> None:
    """Bit by bit, with all other parameters: BatchNorms are units of their own, whose inputs are cast."""
    theirs, found = (pool(WORLD).run(_trained, prepare, 3) for prepare in (_theirs, _compat))
    for expected, own in zip(theirs, found, strict=True):
        assert own.keys() == expected.keys()
        assert [name for name in own if not torch.equal(own[name], expected[name])] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("ours", [_prepared, _composer, _accelerate])
def test_configurations_of_fsdp1_keep_batch_norms_in_float32(ours: Callable[[Net], Any]) -> None:
    """What the first BatchNorm sees, in float32; the rest as far as the dtype of the other modules goes, because
    torch's kernel for both dtypes may round in another way than that for casted inputs."""
    theirs, found = (pool(WORLD).run(_trained, prepare, 1) for prepare in (_theirs, ours))
    terms = tolerance.terms_of(seeded(Net), rows=4 * 5 * 5)
    for expected, own in zip(theirs, found, strict=True):
        assert own.keys() == expected.keys()
        for name, value in own.items():
            seen_first = name.startswith("layers.0.norm.running")
            allowed = tolerance.allowed(expected[name], terms, dtype=torch.float32 if seen_first else BF16)
            assert float((value - expected[name]).abs().max()) <= allowed, name


def _raises(rank: int) -> str:
    config = {"precision": {"mode": "DEFAULT", "keep_float32": []}}
    model = seeded(Net)
    fullshard.prepare_fully_shard(model, None, config, show=False)
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(4, 3, 5, 5))
    return str(raised.value)


def test_without_the_rule_a_batch_norm_has_two_dtypes() -> None:
    """Its running statistics stay in float32. So it is on a CPU; a device may take them."""
    assert all("BFloat16" in text for text in pool(WORLD).run(_raises))
