"""The methods that say how gradients are reduced, each with the effect it has: numbers, messages, calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from fullshard import fully_shard, report
from fullshard._torch import allocate_for
from fullshard.comm import ShardGroup
from fullshard.engine import unit_of
from fullshard.policy import resolve_scale
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, probes, sharded
from tests.harness.installed import needs
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.parity import environment
from tests.harness.threads import run_ranks


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _world(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _linear() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 6, bias=False))


def _use(model: Any, rank: int) -> None:
    """A backward whose gradient, summed over ranks, is 1 + 2 + ... everywhere."""
    model((rank + 1) * torch.ones(1, 4)).sum().backward()


def _full(gradient: Any) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def _gradient(model: Any, rank: int) -> Tensor:
    model.zero_grad()
    _use(model, rank)
    return _full(model.weight.grad)


# ---- divide factors -------------------------------------------------------------------------------------------


def _check_divide_factor(impl: Implementation, shape: tuple[int, ...]) -> None:
    world = _world(shape)
    total = world * (world + 1) / 2

    def rank_main(rank: int) -> None:
        model = impl.fully_shard(_linear(), mesh=_mesh(shape))
        assert torch.all(_gradient(model, rank) == total / world)
        for factor in (1.0, 5.0, float(world), 0.25):
            model.set_gradient_divide_factor(factor)
            assert_close_to_tensor_max(_gradient(model, rank), torch.full((6, 4), total / factor), 1)
        model.zero_grad()
        for sync in (False, True):  # held gradients, too
            model.set_requires_gradient_sync(sync)
            _use(model, rank)
        assert_close_to_tensor_max(_full(model.weight.grad), torch.full((6, 4), 2 * total / 0.25), 1)

    run_ranks(world, rank_main)


@behaviour(
    "`set_gradient_divide_factor` on a CPU: mesh {shape}",
    area="communication",
    torch="better",
    reason="FSDP2 asks the backend for PREMUL_SUM, which only NCCL has",
)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_gradient_divide_factor(impl: Implementation, shape: tuple[int, ...]) -> None:
    _check_divide_factor(impl, shape)


@pytest.mark.sample(3)
@pytest.mark.parametrize("communication", ["auto", "torch"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (3,)], ids=str)
def test_gradient_divide_factor_by_every_strategy(shape: tuple[int, ...], communication: str) -> None:
    with environment({"FULLSHARD_COMMUNICATION": communication}):
        _check_divide_factor(FULLSHARD, shape)


@behaviour("`set_reduce_scatter_divide_factor` warns and works", area="communication")
@for_each_implementation
def test_the_former_name_of_the_divide_factor(impl: Implementation) -> None:
    """A factor of the world is the mean, which torch asks of every backend. Counted on the buffers of one process."""
    with fake_world(2):
        model: Any = impl.fully_shard(_linear())
        with pytest.warns((DeprecationWarning, FutureWarning), match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(2.0)
        unit = unit_of(model)
        assert unit is None or unit.settings.controls.divide_factor == 2.0


def test_scales_are_those_of_torch() -> None:
    """Over ranks, dtypes and factors; product and place of the divisions. Ours asks for no PREMUL_SUM."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    class Group:
        def __init__(self, size: int) -> None:
            self._size = size

        def size(self) -> int:
            return self._size

    for ranks in (1, 2, 3, 8, 12, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for factor in (None, 2.0, 5.0, 64.0):
                for sum_only in (False, True):
                    group: Any = Group(ranks)
                    pre, post, op, _ = _get_gradient_divide_factors(group, None, dtype, "cpu", factor, sum_only)
                    scale = resolve_scale(dtype, ranks, factor, sum_only=sum_only)
                    assert scale.before * scale.after == (factor or ranks)
                    assert scale.after == (post or 1.0), (ranks, dtype, factor, sum_only)
                    assert scale.overflows == (pre is not None)
                    if pre is not None:
                        assert scale.before == pre
                    averaged = op == dist.ReduceOp.AVG
                    assert not averaged or scale.before == ranks


@pytest.mark.parametrize("communication", ["auto", "torch"])
@pytest.mark.parametrize("impl", [FULLSHARD], ids=repr)
def test_float16_sums_do_not_overflow(impl: Implementation, communication: str) -> None:
    """The gradients of four ranks are finite in float16 and so is their mean; their sum is not."""

    def rank_main(rank: int) -> None:
        for shape, reduce in product(((4,), (2, 2), (4, 1)), (torch.float16, None, torch.float32)):
            policy = impl.MixedPrecisionPolicy(torch.float16, reduce)
            model: Any = impl.fully_shard(_linear(), mesh=_mesh(shape), mp_policy=policy)
            model(torch.full((1, 4), 30000.0)).sum().backward()
            assert torch.all(_full(model.weight.grad) == 30000.0), (shape, reduce)

    with environment({"FULLSHARD_COMMUNICATION": communication}):
        run_ranks(4, rank_main)


# ---- hooks -----------------------------------------------------------------------------------------------------


@behaviour("`set_all_reduce_hook` gets the reduced gradients and may change them: mesh {shape}", area="communication")
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
@for_each_implementation
def test_all_reduce_hook(impl: Implementation, shape: tuple[int, ...]) -> None:
    world = _world(shape)
    mean = (world + 1) / 2

    def rank_main(rank: int) -> None:
        model = impl.fully_shard(_linear(), mesh=_mesh(shape))
        seen: list[Tensor] = []

        def hook(gradients: Tensor) -> None:
            seen.append(gradients.clone())
            gradients.mul_(10)

        model.set_all_reduce_hook(hook)
        assert torch.all(_gradient(model, rank) == 10 * mean)
        own = model.weight.to_local().numel()
        (gradients,) = seen
        assert gradients.ndim == 1 and gradients.dtype == torch.float32 and torch.all(gradients[:own] == mean)
        # Summed alone, and divided behind the hook.
        seen.clear()
        model.set_force_sum_reduction_for_comms(True)
        assert torch.all(_gradient(model, rank) == 10 * mean)
        assert torch.all(seen[0][:own] == world * mean)
        with pytest.raises(ValueError, match="stream"):
            model.set_all_reduce_hook(hook, stream=torch.Stream(device="cpu") if len(shape) == 2 else object())
            if impl is not FULLSHARD and len(shape) == 1:
                raise ValueError("stream: torch takes one where nothing replicates")

    run_ranks(world, rank_main)


@behaviour("HSDP in user code: a hook that sums over the replicas", area="communication")
@for_each_implementation
def test_replicas_by_a_hook(impl: Implementation) -> None:
    """What programs wrote before FSDP2 had HSDP: the mesh of a hook's own."""

    def rank_main(rank: int) -> None:
        mesh = _mesh((2, 2))
        model = impl.fully_shard(_linear(), mesh=mesh["shard"])
        group = mesh.get_group("replicate")
        model.set_all_reduce_hook(lambda gradients: dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=group))
        assert torch.all(_gradient(model, rank) == 2.5)

    run_ranks(4, rank_main)


