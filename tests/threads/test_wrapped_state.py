"""Optimizer state in tensors around others: torchao's 8-bit, 4-bit and float8 AdamW, saved and loaded on any number of
ranks. Their steps are compiled by torchao; here they run as they are written, which computes the same."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import checkpoint, fully_shard
from fullshard.checkpoint import CheckpointMismatch
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks, several

# torch 2.12's, where several threads compile the step of torchao's optimizers at once.
pytestmark = pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames:UserWarning")

# Of the rows of two ranks blocks of 256 begin: at each; at every second, so that three ranks cut blocks; at the first
# rank's alone, because the second has too few elements; at the only row's.
SHAPES = {"even": (128, 128), "odd": (90, 192), "mixed": (7, 1024), "single": (1, 8192), "small": (5,)}
CLASSES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


@pytest.fixture(autouse=True)
def as_written() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """The same gradients on any number of ranks: their mean would be rounded otherwise on three."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        gradients = {f"values.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
            if isinstance(parameter, DTensor):
                there = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(gradients[name], *there, src_data_rank=None)
        optimizer.step()


def made(rank: int, bags: list[nn.Module], kind: str, shards: bool = True, **options: Any) -> Any:
    import torchao.optim

    model = bags[rank]
    if shards:
        fully_shard(model, **options)
    return model, getattr(torchao.optim, kind)(model.parameters(), lr=0.05)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and state as plain whole tensors, by rank 0's messages."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(value, parameter)
    return found


