"""`MicroBatches`: pieces that fit, and nothing left of those that did not. Out of memory is injected, or real: an
allocation that no machine has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.extras.micro_batches import is_out_of_memory
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, shard

SAMPLES = 8  # of a rank and step


class _Lack(torch.autograd.Function):
    """Identity whose backward finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lack: Callable[[], None]) -> Tensor:
        ctx.lack = lack
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.lack()
        return gradient, None


def allocator_raises() -> None:
    """What CUDA's allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")


def really() -> None:
    """What the allocator of the host raises."""
    torch.empty(1 << 55, dtype=torch.uint8)


class Memory:
    """A module that has memory for `limit` rows in forward and backward, from its `after`-th call on."""

    def __init__(
        self, module: nn.Module, limit: int, where: str = "forward", lack: Callable[[], None] = really, after: int = 0
    ) -> None:
        self.limit, self.where, self.lack, self.after = limit, where, lack, after
        self.calls = self.failures = 0
        module.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Any:
        self.calls += 1
        if len(args[0]) <= self.limit or self.calls <= self.after:
            return None
        self.failures += 1
        if self.where == "forward":
            self.lack()
        return _Lack.apply(output, self.lack)


def _inputs(rank: int, step: int) -> Tensor:
    return batch(4 * SAMPLES, step)[rank * SAMPLES : (rank + 1) * SAMPLES]


def _loss_of(model: Any, inputs: Tensor) -> Callable[[slice], Tensor]:
    return lambda piece: model(inputs[piece]).pow(2).sum() / inputs.numel()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[operator]
    for p in model.parameters():
        state += [optimizer.state[p]["exp_avg"].full_tensor(), optimizer.state[p]["exp_avg_sq"].full_tensor()]
    return state


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max():g}"


FAST = (
    ("forward", "last", 2, ""),
    ("backward", "each", 2, ""),
    ("backward", "last", 2, "held"),
    ("forward", "each", 2, "reduced"),
)


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def _trained(
    rank: int,
    base: nn.Module,
    memory: Callable[[nn.Module], Memory] | None,
    options: dict[str, Any],
    before: str = "",
) -> tuple[list[Tensor], list[float], int]:
    """Three steps: parameters and optimizer state, losses, and how often memory was lacking. `before`: a backward
    that comes before the window in the same step, "reduced" or "held"."""
    torch.use_deterministic_algorithms(True)
    model = shard(copy.deepcopy(base))
    lacking = memory(model) if memory else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro = fullshard.MicroBatches(model, **options)
    losses = []
    for step in range(3):
        if before:
            model.set_requires_gradient_sync(before == "reduced")
            (model(_inputs(rank, step + 50)[:1]).pow(2).mean()).backward()
            model.set_requires_gradient_sync(True)
        losses.append(float(sum(micro.backward(_loss_of(model, _inputs(rank, step)), SAMPLES))))
        optimizer.step()
        optimizer.zero_grad()
    return _state(model, optimizer), losses, lacking.failures if lacking else 0


@pytest.mark.slow
@pytest.mark.sample(1)
@behaviour(
    "out of memory: `MicroBatches` tries the step again in smaller pieces, bitwise as if they had been small at once",
    area="failures",
    torch="none",
    reason="torch leaves it to the user, and a failed step leaves traces",
)
@pytest.mark.parametrize(
    ("where", "reduce", "world", "before"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(("forward", "backward"), ("last", "each"), (2, 3), ("", "reduced", "held"))
    ],
)
def test_failed_attempts_leave_no_trace(base: nn.Module, where: str, reduce: str, world: int, before: str) -> None:
    """In the second block, in the first step and in the last (where a piece that fitted does so no longer); good
    pieces of the same attempt, and gradients of earlier backwards, included."""
    fixed = {"search": "fixed", "reduce": reduce}
    expected = run_ranks(world, _trained, base, None, {"size": 2, **fixed}, before)
    kinds = {"forward": really, "backward": allocator_raises}

    def memory(model: Any) -> Memory:
        # Calls of a rank in a window of pieces of 2: four, and one before it. The first window finds 2 by failing.
        return Memory(model.layers[1], 2, where, kinds[where])

    found = run_ranks(world, _trained, base, memory, {"search": "halve", "reduce": reduce}, before)
    for (state, losses, failures), (expected_state, expected_losses, _) in zip(found, expected, strict=True):
        assert failures == 2, "8 and 4 were tried"
        assert losses == expected_losses
        _assert_equal(state, expected_state)


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_piece_fails(base: nn.Module, where: str) -> None:
    """Two good pieces of four rows in the first step, one in the second, whose other one fails."""

    def smaller_in_the_second(rank: int) -> list[Tensor]:
        torch.use_deterministic_algorithms(True)
        model = shard(copy.deepcopy(base))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step, size in enumerate((4, 2, 2)):
            fullshard.MicroBatches(model, size=size, search="fixed").backward(
                _loss_of(model, _inputs(rank, step)), SAMPLES
            )
            optimizer.step()
            optimizer.zero_grad()
        return _state(model, optimizer)

    def memory(model: Any) -> Memory:
        return Memory(model.layers[1], 2, where, after=3)

    found = run_ranks(2, _trained, base, memory, {"size": 4, "search": "halve"})
    for (state, _, failures), expected in zip(found, run_ranks(2, smaller_in_the_second), strict=True):
        assert failures == 1
        _assert_equal(state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}, {"reshard_after_forward": False}], ids=str)
def test_it_searches_for_the_largest(base: nn.Module, options: dict[str, Any]) -> None:
    """Half of what failed at first, later what lies between; close to whole batches in plain training."""

    def rank_main(rank: int) -> tuple[list[int | None], list[Tensor]]:
        model = shard(copy.deepcopy(base), **options)
        Memory(model.layers[2], 5)
        micro = fullshard.MicroBatches(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = []
        for step in range(4):
            sizes.append(micro.size)
            micro.backward(_loss_of(model, _inputs(rank, step)), SAMPLES)
            optimizer.step()
            optimizer.zero_grad()
        again = fullshard.MicroBatches(model)
        again.load_state_dict(micro.state_dict())
        assert again.size == micro.size and again.state_dict() == micro.state_dict()
        return sizes, [p.full_tensor().detach() for p in model.parameters()]

    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        sum(_loss_of(plain, _inputs(rank, step))(slice(None)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for sizes, parameters in run_ranks(2, rank_main):
        assert sizes == [None, 4, 4, 4]
        for found, expected in zip(parameters, plain.parameters(), strict=True):
            tolerance.assert_close(found, expected.detach())


class Noisy(nn.Module):
    """All that a forward may change: batch statistics, dropout, a buffer put in the place of another, one that is made
    when it is first needed."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + len(x)
        if self.later is None:
            self.later = torch.ones(())
            self.register_buffer("made", torch.full((), float(len(x))))
        return self.norm(torch.nn.functional.dropout(self.inner(x), 0.5))


