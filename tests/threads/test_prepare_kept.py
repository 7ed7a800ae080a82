"""`precision.keep_float32` of `prepare_fully_shard`: modules that compute in float32 by their class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import Prepared, prepare_fully_shard
from fullshard.engine import unit_of
from fullshard.program import modules_of
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads_only(reason="a sharded model does not pickle")

BF16, F32 = torch.bfloat16, torch.float32


class OwnNorm(nn.LayerNorm):
    """A class of the user's, derived from torch's."""


class Normed(nn.Sequential):
    """A module of norms alone."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Normed(OwnNorm(6)), nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.batch = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(self.batch(x))
        return out


def _prepared(rank: int, config: Any) -> tuple[dict[str, torch.dtype], Prepared]:
    """The dtype that each parameter computes in, on the module in a forward."""
    model = seeded(Net)
    prepared = prepare_fully_shard(model, None, config, show=False)
    found: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda module, _, name=name: found.update({name: module.weight.dtype}))
    model(torch.randn(4, 6)).float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {F32}  # type: ignore[union-attr]
    return found, prepared


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"precision": "DEFAULT"}, {"batch"}),
        ({"precision": {"mode": "PURE", "keep_in_fp32": ["BatchNorm", "LayerNorm"]}}, {"batch", "0"}),
        ({"precision": {"mode": "DEFAULT", "keep_float32": ["*Norm*"]}, "wrap": "none"}, {"batch", "0"}),
        ({"precision": {"mode": "DEFAULT", "keep_float32": ["OwnNorm", "BatchNorm1d"]}}, {"batch", "0"}),
        # What is below a module of the class, in a unit of its own too.
        (
            {
                "precision": {"mode": "DEFAULT", "keep_float32": ["BatchNorm", "Normed"]},
                "wrap": {"plan": ["layers.*.norm.0"]},
            },
            {"batch", "0"},
        ),
        # Units that compute in float32 anyway.
        ({"override": {"layers.*": {"param": "bfloat16", "output": "float32"}}}, set()),
        (
            {
                "override": {"layers.*": {"param": "bfloat16", "output": "float32"}},
                "precision": {"keep_float32": ["OwnNorm"]},
            },
            {"0"},
        ),
    ],
)
def test_modules_of_these_classes_compute_in_float32(config: Any, kept: set[str]) -> None:
    low = {"up", "down", "0"} if "override" in config else {"up", "down", "0", "last", "batch"}
    for found, prepared in run_ranks(2, _prepared, config):
        for name, dtype in found.items():
            own = name.rpartition(".")[2]
            assert dtype == (F32 if own in kept or own not in low else BF16), name
        names = {name for name in found if name.rpartition(".")[2] in kept}
        assert {*prepared.kept} == names
        for row in prepared.units:
            # As the table prints it.
            dtypes = {str(dtype).removeprefix("torch.") for name, dtype in found.items() if _unit(prepared, name, row)}
            assert {*row.compute.split("+")} == dtypes or not dtypes
        line = "computed in the dtype of their parameters:"
        assert (line in str(prepared)) == bool(kept)
        if "batch" in kept:
            assert f"{line} " in str(prepared) and "1 BatchNorm1d" in str(prepared)


def _unit(prepared: Prepared, name: str, row: Any) -> bool:
    """Whether the module of that name is in the unit of `row`, and in no inner one."""
    units = [each.name for each in prepared.units if each.name == name or name.startswith(f"{each.name}.")]
    joined = [each.name for each in prepared.units if name in each.name.split("+")]
    return bool(row.name == (joined or sorted(units, key=len)[-1:] or ["root"])[0])


def _refused(rank: int) -> str:
    model = seeded(Net)
    with pytest.raises(ValueError) as raised:
        prepare_fully_shard(model, None, {"precision": {"mode": "DEFAULT", "keep_float32": ["OwnNrm"]}}, show=False)
    assert all(unit_of(module) is None for module in model.modules())
    return str(raised.value)


def test_a_class_that_is_not_there_is_an_error() -> None:
    for text in run_ranks(1, _refused):
        assert "precision.keep_float32: expected names of classes in Net, found 'OwnNrm'" in text
        assert "the nearest is OwnNorm" in text


def test_names_of_classes() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm2d(2), nn.InstanceNorm1d(2, affine=True), OwnNorm(2))
    assert [*map(type, modules_of(model, ["BatchNorm"]))] == [nn.SyncBatchNorm, nn.BatchNorm2d]
    assert [*map(type, modules_of(model, ["LayerNorm"]))] == [OwnNorm]
    assert modules_of(model, ["RMSNorm"]) == [] and len(modules_of(model, ["*Norm*"])) == 4


class Scale(nn.Module):
    """A norm whose result has the dtype of its weight, as some models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _scaled(rank: int, config: Any) -> torch.dtype:
    model = seeded(lambda: nn.Sequential(Scale(), nn.Linear(6, 6)))
    prepare_fully_shard(model, None, config, show=False)
    out: Tensor = model(torch.ones(2, 6))
    out.float().sum().backward()
    return out.dtype


def test_a_norm_of_the_user_s_that_returns_float32_needs_a_unit() -> None:
    """As docs/prepare.md says: its result goes into a product with bfloat16, which torch refuses."""
    with pytest.raises(Exception, match="same dtype"):
        run_ranks(1, _scaled, {"precision": {"mode": "DEFAULT", "keep_float32": ["Scale"]}, "wrap": "none"})
    unit = {"0": {"param": "float32", "output": "bfloat16"}}
    assert run_ranks(2, _scaled, {"precision": "DEFAULT", "wrap": {"plan": ["0"]}, "override": unit}) == [BF16, BF16]
