"""`step_on_owners`: given the same gradients, whole matrices are stepped bit for bit as in one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import checkpoint, step_on_owners
from fullshard.param import local_part
from tests.harness.models import full_copy, seeded
from tests.harness.threads import run_ranks

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Model(nn.Module):
    """Uneven rows, one row, one column, fewer rows than ranks, vectors, a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.gate = nn.Linear(7, 1)
        self.wide = nn.Linear(1, 9)
        self.down = nn.Linear(9, 6)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.wide(self.gate(torch.tanh(self.up(x)))))
        return y.square().mean() + torch.einsum("eij,bj->bi", self.experts, x).square().mean()


def shard(model: Any, **options: Any) -> Any:
    for child in (model.up, model.gate, model.wide, model.down):
        fullshard.fully_shard(child, **options)
    return fullshard.fully_shard(model, **options)


def flat(model: nn.Module, **options: Any) -> nn.Module:
    return shard(model, **options)  # type: ignore[no-any-return]


def hsdp(model: nn.Module) -> nn.Module:
    return flat(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return flat(model, mesh=mesh["dp"])


def by_columns(model: nn.Module) -> nn.Module:
    return flat(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))


LAYOUTS = {"flat": flat, "hsdp": hsdp, "tp": tensor_parallel, "columns": by_columns}


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    two = [p for p in parameters if p.ndim == 2]
    return torch.optim.Muon([{"params": two[:2], "lr": 0.1}, {"params": two[2:], "nesterov": False}], lr=0.02)


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05, foreach=False)


def adafactor_foreach(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05, foreach=True, maximize=True)


def shampoo(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    package = importlib.import_module("pytorch_optimizer")
    return package.Shampoo(parameters, lr=0.05, momentum=0.5, weight_decay=0.1)  # type: ignore[no-any-return]


def soap(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One dim of some matrices is too large for it: then its state has an empty list instead of a tensor."""
    package = importlib.import_module("pytorch_optimizer")
    options = {"precondition_frequency": 2, "max_precondition_dim": 8, "maximize": True}
    return package.SOAP(parameters, lr=0.05, **options)  # type: ignore[no-any-return]


def muon_and_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Both in one optimizer, which counts its steps in its groups."""
    package = importlib.import_module("pytorch_optimizer")
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.ndim == 2], "use_muon": True},
        {"params": [p for p in given if p.ndim != 2], "use_muon": False},
    ]
    return package.Muon(groups, lr=0.05)  # type: ignore[no-any-return]


KINDS: dict[str, Optimizers] = {
    one.__name__: one for one in (muon, adafactor, adafactor_foreach, shampoo, soap, muon_and_adam)
}


def give_gradients(plain: nn.Module, model: nn.Module, step: int, leave: Iterable[str] = ()) -> None:
    """The same ones to both, without a sum over ranks."""
    generator = torch.Generator().manual_seed(step)
    others = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        gradient, other = torch.randn(parameter.shape, generator=generator), others[name]
        parameter.grad = None if name in leave else gradient
        other.grad = None
        if name not in leave:
            other.grad = parted(gradient, other) if isinstance(other, DTensor) else gradient


def parted(full: Tensor, like: DTensor) -> DTensor:
    """`full`, placed like a parameter, whatever its placements. No message."""
    local = local_part(full, like).clone()
    options: Any = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, **options)


def assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(full_copy(found), expected), where
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{where}[{number}]")
    else:
        assert found == expected, where


def assert_same(plain: nn.Module, ref: Any, model: nn.Module, optimizer: Any, plan: Any) -> None:
    """Parameters, state and settings; state of another shape is on its owner alone."""
    others = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        other = others[name]
        assert torch.equal(full_copy(other), parameter.detach()), name
        for key, value in ref.state.get(parameter, {}).items():
            held = optimizer.state[other]
            if key in held:
                assert_equal(held[key], value, f"{name}.{key}")
            else:
                assert plan.owner(name) != dist.get_rank(), f"{name}.{key} is not on its owner"
            if isinstance(value, Tensor) and value.shape == parameter.shape and name not in plan.kept:
                assert isinstance(held[key], DTensor) and held[key].placements == other.placements
    for group, expected in zip(optimizer.param_groups, ref.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}


CASES = [(kind, "flat", world) for kind in KINDS for world in (1, 2, 3, 4)]
CASES += [(kind, layout, 4) for kind in KINDS for layout in ("hsdp", "tp", "columns")]