def test_buffers_and_random_numbers_are_put_back() -> None:
    """Three steps, of which two try twice. One rank: random numbers belong to the process."""
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def rank_main(rank: int, fails: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model: Any = nn.Sequential(Noisy(), Noisy())
        for part in model:
            fullshard.fully_shard(part)
        fullshard.fully_shard(model)
        memory = Memory(model[1], 4 if fails else SAMPLES)
        micro = fullshard.MicroBatches(model, search="halve") if fails else None
        for step in range(3):
            fixed = fullshard.MicroBatches(model, size=4 if step < 2 else 2, search="fixed")
            memory.limit = memory.limit if step < 2 or not fails else 2
            (micro or fixed).backward(_loss_of(model, inputs), SAMPLES)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
            model.zero_grad()
        assert memory.failures == (2 if fails else 0)
        return [*(p.full_tensor() for p in model.parameters()), *model.buffers(), torch.rand(3)]

    expected, found = (run_ranks(1, rank_main, fails)[0] for fails in (False, True))
    assert len(found) == len(expected) == 8 + 2 * 6 + 1
    _assert_equal(found, expected)


@pytest.mark.slow
@behaviour(
    "out of memory with one sample: the allocator's error with what takes memory; nothing has changed",
    area="errors",
    torch="none",
    reason="`MicroBatches` is fullshard's",
)
@pytest.mark.parametrize(("where", "lack"), [("forward", really), ("backward", allocator_raises)])
def test_where_one_sample_does_not_fit(base: nn.Module, where: str, lack: Callable[[], None]) -> None:
    kind = torch.OutOfMemoryError if lack is allocator_raises else RuntimeError
    said = "CUDA out of memory. Tried to allocate 3.00 GiB." if lack is allocator_raises else "can't allocate memory"

    def rank_main(rank: int) -> str:
        model = shard(copy.deepcopy(base))
        memory = Memory(model.layers[1], SAMPLES, where, lack)
        micro = fullshard.MicroBatches(model)
        micro.backward(_loss_of(model, _inputs(rank, 0)), SAMPLES)
        before = [p.grad.full_tensor().clone() for p in model.parameters()]
        memory.limit = 0
        with pytest.raises(kind) as caught:
            micro.backward(_loss_of(model, _inputs(rank, 1)), SAMPLES)
        assert type(caught.value) is kind and is_out_of_memory(caught.value)
        _assert_equal([p.grad.full_tensor() for p in model.parameters()], before)
        memory.limit = SAMPLES
        micro.backward(_loss_of(model, _inputs(rank, 1)), SAMPLES)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(2, rank_main)):
        assert said in text and f"1 sample does not fit on rank {rank}" in text
        assert "full root" in text and "shards of " in text and "reshard_after_forward" in text


