"""Options that meet: integer reshard, replicas, CPU offload, extensions, accumulation, clipping; several at once.

Beside plain training where torch's FSDP2 can do it too; beside fullshard without the option, bit by bit, where only the
way of the bytes is another one. Offload is run as beside a device (`moved`, tests/harness/moved.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.observe import record
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.models import (
    BY_NAME,
    Trained,
    adamw,
    assert_same_training,
    collect,
    seeded,
)
from tests.harness.moved import links, moved
from tests.harness.parity import assert_same_bits
from tests.harness.threads import WORLD, run_ranks
from tests.threads.test_extensions import Kept, Master, Model, expected_training, inputs, values

assert moved  # a fixture
CASE = BY_NAME["transformer"]
STEPS = 2
# Of each step: (gradient sync, all-reduce) of its micro-batches.
WINDOWS = {
    "one": [(True, True)],
    "without messages": [(False, True), (True, True)],
    "without all-reduce": [(True, False), (True, True)],
    "both": [(False, True), (True, False), (True, True)],
}


def slow(*values: Any) -> Any:
    """A case of the full run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def train(rank: int, model: Any, *, window: str = "one", clip: Any = None, evaluate: bool = False) -> Trained:
    """AdamW steps over the micro-batches of a window; with `evaluate` a forward without gradients in between."""
    optimizer = adamw(model.parameters())
    micros = WINDOWS[window]
    for step in range(STEPS):
        for i, (sync, all_reduce) in enumerate(micros):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            CASE.loss(model, CASE.batch(step * len(micros) + i, rank)).backward()
            if evaluate and i == 0:
                with torch.no_grad():
                    CASE.loss(model, CASE.batch(100, rank))
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def plain_training(world: int, *, window: str = "one", clip: float | None = None) -> Trained:
    """Parameters and optimizer state of the whole batch in one process."""
    model = CASE.build()
    optimizer = adamw(model.parameters())
    micros = len(WINDOWS[window])
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(world):
                (CASE.loss(model, CASE.batch(step * micros + micro, rank)) / world).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


# ---- integer reshard and replicas ----------------------------------------------------------------------------


@pytest.mark.slow
@behaviour("integer `reshard_after_forward` on a mesh that replicates", area="strategies")
@for_each_implementation
def test_kept_parts_on_a_mesh_that_replicates(impl: Implementation) -> None:
    """(2, 4) in blocks of two. Kept parts are on the mesh of blocks, which is over all eight ranks."""
    models = [CASE.build() for _ in range(8)]

    def rank_main(rank: int, impl: Implementation) -> Trained:
        model: Any = CASE.shard(models[rank], impl.fully_shard, mesh=mesh_of(2, 4), reshard_after_forward=2)
        CASE.loss(model, CASE.batch(0, rank))
        for p in model.layers[0].parameters():
            assert isinstance(p, DTensor) and p.placements == (Replicate(), Shard(0))
            assert p.device_mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        model.reshard()
        for layer in model.layers:
            layer.reshard()
            assert all(p.device_mesh.shape == (2, 4) for p in layer.parameters())
        return train(rank, model, clip=impl.clip)

    replicas = run(rank_main, impl, world=8)
    assert_same_training(replicas[0], plain_training(8, clip=0.5))
    for other in replicas[1:]:
        assert_same_bits(other, replicas[0])


