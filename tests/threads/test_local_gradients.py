"""Between micro-batches without synchronisation: what `.grad` of full parameters shows, beside torch's FSDP2."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TORCH_POLICY
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.engine import unit_of
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, probes, run, sharded
from tests.harness.models import seeded
from tests.harness.threads import WORLD

POLICIES = {
    "float32": {},
    "bfloat16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "bfloat16, reduced in float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "float32, reduced in bfloat16": {"reduce_dtype": torch.bfloat16},
}


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _shown(model: nn.Module) -> list[Tensor | None]:
    """The gradients that stand on full parameters; copies."""
    found = [(p, p.grad) for p in model.parameters() if not isinstance(p, DTensor)]
    return [None if gradient is None else gradient.clone() for _, gradient in found]


def _train(impl: Implementation, rank: int, policy: str, **options: Any) -> list[Any]:
    """Two micro-batches without synchronisation and one with it, twice: what stands on full parameters after each, in
    each forward and after `unshard()`, and the reduced gradients."""
    model = probes()
    model[1].linear.weight.requires_grad_(False)
    after_backward = options.pop("reshard_after_backward")
    sharded(impl, model, mp_policy=impl.MixedPrecisionPolicy(**POLICIES[policy]), **options)
    model.set_reshard_after_backward(after_backward)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, *_: seen.append(_shown(module)))
    for step in range(6):
        last = step % 3 == 2
        model.set_requires_gradient_sync(last)
        model(_batch(step, rank)).float().square().mean().backward()
        seen.append(_shown(model))
        model[0].unshard()
        seen.append(_shown(model[0]))
        if after_backward:
            model[0].reshard()
        if last:
            units = [unit_of(child) for child in model] if impl is FULLSHARD else []
            assert all(p.gradients.live_held() is None for unit in units if unit is not None for p in unit.params)
            model.reshard()
            for child in model:
                child.reshard()
            seen.append([None if p.grad is None else p.grad.full_tensor() for p in model.parameters()])
            model.zero_grad()
    return seen


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after_forward", [True, False])
@pytest.mark.parametrize("after_backward", [True, False])
def test_full_parameters_show_what_torch_shows(policy: str, after_forward: bool, after_backward: bool) -> None:
    """Full gradients of this rank alone, not averaged, in the reduce dtype. Torch shows those in another dtype than the
    parameters' from 2.15 on; before, it keeps them elsewhere, and only what was reduced can be compared."""
    hidden = ", reduced" in policy and "param_dtype_override_fn" not in {f.name for f in fields(TORCH_POLICY)}

    def rank_main(rank: int, impl: Implementation) -> tuple[int, int]:
        options = {"reshard_after_forward": after_forward, "reshard_after_backward": after_backward}
        theirs = _train(TORCH, rank, policy, **options)
        ours = _train(FULLSHARD, rank, policy, **options)
        assert len(ours) == len(theirs)
        shown, eps = 0, max(torch.finfo(dtype).eps for dtype in (torch.float32, *POLICIES[policy].values()))
        for position, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
            assert hidden or [g is None for g in mine] == [g is None for g in their], position
            for a, b in zip(mine, their, strict=True):
                if a is None or b is None:
                    continue
                assert a.dtype is b.dtype
                if len(mine) == 6 and position % 10 == 9:
                    # Reduced: the sum over the ranks is rounded once here and for each rank there.
                    assert torch.allclose(a, b, rtol=0, atol=float(WORLD * eps * b.abs().max())), position
                else:
                    assert torch.equal(a, b), position
                    shown += 1
        return shown, len(ours)

    for shown, _ in run(rank_main, FULLSHARD):
        assert bool(shown) != hidden


def _two_held(model: Any, rank: int) -> None:
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model(_batch(0, rank)).square().mean().backward()


def _reduced(model: Any, rank: int) -> list[Tensor]:
    model.set_requires_gradient_sync(True)
    model(_batch(1, rank)).square().mean().backward()
    for module in (model, *model):
        module.reshard()
    return [p.grad.full_tensor() for p in model.parameters()]


