"""Conformance: what roots share, setters that move no numbers, registered methods, what torch's own code looks for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.engine import unit_of
from fullshard.observe import record
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    Implementation,
    for_each_implementation,
    kinds,
    probes,
    run,
    sharded,
)
from tests.harness.installed import has, needs
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD, several


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


# ---- share_comm_ctx ------------------------------------------------------------------------------------------


def _chain(impl: Implementation, stages: int, share: bool) -> list[Any]:
    models = [sharded(impl, probes(4)) for _ in range(stages)]
    if share:
        impl.namespace.share_comm_ctx(models)
    return models


@behaviour("models that share_comm_ctx joins train as before", area="communication")
@for_each_implementation
def test_models_that_share_train_as_before(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        gradients = []
        for share in (False, True):
            stages = _chain(impl, 2, share)
            for _ in range(2):
                stages[1](stages[0](_batch(0, rank))).sum().backward()
            gradients.append([p.grad.full_tensor() for stage in stages for p in stage.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    run(rank_main, impl)


@pytest.mark.parametrize("late", [False, True])
def test_roots_share_buffers_and_the_limit_of_reductions(late: bool) -> None:
    """One backward through two models: they use one another's buffers, and have 2 reductions in flight, not 4."""

    def rank_main(rank: int, impl: Implementation) -> None:
        def measure(share: bool) -> tuple[int, int]:
            stages = _chain(impl, 2, share and not late)
            if late:
                stages[1](stages[0](_batch(0, rank))).sum().backward()
                if share:
                    fullshard.share_comm_ctx(stages)
            roots = [unit_of(stage).root for stage in stages]  # type: ignore[union-attr]
            if not late:
                # With its backward: one that may still come holds the messages of the next.
                stages[1](stages[0](_batch(0, rank))).sum().backward()
                roots = [unit_of(stage).root for stage in stages]  # type: ignore[union-attr]
            contexts = list(dict.fromkeys(root.shared for root in roots if root is not None))
            assert len(contexts) == (1 if share else 2)
            peak = 0

            def look(_: object) -> None:
                nonlocal peak
                peak = max(peak, sum(len(context.in_flight) for context in contexts))

            for root in roots:
                assert root is not None
                root.executor.listeners.append(look)
            stages[1](stages[0](_batch(0, rank))).sum().backward()
            assert not any(context.in_flight for context in contexts)
            return sum(context.pool.nbytes for context in contexts), peak

        alone_nbytes, alone_peak = measure(False)
        shared_nbytes, shared_peak = measure(True)
        assert (alone_peak, shared_peak) == (4, 2)
        assert shared_nbytes < alone_nbytes

    run(rank_main, FULLSHARD, world=several())


def test_a_failure_of_one_root_discards_its_own_reductions() -> None:
    """Those of the root it shares with are still handed over."""

    def rank_main(rank: int, impl: Implementation) -> None:
        first, second = _chain(impl, 2, True)
        first(_batch(0, rank)).sum().backward()
        expected = [p.grad.full_tensor() for p in first.parameters()]
        first.zero_grad()
        with torch.no_grad():
            second(first(_batch(0, rank)))
        roots = [unit_of(each).root for each in (first, second)]  # type: ignore[union-attr]
        under_way: list[int] = []

        def discard(_: Tensor) -> None:
            under_way.append(len(roots[0].shared.in_flight))  # type: ignore[union-attr]
            roots[1].reset()  # type: ignore[union-attr]

        # In the middle of the backward of the first, with its reductions in flight, the second one's are discarded.
        first[0].register_forward_hook(lambda _module, _args, output: output.register_hook(discard) and None)
        first(_batch(0, rank)).sum().backward()
        assert under_way and under_way[0] > 0
        assert all(torch.equal(p.grad.full_tensor(), e) for p, e in zip(first.parameters(), expected, strict=True))

    run(rank_main, FULLSHARD)


# ---- setters -------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(x)))


