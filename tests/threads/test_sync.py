"""`sync_module_states` and `find_drift`: one value on all ranks, and where it is missing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard import find_drift, fully_shard, sync_module_states
from fullshard.comm import broadcast_over
from fullshard.peers import RanksDisagree
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, Tied, batch, part, shard


class Normed(Model):
    """With running statistics, an integer buffer and one that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.arange(4), persistent=False)
        self.register_buffer("alike", torch.rand(2, 2, dtype=torch.float64))
        self.flag = nn.Parameter(torch.rand(3).bfloat16(), requires_grad=False)

    def out(self, x: Tensor) -> Any:
        return self.head(self.norm(x))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def equal(model: nn.Module, expected: nn.Module) -> bool:
    found, wanted = tensors(model), tensors(expected)
    return found.keys() == wanted.keys() and all(
        found[name].dtype is value.dtype and torch.equal(found[name], value) for name, value in wanted.items()
    )


# ---- sync_module_states --------------------------------------------------------------------------------------


@behaviour(
    "`sync_module_states(model)` before sharding: one rank's parameters and buffers for all, onto the meta device too",
    area="initialisation",
    torch="none",
    reason="FSDP1's argument of this name has no successor",
)
@pytest.mark.parametrize(("world", "from_rank"), [(2, 0), (3, 2), (1, 0)])
def test_all_ranks_have_what_one_had(world: int, from_rank: int) -> None:
    models = [seeded(Normed, seed=rank) for rank in range(world)]

    def job(rank: int) -> None:
        model: Any = copy.deepcopy(models[rank])
        model.mask.add_(rank)
        expected: Any = copy.deepcopy(models[from_rank])
        expected.mask.add_(from_rank)
        held = tensors(model)
        assert sync_module_states(model, from_rank=from_rank) is model
        assert equal(model, expected)
        assert all(tensor is held[name] for name, tensor in tensors(model).items()), "written in place"
        assert not model.flag.requires_grad
        if world > 1:
            assert not find_drift(shard(model))

    run_ranks(world, job)


def test_a_receiver_on_the_meta_device_gets_memory() -> None:
    """Whole, in part, and tied: the parameters stay tied, and their marks stay with them."""
    base: Any = seeded(Tied)

    def job(rank: int) -> None:
        if rank == 1:
            model: Any = copy.deepcopy(base)
        else:
            with torch.device("meta"):
                model = Tied()
            if rank == 2:
                model.layers[0] = copy.deepcopy(base.layers[0])
        model.head.weight.mark = rank
        model.head.weight.requires_grad_(rank != 0)
        sync_module_states(model, from_rank=1)
        assert equal(model, base)
        assert model.head.weight is model.embedding.weight and isinstance(model.head.weight, nn.Parameter)
        assert model.head.weight.mark == rank and model.head.weight.requires_grad == (rank != 0)
        model.head.weight.requires_grad_(True)
        shard(model)(part(batch(3, 0), rank)).sum().backward()

    run_ranks(3, job)


