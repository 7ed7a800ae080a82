"""Checkpoints saved by one world and loaded by another: bitwise, in every placement; and all that is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import CheckpointMismatch, resident
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

State = dict[str, Any]


def whole(state: Any) -> Any:
    """`state` with full, copied tensors: what is compared between worlds."""
    if isinstance(state, Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).detach().cpu().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bitwise, and the same keys, types and dtypes."""
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype and torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}.{index}")
    else:
        assert repr(found) == repr(expected), where


# ---- models and optimizers, from any world to any ---------------------------------------------------------------


class Model(nn.Module):
    """Uneven rows, fewer rows than ranks, tied, frozen, unused, a buffer, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.unused = nn.Linear(2, 2).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.frozen(torch.tanh(self.second(hidden) + self.tied(hidden))) * self.scale


def build(rank: int, layout: str = "fsdp") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Model)
    options: State = {}
    world = dist.get_world_size()
    if layout == "hsdp" and world % 2 == 0:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    if layout != "plain":
        for child in (model.first, model.frozen, model.unused):
            fullshard.fully_shard(child, **options)
        fullshard.fully_shard(model, **options)
    groups = [{"params": [p for n, p in model.named_parameters() if "first" in n], "lr": 0.02, "betas": (0.8, 0.9)}]
    groups.append({"params": [p for n, p in model.named_parameters() if "first" not in n]})
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def taken(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> State:
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def saved(rank: int, folder: str, layout: str = "fsdp") -> State:
    model, optimizer = build(rank, layout)
    train(model, optimizer, range(3))
    state = taken(model, optimizer, 3)
    checkpoint.save(state, checkpoint_id=folder)
    here: State = whole(state)
    return here


def loaded(rank: int, folder: str, layout: str = "fsdp") -> tuple[State, State]:
    """What stands in model and optimizer after a load, and again after one more step."""
    model, optimizer = build(rank, layout)
    state = taken(model, optimizer, 0)
    checkpoint.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    checkpoint.set_state_dict(model, optimizer, **parts)
    after: State = whole(taken(model, optimizer, state["step"]))
    train(model, optimizer, range(3, 4))
    return after, whole(taken(model, optimizer, 4))


WORLDS = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (3, 5)]
ALL_WORLDS = [(a, b) for a in range(1, 7) for b in range(1, 7)]


@pytest.mark.sample(1)
@behaviour(
    "saved by {a} ranks, loaded by {b}: bitwise, optimizer included",
    area="checkpoints",
    torch="none",
    reason="our own format; DCP's does it too, and is tested elsewhere",
)
@pytest.mark.parametrize(("a", "b"), WORLDS)
def test_any_world_loads_what_any_other_saved(a: int, b: int, tmp_path: Path) -> None:
    expected = run_ranks(a, saved, str(tmp_path / "c"))[0]
    for found, _ in run_ranks(b, loaded, str(tmp_path / "c")):
        assert_same(found, expected)
    checkpoint.verify(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.sample(full=36)
@pytest.mark.parametrize("layouts", [("fsdp", "fsdp"), ("fsdp", "columns"), ("hsdp", "fsdp"), ("columns", "hsdp")])
@pytest.mark.parametrize(("a", "b"), ALL_WORLDS)
def test_every_world_loads_what_every_other_saved(a: int, b: int, layouts: tuple[str, str], tmp_path: Path) -> None:
    expected = run_ranks(a, saved, str(tmp_path / "c"), layouts[0])[0]
    for found, _ in run_ranks(b, loaded, str(tmp_path / "c"), layouts[1]):
        assert_same(found, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("a", "before", "b", "after"),
    [(4, "hsdp", 3, "fsdp"), (3, "columns", 2, "fsdp"), (2, "fsdp", 4, "hsdp"), (1, "plain", 3, "columns")],
)
def test_layouts_may_differ(a: int, before: str, b: int, after: str, tmp_path: Path) -> None:
    expected = run_ranks(a, saved, str(tmp_path / "c"), before)[0]
    for found, _ in run_ranks(b, loaded, str(tmp_path / "c"), after):
        assert_same(found, expected)


def test_a_step_after_loading_is_the_step_without(tmp_path: Path) -> None:
    """The same world goes on bitwise: parameters, buffers and the optimizer's state."""

    def straight(rank: int) -> State:
        model, optimizer = build(rank)
        train(model, optimizer, range(4))
        found: State = whole(taken(model, optimizer, 4))
        return found

    run_ranks(2, saved, str(tmp_path / "c"))
    for (_, found), expected in zip(run_ranks(2, loaded, str(tmp_path / "c")), run_ranks(2, straight), strict=True):
        assert_same(found, expected)


