"""What users do with sharded parameters between steps: converting, editing, swapping, gathering by hand.

After each of these the model trains as a plain one with the same values would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.policy import use_options
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation
from tests.harness.threads import WORLD, run_ranks, several
from tests.threads.programs import WIDTH, Model, Tied, batch, part, shard


def _base(seed: int, make: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).float().pow(2).mean()


def _steps(model: Any, rank: int, world: int, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        _loss(model, part(batch(world, seed), rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _plain_steps(model: Any, world: int, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    model.__dict__["trained_by"] = tolerance.watch(optimizer)
    for seed in seeds:
        for rank in range(world):
            (_loss(model, part(batch(world, seed), rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _assert_equal_models(model: nn.Module, reference: nn.Module) -> None:
    assert all(isinstance(p, DTensor) for p in model.parameters())
    tolerance.assert_parameters_close(model, reference, reference.__dict__["trained_by"])


def _trains_like(rank: int, model: nn.Module, reference: nn.Module, world: int = WORLD) -> None:
    _steps(model, rank, world, _adam(model), range(3))
    _plain_steps(reference, world, _adam(reference), range(3))
    _assert_equal_models(model, reference)


@pytest.mark.parametrize("world", [1, 2])
def test_converting_the_dtype_of_a_model_in_use(world: int) -> None:
    """Before its first step: test_conversions_after_sharding."""
    base = _base(0)

    def job(rank: int) -> None:
        model, reference = shard(copy.deepcopy(base)), copy.deepcopy(base)
        _steps(model, rank, world, _adam(model), range(1))
        _plain_steps(reference, world, _adam(reference), range(1))
        model.double()
        reference.double()
        assert all(p.dtype is torch.float64 for p in model.parameters())
        _trains_like(rank, model, reference, world)

    run_ranks(world, job)


@pytest.mark.sample(1)
@behaviour(
    "parameters edited or swapped between steps are seen, after an evaluation too",
    area="state",
    torch="better",
    reason="what is kept full is gathered anew once its shards changed; torch's root computes with the old values",
)
@pytest.mark.parametrize("reshard", [None, False, True])
@pytest.mark.parametrize("how", ["in place", "local", "swap", "a part of the model"])
def test_edits_between_steps_are_seen_also_after_evaluation(
    how: str, reshard: bool | None, impl: Implementation
) -> None:
    """The root (or, with False, every unit) keeps its memory after an evaluation; what was edited is gathered anew."""
    base = _base(0)

    def job(rank: int) -> None:
        model, reference = shard(copy.deepcopy(base), impl, reshard_after_forward=reshard), copy.deepcopy(base)
        tokens = part(batch(WORLD, 5), rank)
        with torch.no_grad():
            model(tokens)
            for p, q in zip(model.parameters(), list(reference.parameters()), strict=True):
                assert isinstance(p, DTensor)  # also now: an optimizer may be built here
                if how == "in place":
                    p.mul_(1.5)
                elif how == "local":
                    p.to_local().mul_(1.5)
                if how in ("in place", "local"):
                    q.mul_(1.5)
            if how == "swap":
                old = model.head.weight
                model.head.weight = nn.Parameter(old * 2.0)
                reference.head.weight.mul_(2.0)
            if how == "a part of the model":
                model.layers[0].up._apply(lambda t: t * 2.0)
                for q in reference.layers[0].up.parameters():
                    q.mul_(2.0)
            assert tolerance.close(model(tokens), reference(tokens))
        _trains_like(rank, model, reference)

    run_ranks(WORLD, job)


@pytest.mark.sample(2)  # the first and the last, which no version shows
@pytest.mark.parametrize("kept", ["root in evaluation", "after backward", "by choice in evaluation"])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_step_is_seen_by_parameters_kept_full(foreach: bool, kept: str) -> None:
    """torch's list operations write DTensors without raising a version."""
    base = _base(0)

    def job(rank: int) -> None:
        reshard = False if kept == "by choice in evaluation" else None
        model, reference = shard(copy.deepcopy(base), reshard_after_forward=reshard), copy.deepcopy(base)
        if kept == "after backward":
            model.set_reshard_after_backward(False)
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        for step in range(3):
            _loss(model, part(batch(WORLD, step), rank)).backward()
            with torch.no_grad():
                model(part(batch(WORLD, step), rank))
            ours.step()
            ours.zero_grad()
        _plain_steps(reference, WORLD, theirs, range(3))
        _assert_equal_models(model, reference)

    run_ranks(WORLD, job)


def test_an_early_unshard_is_repeated_once_its_shards_were_written() -> None:
    base = _base(0)

    def job(rank: int) -> None:
        model, reference = shard(copy.deepcopy(base)), copy.deepcopy(base)
        tokens = part(batch(WORLD, 5), rank)
        model(tokens).pow(2).mean().backward()
        model.zero_grad()
        for module in (model, model.layers[0]):
            module.unshard(async_op=True)  # on its way, and not waited for
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p.mul_(1.5)
            assert tolerance.close(model(tokens), reference(tokens))

    run_ranks(WORLD, job)


def test_a_parameter_replaced_by_a_plain_tensor_is_named() -> None:
    base = _base(0)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        model.layers[1].up.weight = nn.Parameter(torch.zeros(2 * WIDTH + 1, WIDTH))
        with pytest.raises(RuntimeError, match=r"up\.weight: expected the sharded DTensor.*found Parameter"):
            model(part(batch(WORLD, 0), rank))

    run_ranks(WORLD, job)