def whole(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = local.dequantize().float() if hasattr(local, "codes") else local.detach().clone()
    if not isinstance(tensor, DTensor):
        return plain
    return DTensor.from_local(
        plain, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The class of this rank's `exp_avg` of each parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        value = optimizer.state[parameter]["exp_avg"]
        local = value.to_local() if isinstance(value, DTensor) else value
        found[name.removeprefix("values.")] = type(local).__name__ if local.numel() else ""
    return found


def _saving(rank: int, bags: list[nn.Module], kind: str, folder: str, shards: bool) -> Any:
    model, optimizer = made(rank, bags, kind, shards)
    steps(model, optimizer, range(3))
    m, o = checkpoint.get_state_dict(model, optimizer)
    checkpoint.save({"m": m, "o": o}, checkpoint_id=folder)
    before, was = values(model, optimizer), kinds(model, optimizer)
    steps(model, optimizer, range(3, 4))
    return before, values(model, optimizer), was


def _loading(rank: int, bags: list[nn.Module], kind: str, folder: str, shards: bool) -> Any:
    model, optimizer = made(rank, bags, kind, shards)
    m, o = checkpoint.get_state_dict(model, optimizer)
    state = {"m": m, "o": o}
    checkpoint.load(state, checkpoint_id=folder)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    before, was = values(model, optimizer), kinds(model, optimizer)
    steps(model, optimizer, range(3, 4))
    return before, {name: value for name, value in values(model, optimizer).items() if "exp_avg" not in name}, was


def bags(count: int) -> list[nn.Module]:
    first = seeded(Bag)
    return [copy.deepcopy(first) for _ in range(count)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(("saves", "loads"), [(2, 3), (3, 1), (1, 2)])
def test_state_goes_to_any_number_of_ranks(kind: str, saves: int, loads: int, tmp_path: Path) -> None:
    """Bitwise: what the state says, and the parameters of the step behind it, which it decides."""
    folder = str(tmp_path / "c")
    (before, after, was), *_ = run_ranks(saves, _saving, bags(saves), kind, folder, saves > 1)
    found = run_ranks(loads, _loading, bags(loads), kind, folder, loads > 1)
    for values_there, after_there, _ in found:
        assert values_there.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(values_there[name], value), name
        for name, value in after_there.items():
            assert torch.equal(after[name], value), name
    state = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}[kind]
    # Two ranks cut between blocks. Of three two hold 43 rows, which are no whole blocks of 256, and the last
    # one 42, which are.
    assert was["even"] == ("Tensor" if saves == 3 and kind != "AdamW4bit" else state) and was["small"] == "Tensor"
    if saves + loads == 3:
        assert found[0][2]["even"] == state


@behaviour(
    "torchao's 8-bit AdamW: a checkpoint of its state, classes kept",
    area="packages",
    torch="none",
    reason="DCP; not run",
)
def test_state_of_the_same_ranks_is_what_it_was(tmp_path: Path) -> None:
    world, folder = several(), str(tmp_path / "c")
    before, after, was = zip(*run_ranks(world, _saving, bags(world), "AdamW8bit", folder, True), strict=True)
    loaded = run_ranks(world, _loading, bags(world), "AdamW8bit", folder, True)
    for rank, (values_there, after_there, classes) in enumerate(loaded):
        assert classes == was[rank]
        assert all(torch.equal(values_there[name], value) for name, value in before[rank].items())
        assert all(torch.equal(after[rank][name], value) for name, value in after_there.items())


def _in_other_ways(rank: int, bags: list[nn.Module], folder: str) -> None:
    """Replicas; a save in the background; torch's own state dicts, loaded in place."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = made(rank, bags, "AdamW8bit", mesh=mesh)
    steps(model, optimizer, range(2))
    expected = values(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    checkpoint.async_save({"o": state}, checkpoint_id=folder)
    steps(model, optimizer, range(2, 3))
    checkpoint.close()
    state = get_optimizer_state_dict(model, optimizer)
    kept = state["state"]["values.even"]["exp_avg"].to_local()  # type: ignore[union-attr,index]
    codes = kept.codes.clone()
    checkpoint.load({"o": state}, checkpoint_id=folder)
    assert not torch.equal(kept.codes, codes)
    found = values(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items() if "exp_avg" in name)


def test_with_replicas_in_the_background_and_in_place(tmp_path: Path) -> None:
    run_ranks(4, _in_other_ways, bags(4), str(tmp_path / "c"))


def _refused(rank: int, bags: list[nn.Module], folder: str) -> None:
    model, optimizer = made(rank, bags, "AdamW8bit", shard_placement_fn=lambda p: Shard(p.ndim - 1))
    steps(model, optimizer, range(1))
    _, o = checkpoint.get_state_dict(model, optimizer)
    with pytest.raises(CheckpointMismatch, match="even.exp_avg: .*OptimState8bit that is cut by rows"):
        checkpoint.save({"o": o}, checkpoint_id=folder)


def test_columns_of_blocks_are_refused(tmp_path: Path) -> None:
    """They are blocks of each rank's columns, of which no whole tensor can be made."""
    run_ranks(2, _refused, bags(2), str(tmp_path / "c"))


def test_what_does_not_fit_in_place_is_named(tmp_path: Path) -> None:
    """One process: another class, a plain tensor, and a class that is not there."""
    import torchao.optim

    model, optimizer = made(0, bags(1), "AdamW8bit", shards=False)
    steps(model, optimizer, range(1))
    held = optimizer.state[model.values["even"]]["exp_avg"]
    checkpoint.save({"x": held, "y": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    manifest = checkpoint.inspect(tmp_path)
    assert sorted(manifest.tensors) == ["x.codes", "x.qmap", "x.scale", "y"]
    _, other = made(0, bags(1), "AdamW4bit", shards=False)
    steps(model, other, range(0))
    four = torchao.optim.subclass_4bit.OptimState4bit.zeros(held.shape)
    for target, said in [(four, "OptimState4bit"), (torch.zeros(128, 128), "float32 here"), (held[:2], r"\(2, 128\)")]:
        with pytest.raises(CheckpointMismatch, match=f"x is .*{said}.*in the checkpoint"):
            checkpoint.load({"x": target, "y": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointMismatch, match="y: expected a plain tensor or a DTensor, found OptimState8bit"):
        checkpoint.load({"x": torch.ones(2), "y": held}, checkpoint_id=tmp_path, no_dist=True)
    changed = torch.zeros_like(held.codes), torch.zeros_like(held.scale)
    fresh = type(held)(*changed, held.qmap, held.signed, held.dtype)
    checkpoint.load({"x": fresh, "y": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(fresh.codes, held.codes) and torch.equal(fresh.scale, held.scale)


def test_a_class_that_is_not_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(0, bags(1), "AdamW8bit", shards=False)
    steps(model, optimizer, range(1))
    m, o = checkpoint.get_state_dict(model, optimizer)
    checkpoint.save({"o": o}, checkpoint_id=tmp_path, no_dist=True)
    model, optimizer = made(0, bags(1), "AdamW8bit", shards=False)
    m, o = checkpoint.get_state_dict(model, optimizer)
    monkeypatch.delitem(sys.modules, "torchao.optim.subclass_8bit")
    with pytest.raises(
        CheckpointMismatch, match="class torchao.optim.subclass_8bit.OptimState8bit.*import its package"
    ):
        checkpoint.load({"o": o}, checkpoint_id=tmp_path, no_dist=True)


def test_an_optimizer_of_plain_tensors_refuses_it() -> None:
    model, optimizer = made(0, bags(1), "AdamW8bit", shards=False)
    steps(model, optimizer, range(1))
    _, o = checkpoint.get_state_dict(model, optimizer)
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatch, match="exp_avg as OptimState8bit, for AdamW, which computes with plain"):
        checkpoint.set_state_dict(model, plain, optim_state_dict=o)