def test_loading_into_a_stepped_optimizer_takes_what_is_stored(tmp_path: Path) -> None:
    """State that came after the save goes: also that of a parameter which had none then."""

    def rank_main(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        fullshard.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[1].requires_grad_(False)
        x = torch.ones(2, 3)
        model(x).sum().backward()
        optimizer.step()
        state = taken(model, optimizer, 1)
        before = whole(state)
        assert set(before["optimizer"]["state"]) == {"0.weight", "0.bias"}
        checkpoint.save(state, checkpoint_id=tmp_path / "c")
        model[1].requires_grad_(True)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        state = taken(model, optimizer, 3)
        assert set(state["optimizer"]["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        checkpoint.load(state, checkpoint_id=tmp_path / "c")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        checkpoint.set_state_dict(model, optimizer, **parts)
        assert_same(whole(taken(model, optimizer, 1)), before)
        assert len(optimizer.state) == 2 and optimizer.param_groups[0]["lr"] == 0.1

    run_ranks(2, rank_main)


# ---- tensors of every kind -------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def tensors() -> dict[str, Tensor]:
    """Shapes with nothing, one row, a prime, many dims; every dtype; views that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for index, shape in enumerate([(7, 3), (1, 5), (0, 4), (2, 3, 5), (11,), (4, 0)]):
        made[f"shape{index}"] = torch.randn(shape, generator=generator)
    for dtype in DTYPES:
        made[str(dtype)] = (torch.randn(6, 2, generator=generator) * 4).to(dtype)
    made["transposed"] = torch.randn(5, 7, generator=generator).t()
    return made


PLACEMENTS: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]


@pytest.mark.parametrize(("a", "b", "locked"), [(3, 4, True), (4, 2, False)])
def test_tensors_of_every_kind_in_any_placement(
    a: int, b: int, locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`locked`: whether a load may lock the pages of files, or reads into memory of its own."""
    if not locked:
        monkeypatch.setattr(resident, "_LOCAL", frozenset())

    def placed(values: dict[str, Tensor], turn: int) -> State:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        choices = [PLACEMENTS[(i + turn) % 3] for i in range(len(values))]
        fitting = [
            c if c != [Shard(1)] or v.ndim > 1 else [Shard(0)] for c, v in zip(choices, values.values(), strict=True)
        ]
        made: State = {
            key: distribute_tensor(value.to(torch.float32), mesh, c).to(value.dtype)
            if value.dtype is torch.float8_e4m3fn
            else distribute_tensor(value, mesh, c)
            for (key, value), c in zip(values.items(), fitting, strict=True)
        }
        return made | {
            "scalar": torch.tensor(3.5),
            "none": None,
            "list": [torch.arange(3), 1],
            "plain": values["shape3"],
        }

    def save(rank: int) -> None:
        checkpoint.save(placed(tensors(), 0), checkpoint_id=tmp_path / "c")

    def load(rank: int) -> State:
        state = placed({key: torch.zeros_like(value) for key, value in tensors().items()}, 1)
        state |= {"scalar": torch.tensor(0.0), "none": 1, "list": [torch.zeros(3, dtype=torch.int64), 0]}
        state["plain"] = torch.zeros(2, 3, 5)
        checkpoint.load(state, checkpoint_id=tmp_path / "c")
        found: State = {}
        for key, value in state.items():
            if isinstance(value, DTensor) and value.dtype is torch.float8_e4m3fn:
                value = value.to(torch.float32)
            found[key] = whole(value)
        return found

    run_ranks(a, save)
    expected = tensors()
    expected = {k: v.to(torch.float32) if v.dtype is torch.float8_e4m3fn else v for k, v in expected.items()}
    for found in run_ranks(b, load):
        for key, value in expected.items():
            assert_same(found[key], value, key)
        assert found["scalar"] == 3.5 and found["none"] is None
        assert_same(found["list"], [torch.arange(3), 1])
        assert_same(found["plain"], expected["shape3"])
    with checkpoint.open_checkpoint(tmp_path / "c") as opened:
        stored = opened.state_dict()
    assert stored["list"][1] == 1
    for key, value in tensors().items():
        same = torch.equal(stored[key].view(torch.uint8), value.contiguous().view(torch.uint8))
        assert stored[key].dtype is value.dtype and same, key


def test_replicated_shards_are_written_once(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        weight = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Replicate(), Shard(0)])
        checkpoint.save({"w": weight, "buffer": torch.ones(100)}, checkpoint_id=tmp_path / "c")

    run_ranks(4, save)
    manifest = checkpoint.verify(tmp_path / "c")
    assert [box.lengths for _, box in manifest.tensors["w"].parts()] == [(3, 2), (3, 2)]
    data = sum(file.data_nbytes for file in manifest.files)
    assert data == 48 + 400 == manifest.nbytes and manifest.world == 4


def test_tensor_parallel_shards(tmp_path: Path) -> None:
    """A weight cut along one dim by tensor parallelism and by FSDP, saved on 4 ranks, loaded on 3 without either."""

    def save(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model = seeded(lambda: nn.Linear(3, 7))
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model, mesh["model"], ColwiseParallel())
        fullshard.fully_shard(model, mesh=mesh["data"])
        checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "c")
        return whole(model.weight)  # type: ignore[no-any-return]

    def load(rank: int) -> Tensor:
        model = nn.Linear(3, 7)
        fullshard.fully_shard(model)
        checkpoint.load(model.state_dict(), checkpoint_id=tmp_path / "c")
        return whole(model.weight)  # type: ignore[no-any-return]

    expected = run_ranks(4, save)[0]
    for found in run_ranks(3, load):
        assert torch.equal(found, expected)


def test_offloaded_shards(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        model = seeded(lambda: nn.Linear(3, 5))
        fullshard.fully_shard(model, offload_policy=fullshard.CPUOffloadPolicy(pin_memory=False))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        checkpoint.save(taken(model, optimizer, 1), checkpoint_id=tmp_path / "c")
        expected = whole(taken(model, optimizer, 1))
        other = nn.Linear(3, 5)
        fullshard.fully_shard(other, offload_policy=fullshard.CPUOffloadPolicy(pin_memory=False))
        fresh = torch.optim.Adam(other.parameters())
        state = taken(other, fresh, 0)
        checkpoint.load(state, checkpoint_id=tmp_path / "c")
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        checkpoint.set_state_dict(other, fresh, **parts)
        assert_same(whole(taken(other, fresh, 1)), expected)

    run_ranks(3, rank_main)


def test_keys_of_some_ranks(tmp_path: Path) -> None:
    """Stages of a pipeline have keys of their own; others find them all."""

    def save(rank: int) -> None:
        checkpoint.save({f"stage{rank}": {"w": torch.full((2,), float(rank)), "n": rank}}, checkpoint_id=tmp_path / "c")

    def load(rank: int) -> None:
        stages = [rank, rank + 2] if rank < 1 else [1]
        state = {f"stage{s}": {"w": torch.zeros(2), "n": 0} for s in stages}
        checkpoint.load(state, checkpoint_id=tmp_path / "c")
        assert state == {f"stage{s}": {"w": state[f"stage{s}"]["w"], "n": s} for s in stages}
        assert all((state[f"stage{s}"]["w"] == s).all() for s in stages)  # type: ignore[attr-defined]

    run_ranks(3, save)
    run_ranks(2, load)


def test_ranks_that_ask_for_different_keys_are_named(tmp_path: Path) -> None:
    """A rank that asks for less would keep its old values, and go on with another state than the others."""

    def rank_main(rank: int) -> None:
        def state() -> State:
            mesh = init_device_mesh("cpu", (3,))
            sharded = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)], src_data_rank=None)
            return {"sharded": sharded, "plain": torch.ones(2), "step": 3, "mine": {}}

        checkpoint.save({**state(), "mine": {f"rank{rank}": rank}}, checkpoint_id=tmp_path / "c")

        def load(found: State, **options: Any) -> str:
            with pytest.raises(CheckpointMismatch) as caught:
                checkpoint.load(found, checkpoint_id=tmp_path / "c", **options)
            return "\n".join(caught.value.problems)

        own = {"mine": {f"rank{rank}": 9}}
        all_of = {key: value for key, value in state().items() if key != "mine"}
        less = {"step": 0} if rank == 1 else {**all_of, "step": 0}
        rest = {"allow_unexpected": ["mine.*"]}
        said = load(less, **rest)
        assert said == (
            "different: plain is asked for by ranks 0 and 2, not by rank 1\n"
            "different: sharded is asked for by ranks 0 and 2, not by rank 1"
        )
        assert less["step"] == 0
        # Also where a rank has keys of its own, because it holds a part of the tensor.
        said = load({**own, **(less if rank == 1 else all_of)}, on_some_ranks=["plain"])
        assert said == "different: sharded is asked for by ranks 0 and 2, not by rank 1"
        # A value that one rank alone wants is said to be so.
        one: State = {"step": 0} if rank else {"step": 0, "plain": torch.zeros(2)}
        rest = {"allow_unexpected": ["mine.*", "sharded"]}
        assert load(one, **rest) == "different: plain is asked for by rank 0, not by ranks 1 and 2"
        checkpoint.load(one, checkpoint_id=tmp_path / "c", on_some_ranks=["pl*"], **rest)
        assert one["step"] == 3 and (rank or (one["plain"] == 1.0).all())
        # Keys of each rank's own, beside those of all.
        every = {**all_of, **own, "step": 0}
        checkpoint.load(every, checkpoint_id=tmp_path / "c")
        assert every["step"] == 3 and every["mine"] == {f"rank{rank}": rank}

    run_ranks(3, rank_main)