def test_axes_of_other_parallelism_stay_apart() -> None:
    """Data-parallel ranks of a tensor-parallel model: DTensors, each rank's own part."""

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(12.0).view(4, 3)
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(full + 100 * (rank // 2), mesh["tp"], [Shard(0)]))
        model.register_buffer("stage", torch.tensor([rank % 2, rank]))
        sync_module_states(model, mesh["dp"], from_rank=1)
        assert isinstance(model.weight, DTensor) and torch.equal(model.weight.full_tensor(), full + 100)
        assert model.stage.tolist() == [rank % 2, rank % 2 + 2]
        # Over all axes of a mesh: what the rank at position 2 in row-major order has.
        other = nn.Module()
        other.weight = nn.Parameter(torch.full((2,), float(rank)))
        sync_module_states(other, mesh, from_rank=2)
        assert other.weight.tolist() == [2.0, 2.0]

    run_ranks(4, job)


def test_what_is_larger_than_the_buffer_goes_in_pieces() -> None:
    """And what is not contiguous, has no elements or no dims, in every kind of dtype."""

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        makes = [
            lambda: torch.arange(100.0),
            lambda: torch.arange(24.0).view(4, 6).t(),
            lambda: torch.empty(0, 3),
            lambda: torch.tensor(7, dtype=torch.int16),
            lambda: torch.arange(9) % 2 == 0,
            lambda: torch.arange(5.0).to(torch.complex64),
            lambda: torch.arange(33).to(torch.bfloat16),
        ]
        for nbytes in (7, 64, 4096):
            values = [make() for make in makes]
            mine = [value if rank == 1 else torch.zeros_like(value) for value in values]
            versions = [tensor._version for tensor in mine]
            broadcast_over(mesh, mine, 1, nbytes=nbytes)
            assert all(torch.equal(tensor, make()) for tensor, make in zip(mine, makes, strict=True))
            if rank != 1:
                assert all(t._version > v for t, v in zip(mine, versions, strict=True) if t.numel()), "seen as written"

    run_ranks(3, job)


def test_what_it_refuses() -> None:
    """On all ranks, and before anything is written."""

    def job(rank: int) -> None:
        with pytest.raises(ValueError, match=r"from_rank: expected a position in the mesh, from 0 to 1, found 2"):
            sync_module_states(nn.Linear(2, 2), from_rank=2)
        with pytest.raises(RanksDisagree, match=r"weight: expected the same shape on every rank, found \(2, 2\) on"):
            sync_module_states(nn.Linear(2 + rank, 2))
        with pytest.raises(RanksDisagree, match="bias: expected this tensor on every rank, found it on rank 0 and not"):
            sync_module_states(nn.Linear(2, 2, bias=rank == 0))
        with pytest.raises(
            ValueError, match="from_rank: expected a rank with values, found that rank 1 has bias on the"
        ):
            model = seeded(lambda: nn.Linear(2, 2))
            if rank == 1:
                model.bias = nn.Parameter(torch.empty(2, device="meta"))
            sync_module_states(model, from_rank=1)
        with pytest.raises(TypeError, match="weight: expected a plain tensor or a DTensor, found"):
            model = nn.Module()
            model.weight = nn.Parameter(torch.eye(2).to_sparse())
            sync_module_states(model)
        model = fully_shard(seeded(lambda: nn.Linear(2, 2)))
        with pytest.raises(RuntimeError, match="call sync_module_states before the first fully_shard"):
            sync_module_states(model)
        with pytest.raises(ValueError, match="call fully_shard first"):
            find_drift(nn.Linear(2, 2))

    run_ranks(2, job)


def test_a_buffer_that_one_rank_has_alone_is_compared_with_nothing() -> None:
    """A cache, say; the others are compared, on all ranks."""

    def job(rank: int) -> None:
        model = shard(seeded(Normed))
        if rank == 1:
            model.register_buffer("a_cache", torch.ones(2))
        model.norm.running_mean += rank
        assert [drift.name for drift in find_drift(model)] == ["norm.running_mean"]

    run_ranks(2, job)


# ---- buffers that go apart -----------------------------------------------------------------------------------


def heard(job: Callable[[int], None], world: int) -> list[str]:
    """What the ranks warned of while they ran `job`, all in one list: warnings belong to the process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(world, job)
    return [str(one.message) for one in caught if "buffers differ" in str(one.message)]


def test_running_statistics_are_reported_once_and_brought_together() -> None:
    base = seeded(Normed)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        for index in range(20):
            model(part(batch(2, index), rank)).pow(2).mean().backward()
            model.zero_grad()
            if index == 2:
                names = {(one.name, one.kind, one.ranks) for one in find_drift(model)}
                assert names == {(f"norm.running_{what}", "buffer", ((0,), (1,))) for what in ("mean", "var")}
        if rank == 0:
            model.mask.add_(1)
        mine = model.norm.running_mean.clone()
        assert sync_module_states(model, from_rank=1, buffers_only=True) is model
        assert torch.equal(model.norm.running_mean, mine) == (rank == 1)
        assert find_drift(model) == ()

    texts = heard(job, 2)
    assert len(texts) == 2 and texts[0] == texts[1], "once on each rank"
    assert "norm.running_mean (rank 0 unlike rank 1), norm.running_var (rank 0 unlike rank 1)" in texts[0]
    assert "since the training began" in texts[0] and "find_drift" in texts[0]


def test_statistics_of_equal_batches_are_not_reported() -> None:
    base = seeded(Normed)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        for index in range(20):
            model(part(batch(2, index), 0)).pow(2).mean().backward()
        assert find_drift(model) == ()

    assert heard(job, 2) == []


def test_integers_of_a_rank_s_own_are_a_warning() -> None:
    base = seeded(Normed)

    def job(rank: int) -> None:
        model: Any = copy.deepcopy(base).eval()
        model.mask.fill_(rank)
        shard(model)
        with torch.no_grad():
            model(part(batch(2, 0), rank))

    texts = heard(job, 2)
    assert len(texts) == 2 and "from the beginning: mask (rank 0 unlike rank 1)" in texts[0]


def test_copies_of_shards_and_ignored_parameters_are_found() -> None:
    base: Any = seeded(Normed)

    def job(rank: int) -> list[tuple[str, str, tuple[tuple[int, ...], ...]]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = copy.deepcopy(base)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.flag})
        assert find_drift(model) == ()
        with torch.no_grad():
            if rank == 3:  # a bit of one copy
                model.layers[1].up.weight.to_local()[0, 0] += 1
            model.flag.fill_(float(rank > 0))
        return [tuple(one) for one in find_drift(model)]

    found = run_ranks(4, job)
    flag = ("flag", "unsharded parameter", ((1, 2, 3), (0,)))
    copies = ("layers.1.up.weight", "replica", ((1,), (3,)))
    assert found == [[flag], [flag, copies], [flag], [flag, copies]]


def test_what_is_found_is_said_in_words() -> None:
    drift = fullshard.extras.Drift("norm.mean", "buffer", ((0, 1, 3), (2,)))
    assert str(drift) == "norm.mean (ranks 0 and 1 and 3 unlike rank 2)"