def _edit(kind: str, model: Any) -> None:
    for p in model.parameters():
        if kind == "scaled":
            p.grad.mul_(0.5)
        elif kind == "replaced":
            p.grad = p.grad * 0.5
        elif kind == "cleared":
            p.grad = None
        elif kind == "zeroed":
            p.grad.zero_()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["scaled", "replaced", "cleared", "zeroed"])
def test_what_the_user_does_with_them_counts(kind: str) -> None:
    """As in torch: they are the gradients that the last micro-batch reduces."""

    def rank_main(rank: int, impl: Implementation) -> None:
        found = []
        for each in (TORCH, FULLSHARD):
            model = sharded(each, probes())
            _two_held(model, rank)
            _edit(kind, model)
            found.append(_reduced(model, rank))
        assert all(
            torch.allclose(a, b, rtol=0, atol=float(4 * torch.finfo(a.dtype).eps * a.abs().max()))
            for a, b in zip(*found, strict=True)
        )

    run(rank_main, FULLSHARD)


def test_a_failed_backward_leaves_them_as_they_were() -> None:
    """Autograd adds in place to what stands on `.grad`: it must not find them there."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(FULLSHARD, probes())
        _two_held(model, rank)
        params = list(model.parameters())
        before = [p.grad.clone() for p in params]
        # Behind the second and the third module, whose gradients have arrived then.
        model[0].register_forward_hook(lambda _, __, hidden: hidden.register_hook(lambda _: 1 / 0) and None)
        out = model(_batch(1, rank))
        with pytest.raises(ZeroDivisionError):
            out.square().mean().backward()
        model.reset_iter_state()
        for p, gradient in zip(params, before, strict=True):
            assert p.grad is not None and torch.equal(p.grad, gradient)

    run(rank_main, FULLSHARD)


def test_they_take_no_memory_of_their_own_and_the_report_counts_them_once() -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(FULLSHARD, probes())
        _two_held(model, rank)
        held = sum(row.measured.gradients for row in fullshard.report(model).units)
        storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
        assert held == sum(p.grad.nbytes for p in model.parameters()) == sum(storages.values())
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert sum(row.measured.gradients for row in fullshard.report(model).units) == 0

    run(rank_main, FULLSHARD)


@pytest.mark.parametrize("held", [True, False])
def test_each_window_is_the_sum_of_its_micro_batches(held: bool) -> None:
    """Two are held in each, or reduced before the last; nothing of the first window is in the second."""

    def rank_main(rank: int, impl: Implementation) -> None:
        plain, model = seeded(probes), sharded(FULLSHARD, seeded(probes))
        for window in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(not held or micro == 2)
                for each in (plain, model):
                    each(_batch(3 * window + micro, 0)).square().mean().backward()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(b.grad.full_tensor(), a.grad)
            plain.zero_grad()
            model.zero_grad()

    run(rank_main, FULLSHARD)


def test_a_parameter_has_one_hook_however_many_micro_batches_are_held() -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(FULLSHARD, probes())
        _two_held(model, rank)
        for step in range(2, 4):
            model(_batch(step, rank)).square().mean().backward()
        fulls = [p.full for child in model for p in unit_of(child).params]  # type: ignore[union-attr]
        assert fulls and {len(full._backward_hooks or ()) for full in fulls} == {1}

    run(rank_main, FULLSHARD)


def test_the_optimizer_clears_them_too_and_a_step_over_full_parameters_is_refused() -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(FULLSHARD, probes())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _two_held(model, rank)
        wrong = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="full"):
            wrong.step()
        optimizer.zero_grad()
        model(_batch(1, rank)).square().mean().backward()
        shown = [p.grad.clone() for p in model.parameters()]
        alone = sharded(FULLSHARD, probes())
        alone.set_reshard_after_backward(False)
        alone.set_requires_gradient_sync(False)
        alone(_batch(1, rank)).square().mean().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(shown, alone.parameters(), strict=True))

    run(rank_main, FULLSHARD)


def test_a_model_with_shown_gradients_can_be_collected() -> None:
    def rank_main(rank: int, impl: Implementation) -> Any:
        model = sharded(FULLSHARD, probes())
        _two_held(model, rank)
        return weakref.ref(model), weakref.ref(unit_of(model[0]))

    found = run(rank_main, FULLSHARD, world=WORLD)
    gc.collect()
    assert all(model() is None and unit() is None for model, unit in found)