def test_optimizers_of_some_ranks_are_named(tmp_path: Path) -> None:
    """One rank leaves the optimizer's state out, which has no tensors yet."""

    def rank_main(rank: int) -> None:
        saved(rank, str(tmp_path / "c"))
        state = taken(*build(rank), 0)
        if rank == 1:
            del state["optimizer"]
        with pytest.raises(CheckpointMismatch) as caught:
            checkpoint.load(state, checkpoint_id=tmp_path / "c")
        assert any("different: optimizer.state.first.weight.exp_avg is" in one for one in caught.value.problems)
        assert all("by rank 0, not by rank 1" in problem for problem in caught.value.problems)

    run_ranks(2, rank_main)


def test_objects_with_a_state_dict(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        def scheduled() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
            return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)

        optimizer, scheduler = scheduled()
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        model = seeded(lambda: nn.Linear(2, 2))
        checkpoint.save({"app": model, "scheduler": scheduler}, checkpoint_id=tmp_path / "c")
        other, (_, fresh) = nn.Linear(2, 2), scheduled()
        checkpoint.load({"app": other, "scheduler": fresh}, checkpoint_id=tmp_path / "c")
        assert_same(whole(other.state_dict()), whole(model.state_dict()))
        assert fresh.last_epoch == 3 and type(fresh.milestones) is type(scheduler.milestones)  # type: ignore[attr-defined]
        assert fresh.state_dict() == scheduler.state_dict()

    run_ranks(2, rank_main)