@pytest.mark.parametrize(("kind", "layout", "world"), CASES)
@pytest.mark.sample(2)
def test_a_step_is_that_of_one_process(kind: str, layout: str, world: int) -> None:
    """In small chunks, with a schedule, options that change between steps, a step without gradients of one parameter,
    and one that is frozen for a step."""
    models = [seeded(Model) for _ in range(2 * world)]

    def job(rank: int) -> None:
        plain, model = models[rank], LAYOUTS[layout](models[world + rank])
        ref, optimizer = KINDS[kind](plain.parameters()), KINDS[kind](model.parameters())
        plan = step_on_owners(optimizer, model=model, chunk_nbytes=700).plan()
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (ref, optimizer)]
        for step in range(4):
            give_gradients(plain, model, step, leave=["down.weight"] if step == 1 else [])
            if step == 2:
                for one in (ref, optimizer):
                    one.param_groups[0]["weight_decay"] = 0.3
            for one in (plain, model):
                one.up.weight.requires_grad_(step != 3)  # type: ignore[union-attr, operator]
                if step == 3:
                    one.up.weight.grad = None  # type: ignore[union-attr]
            ref.step()
            optimizer.step()
            for schedule in schedules:
                schedule.step()
            assert_same(plain, ref, model, optimizer, plan)
        dist.barrier()

    run_ranks(world, job)


# ---- checkpoints ---------------------------------------------------------------------------------------------


def _pair(kind: str, model: nn.Module) -> Any:
    """A model whose matrices have owners where it is sharded."""
    if dist.is_initialized():
        model = flat(model)
    optimizer = KINDS[kind](model.parameters())
    plan = None
    if dist.is_initialized():
        plan = step_on_owners(optimizer, model=model).plan()
    return model, optimizer, plan


def _train(plain: nn.Module, ref: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        give_gradients(plain, model, step)
        ref.step()
        optimizer.step()


def _load(model: nn.Module, optimizer: Any, folder: str) -> None:
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=folder)
    checkpoint.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _assert_loaded(plain: nn.Module, ref: Any, model: nn.Module, optimizer: Any, has: Any) -> None:
    """`has(name)`: whether this rank has state of other shapes of a parameter."""
    others = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(full_copy(others[name]), parameter.detach()), name
        for key, value in ref.state.get(parameter, {}).items():
            held = optimizer.state[others[name]]
            is_shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            assert (key in held) == (is_shaped or has(name)), f"{name}.{key}"
            if key in held:
                assert_equal(held[key], value, f"{name}.{key}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "adafactor_foreach"])
@pytest.mark.sample(2)
def test_saved_at_four_loaded_at_three_and_by_one(kind: str, tmp_path: Path) -> None:
    """Bitwise, and so are the steps after it. SOAP's are not compared: its eigenvectors are columns in memory, and rows
    after a load, so that torch multiplies them by another kernel."""
    models, folder = [seeded(Model) for _ in range(20)], str(tmp_path / "c")
    steps = range(3, 3 if kind == "soap" else 5)

    def reference(number: int) -> Any:
        plain = models[number]
        ref = KINDS[kind](plain.parameters())
        for step in range(3):
            give_gradients(plain, plain, step)
            ref.step()
        return plain, ref

    def save(rank: int) -> None:
        model, optimizer, _ = _pair(kind, models[rank])
        _train(models[4 + rank], KINDS[kind](models[4 + rank].parameters()), model, optimizer, range(3))
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    def load(rank: int) -> None:
        model, optimizer, plan = _pair(kind, models[8 + rank])
        plain, ref = reference(11 + rank)
        _load(model, optimizer, folder)
        _assert_loaded(plain, ref, model, optimizer, lambda name: True)
        _train(plain, ref, model, optimizer, steps)
        if steps:
            # Again, into an optimizer that has stepped.
            plain, ref = reference(16 + rank)
            _load(model, optimizer, folder)
            _train(plain, ref, model, optimizer, steps)
        # What all ranks loaded is on the owner alone after a step.
        own = {title for title, _, owner, *_ in plan.rows() if owner == rank} | plan.kept.keys()
        _assert_loaded(plain, ref, model, optimizer, lambda name: not steps or name in own)

    run_ranks(4, save)
    run_ranks(3, load)
    plain, ref = reference(14)
    model, optimizer, _ = _pair(kind, models[15])
    _load(model, optimizer, folder)
    for step in steps:
        for one, stepped in ((plain, ref), (model, optimizer)):
            give_gradients(one, one, step)
            stepped.step()
    _assert_loaded(plain, ref, model, optimizer, lambda name: True)