def test_a_hook_cannot_take_a_gradient_away() -> None:
    """Whether there is a gradient travels behind what the hook gets; it runs in a world of one, too."""

    models = [seeded(_Half) for _ in range(2)]

    def rank_main(rank: int) -> None:
        model: Any = fully_shard(models[rank])
        model.set_all_reduce_hook(lambda gradients: gradients.zero_())
        model(torch.ones(2, 3), rank).sum().backward()
        assert torch.all(_full(model.parts[0].weight.grad) == 0)
        # Of a parameter that one rank did not use.
        assert (model.parts[1].weight.grad is None) == (torch.distributed.get_world_size() == 1)

    for world in (2, 1):
        run_ranks(world, rank_main)
        models = [seeded(_Half)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
def test_a_step_after_a_hook_that_raised_is_right(shape: tuple[int, ...]) -> None:
    """In the first unit that is reduced and in the last, which is collected when the backward ends."""
    world = _world(shape)

    def rank_main(rank: int) -> None:
        model: Any = sharded(FULLSHARD, probes(4), mesh=_mesh(shape))
        inputs = torch.full((2, 5), float(rank))

        def gradients() -> list[Tensor]:
            model.zero_grad()
            model(inputs).pow(2).sum().backward()
            return [_full(p.grad).clone() for p in model.parameters()]

        expected = gradients()
        model.zero_grad()
        pool = unit_of(model).root.shared.pool  # type: ignore[union-attr]
        nbytes = pool.nbytes
        for unit in (model[3], model[0]):
            unit.set_all_reduce_hook(_refuse)
            with pytest.raises(ZeroDivisionError):
                model(inputs).pow(2).sum().backward()
            unit.set_all_reduce_hook(None)
            assert all(p.grad is None for p in model.parameters())
            assert not any(info.full_nbytes_live for info in report(model).units)
            # Added to nothing: without zero_grad, which would hide what is left.
            model(inputs).pow(2).sum().backward()
            assert all(torch.equal(_full(p.grad), e) for p, e in zip(model.parameters(), expected, strict=True))
            model.zero_grad()
        # A hook of the user's on one gradient: what the backward brought is taken back, from all of them.
        handle = model[2].linear.weight.register_post_accumulate_grad_hook(_refuse)
        with pytest.raises(ZeroDivisionError):
            model(inputs).pow(2).sum().backward()
        handle.remove()
        assert all(p.grad is None for p in model.parameters())
        assert all(map(torch.equal, gradients(), expected))
        assert pool.nbytes == nbytes

    run_ranks(world, rank_main)


@pytest.mark.parametrize("held", [False, True])
def test_a_micro_batch_whose_hook_raised_counts_once(held: bool) -> None:
    """What earlier micro-batches of the step brought is as it was, reduced or held."""

    def rank_main(rank: int) -> None:
        def micro_batch(model: Any, number: int) -> None:
            model.set_requires_gradient_sync(not held or number > 0)
            model(torch.full((2, 5), 1.0 + rank + number)).pow(2).sum().backward()

        plain, model = (sharded(FULLSHARD, seeded(lambda: probes(3))) for _ in range(2))
        for each in (plain, model):
            micro_batch(each, 0)
        handle = model[1].linear.weight.register_post_accumulate_grad_hook(_refuse)
        with pytest.raises(ZeroDivisionError):
            micro_batch(model, 1)
        handle.remove()
        for each in (plain, model):
            micro_batch(each, 1)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(_full(a.grad), _full(b.grad))

    run_ranks(2, rank_main)


def _refuse(_: Tensor) -> None:
    raise ZeroDivisionError


@behaviour("`set_requires_all_reduce(False)` changes nothing without replicas", area="communication")
@for_each_implementation
def test_no_all_reduce_without_replicas(impl: Implementation) -> None:
    def rank_main(rank: int) -> None:
        model = impl.fully_shard(_linear())
        model.set_requires_all_reduce(False)
        assert torch.all(_gradient(model, rank) == 1.5)

    run_ranks(2, rank_main)


# ---- custom messages -------------------------------------------------------------------------------------------


class _Counting:
    """What a custom message was asked to do."""

    def __init__(self) -> None:
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.groups: list[dist.ProcessGroup] = []
        self.ops: list[Any] = []
        self.buffers: set[int] = set()
        self.foreign = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append((tuple(size), dtype))
        made = torch.empty(*size, dtype=dtype, device=device)
        self.buffers.add(made.untyped_storage().data_ptr())
        return made

    def note(self, group: dist.ProcessGroup, *tensors: Tensor) -> None:
        self.groups.append(group)
        self.foreign += sum(t.untyped_storage().data_ptr() not in self.buffers for t in tensors)


class _Gather(_Counting, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note(group, output_tensor, input_tensor)
        # Its name from 2.13 on.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Counting, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.note(group, output_tensor, input_tensor)
        self.ops.append(op)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        scatter(output_tensor, input_tensor, group=group, op=op)


class _AllocatingBackend:
    """What NCCL's backend answers, from memory that can be recognised."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made.append(torch.empty(size, dtype=dtype, device=device))
        return self.made[-1]


def test_memory_of_a_process_group_that_allocates() -> None:
    backend = _AllocatingBackend()
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    made = allocate_for(group, 6, torch.bfloat16, torch.device("cpu"))
    assert made is backend.made[0] and made.shape == (6,) and made.dtype is torch.bfloat16


@pytest.mark.sample(2)
@behaviour(
    "`set_allocate_memory_from_process_group_for_comm`: messages in the backend's memory",
    area="communication",
    torch="different",
    reason="both use it for what they stage; here large parameters, which otherwise arrive in place, are staged for it",
)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
def test_messages_in_memory_of_the_process_group(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer of its messages is the group's; the results are the same; and False takes it back."""
    counting = [_Counting() for _ in range(_world(shape))]

    def allocate(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return counting[dist.get_rank()].allocate((numel,), dtype=dtype, device=device)

    gather_into, reduce_scatter = ShardGroup.gather_into, ShardGroup.reduce_scatter

    def gathered(self: ShardGroup, out: Tensor, piece: Tensor) -> Any:
        counting[dist.get_rank()].note(self.process_group, out, piece)
        return gather_into(self, out, piece)

    def scattered(self: ShardGroup, out: Tensor, pieces: Tensor, *op: Any) -> Any:
        counting[dist.get_rank()].note(self.process_group, out, pieces)
        return reduce_scatter(self, out, pieces, *op)

    monkeypatch.setattr("fullshard.comm.gather.allocate_for", allocate)
    monkeypatch.setattr(ShardGroup, "gather_into", gathered)
    monkeypatch.setattr(ShardGroup, "reduce_scatter", scattered)

    def rank_main(rank: int) -> None:
        seen = counting[rank]
        mesh = _mesh(shape)
        expected = sharded(FULLSHARD, probes(), mesh=mesh)
        model = sharded(FULLSHARD, probes(), mesh=mesh)
        expected.set_communication("torch")
        for enable in (True, False):
            for module in (*model, model):
                module.set_allocate_memory_from_process_group_for_comm(enable)
            for step in range(2):
                for trained in (expected, model):
                    if trained is model and enable:
                        seen.allocated, seen.foreign, seen.groups = [], 0, []
                    trained.zero_grad()
                    trained(torch.full((2, 5), float(rank + step))).pow(2).sum().backward()
                    if trained is model:
                        assert bool(seen.allocated) == enable
                        assert not enable or seen.foreign == 0
                    seen.allocated = []
                for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
                    assert_close_to_tensor_max(_full(ours.grad), _full(other.grad), 4)
        model[1].set_custom_all_gather(_Gather())
        with pytest.raises(AssertionError, match="_Gather"):
            model[1].set_allocate_memory_from_process_group_for_comm(True)

    run_ranks(_world(shape), rank_main)


@behaviour("`set_custom_all_gather` and `set_custom_reduce_scatter`: mesh {shape}", area="communication")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@for_each_implementation
def test_custom_messages(impl: Implementation, shape: tuple[int, ...]) -> None:
    """One gather in forward and one in backward, one reduce-scatter; all tensors are what the objects allocated."""
    world = _world(shape)

    def rank_main(rank: int) -> None:
        mesh = _mesh(shape)
        expected = sharded(impl, probes(), mesh=mesh)
        model = sharded(impl, probes(), mesh=mesh)
        gather, scatter = _Gather(), _Scatter()
        for step in range(3):
            for trained in (expected, model):
                trained.zero_grad()
                trained(torch.full((2, 5), float(rank + step))).pow(2).sum().backward()
            for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
                assert_close_to_tensor_max(_full(ours.grad), _full(other.grad), 4)
            if step == 1:
                assert len(gather.groups) == 2 and len(scatter.groups) == 1
                assert gather.foreign == scatter.foreign == 0
                assert all(group is mesh.get_group("shard") for group in (*gather.groups, *scatter.groups))
                assert scatter.ops == [dist.ReduceOp.AVG]
                assert {dtype for _, dtype in (*gather.allocated, *scatter.allocated)} == {torch.float32}
                model[1].set_force_sum_reduction_for_comms(True)
            elif step == 2:
                assert scatter.ops[-1] == dist.ReduceOp.SUM and len(scatter.groups) == 2
            else:
                model[1].set_custom_all_gather(gather)
                model[1].set_custom_reduce_scatter(scatter)

    run_ranks(world, rank_main)


def test_custom_messages_that_cannot_be() -> None:
    with fake_world(2):
        mixed: Any = nn.Linear(4, 4)
        mixed.bias.data = mixed.bias.data.double()
        mixed = fully_shard(mixed)
        for method in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
            with pytest.raises(ValueError, match=method):
                getattr(mixed, method)(_Gather())
        model: Any = fully_shard(_linear())
        for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
            with pytest.raises(TypeError, match="allocate"):
                getattr(model, method)(len)
        with pytest.raises(ValueError, match="auto, torch"):
            model.set_communication("fast")
        for factor in (0.0, float("inf"), True):
            with pytest.raises((ValueError, TypeError), match="factor"):
                model.set_gradient_divide_factor(factor)


@behaviour("`set_separate_reduce_scatter_group`: one communicator more, and the same numbers", area="communication")
@for_each_implementation
@needs("torch.distributed.fsdp.FSDPModule.set_separate_reduce_scatter_group", half="torch")
def test_separate_reduce_scatter_group(impl: Implementation) -> None:
    def rank_main(rank: int) -> None:
        mesh = _mesh((2, 2))
        model = sharded(impl, probes(), mesh=mesh)
        scatters = [_Scatter() for _ in range(2)]
        for unit, scatter in zip(model, scatters, strict=False):
            unit.set_custom_reduce_scatter(scatter)
        gather = _Gather()
        model[0].set_custom_all_gather(gather)
        gradients = []
        for enable in (False, True, False):
            model.set_separate_reduce_scatter_group(enable)
            model.zero_grad()
            model(torch.ones(2, 5)).pow(2).sum().backward()
            gradients.append([_full(p.grad) for p in model.parameters()])
        shared = mesh.get_group("shard")
        for scatter in scatters:
            first, apart, last = scatter.groups
            assert first is shared and last is shared and apart is not shared
            assert apart is scatters[0].groups[1], "one communicator for all units"
            assert dist.get_process_group_ranks(apart) == dist.get_process_group_ranks(shared)
        assert all(group is shared for group in gather.groups)
        for other in gradients[1:]:
            assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))

    run_ranks(4, rank_main)


# ---- unused parameters, buffers --------------------------------------------------------------------------------


class _Half(nn.Module):
    """`used` decides on each rank which of two equal layers runs; 2: neither of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor, used: int) -> Tensor:
        y = x * self.parts[2].weight.sum()
        return y if used == 2 else self.parts[used](y)


@behaviour("`set_reduce_scatter_unused_params`: ranks may use different parameters of a unit", area="communication")
@for_each_implementation
@needs("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params", half="torch")
def test_reduce_scatter_unused_params(impl: Implementation) -> None:
    """The mean counts a missing gradient as zero; and a parameter that no rank used has a zero gradient."""
    models = [seeded(_Half) for _ in range(2)]

    def rank_main(rank: int) -> None:
        model = impl.fully_shard(models[rank])
        model.set_reduce_scatter_unused_params(True)
        model(torch.ones(2, 3), rank).sum().backward()
        both = [_full(model.parts[i].weight.grad) for i in (0, 1)]
        assert all(torch.any(g != 0) for g in both)
        model.zero_grad()
        model(torch.ones(2, 3), 2).sum().backward()
        for part in (0, 1):
            assert torch.all(_full(model.parts[part].weight.grad) == 0)
        if impl is FULLSHARD:
            model.zero_grad()
            model.set_reduce_scatter_unused_params(False)
            model(torch.ones(2, 3), 2).sum().backward()
            assert model.parts[0].weight.grad is None

    run_ranks(2, rank_main)


def test_a_rank_without_any_gradient_of_a_unit_takes_part() -> None:
    """The first unit, whose output one rank does not use; also in a world of one."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, gate: bool) -> Tensor:
            y = self.first(x)
            return self.second(y if gate else y.detach())

    def rank_main(rank: int, world: int) -> None:
        model: Any = seeded(Gated)
        for module in (model.first, model.second, model):
            fully_shard(module)
        model.set_reduce_scatter_unused_params(True)
        model(torch.ones(1, 3), rank == 1).sum().backward()
        gradient = _full(model.first.weight.grad).clone()
        assert torch.any(gradient != 0) == (world > 1)
        model.first.weight.grad.to_local().add_(1)
        assert torch.unique(_full(model.first.weight.grad) - gradient).tolist() == [1.0]

    for world in (1, 2):
        run_ranks(world, rank_main, world)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_max_input_buffers(shape: tuple[int, ...]) -> None:
    """How many send buffers exist at once, counted in the pool that keeps them; replicas of one shard sum in them."""

    def nbytes(setting: int | None) -> int:
        with fake_world(4):
            model = sharded(FULLSHARD, probes(6), mesh=_mesh(shape))
            if setting is not None:
                model.set_reduce_scatter_max_input_buffers(setting)
            for _ in range(2):
                model(torch.ones(1, 5)).sum().backward()
                model.zero_grad()
            unit = unit_of(model)
            assert unit is not None and unit.root is not None
            return unit.root.shared.pool.nbytes

    sizes = {setting: nbytes(setting) for setting in (None, 1, 2, 3, 4)}
    # Sums over replicas are limited by default, too.
    steps = {sizes[k + 1] - sizes[k] for k in ((1, 2, 3) if len(shape) == 1 else (1, 2))}
    assert len(steps) == 1 and min(steps) > 0, sizes
    assert sizes[None] == sizes[3], "the default keeps two in flight, beside the one being made"


@for_each_implementation
@needs("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_max_input_buffers", half="torch")
def test_max_input_buffers_that_cannot_be(impl: Implementation) -> None:
    with fake_world(2):
        model: Any = impl.fully_shard(_linear())
        for value, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)):
            with pytest.raises(error, match="max_input_buffers"):
                model.set_reduce_scatter_max_input_buffers(value)
