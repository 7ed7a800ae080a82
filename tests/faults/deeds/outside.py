"""What the cases of parameters that no unit has, of replicas and of loads do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fullshard
from tests.faults.actions import Action, local
from tests.faults.program import Run
from tests.harness.models import seeded
from tests.threads.programs import VOCABULARY, WIDTH, Block, Model


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = x
        return found


class HeadOutside(nn.Module):
    """A head that no unit has, above the sharded part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.trunk(tokens))
        return found


HEAD_UNITS = tuple(f"trunk.layers.{i}" for i in range(3))


class WithTable(Model):
    """A part that is read and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def out(self, x: Tensor) -> Any:
        return self.head(x * self.table)


def hsdp(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def whole(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}


def named(run: Run) -> torch.optim.Optimizer:
    return torch.optim.AdamW(run.model.named_parameters(), lr=1e-2)


# ---- values of one rank --------------------------------------------------------------------------------------


def append(seed: Callable[[Run], int]) -> Action:
    """A layer, after `fully_shard`: no unit has it."""

    def action(run: Run) -> None:
        run.model.layers.append(seeded(Block, seed=seed(run)))

    return action


append_same = append(lambda run: 7)
append_by_rank = append(lambda run: 7 + run.rank)


def moved(*names: str) -> Action:
    """These parameters of this rank have other values."""

    def action(run: Run) -> None:
        with torch.no_grad():
            for name in names:
                local(run.model.get_parameter(name)).add_(0.25)

    return action


def seed_of_rank(run: Run) -> None:
    """This rank builds its model from another seed."""
    run.model = seeded(run.setup.model, seed=1)


def seeded_after(run: Run) -> None:
    """Each rank draws values after `fully_shard`, by its own generator, as `init_weights` does."""
    generator = torch.Generator().manual_seed(run.rank)
    with torch.no_grad():
        for p in run.model.parameters():
            local(p).normal_(0.0, 0.1, generator=generator)


def _values(run: Run, seed: int) -> dict[str, Any]:
    """A state dict of other values, as a checkpoint of another run has them."""
    full = seeded(run.setup.model, seed=seed).state_dict()
    state = {}
    for name, value in run.model.state_dict().items():
        whole_value = full[name]
        if isinstance(value, DTensor):
            whole_value = distribute_tensor(whole_value, value.device_mesh, value.placements, src_data_rank=None)
        state[name] = whole_value
    return state


def load(seed: int) -> Action:
    def action(run: Run) -> None:
        run.model.load_state_dict(_values(run, seed))

    return action


def load_head(seed: int) -> Action:
    def action(run: Run) -> None:
        run.model.head.load_state_dict(seeded(lambda: nn.Linear(WIDTH, VOCABULARY), seed=seed).state_dict())

    return action


def flip(name: str) -> Action:
    def action(run: Run) -> None:
        run.model.get_parameter(name).requires_grad_(False)

    return action


def synchronised(run: Run) -> None:
    """All ranks take rank 0's values, before `fully_shard`."""
    if run.rank == 1:
        seed_of_rank(run)
    if run.ours:
        fullshard.sync_module_states(run.model)
    elif not run.plain:
        for value in [*run.model.parameters(), *run.model.buffers()]:
            torch.distributed.broadcast(value.data, 0)


# ---- from the meta device ------------------------------------------------------------------------------------


def on_meta(run: Run) -> None:
    run.model.to("meta")


def _draw(module: nn.Module, shift: float = 0.0) -> None:
    for p in module.parameters(recurse=False):
        if not isinstance(p, DTensor):
            p.normal_(0.0, 0.1).add_(shift)


def materialize(run: Run) -> None:
    if run.plain or run.ours:
        fullshard.materialize(run.model, seed=3, init=_draw)


def materialize_by_rank(run: Run) -> None:
    """The initialiser reads the rank."""
    fullshard.materialize(run.model, seed=3, init=lambda module: _draw(module, 0.01 * run.rank))


def materialize_own_seed(run: Run) -> None:
    """The initialiser sets a seed, of the rank."""

    def init(module: nn.Module) -> None:
        torch.manual_seed(run.rank)
        _draw(module)

    fullshard.materialize(run.model, seed=3, init=init)


def materialize_one_module(run: Run) -> None:
    """The initialiser treats one module otherwise on rank 1."""

    def init(module: nn.Module) -> None:
        _draw(module, 0.25 if run.rank == 1 and module is run.model.layers[1].up else 0.0)

    fullshard.materialize(run.model, seed=3, init=init)


def materialize_counting(run: Run) -> None:
    """The initialiser counts its calls, one more on rank 1."""
    calls = [run.rank]

    def init(module: nn.Module) -> None:
        calls[0] += 1
        _draw(module, 0.01 * calls[0])

    fullshard.materialize(run.model, seed=3, init=init)
