"""`replay`: a bit that flips in one of two runs of a step is told with its rank and parameter; nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.extras import Replay, ReplayError
from tests.harness.behaviours import behaviour
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part, shard

KINDS = ("shard", "received", "gradient", "reduced")


class Counting(Model):
    """With a buffer that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        self.seen += 1
        return super().forward(tokens, depth)


class Training:
    """A model and how it is trained; `flips` in one run of a step."""

    def __init__(self, rank: int, world: int, shape: tuple[int, ...] = (), **options: Any) -> None:
        if shape:
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self.rank, self.world = rank, world
        self.model = shard(seeded(Counting), **options)
        self.optimizer = fullshard.step_on_shards(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.runs = 0
        self.flip: Callable[[], Any] | None = None

    def step(self, number: int) -> Tensor:
        self.runs += 1
        handles = self.flip() if self.flip is not None else []
        loss = self.model(part(batch(self.world, number), self.rank)).pow(2).mean()
        loss.backward()
        for handle in handles or []:
            handle.remove()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def replay(self, number: int, **options: Any) -> Replay:
        return fullshard.replay(
            lambda: self.step(number), self.model, self.optimizer, stateful=[self.scheduler], **options
        )

    def state(self) -> list[Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values()]
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in (*tensors, rate)]


def flip_bit(tensor: Tensor, place: int, bit: int) -> None:
    """In the memory of a float32 tensor, at `place` modulo its size."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[place % bits.numel()] ^= 1 << bit if bit < 31 else -(1 << 31)


def injected(training: Training, kind: str, name: str, place: int, bit: int) -> list[Any]:
    """Flip one bit, now or in the backward that comes; hooks to remove."""
    module_name, _, own = name.rpartition(".")
    module: nn.Module = training.model.get_submodule(module_name)
    if kind == "shard":
        flip_bit(getattr(module, own).to_local().data, place, bit)  # as hardware does: nothing counts it
        return []
    if kind == "received":
        # The gathered parameter, when its module begins.
        return [module.register_forward_pre_hook(lambda m, _: flip_bit(getattr(m, own).data, place, bit))]
    if kind == "reduced":
        return [
            getattr(module, own).register_post_accumulate_grad_hook(
                lambda p: flip_bit(p.grad.to_local().data, place, bit)
            )
        ]

    def hook(gradient: Tensor) -> Tensor:
        wrong = gradient.clone()
        flip_bit(wrong, place, bit)
        return wrong

    handles: list[Any] = []
    handles.append(module.register_forward_pre_hook(lambda m, _: handles.append(getattr(m, own).register_hook(hook))))
    return handles


@pytest.mark.slow
@behaviour(
    "`fullshard.replay`: a bit that flips in one run of a step (shard, message, gradient) is named, with its rank",
    area="failures",
    torch="none",
    reason="torch has no such function",
)
def test_one_hundred_flipped_bits() -> None:
    """In a shard, a received parameter, a gradient before and behind its reduction; in either of the two runs."""
    world = 2

    def rank_main(rank: int) -> tuple[int, int, int]:
        training = Training(rank, world)
        training.step(0)
        names = [name for name, _ in training.model.named_parameters()]
        draw = random.Random(7)
        found = of_rank = named = 0
        for number in range(100):
            kind, owner = KINDS[number % 4], draw.randrange(world)
            rows = [n for n in names if kind in ("received", "gradient") or _owned(training.model, n, owner, world)]
            name, place, bit, run = draw.choice(rows), draw.randrange(1000), draw.randrange(32), draw.choice([1, 2])
            before = training.runs

            def flip() -> list[Any]:
                if training.runs - before != run or rank != owner:  # noqa: B023
                    return []
                return injected(training, kind, name, place, bit)  # noqa: B023

            training.flip = flip
            result = training.replay(number, on_difference="return")
            training.flip = None
            assert training.runs == before + 2
            found += not result.ok
            of_rank += result.rank == owner
            named += str(result.what).endswith(f" {name}")
            # From a good state again: values that a flipped exponent made would hide later ones.
            _reset(training, world)
        return found, of_rank, named

    for found, of_rank, named in run_ranks(world, rank_main):
        # What stays full until backward, the root, is looked at then: what it made wrong may come first.
        assert found >= 99 and of_rank >= 99 and named >= 95, (found, of_rank, named)


def _owned(model: nn.Module, name: str, rank: int, world: int) -> bool:
    """Whether `rank` has rows of it."""
    return len(model.get_parameter(name).shape) > 0 and rank < -(
        -model.get_parameter(name).shape[0] // -(-model.get_parameter(name).shape[0] // world)
    )


def _reset(training: Training, world: int) -> None:
    values = seeded(Counting).state_dict()
    training.model.load_state_dict(values)
    for state in training.optimizer.state.values():
        for value in state.values():
            value.zero_()


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "alone": (1, {}),
    "replicated": (4, {"shape": (2, 2)}),
    "kept full": (2, {"reshard_after_forward": False}),
    "a part is kept": (4, {"reshard_after_forward": 2}),
    "bfloat16": (2, {"mp_policy": fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_that_are_replayed_are_steps(setting: str) -> None:
    """No alarm, from the first step on; parameters, moments, buffers and rate are bitwise those of single steps."""
    world, options = SETTINGS[setting]

    def rank_main(rank: int) -> None:
        replayed, single = (Training(rank, world, **options) for _ in range(2))
        for number in range(6):
            result = replayed.replay(number)
            assert result.ok and result.rank is None and result.differing == ()
            assert torch.equal(result.value, single.step(number))
        assert replayed.runs == 12
        for found, wanted in zip(replayed.state(), single.state(), strict=True):
            assert torch.equal(found, wanted)
        assert all(p.grad is None for p in replayed.model.parameters())

    run_ranks(world, rank_main)


def test_what_an_earlier_step_left_full_is_none_of_the_replayed_one() -> None:
    """Weights that stay full behind backward are freed by the first run, and are those of before the step; the second
    run would free those of the first."""

    def rank_main(rank: int) -> None:
        training = Training(rank, 2, reshard_after_forward=False)
        training.model.set_reshard_after_backward(False)
        for number in range(0, 6, 2):
            training.step(number)
            assert training.replay(number + 1).ok

    run_ranks(2, rank_main)


def test_gradients_of_earlier_backwards_are_part_of_it() -> None:
    """`.grad` stands there when the step begins, and is added to; several optimizers; momentum that was not there."""

    def rank_main(rank: int) -> None:
        results = []
        for replays in (False, True):
            model = shard(seeded(Model))
            optimizers = [
                torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9),
                torch.optim.AdamW([*model.head.parameters(), *model.embedding.parameters()]),
            ]

            def step() -> None:
                model(part(batch(2, 1), rank)).pow(2).mean().backward()  # noqa: B023
                for optimizer in optimizers:  # noqa: B023
                    optimizer.step()

            model(part(batch(2, 0), rank)).pow(2).mean().backward()
            for _ in range(2):
                if replays:
                    assert fullshard.replay(step, model, optimizers).ok
                else:
                    step()
            results.append(
                [p.full_tensor() for p in model.parameters()] + [p.grad.full_tensor() for p in model.parameters()]
            )
        assert all(map(torch.equal, *results))

    run_ranks(2, rank_main)


def test_random_numbers_are_drawn_again_and_gradients_are_not_added_to_those_of_the_first_run() -> None:
    """One rank: threads share one random state. The step leaves its gradients, where there were none."""

    def rank_main(rank: int) -> None:
        model = shard(seeded(Model))

        def step() -> Tensor:
            factor = random.random()
            loss: Tensor = nn.functional.dropout(model(batch(1, 0)), 0.5).mul(factor).pow(2).mean()
            loss.backward()
            return loss.detach()

        result = fullshard.replay(step, model)
        assert result.ok, result
        left = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(5)
        random.seed(5)
        step()
        once = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        torch.manual_seed(5)
        random.seed(5)
        fullshard.replay(step, model)
        assert all(torch.equal(p.grad.full_tensor(), g) for p, g in zip(model.parameters(), once, strict=True))
        assert not all(map(torch.equal, left, once))

    run_ranks(1, rank_main)


def test_a_nan_is_no_difference() -> None:
    def rank_main(rank: int) -> None:
        training = Training(rank, 2)
        with torch.no_grad():
            training.model.seen.fill_(float("nan"))
        assert training.replay(0).ok
        assert training.model.seen.isnan().all()

    run_ranks(2, rank_main)


def test_a_step_that_is_no_function_of_its_state_is_told() -> None:
    """A counter of the caller's own decides: the first difference is on the rank where it does."""

    def rank_main(rank: int) -> None:
        training = Training(rank, 2)
        training.step(0)
        calls = 0

        def step() -> float:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == 2:
                with torch.no_grad():
                    training.model.seen[0] += 0.5
            training.step(1)
            return float(calls) if rank == 1 else 0.0

        with pytest.raises(ReplayError, match=r"differ first on rank 1, in buffer seen\. Memory, a link") as error:
            fullshard.replay(step, training.model, training.optimizer)
        found = error.value.replay
        assert found.differing == (("buffer seen", "the step's value") if rank == 1 else ())
        with pytest.raises(ReplayError, match="differ first on rank 1, in the step's value"):
            fullshard.replay(lambda: step() * 0 + calls * rank, training.model, training.optimizer)

    run_ranks(2, rank_main)


def test_what_is_refused_and_what_a_step_raises() -> None:
    def rank_main(rank: int) -> None:
        training = Training(rank, 2)
        with pytest.raises(ValueError, match="on_difference: expected one of 'raise', 'return', found 'warn'"):
            training.replay(0, on_difference="warn")
        training.model.set_requires_gradient_sync(False)
        training.model(part(batch(2, 0), rank)).sum().backward()
        with pytest.raises(RuntimeError, match="found a window of accumulation open .embedding.weight"):
            training.replay(0)
        training.model.zero_grad()
        training.model.set_requires_gradient_sync(True)

        def fails() -> None:
            raise KeyError("data")

        with pytest.raises(KeyError):
            fullshard.replay(fails, training.model, training.optimizer)
        assert training.replay(0).ok  # and nothing listens any more
        assert not training.model._unit().root.executor.listeners

    run_ranks(2, rank_main)