# ---- what is refused -------------------------------------------------------------------------------------------


def refused(state: State, folder: Path, **options: Any) -> list[str]:
    """What a load of `state` is refused for; tensors and values in it are untouched."""
    before = copy.deepcopy(state)
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.load(state, checkpoint_id=folder, **options)
    assert_same(state, before)
    return caught.value.problems


@behaviour(
    "missing, unexpected, mis-shaped and mis-typed keys are one error that lists them all",
    area="checkpoints",
    torch="none",
    reason="DCP casts dtypes and drops unexpected keys silently",
)
def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    stored = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1), "d": {"x": 1, "y": "text"}, "e": 1}
    checkpoint.save(stored, checkpoint_id=tmp_path)
    state = {
        "a": torch.zeros(4),
        "b": torch.zeros(2, 2, dtype=torch.float16),
        "c": 3,
        "d": {"x": torch.zeros(1), "y": 3},
        "new": torch.zeros(1),
    }
    assert refused(state, tmp_path) == [
        "shape: a is (4,) here, (3,) in the checkpoint",
        "dtype: b is float16 here, float32 in the checkpoint",
        "type: d.x is a tensor here, a number in the checkpoint",
        "missing: new",
        "type: c is a number here, a tensor in the checkpoint",
        "type: d.y is a number here, a str in the checkpoint",
        "unexpected: e",
    ]


