"""`finalize_backward`: steps that end where the user says, beside torch's (from 2.15 on) and plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, for_each_implementation, probes, sharded
from tests.harness.models import BY_NAME, Case, Trained, adamw, assert_same_training, collect, seeded, train_reference
from tests.harness.threads import run_ranks

# torch has it from 2.15 on.
STEPS = 3


def _manual(impl: Implementation, case: Case, **options: Any) -> Any:
    model: Any = case.shard(case.build(), impl.fully_shard, **options)
    model.set_manual_backward_finalization(True)
    return model


# ---- numbers -------------------------------------------------------------------------------------------------


def _at_once(model: Any) -> None:
    assert model.finalize_backward() is None


def _by_handle(model: Any) -> None:
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    handle.wait()  # nothing is left


def _train(
    impl: Implementation, case: Case, rank: int, micro: int, end: Callable[[Any], None], **options: Any
) -> Trained:
    model = _manual(impl, case, **options)
    optimizer = adamw(model.parameters(), watched=False)
    for step in range(STEPS):
        for i in range(micro):
            # Several backwards keep their gradients; one alone sends them while it runs.
            model.set_requires_gradient_sync(micro == 1)
            (case.loss(model, case.batch(step * micro + i, rank)) / micro).backward()
        model.set_requires_gradient_sync(True)
        end(model)
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _plain(case: Case, world: int, micro: int) -> Trained:
    batches = [[case.batch(s * micro + i, rank) for rank in range(world) for i in range(micro)] for s in range(STEPS)]
    return train_reference(case.build(), case.loss, batches)


@behaviour(
    "`set_manual_backward_finalization`, `finalize_backward`: a step ended by them trains as the plain model",
    area="gradients",
    since="2.15",
)
@for_each_implementation
@pytest.mark.parametrize(
    ("name", "micro", "end"),
    [
        ("residual", 1, _at_once),
        ("tied", 3, _by_handle),
        pytest.param("residual", 2, _at_once, marks=pytest.mark.slow),
        pytest.param("frozen", 1, _by_handle, marks=pytest.mark.slow),
        pytest.param("tiny_dims", 2, _at_once, marks=pytest.mark.slow),
    ],
)
def test_a_step_ended_by_hand_trains_as_the_plain_model(
    impl: Implementation, name: str, micro: int, end: Callable[[Any], None]
) -> None:
    case = BY_NAME[name]
    for trained in run_ranks(2, lambda rank: _train(impl, case, rank, micro, end)):
        assert_same_training(trained, _plain(case, 2, micro))


@behaviour("`finalize_backward` with replicas: a step trains as the plain model", area="gradients", since="2.15")
@for_each_implementation
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_with_replicas(impl: Implementation, micro: int) -> None:
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> Trained:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return _train(impl, case, rank, micro, _by_handle, mesh=mesh)

    for trained in run_ranks(4, rank_main):
        assert_same_training(trained, _plain(case, 4, micro))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)},
    ],
    ids=["kept", "offload", "mixed"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_bitwise_the_end_of_a_backward(world: int, options: dict[str, Any]) -> None:
    """One backward, and three of which the last reduces."""
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> list[Trained]:
        found = []
        for manual in (False, True):
            model: Any = case.shard(case.build(), fully_shard, **options)
            model.set_manual_backward_finalization(manual)
            optimizer = adamw(model.parameters(), watched=False)
            for step, micro in enumerate((1, 3)):
                for i in range(micro):
                    model.set_requires_gradient_sync(i == micro - 1)
                    case.loss(model, case.batch(3 * step + i, rank)).backward()
                if manual:
                    model.finalize_backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(collect(model, optimizer))
        return found

    for automatic, by_hand in run_ranks(world, rank_main):
        assert_same_training(by_hand, automatic, eps_multiple=0)


@pytest.mark.slow
def test_partial_sums_over_replicas_are_kept_for_a_later_step_of_all() -> None:
    """torch refuses `set_requires_all_reduce(False)` here."""
    case = BY_NAME["residual"]

    def rank_main(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for manual in (False, True):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model: Any = case.shard(case.build(), fully_shard, mesh=mesh)
            model.set_manual_backward_finalization(manual)
            for i in range(2):
                model.set_requires_all_reduce(i == 1)
                case.loss(model, case.batch(i, rank)).backward()
                if manual:
                    model.finalize_backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        return found

    for automatic, by_hand in run_ranks(4, rank_main):
        assert automatic.keys() == by_hand.keys()
        assert all(torch.equal(automatic[name], by_hand[name]) for name in automatic)


# ---- when ----------------------------------------------------------------------------------------------------


def test_nothing_is_on_grad_before_the_end() -> None:
    """Of one backward or several; what was there before the step stays, and hooks run at the end."""

    def rank_main(rank: int) -> None:
        model = sharded(FULLSHARD, probes())
        model.set_manual_backward_finalization(True)
        parameter = model[0].linear.weight
        seen: list[Tensor] = []
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
        x = torch.full((2, 5), rank + 1.0)
        model(x).pow(2).sum().backward()
        assert parameter.grad is None and not seen
        model.finalize_backward()
        first = parameter.grad.full_tensor()
        assert len(seen) == 1 and torch.equal(seen[0], first)
        model(x).pow(2).sum().backward()
        assert torch.equal(parameter.grad.full_tensor(), first)
        handle = model.finalize_backward(async_op=True)
        assert torch.equal(parameter.grad.full_tensor(), first) and len(seen) == 1
        handle.wait()
        assert torch.equal(parameter.grad.full_tensor(), first + first) and len(seen) == 2

    run_ranks(2, rank_main)


@behaviour("`finalize_backward` frees what backwards kept full", area="when parameters are full", since="2.15")
@for_each_implementation
def test_it_frees_what_pipeline_schedules_keep_full(impl: Implementation) -> None:
    """`set_reshard_after_backward(False)` in all backwards, True before the end."""

    def rank_main(rank: int) -> None:
        model = sharded(impl, probes())
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(torch.ones(2, 5)).pow(2).sum().backward()
        assert all(type(p) is nn.Parameter for p in model.parameters())
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        assert all(type(p) is not nn.Parameter and p.grad is not None for p in model.parameters())

    run_ranks(2, rank_main)


@behaviour(
    "`finalize_backward(async_op=True)` returns a `GradientReductionHandle`, also where nothing is to be reduced",
    area="surface",
    since="2.15",
)
@for_each_implementation
def test_where_it_does_nothing(impl: Implementation) -> None:
    """Before the first forward, and after a backward that reached no sharded parameter."""

    def rank_main(rank: int) -> None:
        model = sharded(impl, probes())
        assert model.finalize_backward() is None
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, impl.namespace.GradientReductionHandle)
        handle.wait()
        model.set_manual_backward_finalization(True)
        x = torch.ones(2, 5, requires_grad=True)
        model(x)
        x.sum().backward()
        model.finalize_backward()
        assert all(p.grad is None for p in model.parameters())

    run_ranks(2, rank_main)


def test_a_call_between_forward_and_backward_changes_no_value() -> None:
    """torch's documents ask not to."""

    def rank_main(rank: int) -> None:
        found = []
        for early in (False, True):
            model = sharded(FULLSHARD, probes())
            model.set_manual_backward_finalization(True)
            for _ in range(2):
                loss = model(torch.full((2, 5), rank + 1.0)).pow(2).sum()
                if early:
                    model.finalize_backward()
                loss.backward()
                model.finalize_backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    run_ranks(2, rank_main)


