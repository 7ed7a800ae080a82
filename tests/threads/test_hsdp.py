"""Meshes that replicate: HSDP, NO_SHARD, accumulation without all-reduce. Beside plain training, FSDP2 and DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard.policy import use_options
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation
from tests.harness.installed import MESH_DIMS, DataParallelMeshDims, needs
from tests.harness.models import (
    BY_NAME,
    Case,
    Trained,
    adamw,
    assert_close_to_tensor_max,
    assert_same_training,
    collect,
    seeded,
    train_reference,
)
from tests.harness.parity import assert_same_bits
from tests.harness.threads import run_ranks

STEPS = 3
NAMES = ("replicate", "shard")


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def _reference(case: Case, world: int, steps: int = STEPS) -> Trained:
    batches = [[case.batch(step, rank) for rank in range(world)] for step in range(steps)]
    return train_reference(case.build(), case.loss, batches)


def _trained(rank: int, impl: Implementation, case: Case, shape: tuple[int, int], models: list[nn.Module]) -> Trained:
    model = case.shard(models[rank], impl.fully_shard, mesh=_mesh(shape))
    for p in model.parameters():
        assert isinstance(p, DTensor) and p.placements == (Replicate(), Shard(0))
        assert p.device_mesh.mesh_dim_names == NAMES
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        case.loss(model, case.batch(step, rank)).backward()
        for p in model.parameters():
            assert p.grad is None or p.grad.placements == p.placements
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _train(case: Case, shape: tuple[int, int], impl: Implementation = FULLSHARD) -> list[Trained]:
    world = shape[0] * shape[1]
    models = [case.build() for _ in range(world)]
    return run_ranks(world, _trained, impl, case, shape, models)


# ---- training ------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@behaviour("training on a mesh (replicate, shard) of {shape}", area="strategies")
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (3, 1), (1, 2)], ids=str)
@for_each_implementation
def test_training_equals_the_plain_model(impl: Implementation, shape: tuple[int, int]) -> None:
    for name in ("uneven_mlp", "tied"):
        case = BY_NAME[name]
        replicas = _train(case, shape, impl)
        assert_same_training(replicas[0], _reference(case, shape[0] * shape[1]))
        for other in replicas[1:]:
            assert_same_bits(other, replicas[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["tiny_dims", "mixed_shapes", "frozen", "nested"])
def test_other_shapes_of_parameters(name: str) -> None:
    """Fewer rows than ranks, convolutions, frozen parameters, units within units; and twice the same bits."""
    case = BY_NAME[name]
    replicas = _train(case, (2, 2))
    assert_same_training(replicas[0], _reference(case, 4))
    again = _train(case, (2, 2))
    for other in (*replicas[1:], *again):
        assert_same_bits(other, replicas[0])


def test_replicas_of_one_shard_exchange_gradients_alone() -> None:
    """A mesh (N, 1) is DDP: the full parameter is the shard, and what trains is what DDP trains, bit by bit on two."""
    case = BY_NAME["transformer"]
    models, plain = [case.build() for _ in range(2)], [case.build() for _ in range(2)]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(models[rank], fullshard.fully_shard, mesh=_mesh((2, 1)))
        reference = plain[rank]
        optimizers = adamw(model.parameters()), adamw(reference.parameters())
        for step in range(STEPS):
            for trained, optimizer in zip((model, reference), optimizers, strict=True):
                case.loss(trained, case.batch(step, rank)).backward()
                if trained is reference:
                    for p in reference.parameters():
                        p.grad.div_(2)  # type: ignore[union-attr]
                        dist.all_reduce(p.grad)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_bits(collect(model, optimizers[0]), collect(reference, optimizers[1]))
        assert all(info.full_nbytes_live == 0 for info in fullshard.report(model).units)

    run_ranks(2, rank_main)


@behaviour("`replicate`: data parallelism without sharding ({case})", area="strategies")
@pytest.mark.parametrize("case", ["transformer", "frozen"])
@for_each_implementation
def test_replicate(impl: Implementation, case: str) -> None:
    """On 3 ranks; the parameters are whole on each, the same bits; accumulation; and the plain model's training."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

    replicate: Any = fullshard.replicate if impl is FULLSHARD else torch_replicate
    model_case = BY_NAME[case]
    models = [model_case.build() for _ in range(3)]

    def rank_main(rank: int) -> Trained:
        model: Any = model_case.shard(models[rank], replicate)
        for p in model.parameters():
            assert isinstance(p, DTensor) and p.placements == (Replicate(),) and p.to_local().shape == p.shape
            assert p.device_mesh.mesh_dim_names == ("replicate",)
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            # The same batch once without messages, and taken back.
            model.set_requires_gradient_sync(False)
            model_case.loss(model, model_case.batch(step, rank)).backward()
            model.set_requires_gradient_sync(True)
            model_case.loss(model, model_case.batch(step, rank)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        return Trained({name: p.to_local().detach().clone() for name, p in model.named_parameters()})

    replicas = run_ranks(3, rank_main)
    expected = _reference(model_case, 3)
    for trained in replicas:
        assert_same_training(Trained(trained.params), Trained(expected.params, allowed=expected.allowed))
        assert_same_bits(trained, replicas[0])


@for_each_implementation
def test_replicate_refuses(impl: Implementation) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

    replicate: Any = fullshard.replicate if impl is FULLSHARD else torch_replicate
    with fake_world(4):
        with pytest.raises(ValueError):
            replicate(nn.Linear(2, 2), mesh=_mesh((2, 2)))
        with pytest.raises(RuntimeError):
            replicate(impl.fully_shard(nn.Linear(2, 2)))
        with pytest.raises(AssertionError):
            replicate(replicate(nn.Linear(2, 2)))
        for method in ("state_dict", "parameters"):
            assert getattr(replicate(nn.Linear(2, 2)), method)()


# ---- gradients ----------------------------------------------------------------------------------------------


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.parts[0](x) + self.parts[part](x)


@behaviour(
    "a gradient that one replica alone has counts",
    area="strategies",
    torch="better",
    reason="FSDP2's messages then differ in size from rank to rank; here presence travels with the gradients",
)
def test_a_gradient_that_one_replica_alone_has_counts(impl: Implementation) -> None:
    """On one rank of four; and `.grad` stays None only where no rank has one."""
    models = [seeded(_Branches) for _ in range(4)]
    plain = seeded(_Branches)
    (plain(torch.ones(2, 3), 1).sum() / 4).backward()
    expected = plain.parts[1].weight.grad  # type: ignore[union-attr]

    def rank_main(rank: int) -> None:
        model = impl.fully_shard(models[rank], mesh=_mesh((2, 2)))
        model(torch.ones(2, 3), int(rank == 3)).sum().backward()
        grad = model.parts[1].weight.grad
        assert_close_to_tensor_max(grad.full_tensor(), expected, 2)
        assert model.parts[2].weight.grad is None

    run_ranks(4, rank_main)


def _flat(p: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    return p.full_tensor()


WINDOWS: dict[str, list[tuple[bool, bool]]] = {  # (gradient sync, all-reduce) of each micro-batch
    "no all-reduce": [(True, False), (True, False), (True, True)],
    "neither": [(False, True), (True, False), (True, True)],
    "mixed": [(True, False), (False, False), (True, True)],
    "both reduce": [(True, True), (True, False), (True, True)],
}


@pytest.mark.sample(2)
@behaviour("HSDP accumulation: `set_requires_all_reduce` ({window})", area="communication")
@pytest.mark.parametrize("window", WINDOWS)
@for_each_implementation
def test_accumulation_without_all_reduce(impl: Implementation, window: str) -> None:
    """Micro-batches of which only the last one is summed over the replicas: gradients are those of all of them."""
    case = BY_NAME["residual"]
    reference = case.build()
    for rank in range(4):
        for micro in range(3):
            (case.loss(reference, case.batch(micro, rank)) / 4).backward()

    def rank_main(rank: int, shape: tuple[int, int]) -> None:
        model: Any = case.shard(case.build(), impl.fully_shard, mesh=_mesh(shape))
        for again in range(2):  # nothing of the first window is left in the second
            for micro, (sync, all_reduce) in enumerate(WINDOWS[window]):
                model.set_requires_gradient_sync(sync)
                model.set_requires_all_reduce(all_reduce)
                case.loss(model, case.batch(micro, rank)).backward()
            for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
                tolerance.assert_close(_flat(ours.grad), plain.grad, what=f"{name}, window {again}")
            model.zero_grad()

    for shape in ((2, 2), (4, 1)):
        run_ranks(4, rank_main, shape)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=str)
def test_partial_sums_are_kept_cleared_and_outlive_a_failed_backward(shape: tuple[int, int]) -> None:
    """They are marked on `.grad`; `step()` refuses; `zero_grad()` drops them; a backward that fails leaves them."""
    case = BY_NAME["residual"]
    world = shape[0] * shape[1]
    reference = case.build()
    for rank in range(world):
        for micro in (1, 3):
            (case.loss(reference, case.batch(micro, rank)) / world).backward()
    models = [case.build() for _ in range(world)]

    def rank_main(rank: int) -> None:
        model: Any = case.shard(models[rank], fullshard.fully_shard, mesh=_mesh(shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.set_requires_all_reduce(False)
        case.loss(model, case.batch(0, rank)).backward()
        assert all(type(p.grad).__name__ == "PendingGrad" for p in model.parameters())
        before = [p.to_local().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="set_requires_all_reduce"):
            optimizer.step()
        assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        case.loss(model, case.batch(1, rank)).backward()
        for all_reduce in (False, True):  # in a backward that keeps, and in one that sends what was kept
            model.set_requires_all_reduce(all_reduce)
            handle = model[0].register_full_backward_pre_hook(_raise)
            loss = case.loss(model, case.batch(2, rank))
            with pytest.raises(_Stop):
                loss.backward()
            handle.remove()
        case.loss(model, case.batch(3, rank)).backward()
        for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            tolerance.assert_close(_flat(ours.grad), plain.grad, what=name)

    # One reduction under way: of the backward that fails the first unit's partial sum is there already.
    with use_options(reductions_in_flight=1):
        run_ranks(world, rank_main)


def _raise(*_: Any) -> None:
    raise _Stop


def test_partial_sums_of_some_parameters_on_one_replica() -> None:
    """A parameter that one replica used in an earlier micro-batch, and nobody in the last one, has its gradient."""
    models = [seeded(_Branches) for _ in range(4)]
    plain = seeded(_Branches)
    for part in (1, 0, 0, 0):  # rank 0 alone uses part 1, in the first micro-batch
        (plain(torch.ones(2, 3), part).sum() / 4).backward()
        (plain(torch.ones(2, 3), 0).sum() / 4).backward()

    def rank_main(rank: int) -> None:
        model: Any = fullshard.fully_shard(models[rank], mesh=_mesh((2, 2)))
        model.set_requires_all_reduce(False)
        model(torch.ones(2, 3), int(rank == 0)).sum().backward()
        assert (model.parts[1].weight.grad is None) == (rank >= 2), "a replica is two ranks that share"
        model.set_requires_all_reduce(True)
        model(torch.ones(2, 3), 0).sum().backward()
        for part in (0, 1):
            assert_close_to_tensor_max(_flat(model.parts[part].weight.grad), plain.parts[part].weight.grad, 4)  # type: ignore[union-attr,arg-type]
        assert model.parts[2].weight.grad is None

    run_ranks(4, rank_main)


@behaviour("mixed precision on a mesh that replicates", area="strategies")
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
@for_each_implementation
def test_mixed_precision(impl: Implementation, reduce: torch.dtype) -> None:
    """Gradients in float32, within what was rounded to bfloat16 on the way."""
    case = BY_NAME["residual"]
    reference = case.build()
    for rank in range(4):
        (case.loss(reference, case.batch(0, rank)) / 4).backward()

    def rank_main(rank: int) -> None:
        policy = impl.MixedPrecisionPolicy(torch.bfloat16, reduce, output_dtype=torch.float32)
        for shape in ((2, 2), (4, 1)):
            model: Any = case.shard(case.build(), impl.fully_shard, mesh=_mesh(shape), mp_policy=policy)
            case.loss(model, case.batch(0, rank)).backward()
            for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert ours.grad.dtype == torch.float32
                difference = (_flat(ours.grad) - plain.grad).norm() / plain.grad.norm()  # type: ignore[union-attr,operator]
                assert difference < 0.05, f"{name} {shape}: {difference}"

    run_ranks(4, rank_main)


@behaviour("`dp_mesh_dims` of axes to replicate over alone", area="strategies")
@for_each_implementation
@needs(MESH_DIMS, half="torch")
def test_replicas_on_a_full_mesh(impl: Implementation) -> None:
    """`fully_shard` and `replicate`: gradients are the mean over the data-parallel axis, placements stay."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate

    replicate: Any = fullshard.replicate if impl is FULLSHARD else torch_replicate

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for apply in (impl.fully_shard, replicate):
            linear = seeded(lambda: nn.Linear(3, 4, bias=False))
            weight = linear.weight.detach().clone()
            linear.weight = nn.Parameter(distribute_tensor(weight, mesh, (Replicate(), Shard(0)), src_data_rank=None))
            model = apply(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
            assert model.weight.placements == (Replicate(), Shard(0))
            value = 1.0 + mesh.get_local_rank("dp")
            x = DTensor.from_local(torch.full((1, 3), value), mesh, (Replicate(), Replicate()))
            model(x).to_local().sum().backward()
            assert torch.all(_flat(model.weight.grad) == 1.5)

    run_ranks(4, rank_main)


# ---- clipping ------------------------------------------------------------------------------------------------


@behaviour("clipping by the global norm on a mesh that replicates", area="clipping")
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@for_each_implementation
def test_clipping(impl: Implementation, shape: tuple[int, int]) -> None:
    """The norm of what the plain model has, counted once and not once for each replica; ours with one message."""
    case = BY_NAME["residual"]
    reference = case.build()
    for rank in range(4):
        (case.loss(reference, case.batch(0, rank)) / 4).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)

    def rank_main(rank: int) -> None:
        model: Any = case.shard(case.build(), impl.fully_shard, mesh=_mesh(shape))
        case.loss(model, case.batch(0, rank)).backward()
        norm = impl.clip(model.parameters(), 0.1)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        tolerance.assert_close(norm, expected)
        for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            tolerance.assert_close(_flat(ours.grad), plain.grad, what=name)

    run_ranks(4, rank_main)


def test_clipping_sends_one_message_for_each_group_of_ranks() -> None:
    """Units on (replicate, shard), on (shard) alone and whole on each rank: only what is cut is summed, once."""
    with fake_world(4):
        mesh = _mesh((2, 2))
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        fullshard.fully_shard(model[0], mesh=mesh)
        fullshard.fully_shard(model[1], mesh=mesh["shard"])
        fullshard.fully_shard(model[2], mesh=_mesh((4, 1)))
        fullshard.replicate(model[3])
        for part in model:
            part(torch.ones(1, 4)).sum().backward()
        with CommDebugMode() as comm:
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
        assert comm.get_total_counts() == 1, comm.get_comm_counts()
