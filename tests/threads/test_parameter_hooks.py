"""Hooks that users put on sharded parameters: when they run, what they see, and what becomes of what they return."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, Implementation, each_world, for_each_implementation, run
from tests.harness.models import seeded
from tests.harness.threads import WORLD
from tests.threads.programs import Model, batch, compare_gradients, part, shard


def _base() -> Any:
    return seeded(Model)


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).pow(2).mean()


def _edit(model: nn.Module, seen: list[Tensor]) -> None:
    """Hooks that multiply by 3: by what they return, in place without returning anything, and two behind each other."""

    def in_place(gradient: Tensor) -> None:
        gradient.mul_(3.0)

    parameters = dict(model.named_parameters())
    parameters["layers.0.up.weight"].register_hook(lambda gradient: gradient * 3.0)
    parameters["layers.1.norm.bias"].register_hook(in_place)
    parameters["head.weight"].register_hook(lambda gradient: gradient * 1.5)
    parameters["head.weight"].register_hook(lambda gradient: gradient * 2.0)
    parameters["embedding.weight"].register_hook(lambda gradient: seen.append(gradient.clone()))


@behaviour(
    "`parameter.register_hook` sees the reduced gradient of each backward, and what it returns takes its place",
    area="gradients",
    torch="better",
    reason="torch never calls them: the sharded parameter is in no graph",
)
@each_world
def test_tensor_hooks_change_gradients_as_in_the_plain_model(world: int, impl: Implementation) -> None:
    """With an accumulation of two reductions in the second step, and one of held gradients in the third."""
    base = _base()

    def rank_main(rank: int, impl: Implementation) -> None:
        reference = copy.deepcopy(base)
        model = shard(copy.deepcopy(base), impl)
        seen: list[Tensor] = []
        of_reference: list[Tensor] = []
        _edit(model, seen)
        _edit(reference, of_reference)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        tolerance.watch(optimizers[1])
        for step, micro_batches in enumerate((1, 2, 2)):
            for i in range(micro_batches):
                model.set_requires_gradient_sync(step < 2 or i == micro_batches - 1)
                tokens = batch(world, 10 * step + i)
                _loss(model, part(tokens, rank)).backward()
                (sum(_loss(reference, part(tokens, r)) for r in range(world)) / world).backward()
            compare_gradients(model, reference, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        tolerance.assert_parameters_close(model, reference, optimizers[1])
        # Once for each reduction: the two backwards of the last step had one together.
        assert len(seen) == 4 and len(of_reference) == 5
        wanted = [*of_reference[:3], of_reference[3] + of_reference[4]]
        for ours, theirs in zip(seen, wanted, strict=True):
            whole: Any = ours
            tolerance.assert_close(whole.full_tensor(), theirs)

    run(rank_main, impl, world=world)


def test_when_hooks_run_and_what_they_see() -> None:
    """Tensor hooks before anything is on `.grad`, post-accumulate hooks behind, with gradients off; all ranks in the
    same order, so that a hook may communicate. A sum that stays within the replicas of a shard is no gradient yet."""

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(_base(), impl, mesh=mesh, mp_policy=policy)
        model.layers[0].up.weight.requires_grad_(False)
        model.layers[0].up.bias.requires_grad_(False)
        log: list[tuple[str, str]] = []
        norms: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                with pytest.raises(RuntimeError, match="require gradient"):
                    parameter.register_hook(lambda gradient: None)
                continue

            def before(gradient: DTensor, name: str = name, parameter: Any = parameter) -> None:
                assert not isinstance(parameter.grad, DTensor) or "Pending" in repr(parameter.grad)
                assert not torch.is_grad_enabled() and not gradient.requires_grad
                assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements
                assert gradient.dtype is torch.float32 and gradient.shape == parameter.shape
                norms[name] = gradient.full_tensor().norm()
                log.append(("before", name))

            def behind(parameter: Any, name: str = name) -> None:
                assert not torch.is_grad_enabled()
                assert torch.equal(parameter.grad.full_tensor().norm(), norms[name])
                log.append(("behind", name))

            parameter.register_hook(before)
            parameter.register_post_accumulate_grad_hook(behind)
        tokens = part(batch(4, 0), rank)
        model.set_requires_all_reduce(False)
        _loss(model, tokens).backward()
        assert not log
        model.set_requires_all_reduce(True)
        _loss(model, tokens).backward()
        kinds = [kind for kind, _ in log]
        names = [name for _, name in log[: len(log) // 2]]
        assert kinds == ["before"] * len(names) + ["behind"] * len(names)
        assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
        orders: list[Any] = [None] * 4
        dist.all_gather_object(orders, log)
        assert orders == [log] * 4

    run(rank_main, FULLSHARD, world=4)


class Raised(Exception):
    """By a hook, on purpose."""


def _raise(gradient: Tensor) -> None:
    raise Raised


# What a hook returns, and what is said of it.
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a number": (lambda gradient: 5, TypeError, r"head\.weight: .* found int"),
    "a plain tensor": (lambda gradient: gradient.full_tensor(), RuntimeError, r"found a plain tensor"),
    "another shape": (lambda gradient: gradient[1:], RuntimeError, r"found shape \(10, 6\)"),
    "another dtype": (lambda gradient: gradient.double(), RuntimeError, r"and dtype torch\.float64"),
    "an exception": (_raise, Raised, "^$"),
}


def test_what_hooks_return() -> None:
    """Other placements are brought to those of the parameter; what cannot be a gradient is refused, and then the step
    was not taken: no gradient is handed over, and the next one is right."""
    base = _base()

    def rank_main(rank: int, impl: Implementation) -> None:
        reference = copy.deepcopy(base)
        model = shard(copy.deepcopy(base), impl)
        tokens = part(batch(WORLD, 0), rank)
        for what, (hook, error, message) in WRONG.items():
            handle = model.head.weight.register_hook(hook)
            with pytest.raises(error, match=message):
                _loss(model, tokens).backward()
            handle.remove()
            assert all(p.grad is None for p in model.parameters()), what
        kept: list[Any] = []

        def replicated(gradient: DTensor) -> Tensor:
            kept.append(gradient.redistribute(placements=[Replicate()]) * 2.0)
            return kept[-1]

        def same_every_time(gradient: DTensor) -> Tensor:
            kept.append(gradient)
            return gradient

        model.head.weight.register_hook(replicated)
        model.head.bias.register_hook(lambda gradient: gradient.redistribute(placements=[Replicate()]))
        model.embedding.weight.register_hook(same_every_time)
        reference.head.weight.register_hook(lambda gradient: gradient * 2.0)
        for micro_batch in range(2):
            _loss(model, tokens).backward()
            assert model.head.weight.grad.placements == (Shard(0),)
            for r in range(WORLD):
                (_loss(reference, part(batch(WORLD, 0), r)) / WORLD).backward()
            if micro_batch == 0:
                copies = [tensor.full_tensor().clone() for tensor in kept]
        compare_gradients(model, reference, 0)
        # What a hook kept is its own: the second backward was not added to it.
        assert all(torch.equal(t.full_tensor(), c) for t, c in zip(kept[: len(copies)], copies, strict=True))

    run(rank_main, FULLSHARD)


@behaviour(
    "hooks that a parameter had before it was sharded stay with it",
    area="gradients",
    torch="better",
    reason="torch drops them, silently",
)
def test_hooks_stay_with_the_parameter(impl: Implementation) -> None:
    """Also through conversions, `to_empty` and `load_state_dict(assign=True)`; and their handles remove them."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)))
        log: list[str] = []
        handles = []
        for linear in model:
            handles.append(linear.weight.register_hook(lambda gradient: log.append("before")))
            handles.append(linear.weight.register_post_accumulate_grad_hook(lambda p: log.append("behind")))
        for linear in model:
            impl.fully_shard(linear)
        impl.fully_shard(model)

        def step() -> list[str]:
            log.clear()
            dtype = model[0].weight.dtype
            model(torch.ones(2, 5, dtype=dtype)).sum().backward()
            return list(log)

        every = ["before", "before", "behind", "behind"]
        assert step() == every
        model.double()
        assert step() == every
        state = {name: value.full_tensor().float() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model[0].weight.dtype is torch.float32
        model.zero_grad()
        assert step() == every
        model.to_empty(device="cpu")
        model.load_state_dict(state)
        model.zero_grad()
        assert step() == every
        for handle in handles:
            handle.remove()
        assert step() == []

    run(rank_main, impl)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@behaviour("an optimizer that steps in `register_post_accumulate_grad_hook`, as plain training", area="training")
@for_each_implementation
@each_world
def test_an_optimizer_in_backward(impl: Implementation, world: int) -> None:
    base = _base()

    def rank_main(rank: int, impl: Implementation) -> None:
        reference = copy.deepcopy(base)
        model = shard(copy.deepcopy(base), impl)
        for module in (model, reference):
            optimizers = {
                p: tolerance.watch(torch.optim.AdamW([p], lr=1e-2), terms=tolerance.TERMS) for p in module.parameters()
            }

            def step(parameter: Tensor, optimizers: Any = optimizers) -> None:
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()

            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(step)
        for i in range(3):
            tokens = batch(world, i)
            _loss(model, part(tokens, rank)).backward()
            (sum(_loss(reference, part(tokens, r)) for r in range(world)) / world).backward()
            assert all(p.grad is None for p in model.parameters())
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            whole: Any = ours
            limit = optimizers[theirs].tolerance.of_parameter(theirs)
            assert tolerance.largest(whole.full_tensor(), theirs) <= limit, name

    run(rank_main, impl, world=world)