# ---- errors --------------------------------------------------------------------------------------------------


def _used(impl: Implementation, *, manual: bool = True) -> Any:
    model = sharded(impl, probes())
    model.set_manual_backward_finalization(manual)
    return model


def _backward(model: Any) -> None:
    model(torch.ones(2, 5)).pow(2).sum().backward()


def _below_the_root(model: Any) -> None:
    _backward(model)
    model.finalize_backward()
    model[0].finalize_backward()


def _set_below_the_root(model: Any) -> None:
    model[0].set_manual_backward_finalization(True)
    _backward(model)


def _set_below_the_root_later(model: Any) -> None:
    _backward(model)
    model.finalize_backward()
    model[0].set_manual_backward_finalization(True)


def _automatic(model: Any) -> None:
    model.set_manual_backward_finalization(False)
    _backward(model)
    model.finalize_backward()


def _changed(model: Any) -> None:
    _backward(model)
    model.set_manual_backward_finalization(False)


def _changed_within_a_step(model: Any) -> None:
    model.set_manual_backward_finalization(False)
    model.set_is_last_backward(False)
    _backward(model)
    model.set_manual_backward_finalization(True)


def _twice(model: Any) -> None:
    _backward(model)
    model.finalize_backward(async_op=True)
    model.finalize_backward()