def test_what_may_differ_is_said(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.full((3,), 0.1), "b": {"x": 1, "y": 2}, "i": torch.ones(1)}, checkpoint_id=tmp_path)
    state: State = {"a": torch.zeros(3, dtype=torch.bfloat16), "c": 5, "b": {"x": 0}, "i": torch.zeros(1)}
    assert len(refused(state, tmp_path)) == 3
    assert refused(state, tmp_path, allow_missing=["c"], allow_unexpected=["b.*"]) == [
        "dtype: a is bfloat16 here, float32 in the checkpoint"
    ]
    checkpoint.load(state, checkpoint_id=tmp_path, cast=True, allow_missing=["c"], allow_unexpected=["b.y"])
    assert state["a"].dtype is torch.bfloat16 and torch.equal(state["a"], torch.full((3,), 0.1).bfloat16())
    assert state["c"] == 5 and state["b"] == {"x": 1}
    counts = {"a": torch.zeros(3), "b": {"x": 0, "y": 0}, "i": torch.zeros(1, dtype=torch.int64)}
    assert refused(counts, tmp_path, cast=True) == ["dtype: i is int64 here, float32 in the checkpoint"]
    renamed: State = {"model.a": torch.zeros(3), "b": {"x": 0, "y": 0}, "i": torch.zeros(1)}
    checkpoint.load(renamed, checkpoint_id=tmp_path, rename={"model.a": "a"})
    assert torch.equal(renamed["model.a"], torch.full((3,), 0.1))
    renamed = {"model.a": torch.zeros(3), "b": {"x": 0, "y": 0}, "i": torch.zeros(1)}
    checkpoint.load(renamed, checkpoint_id=tmp_path, rename=lambda key: key.removeprefix("model."))
    assert torch.equal(renamed["model.a"], torch.full((3,), 0.1))
    assert refused(renamed, tmp_path, rename={"model.a": "z"})[0] == "missing: model.a (as z)"
    with pytest.raises(TypeError, match="a list of keys"):
        checkpoint.load(state, checkpoint_id=tmp_path, allow_missing="c")


