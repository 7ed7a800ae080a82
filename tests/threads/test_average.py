"""`average`: EMA and SWA on shards, bit for bit those of one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard import average, fully_shard, weights
from fullshard.checkpoint import load, save
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.test_weights import Odd

KINDS: list[dict[str, float]] = [{"decay": 0.9}, {"window": math.inf}, {"window": 2}, {"decay": 0.0}, {"window": 1}]


def sharded(replicas: int = 1, **options: Any) -> Any:
    model: Any = seeded(Odd)
    world = torch.distributed.get_world_size()
    shape, names = ((replicas, world // replicas), ("r", "s")) if replicas > 1 else ((world,), ("s",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.q, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params={model.own, model.scale}, **options)
    return model


def move(model: nn.Module, step: int) -> None:
    """The same change of all values, sharded or not: of each bits that differ from all others."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number))
            full = full.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                dim, mesh = parameter.placements[-1].dim, parameter.device_mesh  # type: ignore[attr-defined]
                pieces, at = full.chunk(mesh.size(-1), dim), mesh.get_coordinate()[-1]  # type: ignore[index]
                parameter.to_local().copy_(pieces[at] if at < len(pieces) else full.narrow(dim, 0, 0))
            else:
                parameter.copy_(full)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def oracle(kind: dict[str, float], steps: int) -> dict[str, Tensor]:
    """One process, in float32, by torch's own class."""
    if kind.get("window") == 2:  # torch has none

        def mean(averaged: Tensor, current: Tensor, count: Any) -> Tensor:
            return averaged + (current - averaged) / min(int(count) + 1, 2)

        options: dict[str, Any] = {"avg_fn": mean}
    elif kind.get("window") == 1:
        options = {"avg_fn": lambda averaged, current, count: averaged + (current - averaged) / 1}
    elif "decay" in kind:
        options = {"avg_fn": get_ema_avg_fn(kind["decay"])}
    else:
        options = {}
        # Torch's default is one operation, a lerp, for several tensors at once; its formula for one is this.
        options["avg_fn"] = torch.optim.swa_utils.get_swa_avg_fn()
    plain = seeded(Odd)
    averaged = AveragedModel(copy.deepcopy(plain).float(), **options)
    for step in range(steps):
        move(plain, step)
        averaged.update_parameters(copy.deepcopy(plain).float())
    return dict(averaged.module.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@pytest.mark.sample(3, full=20)
def test_bits_are_those_of_one_process(kind: dict[str, float], world: int, replicas: int) -> None:
    expected = oracle(kind, 5)

    def rank_main(rank: int) -> None:
        model = sharded(replicas)
        mean = average(model, device="cpu" if replicas > 1 else None, **kind)  # where the shards are, too
        for step in range(5):
            move(model, step)
            mean.update()
        found = mean.state_dict()
        assert found["updates"] == 5 and set(found["means"]) == {
            name for name, _ in seeded(Odd).named_parameters() if name != "head.weight"
        }
        for name, tensor in found["means"].items():
            assert tensor.dtype is torch.float32
            assert torch.equal(whole(tensor), expected[name]), name

    run_ranks(world, rank_main)


def test_applied_has_the_average_and_leaves_no_trace() -> None:
    def rank_main(rank: int) -> None:
        model = sharded(reshard_after_forward=False)
        mean = average(model, decay=0.5)
        for step in range(3):
            move(model, step)
            mean.update()
        before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
        expected = {name: whole(tensor) for name, tensor in mean.state_dict()["means"].items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.q(torch.ones(1, 4)).sum().backward()  # full parameters stay on the module
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
        own = model.q(x)
        with mean.applied():
            for name, tensor in weights(model).tensors():
                if name in expected:
                    assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
                elif name != "head.weight":
                    assert torch.equal(tensor, before[name]), name
            with torch.no_grad():
                assert torch.equal(model.q(x), nn.functional.linear(x, expected["q.weight"]))
            with pytest.raises(RuntimeError, match=r"SGD.step\(\): expected no step while an average is applied"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="found an average applied already"), mean.applied():
                pass
        after = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert torch.equal(model.q(x), own)
        optimizer.step()
        with pytest.raises(KeyError), mean.applied():
            raise KeyError("in an evaluation")
        assert not fullshard.extras.average.__globals__["_applied"]

    run_ranks(2, rank_main)


def test_training_is_what_it_is_without_an_average() -> None:
    def rank_main(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for averaged in (False, True):
            model: Any = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
            fully_shard(model[0])
            fully_shard(model)
            mean = average(model, decay=0.9) if averaged else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if mean is not None:
                    mean.update()
                    with mean.applied(), torch.no_grad():
                        model(x)
            found.append({name: whole(tensor) for name, tensor in model.state_dict().items()})
        return found

    for one, other in run_ranks(2, rank_main):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_it_for_any_number_of_ranks(tmp_path: Any) -> None:
    expected = oracle({"decay": 0.9}, 3)

    def writes(rank: int) -> None:
        model = sharded()
        mean = average(model, decay=0.9)
        for step in range(3):
            move(model, step)
            mean.update()
        save({"average": mean}, checkpoint_id=tmp_path / "saved")

    def reads(rank: int) -> None:
        model = sharded()
        mean = average(model, decay=0.9)
        load({"average": mean}, checkpoint_id=tmp_path / "saved")
        assert mean.updates == 3
        for name, tensor in mean.state_dict()["means"].items():
            assert torch.equal(whole(tensor), expected[name]), name
        # And from whole tensors, as torch.save of one process has them.
        other = average(model, decay=0.9)
        other.load_state_dict(
            {"means": {n: t.clone() for n, t in expected.items() if n in mean.state_dict()["means"]}, "updates": 3}
        )
        for name, tensor in other.state_dict()["means"].items():
            assert torch.equal(whole(tensor), expected[name]), name
        with pytest.raises(KeyError, match="expected the names of this average"):
            other.load_state_dict({"means": {}, "updates": 1})

    run_ranks(2, writes)
    run_ranks(3, reads)
    run_ranks(1, reads)


def test_an_export_has_the_average_and_a_load_starts_a_new_one(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Linear(3, 5))
        fully_shard(model)
        mean = average(model, window=math.inf)
        for step in range(3):
            move(model, step)
            mean.update()
        expected = {name: whole(tensor).clone() for name, tensor in mean.state_dict()["means"].items()}
        with mean.applied():
            tensors = dict(weights(model).tensors())
        if rank == 0:
            safetensors.save_file(tensors, str(tmp_path / "model.safetensors"))
        torch.distributed.barrier()
        fullshard.load_pretrained(model, tmp_path, progress=False)
        mean.reset()
        assert mean.updates == 0
        for name, tensor in mean.state_dict()["means"].items():
            assert torch.equal(whole(tensor), expected[name])
            assert torch.equal(whole(model.state_dict()[name]), expected[name])

    run_ranks(2, rank_main)


def test_buffers_are_averaged_if_asked() -> None:
    model = seeded(Odd)
    mean = average(model, window=math.inf, buffers=True)
    for value in (1.0, 2.0, 6.0):
        model.norm.running_mean.fill_(value)  # type: ignore[union-attr, operator]
        mean.update()
    means = mean.state_dict()["means"]
    assert torch.equal(means["norm.running_mean"], torch.full((4,), 3.0)) and "norm.num_batches_tracked" not in means
    with mean.applied():
        assert model.norm.running_mean[0] == 3  # type: ignore[union-attr, index]
    assert model.norm.running_mean[0] == 6  # type: ignore[union-attr, index]
    assert "norm.running_mean" not in average(model, decay=0.1).state_dict()["means"]


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_update_is_a_few_operations_whatever_the_number_of_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    mean = average(model, decay=0.9)
    mean.update()
    with _Counts() as counted:
        mean.update()
    foreach = [name for name in counted.names if "_foreach_" in name]
    assert len(foreach) == 3, foreach
    assert {name for name in counted.names} - set(foreach) <= {"aten.detach.default"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, ValueError),
        ({"decay": 0.9, "window": 3}, ValueError),
        ({"decay": 1.1}, ValueError),
        ({"window": 0}, ValueError),
        ({"decay": "0.9"}, TypeError),
        ({"decay": 0.9, "device": "cuda"}, ValueError),
        ({"decay": 0.9, "buffers": "yes"}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        average(nn.Linear(2, 2), **options)


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="expected parameters with values, found some on the meta device"):
        average(model, decay=0.9)


def test_copies_lead_here() -> None:
    def rank_main(rank: int) -> None:
        model = sharded()
        for copies in (copy.deepcopy, AveragedModel):
            with pytest.raises(AssertionError, match=r"fullshard.average\(model, decay=0.999\)"):
                copies(model)

    run_ranks(1, rank_main)