def test_other_errors_go_through(base: nn.Module) -> None:
    """Once, and as they were raised; synchronisation is what it was."""

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        calls = []

        def loss_of(piece: slice) -> Tensor:
            calls.append(piece)
            if len(calls) == 2:
                raise KeyError("mine")
            return _loss_of(model, _inputs(rank, 0))(piece)

        with pytest.raises(KeyError, match="mine"):
            fullshard.MicroBatches(model, size=2).backward(loss_of, SAMPLES)
        assert calls == [slice(0, 2), slice(2, 4)]
        model.zero_grad()
        model(_inputs(rank, 0)).sum().backward()
        assert all(p.grad.full_tensor() is not None for p in model.parameters())

    run_ranks(2, rank_main)


def test_what_it_returns_and_refuses(base: nn.Module) -> None:
    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        loss_of = _loss_of(model, _inputs(rank, 0))
        micro = fullshard.MicroBatches(model, size=3)
        answers = micro.backward(lambda piece: (loss_of(piece), piece.stop), SAMPLES)
        assert [stop for _, stop in answers] == [3, 6, 8]
        assert not any(loss.requires_grad for loss, _ in answers)
        with pytest.raises(ValueError, match="samples: expected a number of samples, at least 1, found 0"):
            micro.backward(loss_of, 0)
        for wrong in ({"size": 0}, {"size": True}, {"search": "up"}, {"reduce": "never"}, {"search": "fixed"}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong)) if len(wrong) == 1 else ''}|size"):
                fullshard.MicroBatches(model, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="apply fully_shard first"):
            fullshard.MicroBatches(nn.Linear(2, 2))
        stepping = fullshard.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="steps in backward"):
            micro.backward(loss_of, SAMPLES)
        stepping.remove()

    run_ranks(2, rank_main)


def test_what_is_out_of_memory() -> None:
    for error in (torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("cublas: CUBLAS_STATUS_ALLOC_FAILED")):
        assert is_out_of_memory(error)
    for other in (RuntimeError("memory format"), ValueError("DefaultCPUAllocator: can't allocate memory"), KeyError()):
        assert not is_out_of_memory(other)


@pytest.mark.parametrize("reduce", ["last", "each"])
def test_when_gradients_are_reduced(base: nn.Module, reduce: str) -> None:
    """What stands on `.grad` while the second piece begins: a promise, or the shard of a sum."""

    def rank_main(rank: int) -> None:
        model = shard(copy.deepcopy(base))
        micro = fullshard.MicroBatches(model, size=SAMPLES // 2, reduce=reduce)
        inputs, seen = _inputs(rank, 0), []
        loss = _loss_of(model, inputs)

        def noting(piece: slice) -> Tensor:
            seen.append({type(p.grad).__name__ for p in model.parameters()})
            return loss(piece)

        micro.backward(noting, SAMPLES)
        assert seen == [{"NoneType"}, {"PendingGrad" if reduce == "last" else "DTensor"}]

    run_ranks(2, rank_main)
