"""Models with experts on fewer ranks than the rest, and their oracle.

Four ranks on a mesh (outer, expert) of (2, 2): each pair of ranks along `expert` shares its experts, and all four share
the rest. The oracle trains plain models, one per pair, whose shared parameters are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.harness.models import adamw, assert_close_to_tensor_max, full_copy, seeded

WORLD = 4
PAIRS = ((0, 1), (2, 3))


class Layer(nn.Module):
    """A shared linear and two experts, one of three dims; `recompute` runs it under activation checkpointing."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(experts, width, 6) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 6, width) * 0.3)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:  # (n, width)
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(x))
        return x + torch.einsum("eni,eio->no", torch.tanh(torch.einsum("ni,eio->eno", h, self.up)), self.down)


def model_of(pair: int, width: int = 4, experts: int = 2) -> nn.Module:
    """The model of one pair of ranks: shared parameters are equal, experts are its own."""
    model = seeded(lambda: nn.Sequential(*(Layer(width, experts) for _ in range(2)), nn.Linear(width, 3)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_expert(name):
                p.mul_(1 + pair)
    return model


def is_expert(name: str) -> bool:
    return name.rpartition(".")[2] in ("up", "down")


def batch(step: int, rank: int, width: int = 4) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(50 * step + rank))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """(all four ranks, both axes)."""
    return init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "expert"))


def sharded(impl: Any, model: nn.Module, mesh: DeviceMesh, expert: Any, dim: int, **options: Any) -> Any:
    """Experts along `dim` as the result `expert` of a dim says, everything else along the last dim."""
    experts = {id(p) for name, p in model.named_parameters() if is_expert(name)}
    options["shard_placement_fn"] = lambda p: expert(Shard(dim)) if id(p) in experts else Shard(-1)
    for layer in list(model.children())[:-1]:
        impl.fully_shard(layer, mesh=mesh, **options)
    return impl.fully_shard(model, mesh=mesh, **options)


class Oracle:
    """Plain training of both pairs' models: experts average over their pair, the rest over all ranks."""

    def __init__(self, width: int = 4, experts: int = 2) -> None:
        self.models = [model_of(pair, width, experts) for pair in range(2)]
        self.optimizers = [adamw(model.parameters()) for model in self.models]
        self.width = width

    def gradients(self, step: int) -> list[dict[str, Tensor]]:
        found = []
        for pair, ranks in enumerate(PAIRS):
            of_rank: list[dict[str, Tensor]] = []
            for rank in ranks:
                self.models[pair].zero_grad()
                loss(self.models[pair], batch(step, rank, self.width)).backward()
                of_rank.append(
                    {n: p.grad.clone() for n, p in self.models[pair].named_parameters() if p.grad is not None}
                )
            found.append({name: (of_rank[0][name] + of_rank[1][name]) / 2 for name in of_rank[0]})
        for name in found[0]:
            if not is_expert(name):
                found[0][name] = found[1][name] = (found[0][name] + found[1][name]) / 2
        return found

    def norm(self, gradients: list[dict[str, Tensor]], p: float = 2.0) -> Tensor:
        """Over the shared parameters and the experts of both pairs."""
        every = [g for pair, of_pair in enumerate(gradients) for n, g in of_pair.items() if is_expert(n) or pair == 0]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double(), p) for g in every]), p)

    def step(self, step: int, max_norm: float | None = None) -> Tensor | None:
        gradients = self.gradients(step)
        norm = None if max_norm is None else self.norm(gradients)
        scale = 1.0 if norm is None or max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        for pair, model in enumerate(self.models):
            for name, p in model.named_parameters():
                p.grad = gradients[pair][name] * scale
            self.optimizers[pair].step()
            self.optimizers[pair].zero_grad()
        return norm

    def check(self, model: Any, optimizer: torch.optim.Optimizer, pair: int, eps: float) -> None:
        plain, state = self.models[pair], self.optimizers[pair].state
        for name, p in model.named_parameters():
            whole = plain.get_parameter(name)
            assert_close_to_tensor_max(full_copy(p), whole.detach(), eps, name)
            for key, value in state[whole].items():
                assert_close_to_tensor_max(full_copy(optimizer.state[p][key]), value, eps, f"{name}.{key}")
