"""`shard_placement_fn`: parameters cut along any dim, evenly or not, train and save as those cut along dim 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import MixedPrecisionPolicy, full_params, fully_shard, materialize, report
from fullshard.comm import BufferPool, Dtypes, Links, ShardGroup, reduce_channel
from fullshard.comm.reduce import MessageReduce
from fullshard.layout import FlatLayout, ShardLayout
from fullshard.policy import Controls, use_options
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.installed import fails_before
from tests.harness.models import (
    BY_NAME,
    Trained,
    adamw,
    assert_close_to_tensor_max,
    assert_same_training,
    collect,
    full_copy,
    seeded,
    train_reference,
)
from tests.harness.parity import assert_same_bits, train_alone, train_beside_oracle
from tests.harness.random_models import BlockSpec, LeafSpec, ModelSpec
from tests.harness.threads import run_ranks

STEPS = 3


class Even(nn.Module):
    """One to three dims, each of which two and four ranks share evenly; torch asks for that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.table = nn.Parameter(torch.randn(4, 8, 12) * 0.3)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (n, 8) -> (n, 8)
        h = torch.tanh(self.up(x))
        return x + self.down(h + torch.einsum("ni,kio->no", x, self.table))


def _even(depth: int = 2) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(Even() for _ in range(depth))))


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def _mixed_dims(parameter: nn.Parameter) -> Shard | None:
    """Dim 1, the last one, or no answer: three ways in one unit."""
    return {3: Shard(-2), 2: Shard(1)}.get(parameter.ndim)


def _sharded(impl: Any, model: nn.Module, fn: Any, **options: Any) -> Any:
    for child in model.children():
        impl.fully_shard(child, shard_placement_fn=fn, **options)
    return impl.fully_shard(model, shard_placement_fn=fn, **options)


# ---- both implementations, evenly ----------------------------------------------------------------------------