def _forward_too_early(model: Any) -> None:
    _backward(model)
    model.finalize_backward(async_op=True)
    model(torch.ones(2, 5))


def _reset(model: Any) -> None:
    _backward(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()


def _within_backward(model: Any) -> None:
    x = torch.ones(2, 5, requires_grad=True)
    x.register_hook(lambda _: model.finalize_backward())
    model(x).sum().backward()


def _changed_within_backward(model: Any) -> None:
    model.set_manual_backward_finalization(False)
    x = torch.ones(2, 5, requires_grad=True)
    x.register_hook(lambda _: model.set_manual_backward_finalization(True))
    model(x).sum().backward()


BOTH = {
    "below the root": _below_the_root,
    "set below the root": _set_below_the_root,
    "set below the root after a step": _set_below_the_root_later,
    "in the automatic mode": _automatic,
    "the mode changed between backward and end": _changed,
    "the mode changed within a step": _changed_within_a_step,
    "twice": _twice,
    "a forward before its wait": _forward_too_early,
    "its wait after a reset": _reset,
    "inside of a backward": _within_backward,
    "the mode changed inside of a backward": _changed_within_backward,
}


def _step_too_early(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model)
    optimizer.step()


def _step_under_way(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model)
    model.finalize_backward(async_op=True)
    optimizer.step()


def _step_of_kept(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    _backward(model)
    optimizer.step()


def _forgotten(model: Any) -> None:
    _backward(model)
    _backward(model)


def _forgotten_before_evaluation(model: Any) -> None:
    _backward(model)
    with torch.no_grad():
        model(torch.ones(2, 5))


def _two_that_reduce(model: Any) -> None:
    first, second = (model(torch.ones(2, 5)).sum() for _ in range(2))
    first.backward()
    second.backward()


def _failed(model: Any) -> None:
    x = torch.ones(2, 5, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    model.finalize_backward()


OURS = {
    "a step of the optimizer before it": _step_too_early,
    "a step of the optimizer before its wait": _step_under_way,
    "a step of the optimizer with gradients that were kept": _step_of_kept,
    "a second step without it": _forgotten,
    "an evaluation without it": _forgotten_before_evaluation,
    "two backwards that reduce before it": _two_that_reduce,
    "after a backward that failed": _failed,
}


@pytest.mark.sample(6)
@behaviour("refused, by the same type of error: `finalize_backward`, {case}", area="errors", since="2.15")
@for_each_implementation
@pytest.mark.parametrize("case", BOTH)
def test_refused_as_by_torch(impl: Implementation, case: str) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(RuntimeError) as caught:
            BOTH[case](_used(impl))
        if impl is FULLSHARD:
            assert "expected" in str(caught.value) and "found" in str(caught.value) and "; " in str(caught.value)

    run_ranks(2, rank_main)


@behaviour(
    "`finalize_backward`: an error that says what to do, {case}",
    area="errors",
    torch="better",
    reason="torch says nothing, and a step trains on what was there before, or on nothing; or its error names nothing",
    since="2.15",
)
@pytest.mark.parametrize("case", OURS)
def test_refused_where_torch_says_nothing(impl: Implementation, case: str) -> None:
    """A step would train on what was there before, or on nothing."""

    def rank_main(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)expected .* found .*"):
            OURS[case](_used(impl))

    run_ranks(2, rank_main)


def test_the_cure_of_a_forgotten_end_is_to_call_it() -> None:
    def rank_main(rank: int) -> None:
        model = _used(FULLSHARD)
        _backward(model)
        with pytest.raises(RuntimeError, match=r"call finalize_backward\(\) on the root"):
            model(torch.ones(2, 5))
        model.finalize_backward()
        once = [p.grad.full_tensor() for p in model.parameters()]
        _backward(model)
        model.finalize_backward()
        assert all(torch.equal(p.grad.full_tensor(), 2 * g) for p, g in zip(model.parameters(), once, strict=True))

    run_ranks(2, rank_main)


def test_models_that_share_buffers_wait_for_each_other() -> None:
    """As torch's do; one after the other is right."""

    def rank_main(rank: int) -> None:
        first, second = (_used(FULLSHARD) for _ in range(2))
        fullshard.share_comm_ctx([first, second])
        assert first._get_fsdp_state()._comm_ctx is second._get_fsdp_state()._comm_ctx
        alone = _used(FULLSHARD)
        assert alone._get_fsdp_state()._comm_ctx is not first._get_fsdp_state()._comm_ctx
        for model in (alone, first, second):
            _backward(model)
        handle = first.finalize_backward(async_op=True)
        for call in (lambda: second(torch.ones(2, 5)), second.finalize_backward):
            with pytest.raises(RuntimeError, match=r"shares buffers.*GradientReductionHandle"):
                call()
        alone.finalize_backward()
        handle.wait()
        second.finalize_backward()
        for model in (first, second):
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())

    run_ranks(2, rank_main)


# ---- failures ------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["forward", "backward", "end", "wait"])
def test_a_failed_step_leaves_earlier_micro_batches_and_nothing_else(where: str) -> None:
    """Bitwise what it would have been: the failed micro-batch, or the end, is done again."""

    def rank_main(rank: int) -> None:
        found = []
        for fails in (False, True):
            model = _used(FULLSHARD)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                model.set_requires_gradient_sync(False)
                for i in range(2):
                    x = torch.full((2, 5), rank + i + step + 1.0, requires_grad=True)
                    if fails and step == 1 and i == 1 and where in ("forward", "backward"):
                        _fail(model, x, where)
                    model(x).pow(2).sum().backward()
                model.set_requires_gradient_sync(True)
                if fails and step == 1 and where in ("end", "wait"):
                    _fail_at_the_end(model, where)
                model.finalize_backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(collect(model, optimizer))
        assert_same_training(found[1], found[0], eps_multiple=0)

    run_ranks(2, rank_main)


def _fail(model: Any, x: Tensor, where: str) -> None:
    if where == "forward":
        handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    else:
        handle = x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).pow(2).sum().backward()
    handle.remove()


def _fail_at_the_end(model: Any, where: str) -> None:
    if where == "wait":
        reduction = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="discarded"):
            reduction.wait()
        return
    handle = model[0].linear.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.finalize_backward()
    handle.remove()
    # All ranks meet in a forward after a failure that they heard of.
    with torch.no_grad():
        model(torch.ones(2, 5))