@pytest.mark.slow
@pytest.mark.parametrize("window", ["both", *(slow(window) for window in WINDOWS if window != "both")])
def test_kept_parts_change_no_bit_on_a_mesh_that_replicates(window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation of every kind, evaluations in between, mixed precision; every command checked."""
    monkeypatch.setenv("FULLSHARD_CHECK", "1")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = [[CASE.build() for _ in range(8)] for _ in range(2)]

    def rank_main(rank: int) -> None:
        results = []
        for built, reshard in zip(models, (2, True), strict=True):
            model = CASE.shard(
                built[rank], fullshard.fully_shard, mesh=mesh_of(2, 4), reshard_after_forward=reshard, mp_policy=policy
            )
            results.append(train(rank, model, window=window, clip=fullshard.clip_grad_norm_, evaluate=True))
        assert_same_bits(*results)

    run_ranks(8, rank_main)


# ---- integer reshard and offload -----------------------------------------------------------------------------


@behaviour("integer `reshard_after_forward` with CPUOffloadPolicy", area="offload")
@for_each_implementation
def test_kept_parts_and_offload(impl: Implementation) -> None:
    models = [CASE.build() for _ in range(4)]

    def rank_main(rank: int, impl: Implementation) -> Trained:
        policy = impl.namespace.CPUOffloadPolicy(pin_memory=False)
        model = CASE.shard(models[rank], impl.fully_shard, reshard_after_forward=2, offload_policy=policy)
        return train(rank, model, clip=impl.clip)

    trained = run(rank_main, impl, world=4)[0]
    assert_same_training(trained, plain_training(4, clip=0.5))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "param_dtype"),
    [((4,), torch.bfloat16), ((2, 4), None), slow((4,), None), slow((2, 4), torch.bfloat16)],
    ids=str,
)
def test_backward_gathers_kept_parts_and_copies_nothing_from_the_host(
    shape: tuple[int, ...], param_dtype: torch.dtype | None, moved: None
) -> None:
    """They are on the device: one copy up for each forward, one down for each step; and no bit changes."""
    ranks = torch.Size(shape).numel()
    models = [[CASE.build() for _ in range(ranks)] for _ in range(2)]
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)

    def rank_main(rank: int) -> None:
        results = []
        for built, offload in zip(models, (False, True), strict=True):
            options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
            model: Any = CASE.shard(
                built[rank],
                fullshard.fully_shard,
                mesh=mesh_of(*shape),
                reshard_after_forward=2,
                mp_policy=policy,
                **options,
            )
            results.append(train(rank, model, window="without messages", clip=fullshard.clip_grad_norm_))
            if offload:
                found = links(model)
                assert len(found) == 4
                assert [link.uploads for link in found] == [2 * STEPS] * 4
                assert [link.downloads for link in found] == [STEPS] * 4
                with record(model) as trace:
                    CASE.loss(model, CASE.batch(7, rank)).backward()
                assert {"reshard_secondary", "unshard_secondary"} <= {kind for kind, _ in trace.commands}
        assert_same_bits(*results)

    run_ranks(ranks, rank_main)


# ---- offload and replicas ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@behaviour("CPUOffloadPolicy on a mesh that replicates, with clipping and accumulation ({window})", area="offload")
@pytest.mark.parametrize("window", ["without messages", "without all-reduce"])
@for_each_implementation
def test_offload_on_a_mesh_that_replicates(window: str, impl: Implementation) -> None:
    models = [CASE.build() for _ in range(4)]

    def rank_main(rank: int, impl: Implementation) -> Trained:
        policy = impl.namespace.CPUOffloadPolicy(pin_memory=False)
        model = CASE.shard(models[rank], impl.fully_shard, mesh=mesh_of(2, 2), offload_policy=policy)
        return train(rank, model, window=window, clip=impl.clip)

    replicas = run(rank_main, impl, world=4)
    assert_same_training(replicas[0], plain_training(4, window=window, clip=0.5))
    for other in replicas[1:]:
        assert_same_bits(other, replicas[0])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("window", ["both", *(slow(window) for window in WINDOWS if window != "both")])
def test_offload_changes_no_bit_on_a_mesh_that_replicates(window: str, shape: tuple[int, int], moved: None) -> None:
    """One download for each unit and step: partial sums stay on the device until replicas have them."""
    ranks = shape[0] * shape[1]
    models = [[CASE.build() for _ in range(ranks)] for _ in range(2)]

    def rank_main(rank: int) -> None:
        results = []
        for built, offload in zip(models, (False, True), strict=True):
            options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
            model: Any = CASE.shard(built[rank], fullshard.fully_shard, mesh=mesh_of(*shape), **options)
            results.append(train(rank, model, window=window, clip=fullshard.clip_grad_norm_, evaluate=True))
            if offload:
                assert [link.downloads for link in links(model)] == [STEPS] * 4
        assert_same_bits(*results)

    run_ranks(ranks, rank_main)


# ---- extensions ----------------------------------------------------------------------------------------------


def train_extension(rank: int, model: Any, shard: Any, **options: Any) -> list[Tensor]:
    shard(model.first, **options)
    shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step, rank)).square().sum().backward()
        for p in model.parameters():
            assert p.grad.device.type == "cpu" and p.grad.placements == p.placements
        optimizer.step()
    return values(model)


@behaviour("fsdp_pre_all_gather on a mesh that replicates", area="extensions")
@pytest.mark.parametrize("kind", [Master, Kept], ids=lambda kind: kind.__name__)
@for_each_implementation
def test_extensions_on_a_mesh_that_replicates(kind: Any, impl: Implementation) -> None:
    """Equal to plain training with the quantisation of two shards and the gradient of four ranks."""
    expected = expected_training(kind, 4, 2, torch.float32, STEPS, ranks=4)
    models = [seeded(lambda: Model(kind, 4)) for _ in range(4)]

    def rank_main(rank: int, impl: Implementation) -> list[Tensor]:
        return train_extension(rank, models[rank], impl.fully_shard, mesh=mesh_of(2, 2))

    replicas = run(rank_main, impl, world=4)
    for value, wanted in zip(replicas[0], expected, strict=True):
        tolerance.assert_close(value, wanted)
    for other in replicas[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, replicas[0], strict=True))


@behaviour("fsdp_pre_all_gather with CPUOffloadPolicy", area="extensions")
@pytest.mark.parametrize("kind", [Master, Kept], ids=lambda kind: kind.__name__)
@for_each_implementation
def test_extensions_and_offload(kind: Any, impl: Implementation) -> None:
    expected = expected_training(kind, 4, WORLD, torch.float32, STEPS)
    models = [seeded(lambda: Model(kind, 4)) for _ in range(WORLD)]

    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.namespace.CPUOffloadPolicy(pin_memory=False)
        found = train_extension(rank, models[rank], impl.fully_shard, offload_policy=policy)
        for value, wanted in zip(found, expected, strict=True):
            tolerance.assert_close(value, wanted)

    run(rank_main, impl)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
def test_offload_changes_no_bit_of_extensions(shape: tuple[int, ...], moved: None) -> None:
    """Uneven rows; its gradient comes to the host in one copy for each step, as that of other parameters."""
    ranks = torch.Size(shape).numel()
    models = [[seeded(lambda: Model(Master, 5)) for _ in range(ranks)] for _ in range(2)]

    def rank_main(rank: int) -> None:
        results = []
        for built, offload in zip(models, (False, True), strict=True):
            options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
            model: Any = built[rank]
            results.append(train_extension(rank, model, fullshard.fully_shard, mesh=mesh_of(*shape), **options))
            if offload:
                assert [link.downloads for link in links(model)] == [STEPS] * 2
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    run_ranks(ranks, rank_main)
