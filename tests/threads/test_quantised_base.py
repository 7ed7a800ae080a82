"""QLoRA: a frozen base of bitsandbytes' 4-bit parameters, whose class and `quant_state` modules read in forward, and
adapters that train. The package itself quantises and computes, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute

import fullshard
from fullshard import MixedPrecisionPolicy, checkpoint, fully_shard
from fullshard.checkpoint import CheckpointMismatch
from tests.harness.behaviours import behaviour
from tests.harness.models import adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD, run_ranks, several

ROWS, STEPS, WIDTH = 2, 4, 64


class Adapted(nn.Module):
    """(n, WIDTH) -> (n, WIDTH): x + tanh(base(x) + b(a(x))), of which `base` is 4-bit and frozen."""

    def __init__(self, storage: torch.dtype, dtype: torch.dtype, recomputes: bool) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        self.base = Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=dtype, quant_type="nf4", quant_storage=storage)
        self.base.weight.requires_grad_(False)
        self.base.to("cpu")  # quantises
        self.a = nn.Linear(WIDTH, 5, bias=False, dtype=dtype)
        self.b = nn.Linear(5, WIDTH, bias=False, dtype=dtype)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self._forward, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


def model(
    storage: torch.dtype = torch.uint8, dtype: torch.dtype = torch.float32, recomputes: bool = False
) -> nn.Sequential:
    made = seeded(lambda: nn.Sequential(*(Adapted(storage, dtype, recomputes) for _ in range(3))))
    assert isinstance(made, nn.Sequential)
    return made


def train(model: nn.Module, rank: int | None, world: int) -> Any:
    """Adapters alone; `rank` None: on the rows of all ranks, as one process would."""
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    for step in range(STEPS):
        rows = torch.randn(ROWS * world, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        x = rows if rank is None else rows[ROWS * rank : ROWS * (rank + 1)]
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = collect(model, optimizer)
    for name, value in trained.params.items():
        if ".base." in name:
            trained.params[name] = value.view(torch.uint8)  # bits: some are no numbers
    return trained


def _with_whole_units(model: nn.Sequential, **options: Any) -> None:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _with_a_frozen_unit(model: nn.Sequential, **options: Any) -> None:
    """The 4-bit layer is a unit by itself, all of it frozen: only its input needs a gradient."""
    for block in model:
        fully_shard(block.base, **options)
    fully_shard(model, **options)


def _training(rank: int, world: int, ours: list[nn.Sequential], shard: Any, options: dict[str, Any]) -> Any:
    shard(ours[rank], **options)
    return train(ours[rank], rank, world)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", [_with_whole_units, _with_a_frozen_unit])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_adapters_on_a_4_bit_base_train_as_in_one_process(storage: torch.dtype, shard: Any) -> None:
    plain = train(model(storage), None, WORLD)
    for actual in run_ranks(WORLD, _training, WORLD, [model(storage) for _ in range(WORLD)], shard, {}):
        assert_same_training(actual, plain)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world", "dtype", "options", "recomputes"),
    [
        (1, torch.float32, {}, False),
        (3, torch.float32, {}, False),  # 1,024 rows of packed values
        (4, torch.float32, {"reshard_after_forward": False}, False),
        (4, torch.float32, {"reshard_after_forward": 2}, False),
        (2, torch.float32, {}, True),
        (2, torch.bfloat16, {}, False),
        # A base that was stored as bfloat16 is not cast with the adapters: its values are bits.
        (2, torch.float32, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}, False),
        (2, torch.bfloat16, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, False),
    ],
)
def test_in_every_way_of_sharding(world: int, dtype: torch.dtype, options: Any, recomputes: bool) -> None:
    plain = train(model(torch.bfloat16, dtype), None, world)
    models = [model(torch.bfloat16, dtype, recomputes) for _ in range(world)]
    for actual in run_ranks(world, _training, world, models, _with_whole_units, options):
        assert_same_training(actual, plain)


def _on_replicas(rank: int, models: list[nn.Sequential]) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _with_whole_units(models[rank], mesh=mesh)
    return train(models[rank], rank, 4)


def test_with_replicas() -> None:
    plain = train(model(), None, 4)
    for actual in run_ranks(4, _on_replicas, [model() for _ in range(4)]):
        assert_same_training(actual, plain)


def _looking(rank: int, models: list[nn.Sequential]) -> None:
    from bitsandbytes.nn import Params4bit

    ours = models[rank]
    before = [block.base.weight for block in ours]
    _with_whole_units(ours)
    seen = list[Any]()
    for block in ours:
        block.base.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    ours(torch.ones(1, WIDTH)).sum().backward()
    assert len(seen) == 3
    for old, full, block in zip(before, seen, ours, strict=True):
        assert type(full) is Params4bit and full.quant_state is old.quant_state and full.bnb_quantized
        assert full.shape == old.shape and full.absmax is old.absmax  # a property of the class
        weight = block.base.weight
        assert isinstance(weight, DTensor) and weight.quant_state is old.quant_state and not weight.requires_grad


@behaviour(
    "bitsandbytes: the class and the `quant_state` of 4-bit weights are there in forward",
    area="packages",
    torch="none",
    reason="torch's FSDP2 makes plain parameters of them; only layers that look elsewhere (`Linear4bit`) work",
)
def test_class_and_attributes_stay() -> None:
    world = several()
    run_ranks(world, _looking, [model() for _ in range(world)])


class Scaled(nn.Parameter):
    """A parameter with an attribute that its module reads, and that training changes."""

    scale: float


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(7, 5))
        weight.__class__ = Scaled
        self.weight: Any = weight
        self.weight.scale = 2.0
        self.norm: Any = nn.Parameter(torch.ones(7))
        self.norm.offset = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.scale += 1.0
        output: Tensor = (x @ self.weight.T) * self.weight.scale * (self.norm + self.norm.offset)
        return output


def _writing(rank: int, ours: list[nn.Module]) -> Any:
    fully_shard(ours[rank])
    x = torch.arange(5.0).view(1, 5)
    outputs = [ours[rank](x) for _ in range(2)]
    ours[rank].reshard()
    weight, norm = ours[rank].weight, ours[rank].norm
    assert isinstance(weight, DTensor) and (weight.scale, norm.offset) == (4.0, 1.0)  # type: ignore[attr-defined]
    weight.scale = 9.0  # type: ignore[attr-defined]
    outputs.append(ours[rank](x))
    ours[rank].reshard()
    with fullshard.full_params(ours[rank]):
        standing: Any = ours[rank].weight
        assert type(standing) is Scaled and standing.scale == 10.0
    ours[rank].double()  # rebuilt; attributes and class stay
    outputs.append(ours[rank](x.double()))
    return [output.detach() for output in outputs]


def test_attributes_are_those_of_one_parameter() -> None:
    """Written in forward or outside of it, on the full or on the sharded one, also of plain parameters."""
    plain: Any = seeded(Scaling)
    x = torch.arange(5.0).view(1, 5)
    expected = [plain(x) for _ in range(2)]
    plain.weight.scale = 9.0
    expected += [plain(x), plain.double()(x.double())]
    for outputs in run_ranks(WORLD, _writing, [seeded(Scaling) for _ in range(WORLD)]):
        for output, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted.detach())


def _casting(rank: int, models: list[nn.Sequential]) -> str:
    _with_whole_units(models[rank])
    with pytest.raises(RuntimeError) as caught:
        models[rank].to(torch.float32)
    return str(caught.value)


def test_a_cast_of_packed_values_is_refused() -> None:
    """In place of a forward with rounded bits. (`uint8` is no floating dtype: torch leaves it alone.)"""
    for said in run_ranks(WORLD, _casting, [model(torch.bfloat16) for _ in range(WORLD)]):
        assert "base.weight" in said and "torch.bfloat16" in said and "torch.float32" in said


def _saving(rank: int, models: list[nn.Sequential], others: list[nn.Sequential], folder: str) -> None:
    ours, other = models[rank], others[rank]
    _with_whole_units(ours)
    _with_whole_units(other)
    trained = train(ours, rank, WORLD)
    state, _ = checkpoint.get_state_dict(ours)
    checkpoint.save({"model": state}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    wanted, _ = checkpoint.get_state_dict(other)
    checkpoint.load({"model": wanted}, checkpoint_id=folder)
    checkpoint.set_state_dict(other, model_state_dict=wanted)
    for name, parameter in other.named_parameters():
        full: Any = parameter.full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(full, trained.params[name]), name
    x = torch.ones(1, WIDTH)
    assert torch.equal(other(x), ours(x))
    # The mean of the statistics is in a copy alone, which nobody can write back.
    name = next(name for name in wanted if "bitsandbytes__" in name)
    wanted[name] = wanted[name].clone().roll(1)
    with pytest.raises(CheckpointMismatch, match=f"{name}: its module saves it and does not load it"):
        checkpoint.set_state_dict(other, model_state_dict=wanted)


def test_weights_and_their_statistics_are_saved(tmp_path: Path) -> None:
    """bitsandbytes adds the statistics of a weight to the state dict; they are found on the sharded parameter."""
    one = model()
    names = list(one.state_dict())
    assert "0.base.weight.absmax" in names
    models = [model() for _ in range(2 * WORLD)]
    run_ranks(WORLD, _saving, models[:WORLD], models[WORLD:], str(tmp_path / "saved"))
    with checkpoint.open_checkpoint(tmp_path / "saved") as reader:
        for name in names:
            assert torch.equal(reader.tensor(f"model.{name}"), one.state_dict()[name]) or ".a." in name or ".b." in name


def _evaluating(rank: int, models: list[nn.Sequential], repacks: bool, shards: bool) -> Tensor:
    ours = models[rank].eval()
    for block in ours:
        block.base.support_avx512bf16_for_cpu = repacks
    if shards:
        _with_whole_units(ours)
    with torch.no_grad():
        if repacks:
            with pytest.raises(RuntimeError, match="base.weight written.*support_avx512bf16_for_cpu = False"):
                ours(torch.ones(1, WIDTH))
            return torch.empty(0)
        output: Tensor = ours(torch.ones(3, WIDTH))
    return output


def test_repacking_for_a_cpu_is_refused_and_can_be_switched_off() -> None:
    """In eval on a CPU with AVX512-BF16, bitsandbytes assigns other bytes to the weight for good; they would be lost
    with the gathered copy."""
    models = [model() for _ in range(2 * WORLD + 1)]
    run_ranks(WORLD, _evaluating, models[:WORLD], True, True)
    (expected,) = run_ranks(1, _evaluating, models[-1:], False, False)
    for output in run_ranks(WORLD, _evaluating, models[WORLD:-1], False, True):
        torch.testing.assert_close(output, expected)