def test_reset_discards_what_a_backward_sent() -> None:
    def rank_main(rank: int) -> None:
        model = _used(FULLSHARD)
        _backward(model)
        model.reset_iter_state()
        model.finalize_backward()
        assert all(p.grad is None for p in model.parameters())
        _backward(model)
        model.finalize_backward()
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(2, rank_main)


def test_a_handle_of_a_step_that_was_discarded_does_not_end_the_next() -> None:
    def rank_main(rank: int) -> None:
        model = _used(FULLSHARD)
        _backward(model)
        old = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        _backward(model)
        new = model.finalize_backward(async_op=True)
        with pytest.raises(RuntimeError, match="the step was discarded"):
            old.wait()
        assert all(p.grad is None for p in model.parameters())
        new.wait()
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(2, rank_main)


# ---- ranks that differ -----------------------------------------------------------------------------------------


def test_ranks_in_different_modes_are_named() -> None:
    """The first message of a backward carries the mode, and both ranks raise where they wait for it."""

    def rank_main(rank: int) -> None:
        model = _used(FULLSHARD, manual=rank == 0)
        with pytest.raises(fullshard.RanksDisagree, match="set_manual_backward_finalization.*rank"):
            _backward(model)
            model.finalize_backward()
        assert all(p.grad is None for p in model.parameters())

    run_ranks(2, rank_main)


def test_a_rank_that_forgets_the_end_is_named() -> None:
    """It continues with the next micro-batch, and would wait for gathers while the other one waits for reductions."""

    def rank_main(rank: int) -> None:
        model = _used(FULLSHARD)
        model.set_requires_gradient_sync(False)
        _backward(model)
        model.set_requires_gradient_sync(True)
        with pytest.raises(fullshard.RanksDisagree, match=r"(?s)rank 0.*rank 1"):
            if rank == 0:
                model.finalize_backward()
            else:
                model(torch.ones(2, 5))

    run_ranks(2, rank_main)


def test_a_frozen_unit_has_no_gradient() -> None:
    """On no rank."""

    def rank_main(rank: int) -> None:
        model = seeded(lambda: nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
        root: Any = fully_shard(nn.Sequential(fully_shard(model[0]), fully_shard(model[1])))
        root.set_manual_backward_finalization(True)
        model[1].requires_grad_(False)
        root(torch.ones(1, 3)).sum().backward()
        root.finalize_backward()
        assert model[0].weight.grad is not None and model[1].weight.grad is None

    run_ranks(2, rank_main)