def _train_tokens(model: Any, ranks: list[int]) -> Trained:
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in ranks:
            tokens = torch.tensor([(step + 3 * rank) % 11, 2, 2, 7])
            (model(tokens).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@behaviour("set_unshard_in_backward(False): an embedding is not gathered in backward", area="communication")
@for_each_implementation
def test_an_embedding_is_not_gathered_in_backward(impl: Implementation) -> None:
    expected = _train_tokens(seeded(Tokens), list(range(WORLD)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = sharded(impl, seeded(Tokens))
        model.embedding.set_unshard_in_backward(False)
        seen: list[set[type]] = []
        model.layer.register_full_backward_hook(lambda *_: seen.append(kinds(model.embedding)))
        assert_same_training(_train_tokens(model, [rank]), expected)
        assert seen == [{DTensor}] * 3
        if impl is FULLSHARD:
            with record(model) as trace:
                model(torch.tensor([1, 2])).sum().backward()
            assert [kind for kind, unit in trace.commands if unit == "embedding"] == [
                "unshard",
                "wait",
                "reshard",
                "reduce",
            ]

    run(rank_main, impl)


@behaviour(
    "set_unshard_in_backward(False) for weights that backward reads is right nevertheless",
    area="communication",
    torch="better",
    reason="saved weights are watched, and gathered where they are read; torch fails in the backward",
)
def test_weights_that_backward_reads_all_the_same(impl: Implementation) -> None:
    expected = _train_tokens(seeded(Tokens), list(range(WORLD)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = sharded(impl, seeded(Tokens))
        model.layer.set_unshard_in_backward(False)
        assert_same_training(_train_tokens(model, [rank]), expected)

    run(rank_main, impl)


@behaviour("set_post_optim_event holds for one forward", area="surface")
@for_each_implementation
@pytest.mark.parametrize("after_the_first_forward", [False, True])
def test_the_event_of_the_optimizer_is_used_once(after_the_first_forward: bool, impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        if after_the_first_forward:
            model(_batch(0, rank))
        event = torch.Event()
        model.set_post_optim_event(event)
        alive = weakref.ref(event)
        # Nothing refers to it in a circle, so no collection is needed; in a process of many tests one takes a minute.
        del event
        assert alive() is not None
        model(_batch(0, rank))
        assert alive() is None

    run(rank_main, impl)


@pytest.mark.parametrize("wrong", ["now", 1, True])
def test_an_event_is_an_event(wrong: object) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        with pytest.raises(TypeError, match=r"event: expected .*, found .*; pass"):
            model.set_post_optim_event(wrong)

    run(rank_main, FULLSHARD, world=1)


@behaviour("_set_unshard_async_op changes no result", area="surface")
@for_each_implementation
def test_set_unshard_async_op(impl: Implementation) -> None:
    """With us it changes nothing: a prefetched gather is under way while the unit before it computes, with either."""

    def rank_main(rank: int, impl: Implementation) -> None:
        found, traces = [], []
        for value in (None, False, True):
            model = sharded(impl, probes())
            if value is not None:
                model._set_unshard_async_op(value)
            model(_batch(0, rank)).sum().backward()
            if impl is FULLSHARD:
                with record(model) as trace:
                    model(_batch(0, rank)).sum().backward()
                traces.append(trace.lines)
            else:
                model(_batch(0, rank)).sum().backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        if traces:
            assert traces[0] == traces[1] == traces[2]
            first = traces[0].index("  unshard 1")
            assert traces[0][first:].index("  wait 1") > 1, "in flight over the forward of the unit before it"
            with pytest.raises(TypeError, match="async_op: expected a bool, found 1"):
                model._set_unshard_async_op(1)

    run(rank_main, impl)


@behaviour("set_is_last_backward(False) keeps the order for the backwards to come", area="gradients")
@for_each_implementation
def test_set_is_last_backward(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        first, second = model(_batch(0, rank)).sum(), model(_batch(1, rank)).sum()
        model.set_is_last_backward(False)
        first.backward()
        model.set_is_last_backward(True)
        second.backward()
        once = sharded(impl, probes())
        (once(_batch(0, rank)).sum() + once(_batch(1, rank)).sum()).backward()
        for a, b in zip(model.parameters(), once.parameters(), strict=True):
            assert tolerance.close(a.grad.full_tensor(), b.grad.full_tensor())
        assert kinds(model) == {DTensor}

    run(rank_main, impl)


@behaviour("explicit prefetch lists gather what they name, where they say", area="prefetch")
@for_each_implementation
def test_prefetch_lists_have_an_effect(impl: Implementation) -> None:
    """In forward and in backward; asserted by what is gathered (ours: under way) when the unit that names it begins."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes(4))
        model[0].set_modules_to_forward_prefetch([model[2], model[3]])
        model[3].set_modules_to_backward_prefetch([model[1], model[0]])
        if impl is not FULLSHARD:
            model(_batch(0, rank)).sum().backward()  # no trace to look at: it is accepted
            return
        with record(model) as trace:
            model(_batch(0, rank)).sum().backward()
        forward = trace.lines.index("> pre_forward 0")
        assert trace.lines[forward + 1 : forward + 5] == ["  unshard 0", "  wait 0", "  unshard 2", "  unshard 3"]
        backward = trace.lines.index("> pre_backward 3")
        assert trace.lines[backward + 1 : backward + 5] == ["  unshard 3", "  wait 3", "  unshard 1", "  unshard 0"]

    run(rank_main, impl)


# ---- mixed imports, and what torch's own code looks for ------------------------------------------------------


def test_torch_s_policy_objects_are_accepted() -> None:
    """A program that changed only some of its imports."""

    def rank_main(rank: int, impl: Implementation) -> None:
        found = []
        for namespace in (torch_fsdp, fullshard):
            policy = namespace.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = sharded(impl, probes(), mp_policy=policy, offload_policy=namespace.OffloadPolicy())
            model(_batch(0, rank)).sum().backward()
            assert model[0].seen[0][2] is torch.bfloat16
            found.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    run(rank_main, FULLSHARD)


SEVERAL_GROUPS = has("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group")


def _pipeline_stage(model: Any, state: Any, batches: list[Tensor]) -> None:
    """What torch's pipelining does with a sharded stage: micro-batches without reduction, then one by hand."""
    for x in batches:
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    for each in state._state_ctx.all_states:
        # Stages up to 2.11 know one group of each state, or none.
        for group in each._fsdp_param_groups if SEVERAL_GROUPS else filter(None, [each._fsdp_param_group]):
            group.post_backward()
    state._root_post_backward_final_callback()


@behaviour("a pipeline stage reduces explicitly through fully_shard.state", area="communication")
@for_each_implementation
def test_a_pipeline_stage_reduces_by_hand(impl: Implementation) -> None:
    """torch's own function finds our state under its key."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model, once = sharded(impl, probes()), sharded(impl, probes())
        state: Any = torch_fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
        assert state is impl.fully_shard.state(model) is model._get_fsdp_state()  # type: ignore[attr-defined]
        _pipeline_stage(model, state, [_batch(0, rank), _batch(1, rank)])
        assert len(state._state_ctx.all_states) == 4
        (once(_batch(0, rank)).sum() + once(_batch(1, rank)).sum()).backward()
        for a, b in zip(model.parameters(), once.parameters(), strict=True):
            assert tolerance.close(a.grad.full_tensor(), b.grad.full_tensor())
        assert kinds(model) == {DTensor}

    run(rank_main, impl)


def test_reducing_by_hand_inside_a_backward_is_refused() -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        out = model(_batch(0, rank))
        out.register_hook(lambda _: model._get_fsdp_state()._root_post_backward_final_callback())
        with pytest.raises(RuntimeError, match="expected no backward to be running"):
            out.sum().backward()

    run(rank_main, FULLSHARD, world=1)


# ---- registered forward methods ------------------------------------------------------------------------------

# ---- registered forward methods ------------------------------------------------------------------------------


class Talker(nn.Module):
    """`encode` reads a weight of its own; `generate` calls forward and encode several times and reads it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale

    def encode(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        """What encode says."""
        return x * self.scale * factor

    def generate(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = self(x) + self.encode(x, factor=0.5) + self.scale
        return x

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError(f"{type(self.scale).__name__} {tuple(x.shape)}")


class Inheriting(Talker):
    pass


def _talker(impl: Implementation, methods: tuple[str, ...], *, root: bool, **options: Any) -> Any:
    talker = seeded(Inheriting)
    impl.fully_shard(talker.inner, **options)
    impl.fully_shard(talker, **options)
    for method in methods:
        impl.namespace.register_fsdp_forward_method(talker, method)
    return talker if root else impl.fully_shard(nn.Sequential(talker))


def _train_method(model: Any, talker: Any, method: Callable[[Any, Tensor], Tensor], ranks: list[int]) -> Trained:
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in ranks:
            (method(talker, _batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _encode(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker.encode(x, factor=2.0)
    return out


def _encode_and_forward(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker(talker.encode(x)) + talker.encode(talker(x))
    return out


def _generate(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker.generate(x, 3)
    return out


def _assert_method_trains(
    impl: Implementation,
    method: Callable[[Any, Tensor], Tensor],
    *,
    root: bool = True,
    world: int = WORLD,
    **options: Any,
) -> None:
    plain = seeded(Inheriting)
    expected = _train_method(plain if root else nn.Sequential(plain), plain, method, list(range(world)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model = _talker(impl, ("encode", "generate"), root=root, **options)
        talker = model if root else model[0]
        if not root:
            model(_batch(0, rank))  # the outermost module runs first
        found = _train_method(model, talker, method, [rank])
        assert_same_training(found, expected)
        assert kinds(model) == {DTensor}

    run(rank_main, impl, world=world)


def _recomputed(talker: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(talker.encode, x.requires_grad_(), use_reentrant=reentrant)
    return out


@behaviour("a registered method may be recomputed", area="recomputation")
@for_each_implementation
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_registered_method_may_be_recomputed(reentrant: bool, impl: Implementation) -> None:
    _assert_method_trains(impl, partial(_recomputed, reentrant=reentrant), root=False)


@behaviour("a registered method gathers, frees and has gradients as forward", area="surface")
@for_each_implementation
@pytest.mark.parametrize("method", [_encode, _encode_and_forward])
def test_a_registered_method_trains(method: Callable[[Any, Tensor], Tensor], impl: Implementation) -> None:
    for root in (True, False):
        _assert_method_trains(impl, method, root=root)


@behaviour(
    "a registered method may call forward and other registered methods",
    area="surface",
    torch="better",
    reason="torch frees at the end of the inner call, and what is left of the method finds sharded parameters",
)
def test_a_registered_method_may_call_forward(impl: Implementation) -> None:
    for root in (True, False):
        _assert_method_trains(impl, _generate, root=root, reshard_after_forward=True)


@pytest.mark.parametrize("world", [1, 3])
def test_registered_methods_train_in_any_world(world: int) -> None:
    _assert_method_trains(FULLSHARD, _generate, world=world)
    _assert_method_trains(FULLSHARD, _encode_and_forward, root=False, world=world)


@behaviour("a registered method casts inputs and outputs, and runs without gradients", area="surface")
@for_each_implementation
def test_a_registered_method_casts_and_runs_without_gradients(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = _talker(impl, ("encode",), root=True, mp_policy=policy, reshard_after_forward=True)
        with torch.no_grad():
            out = model.encode(torch.ones(2, 5), factor=2.0)
        expected = (2 * seeded(Talker).scale.detach()).bfloat16().double().expand(2, 5)
        assert out.dtype is torch.float64 and torch.equal(out, expected)
        assert kinds(model) == {DTensor}
        assert model.encode.__name__ == "encode" and model.encode.__doc__ == "What encode says."

    run(rank_main, impl)


@behaviour("an exception in a registered method is the user's, and the next call works", area="failures")
@for_each_implementation
@needs("torch.distributed.fsdp.FSDPModule.reset_iter_state", half="torch")
def test_an_exception_in_a_registered_method(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = _talker(impl, ("encode", "fail"), root=True)
        with pytest.raises(ValueError, match=r"Parameter \(6, 5\)"):
            model.fail(_batch(0, rank))
        if impl is not FULLSHARD:
            model.reset_iter_state()
        model.encode(_batch(0, rank)).sum().backward()
        plain = [seeded(Talker) for _ in range(WORLD)]
        for other, talker in enumerate(plain):
            talker.encode(_batch(0, other)).sum().backward()
        expected = sum(talker.scale.grad for talker in plain) / WORLD  # type: ignore[misc]
        assert tolerance.close(model.scale.grad.full_tensor(), expected)

    run(rank_main, impl)


def test_an_exception_in_a_nested_call_may_be_caught() -> None:
    """By the method around it, which continues with full parameters."""

    class Catching(Talker):
        def try_twice(self, x: Tensor) -> Tensor:
            try:
                self.fail(x)
            except ValueError:
                return self.encode(x) + self.scale
            raise AssertionError("fail did not fail")

    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Catching)
        impl.fully_shard(model)
        for method in ("fail", "encode", "try_twice"):
            fullshard.register_fsdp_forward_method(model, method)
        for _ in range(2):
            model.zero_grad()
            x = torch.ones(2, 5)
            model.try_twice(x).sum().backward()
            assert torch.equal(model.scale.grad.full_tensor(), torch.full((5,), 4.0))
            assert kinds(model) == {DTensor}

    run(rank_main, FULLSHARD)


def test_registering_is_done_once_and_refuses_what_runs_later() -> None:
    class Streaming(nn.Linear):
        def stream(self, x: Tensor) -> Any:
            yield self(x)

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(seeded(lambda: Streaming(2, 2)))
        fullshard.register_fsdp_forward_method(model, "extra_repr")
        registered = model.extra_repr
        fullshard.register_fsdp_forward_method(model, "extra_repr")
        assert model.extra_repr is registered and model.extra_repr() == nn.Linear(2, 2).extra_repr()
        with pytest.raises(NotImplementedError, match=r"expected .*, found 'stream'.*; call unshard\(\)"):
            fullshard.register_fsdp_forward_method(model, "stream")
        theirs = torch_fsdp.fully_shard(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="sharded by torch"):
            fullshard.register_fsdp_forward_method(theirs, "extra_repr")

    run(rank_main, FULLSHARD)