def test_a_mismatch_on_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        checkpoint.save({"w": weight, "b": torch.ones(2)}, checkpoint_id=tmp_path)
        own = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
        state = {"w": own, "b": torch.zeros(2 + rank)}
        with pytest.raises(CheckpointMismatch) as caught:
            checkpoint.load(state, checkpoint_id=tmp_path)
        assert not own.to_local().any() and not state["b"].any()
        return caught.value.problems

    assert run_ranks(2, rank_main) == [["shape: b is (3,) here, (2,) in the checkpoint"]] * 2


@behaviour(
    "a value or replica that differs between ranks is an error of the save",
    area="checkpoints",
    torch="none",
    reason="of a step that differs DCP keeps the last writer's",
)
def test_ranks_that_differ_are_an_error_before_anything_is_written(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        for state, says in [
            ({"step": rank}, "step: one value on rank 0, another on rank 1"),
            ({"b": torch.ones(2 + rank)}, "b: float32 (2,) on rank 0, float32 (3,) on rank 1"),
            ({"b": torch.full((2,), float(rank))}, "b: rank 0 has"),
        ]:
            with pytest.raises(CheckpointMismatch, match="take_first") as caught:
                checkpoint.save(state, checkpoint_id=tmp_path / "c")
            assert says in caught.value.problems[0], caught.value.problems
            assert not checkpoint.is_complete(tmp_path / "c")
        # The first rank writes more than the others already, and its tensor is taken all the same.
        own: State = {"large": torch.ones(100)} if rank == 0 else {}
        mine = {"m": {"step": rank, "b": torch.ones(2) * rank}} | own
        checkpoint.save(mine, checkpoint_id=tmp_path / "c", take_first=["m.*"])
        found: State = {"m": {"step": 5, "b": torch.ones(2)}, "large": torch.ones(100)}
        checkpoint.load(found, checkpoint_id=tmp_path / "c")
        assert found["m"]["step"] == 0 and not found["m"]["b"].any()

    run_ranks(2, rank_main)


class Odd:
    """Nothing that can be saved."""


class Failing:
    """An object whose state cannot be taken on the second rank."""

    def state_dict(self) -> State:
        if dist.get_rank() == 1:
            raise ValueError("not now")
        return {}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def test_an_object_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(CheckpointMismatch, match=r"state_dict\(\) raised ValueError: not now"):
            checkpoint.save({"loader": Failing(), "n": 1}, checkpoint_id=tmp_path / "c")

    run_ranks(2, rank_main)
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_saved_is_listed_before_anything_is_written(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {
            "odd": Odd(),
            "pair": (torch.ones(1), 2),
            "numbered": {0: torch.ones(1)},
            "meta": torch.empty(2, device="meta"),
            "sparse": torch.eye(2).to_sparse(),
            "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
            "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            "a": {"b": 1},
            "a.b": 2,
            "\ud800": 1,
            "fine": torch.ones(1) if rank else 3.0,
        }
        with pytest.raises(CheckpointMismatch) as caught:
            checkpoint.save(state, checkpoint_id=tmp_path / "c")
        assert [problem.split(":")[0] for problem in caught.value.problems] == [
            "odd",
            "pair",
            "numbered",
            "optimizer",
            "a.b",
            "\ud800",
            "meta",
            "sparse",
            "partial",
        ]
        assert not (tmp_path / "c").exists()

    run_ranks(2, rank_main)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a dict"):
        checkpoint.save([torch.ones(1)], checkpoint_id=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path of a directory"):
        checkpoint.load({}, checkpoint_id=None)  # type: ignore[arg-type]
    with pytest.raises(checkpoint.CheckpointNotFound, match="no directory"):
        checkpoint.load({}, checkpoint_id=tmp_path / "nowhere")
    with pytest.raises(checkpoint.CheckpointNotFound, match="found no CURRENT"):
        checkpoint.load({}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="convert"):
        checkpoint.load({}, checkpoint_id=tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        checkpoint.save({"a": 1}, checkpoint_id=tmp_path / "file" / "c")
