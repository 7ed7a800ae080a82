"""`materialize`: initial values unit by unit, the same whatever the world, the units and the order of modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.programs import Frozen, Model, Tied, batch, part, shard
from tests.threads.test_initialisation import AttendingResetting, X, dtensor, on_meta


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Bitwise, parameters and buffers."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert whole.dtype is theirs.dtype and torch.equal(whole, theirs), name
        assert ours.requires_grad == theirs.requires_grad, name
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def plain(make: Callable[[], nn.Module], **options: Any) -> Any:
    return fullshard.materialize(on_meta(make), **options)


@pytest.mark.sample(2)
@behaviour(
    "`fullshard.materialize`: initial values are those of the plain model, at any world",
    area="initialisation",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [Model, Tied, Frozen])
def test_values_depend_on_the_seed_alone(make: Callable[[], nn.Module], world: int) -> None:
    reference, other = plain(make, seed=3), plain(make, seed=4)
    assert not torch.equal(reference.embedding.weight, other.embedding.weight)
    assert not torch.equal(reference.layers[0].up.bias, reference.layers[1].up.bias)

    def job(rank: int) -> None:
        for units in ("blocks", "root", "before and after to_empty"):
            model = on_meta(make)
            fully_shard(model) if units == "root" else shard(model)
            if units == "before and after to_empty":
                model.to_empty(device="cpu")
            before = torch.random.get_rng_state()
            assert fullshard.materialize(model, seed=3) is model
            # Ranks that are threads share the generator, and another one may be using it now.
            assert world > 1 or torch.equal(torch.random.get_rng_state(), before)
            assert_same(model, reference)
        assert (model.head.weight is model.embedding.weight) == (make is Tied)
        tokens = part(batch(world, 0), rank)
        assert tolerance.close(model(tokens), reference(tokens))
        model(tokens).sum().backward()

    run_ranks(world, job)


def test_the_ambient_seed_and_ranks_that_differ() -> None:
    torch.manual_seed(11)
    reference = plain(Model, seed=11)

    def job(rank: int) -> None:
        assert_same(fullshard.materialize(shard(on_meta(Model))), reference)
        model = shard(on_meta(Model))
        with pytest.raises(ValueError, match="seed: expected the same one on all ranks"):
            fullshard.materialize(model, seed=rank)
        with pytest.raises(TypeError, match="seed: expected an int"):
            fullshard.materialize(model, seed="0")  # type: ignore[arg-type]
        assert all(p.is_meta for p in model.parameters())

    run_ranks(several(), job)


def test_values_are_drawn_in_the_dtype_of_storage() -> None:
    reference = plain(Model, seed=1)

    def job(rank: int) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = shard(on_meta(Model), mp_policy=policy)
        fullshard.materialize(model, seed=1)
        assert_same(model, reference)

    run_ranks(WORLD, job)


@behaviour(
    "`fullshard.materialize`: no more is full than the largest unit",
    area="initialisation",
    torch="none",
    reason="torch has no such function",
)
@pytest.mark.parametrize("world", [1, 2])
def test_no_more_is_full_than_the_largest_unit(world: int) -> None:
    """Counted at every call of the initialiser, over all full parameters that any call has seen so far."""
    base = Model()
    root = sum(p.nbytes for module in (base.embedding, base.head) for p in module.parameters())
    largest = max(root, sum(p.nbytes for p in base.layers[0].parameters()))

    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        seen: dict[int, weakref.ref[Tensor]] = {}
        peaks: list[int] = []

        def counted(module: nn.Module) -> None:
            for p in model.parameters():
                if not isinstance(p, DTensor):
                    seen[id(p)] = weakref.ref(p)
            alive = [p for ref in seen.values() if (p := ref()) is not None]
            peaks.append(sum(p.nbytes for p in alive))
            for p in module.parameters(recurse=False):
                nn.init.normal_(p)

        fullshard.materialize(model, init=counted)
        assert max(peaks) == largest and len(seen) > 4
        assert all(ref() is None for ref in seen.values())

    run_ranks(world, job)


# ---- initialisers --------------------------------------------------------------------------------------------


def by_data(module: nn.Module) -> None:
    """As most model code does it; asks children for parameters by name too, as GPT-2's does."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
        module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_()
    elif isinstance(module, nn.LayerNorm):
        module.weight.data.fill_(1.0)
        module.bias.data.zero_()
    for name, p in module.named_parameters():
        if name == "down.weight":
            p.data.mul_(0.1)


def by_replacing(module: nn.Module) -> None:
    for name, p in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(torch.randn(p.shape), requires_grad=p.requires_grad))


def by_emptying(module: nn.Module) -> None:
    """As `param_init_fn` of FSDP1 does it, which finds its module on the meta device."""
    module.to_empty(device="cpu", recurse=False)
    for p in module.parameters(recurse=False):
        p.data.normal_()