@behaviour("`shard_placement_fn`: `Shard(i)` trains, clips and saves as plain training", area="placement")
@for_each_implementation
@pytest.mark.parametrize("world", [2, 4])
def test_any_dim_trains_clips_and_saves_as_plain_training(impl: Implementation, world: int) -> None:
    plain = _even()

    def rank_main(rank: int, impl: Implementation) -> Trained:
        model = _sharded(impl, _even(), _mixed_dims)
        for name, p in model.named_parameters():
            whole = plain.get_parameter(name)
            dim = {3: 1, 2: 1, 1: 0}[p.ndim]
            assert isinstance(p, DTensor) and p.placements == (Shard(dim),), name
            assert p.shape == whole.shape and p.stride() == whole.stride()
            assert p.to_local().is_contiguous()
            assert torch.equal(p.to_local(), whole.chunk(world, dim)[rank]), name
            assert torch.equal(p.full_tensor(), whole), name
            assert torch.equal(p.redistribute(placements=[Shard(0)]).to_local(), whole.chunk(world)[rank]), name
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            _loss(model, _batch(step, rank)).backward()
            assert all(p.grad.placements == p.placements for p in model.parameters())
            impl.clip(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        trained = collect(model, optimizer)
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert all(torch.equal(state[name], value) for name, value in trained.params.items())
        return trained

    def clipped(params: Any) -> torch.optim.Optimizer:
        held = list(params)
        optimizer = adamw(held)

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(held, 0.1)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    expected = train_reference(
        _even(), _loss, [[_batch(step, rank) for rank in range(world)] for step in range(STEPS)], clipped
    )
    for trained in run(rank_main, impl, world=world):
        assert_same_training(trained, expected)


@behaviour("`shard_placement_fn` may answer None for dim 0", area="placement")
@for_each_implementation
def test_the_answer_none_is_dim_0(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        asked: list[nn.Parameter] = []
        model = _even(1)
        before = list(model[0].parameters())
        impl.fully_shard(model[0], shard_placement_fn=lambda p: asked.append(p))
        assert {id(p) for p in asked} == {id(p) for p in before}
        assert all(p.placements == (Shard(0),) for p in model.parameters())

    run(rank_main, impl)


REFUSED = {
    "a dim after the last": (lambda p: Shard(2), AssertionError),
    "a dim before the first": (lambda p: Shard(-3), AssertionError),
    "Replicate": (lambda p: Replicate(), ValueError),
    "a number": (lambda p: 1, ValueError),
    "a tuple": (lambda p: (Shard(0), None), ValueError),
    "no function": (Shard(0), TypeError),
}
_TAKEN_FOR_A_SHARD = fails_before((2, 12), "FSDP2 reads `dim` of whatever `shard_placement_fn` returns")
OLD_TORCH = dict.fromkeys(("Replicate", "a number", "a tuple"), _TAKEN_FOR_A_SHARD)


@behaviour("a wrong answer of `shard_placement_fn`, by the same type of error: {what}", area="errors")
@for_each_implementation
@pytest.mark.parametrize("what", [pytest.param(what, marks=OLD_TORCH.get(what, ())) for what in REFUSED])
def test_wrong_answers_are_refused(impl: Implementation, what: str) -> None:
    fn, error = REFUSED[what]

    def rank_main(rank: int, impl: Implementation) -> None:
        model = nn.Linear(4, 4, bias=False)
        with pytest.raises(error) as raised:
            impl.fully_shard(model, shard_placement_fn=fn)
        if impl.name == "fullshard":
            assert "shard_placement_fn" in str(raised.value) and "expected" in str(raised.value)
            # Nothing was changed: the call can be made again.
            assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
            impl.fully_shard(model)

    run(rank_main, impl)


# ---- unevenly ------------------------------------------------------------------------------------------------


def test_uneven_dims_are_cut_as_torch_chunk_cuts() -> None:
    """torch refuses these with NotImplementedError."""

    def rank_main(rank: int, world: int) -> None:
        for case in (BY_NAME["tiny_dims"], BY_NAME["mixed_shapes"]):
            plain, model = case.build(), case.build()
            case.shard(model, fully_shard, shard_placement_fn=lambda p: Shard(p.ndim - 1))
            for (name, p), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
                chunks = whole.detach().chunk(world, -1)
                mine = chunks[rank] if rank < len(chunks) else whole.detach()[..., :0]
                assert p.to_local().shape == mine.shape and torch.equal(p.to_local(), mine), name
                assert p.to_local().is_contiguous() and torch.equal(p.full_tensor(), whole), name

    for world in (2, 3, 4):
        run_ranks(world, rank_main, world)


# Every kind of leaf, three ways to cut, dims of one to seven; frozen, tied, unused by some step or rank; accumulation.
_LEAVES = (
    LeafSpec("dense", 7),
    LeafSpec("twins"),
    LeafSpec("table", 3, use="by_rank"),
    LeafSpec("conv", 2, use="by_step"),
    LeafSpec("norm"),
    LeafSpec("scale"),
)
_SPEC = ModelSpec(
    (
        BlockSpec(
            _LEAVES, BlockSpec((LeafSpec("dense", 1, unit=True), LeafSpec("dense_no_bias", 2)), recompute="inside")
        ),
        BlockSpec((LeafSpec("dense_no_bias", 13),), recompute="outside", reshard=False),
        # The only parameter of its unit: dim 0 would be gathered straight into place.
        BlockSpec((LeafSpec("table", 5),)),
    ),
    width=5,
    frozen=(1, 8),
    dims=(1, 2, 1, 0),
    sync=(False, True),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ["none", "bf16_reduced_in_fp32", "fp32_reduced_in_bf16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_dims_train_as_plain_training(world: int, policy: str) -> None:
    spec = ModelSpec(**{**vars(_SPEC), "policy": policy})
    with use_options(**spec.options()):
        run_ranks(world, train_beside_oracle, spec, world, 2)


def test_one_reduce_scatter_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's reduction reads the same send buffer."""
    with use_options(**_SPEC.options(), communication="torch"):
        run_ranks(3, train_beside_oracle, _SPEC, 3, 2)


@behaviour(
    "the dim along which a parameter is cut changes no bit of the training",
    area="placement",
    torch="none",
    reason="a promise of ours: ranks add in one order whatever is cut",
)
def test_the_dim_changes_no_bit() -> None:
    """Which rank adds an element does not change what is added, nor in which order."""

    def rank_main(rank: int, dims: tuple[int, ...]) -> Trained:
        return train_alone(rank, ModelSpec(**{**vars(_SPEC), "dims": dims}), 2)

    with use_options(**_SPEC.options()):
        expected = run_ranks(3, rank_main, (0,))[0]
        for dims in ((1,), (2, 0, 1)):
            assert_same_bits(run_ranks(3, rank_main, dims)[2], expected)


def test_gradients_of_any_strides_and_offset_are_sent_alike() -> None:
    """Autograd hands over what it got: parts of larger tensors; those of DTensors may have any strides."""
    layouts = [ShardLayout(shape, dim, 3) for shape, dim in (((5, 3), 1), ((4, 6, 2), 1), ((7, 3), 0), ((6, 2), 0))]
    pack = FlatLayout.build(layouts, 4)
    whole = [torch.randn(layout.shape) for layout in layouts]

    def offset(t: Tensor) -> Tensor:
        return torch.cat([torch.randn(3), t.flatten()])[3:].view(t.shape)

    def permuted(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    with fake_world(3) as group:
        dtypes = Dtypes(*[torch.float32] * 4)
        links, pool = Links(ShardGroup(group, torch.device("cpu"))).under("auto"), BufferPool(keep=False)
        channel = reduce_channel(links, pack, (), dtypes, pool, strategy="auto", controls=Controls())
        assert isinstance(channel, MessageReduce)
        expected, _ = channel.fill(whole, torch.float32)
        message = expected.tensor.view(3, -1)
        for segment, gradient in zip(pack.segments, whole, strict=True):
            for rank, chunk in enumerate(gradient.chunk(3, segment.layout.dim)):
                part = message[rank, segment.offset : segment.offset + chunk.numel()]
                assert torch.equal(part.view(chunk.shape), chunk), (segment, rank)
        for change in (offset, permuted):
            found, _ = channel.fill([change(gradient) for gradient in whole], torch.float32)
            assert torch.equal(found.tensor, expected.tensor), change.__name__


def test_parameters_without_elements() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: Tensor) -> Tensor:  # (n, 4) -> (n, 4)
            return x + (self.empty * 2).sum(0)

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Sequential(Nothing(), nn.Linear(4, 3)))
        fully_shard(model[0], shard_placement_fn=_last_dim)
        fully_shard(model, shard_placement_fn=_last_dim)
        assert model[0].empty.to_local().shape[0] == 0
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        assert model[0].empty.grad.full_tensor().shape == (0, 4)

    run_ranks(3, rank_main)


# ---- state ---------------------------------------------------------------------------------------------------


def _uneven() -> nn.Module:  # (n, 7, 5) -> (n, 3, 6)
    return seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Conv1d(7, 3, 2, bias=False)))


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


def _x(rank: int = 0) -> Tensor:
    return torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(rank))


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_state_goes_out_and_in_by_every_way(world: int) -> None:
    """state_dict, load_state_dict (copying and assigning), to_empty, a change of dtype."""

    def rank_main(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        other = _uneven()
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(-3).add_(0.5)
        want = other(_x())

        def fresh() -> Any:
            model = _uneven()
            fully_shard(model[0], mesh=mesh, shard_placement_fn=_last_dim)
            return fully_shard(model, mesh=mesh, shard_placement_fn=_last_dim)

        def check(model: Any) -> None:
            for name, whole in other.named_parameters():
                p = model.get_parameter(name)
                assert p.placements == (Shard(whole.ndim - 1),), name
                assert torch.equal(p.full_tensor(), whole.to(p.dtype)), name
            assert tolerance.close(model(_x().to(p.dtype)), want.to(p.dtype), dtype=torch.float32)
            model(_x().to(p.dtype)).sum().backward()
            assert all(p.grad.to_local().shape == p.to_local().shape for p in model.parameters())

        cut = {
            name: distribute_tensor(value.detach().clone(), mesh, [Shard(value.ndim - 1)])
            for name, value in other.named_parameters()
        }
        model = fresh()
        model(_x()).sum().backward()
        model.load_state_dict(cut)
        check(model)
        model = fresh()
        model.load_state_dict(copy.deepcopy(cut), assign=True)
        check(model)
        # From shards cut along another dim; torch refuses those of a dim smaller than the world.
        rows = {name: value.redistribute(placements=[Shard(0)]) for name, value in cut.items()}
        for assign in (False, True):
            model = fresh()
            model.load_state_dict(dict(rows), assign=assign)
            check(model)
        again = fresh()
        again.load_state_dict(model.state_dict())
        check(again)
        # From plain full tensors; then full ones in place of the shards, read and written.
        again = fresh()
        again.load_state_dict(other.state_dict())
        check(again)
        again = fresh()
        with full_params(again, writeback=True), torch.no_grad():
            for name, whole in other.named_parameters():
                again.get_parameter(name).copy_(whole)
        check(again)
        with torch.device("meta"):
            empty = _uneven()
        fully_shard(empty, mesh=mesh, shard_placement_fn=_last_dim)
        empty.to_empty(device="cpu")
        empty.load_state_dict(cut)
        check(empty)
        with torch.device("meta"):
            drawn = [_uneven(), _uneven()]
        fully_shard(drawn[0], mesh=mesh, shard_placement_fn=_last_dim)
        drawn = [materialize(model, seed=3) for model in drawn]
        for ours, plain in zip(drawn[0].parameters(), drawn[1].parameters(), strict=True):
            assert torch.equal(full_copy(ours), plain)
        check(model.double())
        assert not any(info.full_nbytes_live for info in report(model).units if info.name)

    run_ranks(world, rank_main, world)


# ---- several storage dtypes, and what is trainable -------------------------------------------------------------


class _Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
        self.c = nn.Parameter(torch.randn(7, 5).bfloat16())
        self.d = nn.Parameter(torch.randn(5))
        self.e = nn.Parameter(torch.randn(2, 5, 3).bfloat16())

    def forward(self, x: Tensor) -> Tensor:  # (n, 5) -> (n, 5)
        h = (x @ self.a).double() @ self.b
        return (h.bfloat16() @ self.c).float() * self.d + self.e.float().sum((0, 2))


@pytest.mark.parametrize("world", [1, 3])
def test_dtypes_dims_and_frozen_parameters_of_one_unit(world: int) -> None:
    """Three storage dtypes, of which some are frozen, then unfrozen, then others frozen. torch asserts on the mix."""
    trainable = [("a", "b", "c", "d", "e"), ("a", "c"), ("b", "d", "e"), ("e",)]
    dims = {"a": 1, "b": 0, "c": 1, "d": 0, "e": 2}

    def rank_main(rank: int, world: int) -> None:
        plain, ours = seeded(_Dtypes), seeded(_Dtypes)
        where = {id(p): Shard(dims[name]) for name, p in ours.named_parameters()}
        model: Any = fully_shard(ours, shard_placement_fn=lambda p: where[id(p)])
        assert {name: p.placements[0].dim for name, p in model.named_parameters()} == dims
        for names in trainable:
            for net in (plain, model):
                net.zero_grad()
                for name, p in net.named_parameters():
                    p.requires_grad_(name in names)
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(7))
            plain(x).pow(2).mean().backward()
            model(x).pow(2).mean().backward()
            for name, p in plain.named_parameters():
                grad = model.get_parameter(name).grad
                assert (grad is None) == (p.grad is None) == (name not in names), name
                if p.grad is not None:
                    # Equal on all ranks, so their mean is what each has, but for the rounding of a sum of three.
                    assert_close_to_tensor_max(grad.full_tensor(), p.grad, 0 if world == 1 else 1, name)

    run_ranks(world, rank_main, world)


def test_mixed_precision_gathers_the_compute_dtype() -> None:
    def rank_main(rank: int) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        plain = _even(1)
        seen: list[Tensor] = []
        model = _even(1)
        fully_shard(model[0], shard_placement_fn=_mixed_dims, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model[0].register_forward_pre_hook(lambda module, args: seen.append(module.table.detach().clone()))
        model(_batch(0, rank)[0]).sum().backward()
        assert seen[0].dtype is torch.bfloat16 and torch.equal(seen[0], plain[0].table.bfloat16())

    run_ranks(4, rank_main)
