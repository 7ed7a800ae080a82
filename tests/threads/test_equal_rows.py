"""Shards that ranks filled with equal random values are named in the first forward; values that may repeat are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard import CPUOffloadPolicy, fully_shard, materialize
from fullshard.agree.equal_rows import warn_of_equal_rows
from fullshard.engine.unit import module_units
from tests.harness import models
from tests.harness.fake import fake_world
from tests.harness.threads import WORLD, run_ranks

WORDS = "expected each rank to draw rows of its own, found equal random values on ranks 0 and 1 in "
X = torch.ones(1, 12)


def seeded(rank: int, seed: int = 0) -> torch.Generator:
    """As of a process of its own; ranks that are threads share torch's."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Each warning, with its rank. Not `catch_warnings`: ranks are threads of a process with one list of filters."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "fullshard.agree.equal_rows.warnings.warn", lambda text, **_: found.append((dist.get_rank(), text))
    )
    return found


# What is said is collected in this process, which forks cannot write to.
pytestmark = pytest.mark.threads_only(reason="a fork's warnings are not this process's")


def first_forward(model: nn.Module, fill: Callable[[Any], object], x: Tensor, **options: Any) -> None:
    """After `fill` wrote the shards."""
    for layer in model.children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
    with torch.no_grad():
        fill(model)
    model(x)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))


def on_meta(make: Callable[[], nn.Module] = net) -> nn.Module:
    with torch.device("meta"):
        return make()


def local(p: nn.Parameter) -> Tensor:
    assert isinstance(p, DTensor)
    return p.to_local()


def draw(rank: int, make: Callable[[int], torch.Generator] = seeded) -> Callable[[nn.Module], None]:
    """Weights at random, from a generator of this rank; norms and biases as usual."""

    def fill(model: nn.Module) -> None:
        generator = make(rank)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif local(p).ndim == 1:
                p.fill_(1.0)
            else:
                local(p).normal_(generator=generator)

    return fill


def test_equal_draws_are_named_by_one_rank(said: list[tuple[int, str]]) -> None:
    run_ranks(WORLD, lambda rank: first_forward(on_meta(), draw(rank), X))
    ((rank, text),) = said
    assert rank == 0 and WORDS in text and "in 0.weight, 2.weight: nn.init" in text
    for word in ("fullshard.materialize(model, seed=...)", "load a checkpoint", "torch.manual_seed(seed + rank)"):
        assert word in text


FILLS: dict[str, Callable[[Tensor, torch.Generator], object]] = {
    "uniform": lambda t, g: t.uniform_(-0.1, 0.1, generator=g),
    "truncated": lambda t, g: nn.init.trunc_normal_(t, std=0.02, generator=g),
    "through .data": lambda t, g: t.data.normal_(generator=g),
    "exponential": lambda t, g: t.exponential_(generator=g),
}


@pytest.mark.parametrize("fill", FILLS)
def test_any_random_fill_is_seen_where_the_model_had_values(fill: str, said: list[tuple[int, str]]) -> None:
    """As `model.apply(init)` after `fully_shard`, with or without offload: the values before were equal and known."""

    def job(rank: int) -> None:
        generator = seeded(rank)

        def all_of(model: nn.Module) -> None:
            for p in model.parameters():
                FILLS[fill](local(p), generator)

        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if fill == "uniform" else {}
        first_forward(models.seeded(net), all_of, X, **options)

    run_ranks(WORLD, job)
    ((_, text),) = said
    assert WORDS in text and "in 0.weight, 2.weight: nn.init" in text  # the others have four elements on a rank


def test_ranks_that_share_a_seed_in_pairs(said: list[tuple[int, str]]) -> None:
    """`torch.manual_seed(seed + local_rank)` on two machines of two."""
    run_ranks(4, lambda rank: first_forward(on_meta(), draw(rank, lambda rank: seeded(rank, rank % 2)), X))
    assert "on ranks 0 and 2 in 0.weight" in said[0][1] and len(said) == 1


def test_replicas_may_be_equal_and_shards_may_not(said: list[tuple[int, str]]) -> None:
    def job(rank: int, seed: Callable[[int], int]) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        first_forward(on_meta(), draw(rank, lambda rank: seeded(rank, seed(rank))), X, mesh=mesh)

    run_ranks(4, job, lambda rank: rank % 2)
    assert not said
    run_ranks(4, job, lambda rank: 0)
    assert "on ranks 0 and 1 in 0.weight" in said[0][1] and len(said) == 1


def test_other_dims_and_uneven_rows(said: list[tuple[int, str]]) -> None:
    """Five rows on three ranks: two have two rows, the last one has one, and is not judged."""

    def job(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 12)))
        place = lambda p: Shard(int(p.ndim == 2 and p.shape[0] == 12))  # noqa: E731
        first_forward(model, draw(rank), X, shard_placement_fn=place)

    run_ranks(3, job)
    assert "on ranks 0 and 1 in 0.weight, 1.weight" in said[0][1]


# ---- what is no finding ----------------------------------------------------------------------------------------------


class Patterns(nn.Module):
    """Ramps as Mamba's, identities as of `nn.init.dirac_`, constants, experts copied from one; alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(8, 12))
        self.D = nn.Parameter(torch.zeros(16))
        self.mix = nn.Parameter(torch.zeros(12, 12))
        self.experts = nn.Parameter(torch.zeros(4, 6, 2))

    def fill(self) -> None:
        local(self.A_log).copy_(torch.arange(1.0, 13).log().expand_as(local(self.A_log)))
        local(self.D).copy_(torch.arange(8.0))
        local(self.mix).copy_(torch.eye(6).repeat(1, 2))
        one = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
        local(self.experts).copy_(one.expand_as(local(self.experts)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.A_log.sum() + self.D.sum() + self.mix.sum() + self.experts.sum()


def test_patterns_are_no_draws(said: list[tuple[int, str]]) -> None:
    run_ranks(2, lambda rank: first_forward(nn.Sequential(on_meta(Patterns)), lambda model: model[0].fill(), X))
    assert not said


def test_sound_ways_to_begin_are_no_finding(said: list[tuple[int, str]]) -> None:
    def job(rank: int) -> None:
        whole = models.seeded(net)
        first_forward(on_meta(), draw(rank, lambda rank: seeded(rank, rank)), X)
        first_forward(on_meta(), lambda model: materialize(model, seed=0), X)
        first_forward(on_meta(), lambda model: model.load_state_dict(whole.state_dict()), X)
        first_forward(models.seeded(net), lambda model: None, X)

    run_ranks(WORLD, job)
    assert not said


@pytest.mark.parametrize(("world", "parameters"), [(64, 20), (10_000, 13)])
def test_many_ranks_send_a_megabyte_at_most(world: int, parameters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has one row of wide weights, and some have none."""
    sent: list[tuple[int, ...]] = []

    def whole(table: DTensor, what: str) -> Tensor:
        sent.append(tuple(table.shape))
        return table.to_local()

    monkeypatch.setattr("fullshard.agree.equal_rows.whole_of", whole)
    with fake_world(world):
        model = nn.Sequential(*(fully_shard(nn.Linear(8, 4096, bias=False)) for _ in range(20)))
        params = [param for layer in model for param in module_units(layer)[0].params]
        mesh = params[0].spec.mesh
        warn_of_equal_rows(mesh, "model", params, [f"{i}" for i in range(20)])
    assert sent == [(world, parameters)] and 8 * world * parameters <= 1 << 20