@pytest.mark.sample(2)
@pytest.mark.parametrize("init", [by_data, by_replacing, by_emptying])
@pytest.mark.parametrize("world", [1, 3])
def test_an_initialiser_of_the_user(init: Callable[[nn.Module], None], world: int) -> None:
    """Called as by `apply`, children first, with what the unit has full."""
    reference = plain(Frozen, seed=5, init=init)
    assert init is not by_data or reference.layers[0].down.weight.std() < 0.004

    def job(rank: int) -> None:
        model = on_meta(Frozen)
        model.head.weight.kind = "output"  # initialisers look for marks on parameters, and so do optimizers
        kinds: list[str] = []

        def marked(module: nn.Module) -> None:
            kinds.extend(p.kind for p in module.parameters(recurse=False) if hasattr(p, "kind"))
            init(module)

        model = fullshard.materialize(shard(model), seed=5, init=marked)
        assert kinds == [model.head.weight.kind] == ["output"]
        assert_same(model, reference)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(part(batch(world, step), rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(world, job)


class OwnInit(nn.Module):
    """`init_weights` for what is below, after its children's own; and a parameter that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.gate = nn.Parameter(torch.ones(3))

    def init_weights(self) -> None:
        nn.init.constant_(self.linear.bias, 2.0)
        nn.init.uniform_(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gate.sum()


class NoInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.gate = nn.Parameter(torch.ones(3))


class WithArgument(OwnInit):
    def init_weights(self, std: float) -> None:  # type: ignore[override]
        raise AssertionError("never called")


class Whole(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OwnInit(), OwnInit())

    def init_weights(self) -> None:
        raise AssertionError("never called")


def test_which_initialisers_are_called() -> None:
    reference = plain(lambda: nn.Sequential(OwnInit(), OwnInit()), seed=2)
    assert (reference[0].linear.bias == 2.0).all() and reference[0].linear.weight.std() > 0

    def job(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(OwnInit(), OwnInit()))
        fully_shard(model[0])
        assert_same(fullshard.materialize(fully_shard(model), seed=2), reference)
        for make, message in (
            (NoInit, r"found none on the model \(\w*NoInit\) for gate; write one, or pass init="),
            (WithArgument, r"found the model \(\w*WithArgument\), whose init_weights takes arguments"),
        ):
            model = fully_shard(on_meta(make))
            with pytest.raises(ValueError, match=message):
                fullshard.materialize(model)
        model = on_meta(Whole)
        model.extra = nn.Linear(2, 2, device="meta")
        fully_shard(model[0])
        fully_shard(model)
        with pytest.raises(ValueError, match="init_weights reaches into 1 other units"):
            fullshard.materialize(model)

    run_ranks(WORLD, job)


def test_an_initialiser_that_fails_or_leaves_its_unit() -> None:
    def everything(module: nn.Module) -> None:
        for p in module.parameters():
            nn.init.ones_(p)

    def everything_by_data(module: nn.Module) -> None:
        for p in module.parameters():
            p.data.fill_(1.0)

    def shrinking(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(torch.ones(2, 2))
        else:
            by_data(module)

    def failing(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            raise KeyError("embedding")
        by_data(module)

    reference = plain(Model, seed=6, init=by_data)

    def job(rank: int) -> None:
        for init, error, message in (
            (everything, RuntimeError, "wrote shards of one of the 3 other units"),
            (everything_by_data, RuntimeError, "wrote shards of one of the 3 other units"),
            (shrinking, RuntimeError, r"embedding\.weight: expected a plain parameter of shape \(11, 6\)"),
            (failing, KeyError, "embedding"),
        ):
            model = shard(on_meta(Model))
            with pytest.raises(error, match=message):
                fullshard.materialize(model, seed=6, init=init)
            assert all(isinstance(p, DTensor) for p in model.parameters())
            with pytest.raises(RuntimeError, match=r"nothing was written to .*: embedding\.weight"):
                model(part(batch(2, 0), rank))
            fullshard.materialize(model, seed=6, init=by_data)
            if init in (shrinking, failing):  # what had values by then keeps them; so does the rest, being the same
                assert_same(model, reference)
            model(part(batch(2, 0), rank))

    run_ranks(WORLD, job)


def test_what_has_values_keeps_them_and_a_checkpoint_may_bring_the_rest() -> None:
    base = Model()
    reference = plain(Model, seed=7)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        assert_same(fullshard.materialize(model, seed=7), base)
        model = shard(on_meta(Model))
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.head.weight.copy_(dtensor(base.head.weight, model.head.weight))
        fullshard.materialize(model, seed=7)
        with torch.no_grad():
            expected = copy.deepcopy(reference)
            expected.head.weight.copy_(base.head.weight)
        assert_same(model, expected)
        model = shard(on_meta(Model))
        fullshard.materialize(model, init=lambda module: None)
        with pytest.raises(RuntimeError, match=r"nothing was written to .*: embedding\.weight"):
            model(part(batch(2, 0), rank))
        state = {name: dtensor(base.get_parameter(name), p) for name, p in model.state_dict().items()}
        model.load_state_dict(state)
        assert_same(model, base)
        model(part(batch(2, 0), rank))

    run_ranks(WORLD, job)


def test_buffers_and_what_is_outside_of_units() -> None:
    """An unsharded wrapper with parameters of its own, ignored ones, tied ones, and frequencies that `init` ignores."""

    def make() -> Any:
        wrapper = nn.Sequential(nn.Linear(6, 6), AttendingResetting(), nn.Linear(6, 6))
        wrapper[0].weight = wrapper[2].weight
        return wrapper

    reference = plain(make, seed=8)
    assert torch.equal(reference[1].rope.inv_freq, AttendingResetting().rope.inv_freq)
    assert reference[0].weight is reference[2].weight

    def partly(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters") and next(module.parameters(), None) is not None:
            module.reset_parameters()

    def job(rank: int) -> None:
        for init in (None, partly):
            model = on_meta(make)
            fully_shard(model[1], ignored_params={model[1].proj.bias})
            fullshard.materialize(model, seed=8, init=init)
            assert not isinstance(model[1].proj.bias, DTensor)
            assert model[0].weight is model[2].weight
            assert_same(model, reference)
            assert tolerance.close(model(X), copy.deepcopy(reference)(X))

    run_ranks(WORLD, job)


def test_a_model_in_use() -> None:
    """Also while full parameters show."""
    reference = plain(Model, seed=1)

    def job(rank: int) -> None:
        model = fullshard.materialize(shard(on_meta(Model)), seed=0)
        tokens = part(batch(2, 0), rank)
        model(tokens).sum().backward()
        model.to_empty(device="cpu")
        model.unshard()
        model.layers[0].unshard()
        fullshard.materialize(model, seed=1)
        assert_same(model, reference)
        assert tolerance.close(model(tokens), reference(tokens))

    run_ranks(WORLD, job)


def test_the_device() -> None:
    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        with pytest.raises(ValueError, match=r"device: expected cpu, .* found meta"):
            fullshard.materialize(model, device="meta")
        fullshard.materialize(model, device="cpu")

    run_ranks(WORLD, job)


def test_an_optimizer_that_was_built_before_goes_on() -> None:
    reference = plain(Model, seed=9)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for seed in range(2):
        for rank in range(WORLD):
            (reference(part(batch(WORLD, seed), rank)).pow(2).mean() / WORLD).backward()
        theirs.step()
        theirs.zero_grad()

    def job(rank: int) -> None:
        model = shard(on_meta(Model))
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fullshard.materialize(model, seed=9)
        for seed in range(2):
            model(part(batch(WORLD, seed), rank)).pow(2).mean().backward()
            ours.step()
            ours.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert tolerance.close(p.full_tensor(), q)

    run_ranks(WORLD, job)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_beside_tensor_parallelism() -> None:
    """The same values as without; a shard cut twice, of which some ranks own nothing, is judged over both axes."""
    reference = plain(TwoLinears, seed=4)

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = on_meta(TwoLinears)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        model.to_empty(device="cpu")
        if rank == 3:
            model.up.bias.to_local().data.zero_()
        with pytest.raises(RuntimeError, match=r"nothing was written to .*: up\.weight, down\.weight, down\.bias; "):
            model(torch.ones(2, 6))
        model.to_empty(device="cpu")
        fullshard.materialize(model, seed=4)
        assert_same(model, reference)
        assert tolerance.close(model(torch.ones(2, 6)), reference(torch.ones(2, 6)))

    run_ranks(4, job)


def test_replicas_of_shards() -> None:
    reference = plain(Model, seed=4)

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard(on_meta(Model), mesh=mesh)
        model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="nothing was written to"):
            model(part(batch(4, 0), rank))
        fullshard.materialize(model, seed=4)
        assert_same(model, reference)
        model(part(batch(4, 0), rank))

    run_ranks(4, job)


def test_beside_offload() -> None:
    reference = plain(Model, seed=4)

    def job(rank: int) -> None:
        model = shard(on_meta(Model), offload_policy=fullshard.CPUOffloadPolicy(pin_memory=False))
        assert_same(fullshard.materialize(model, seed=4), reference)
        model(part(batch(2, 0), rank)).sum().backward()

    run_ranks(WORLD, job)


def test_shards_of_another_dim() -> None:
    reference = plain(TwoLinears, seed=4)

    def job(rank: int) -> None:
        model = on_meta(TwoLinears)
        fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        assert_same(fullshard.materialize(model, seed=4), reference)
        assert tolerance.close(model(torch.ones(2, 6)), reference(torch.ones(2, 6)))

    run_ranks(4, job)