def test_unshard_and_reshard() -> None:
    base = _base(0)

    def job(rank: int) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(copy.deepcopy(base), mp_policy=policy)
        block = model.layers[0]
        assert all(p.dtype is torch.float32 for p in model.parameters())
        for _ in range(2):  # before and after the root is known
            model.unshard()
            handle = block.unshard(async_op=True)
            assert isinstance(block.up.weight, DTensor)
            handle.wait()
            handle.wait()
            assert not isinstance(block.up.weight, DTensor)
            for full in (model.head.weight, block.up.weight):
                assert full.dtype is torch.bfloat16
            assert torch.equal(block.up.weight, base.layers[0].up.weight.bfloat16())
            assert isinstance(model.layers[1].up.weight, DTensor)
            model.reshard()
            block.reshard()
            block.reshard()
            assert all(isinstance(p, DTensor) for p in model.parameters())
            _loss(model, part(batch(WORLD, 0), rank)).backward()
        block.unshard(async_op=True)  # used by the next forward
        _loss(model, part(batch(WORLD, 0), rank)).backward()
        assert not any(unit.full_nbytes_live for unit in fullshard.report(model).units)

    run_ranks(WORLD, job)


def test_a_gradient_that_was_only_accumulated_refuses_to_be_used() -> None:
    base = _base(0)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        optimizer = _adam(model)
        model.set_requires_gradient_sync(False)
        _loss(model, part(batch(WORLD, 0), rank)).backward()
        before = [p.full_tensor().clone() for p in model.parameters()]
        for use in (
            optimizer.step,
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: fullshard.clip_grad_norm_(model.parameters(), 1.0),
            lambda: model.head.weight.grad + 1,
        ):
            with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
                use()
        assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
        model.set_requires_gradient_sync(True)
        _loss(model, part(batch(WORLD, 1), rank)).backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run_ranks(WORLD, job)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@behaviour("a gradient that is held does not change", area="gradients")
@for_each_implementation
def test_a_held_gradient_does_not_change(impl: Implementation) -> None:
    base = _base(0)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base), impl)
        _loss(model, part(batch(WORLD, 0), rank)).backward()
        held = [p.grad for p in model.parameters()]
        values = [g.full_tensor().clone() for g in held]
        model.zero_grad()
        for step in range(1, 4):
            _loss(model, part(batch(WORLD, step), rank)).backward()
            model.zero_grad()
        assert all(torch.equal(g.full_tensor(), v) for g, v in zip(held, values, strict=True))

    run_ranks(WORLD, job)


def test_weights_tied_across_units_are_refused_with_both_places() -> None:
    base = _base(0, Tied)

    def job(rank: int) -> None:
        model: Any = copy.deepcopy(base)
        fully_shard(model.embedding)
        fix = r"fully_shard\(\[embedding, head\]\)"
        with pytest.raises(ValueError, match=rf"head\.weight: .*tied to embedding\.weight \(.*: Embedding\).*{fix}"):
            fully_shard(model)
        apart: Any = copy.deepcopy(base)
        fully_shard(apart.embedding)
        with pytest.raises(ValueError, match=r"weight: .*tied to weight of Embedding.*\[Embedding, Linear\]"):
            fully_shard(apart.head)
        # What the error says to do.
        mended: Any = copy.deepcopy(base)
        fully_shard([mended.embedding, mended.head])
        fully_shard(mended)
        assert mended.head.weight is mended.embedding.weight
        _trains_like(rank, mended, copy.deepcopy(base))

    run_ranks(WORLD, job)


def test_names_and_classes_of_a_sharded_module() -> None:
    base = _base(0)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        assert isinstance(model, Model) and isinstance(model, FSDPModule)
        assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        assert repr(model).startswith("FSDPModel(")
        assert type(model.layers[0]) is type(model.layers[1])
        again = type(model)()  # as slicing a container does
        assert type(again) is Model

    run_ranks(1, job)


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_full_parameters_are_freed(prefetch: int) -> None:
    """At every hook of every module, in forward and backward: the root and the unit at work, and no more."""
    base = _base(0)

    def job(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        seen: list[set[str]] = []

        def look(*_: Any) -> None:
            seen.append({unit.name for unit in fullshard.report(model).units if unit.full_nbytes_live})

        for module in model.modules():
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
            if not isinstance(module, (nn.Embedding, Model)):  # their inputs are tokens: no such hook
                module.register_full_backward_hook(look)
        optimizer = _adam(model)
        for step in range(3):
            _steps(model, rank, WORLD, optimizer, range(step, step + 1))
        # On gloo a gather ahead arrives in the staging buffer, so its full memory is not allocated yet.
        assert all(len(names - {""}) <= 1 for names in seen), max(seen, key=len)
        assert any("layers.1" in names for names in seen)

    with use_options(prefetch_depth=prefetch):
        run_ranks(several(), job)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_holds_its_share(world: int) -> None:
    base = _base(0)

    def job(rank: int) -> int:
        model = shard(copy.deepcopy(base))
        _steps(model, rank, world, (optimizer := _adam(model)), range(1))
        storages = {}
        for p in model.parameters():
            for tensor in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
                storage = tensor.to_local().untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    held = run_ranks(world, job)
    full = 3 * sum(p.nbytes for p in base.parameters())
    rows = {p.shape[0] for p in base.parameters()}
    padding = 3 * sum(p[0].nbytes * (world - 1) for p in base.parameters()) + 3 * 64 * world * len(rows) * 8
    assert full <= sum(held) <= full + padding
    assert max(held) <= full / world + padding
