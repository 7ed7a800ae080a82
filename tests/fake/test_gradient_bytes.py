"""How many bytes gradients and their messages take, counted, with each dial that limits them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.counting import MemoryCounter, nccl_plan
from fullshard import MixedPrecisionPolicy, fully_shard, report
from fullshard.engine import unit_of
from fullshard.layout import total
from fullshard.policy import use_options
from fullshard.schedule import Command
from tests.harness.fake import fake_world

WIDTH, LAYERS, WEIGHTS, WORLD = 32, 6, 4, 4
# One weight, and all of a unit, in float32.
WEIGHT = WIDTH * WIDTH * 4
UNIT = WEIGHTS * WEIGHT
# Both ends of a reduce-scatter.
MESSAGE = UNIT + UNIT // WORLD


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(WEIGHTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@contextmanager
def _model(*, nccl: bool, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Iterator[Any]:
    with ExitStack() as stack:
        stack.enter_context(fake_world(WORLD))
        stack.enter_context(use_options(**options))
        if nccl:
            stack.enter_context(nccl_plan(0))
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        policy = policy or MixedPrecisionPolicy()
        for block in model:
            fully_shard(block, mp_policy=policy)
        yield fully_shard(model, mp_policy=policy)


def _peaks(model: Any) -> tuple[int, int]:
    """Bytes at the peak of a backward beyond the gradient shards it leaves; those of messages under way whenever the
    gradients of a unit are complete."""
    executor = unit_of(model).root.executor  # type: ignore[union-attr]
    under_way: list[int] = []

    def note(command: Command) -> None:
        if command.kind == "reduce":
            under_way.append(sum(flight.reduction.held_nbytes for flight in executor.shared.in_flight))

    with MemoryCounter() as counter:
        counter.mark("forward")
        loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
        executor.listeners.append(note)
        counter.mark("backward")
        loss.backward()
        counter.mark("after")
    executor.listeners.remove(note)
    peak = counter.peak("backward", without_lasting=("backward",))
    model.zero_grad()
    return peak, max(under_way)


def _step(model: Any) -> None:
    model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
    model.zero_grad()


# Presence, and vectors that are not counted as gradients.
SMALL = WEIGHT


def test_a_limit_in_bytes_is_kept() -> None:
    """Down to what the unit that computes needs by itself. Without a limit two units more are under way."""
    with _model(nccl=True) as model:
        for _ in range(2):
            _step(model)
        model.set_memory_budget(gradients=UNIT)
        limited, _ = _peaks(model)
        # Nothing of other units: its gradients, and its message.
        assert limited <= UNIT + UNIT + MESSAGE + SMALL
        model.set_memory_budget(gradients=0)
        at_once, under_way = _peaks(model)
        assert under_way == 0 and at_once <= limited
        model.set_memory_budget(gradients=99 * UNIT)
        unlimited, under_way = _peaks(model)
        assert under_way >= 2 * MESSAGE and unlimited >= 2 * UNIT + UNIT + 2 * UNIT - WEIGHT
        model.set_memory_budget(gradients=None)
        assert _peaks(model)[0] > limited


def test_the_largest_missing_gradient_is_one_of_those_that_train_now() -> None:
    with _model(nccl=True) as model:
        model.set_memory_budget(gradients=UNIT)
        for _ in range(2):
            _step(model)
        gradients = unit_of(model[1]).gradients  # type: ignore[union-attr]
        assert gradients.largest_missing_nbytes() == WEIGHT
        model[1].requires_grad_(False)
        _step(model)
        assert gradients.largest_missing_nbytes() == 0


def test_mixed_precision_takes_two_full_units_and_one_message() -> None:
    """Shards in float32 are cast straight to where they belong in the full parameters: no buffer for the cast. FSDP2
    takes half a unit more (2c + g + r)."""
    with _model(nccl=True, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)) as model:
        for _ in range(2):
            _step(model)
        model.set_memory_budget(gradients=UNIT // 2)
        with MemoryCounter() as counter:
            counter.mark("forward")
            loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
            counter.mark("backward")
            loss.backward()
        vectors = WIDTH * 4
        assert counter.peak("forward", above_nbytes=vectors) == 2 * UNIT // 2
        beyond = counter.peak("backward", without_lasting=("backward",), above_nbytes=vectors)
        # One full unit and gradients in bfloat16, and the message in float32.
        assert beyond <= UNIT // 2 + UNIT // 2 + UNIT + SMALL


def test_one_message_a_unit_is_waited_for_as_a_whole() -> None:
    """As on a CPU, where nothing is limited by default."""
    with _model(nccl=False, reductions_in_flight=3) as model:
        for _ in range(2):
            _step(model)
        assert _peaks(model)[1] >= 6 * UNIT
        model.set_memory_budget(gradients=3 * UNIT + SMALL)
        assert 0 < _peaks(model)[1] <= 2 * UNIT + SMALL
        model.set_memory_budget(gradients=2 * UNIT)
        assert _peaks(model)[1] == 0


@pytest.mark.parametrize("limit", [UNIT // 2, UNIT, 3 * UNIT // 2, 3 * UNIT, 99 * UNIT])
def test_the_expected_peak_knows_the_limit(limit: int) -> None:
    """What is counted is no more than the report says, and not much less; gradient shards are not part of it."""
    with _model(nccl=True) as model:
        _step(model)
        model.set_memory_budget(gradients=limit)
        for _ in range(2):
            _step(model)
        moving = [term for term in report(model).peak_terms if not term.name.startswith(("shards", "reduced"))]
        # What the backend brings becomes gradient shards too.
        brought = sum(term.nbytes // (WORLD + 1) for term in moving if term.name.startswith("reduction"))
        counted, expected = _peaks(model)[0], total(moving) - brought
        assert counted - SMALL <= expected <= counted + 2 * WEIGHT, moving


@pytest.mark.parametrize("reductions", [1, 2, 4])
def test_the_number_of_reductions_is_a_limit_too(reductions: int) -> None:
    with _model(nccl=True, reductions_in_flight=reductions) as model:
        for _ in range(2):
            _step(model)
        model.set_memory_budget(gradients=99 * UNIT)
        under_way = _peaks(model)[1]
        assert reductions * MESSAGE <= under_way <= reductions * (MESSAGE + SMALL)


@pytest.mark.sample(3)
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_expected_peak_knows_the_send_buffers(buffers: int, mixed: bool) -> None:
    """With one, the default on a device, no more than FSDP2 takes: (2c + g + r)P, without the shards that it leaves."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    with _model(nccl=True, policy=policy) as model:
        model.set_reduce_scatter_max_input_buffers(buffers)
        for _ in range(3):
            _step(model)
        moving = [term for term in report(model).peak_terms if not term.name.startswith(("shards", "reduced"))]
        brought = sum(term.nbytes // (WORLD + 1) for term in moving if term.name.startswith("reduction"))
        counted, expected = _peaks(model)[0], total(moving) - brought
        assert counted - SMALL <= expected <= counted + 2 * WEIGHT, moving
        if buffers == 1:
            compute = UNIT // 2 if mixed else UNIT
            assert counted <= 2 * compute + compute + UNIT + SMALL


def test_send_buffers_are_a_limit_too() -> None:
    """`set_reduce_scatter_max_input_buffers`: one more than are under way when another is made."""
    with _model(nccl=True) as model:
        _step(model)
        model.set_memory_budget(gradients=99 * UNIT)
        for buffers in (1, 3):
            model.set_reduce_scatter_max_input_buffers(buffers)
            _step(model)
            assert _peaks(model)[1] <= max(1, buffers) * (MESSAGE + SMALL)
        assert _peaks(model)[1] >= 2 * MESSAGE


def test_only_gradients_that_will_be_sent_count() -> None:
    """Not those of micro-batches that hold them, nor those of a backward that failed."""
    with _model(nccl=True) as model:
        _step(model)
        model.set_memory_budget(gradients=99 * UNIT)
        waiting = unit_of(model).root.executor.waiting  # type: ignore[union-attr]
        counted: list[int] = []
        for block in model:
            block.register_forward_hook(
                lambda _module, _args, output: output.register_hook(lambda _: counted.append(waiting.nbytes)) and None
            )
        model.set_requires_gradient_sync(False)
        _step(model)
        assert len(counted) == LAYERS and not any(counted)
        model.set_requires_gradient_sync(True)

        def refuse(command: Command) -> None:
            if command.kind == "reduce":
                raise RuntimeError("refused")

        unit_of(model).root.executor.listeners.append(refuse)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="refused"):
            _step(model)
        assert waiting.nbytes > 0
        model.reset_iter_state()
        assert waiting.nbytes == 0


def test_a_limit_that_was_set_below_a_root_is_refused_when_that_forms() -> None:
    with fake_world(WORLD):
        block = fully_shard(Block())
        block.set_memory_budget(gradients=UNIT)
        model = fully_shard(nn.Sequential(block))
        with pytest.raises(RuntimeError, match="expected to be called on the root, found that it was called on"):
            _step(model)


def test_a_limit_is_of_the_root_and_a_number_of_bytes() -> None:
    with _model(nccl=False) as model:
        _step(model)
        with pytest.raises(RuntimeError, match=r"\(gradients\): expected the root module, found 0 below it"):
            model[0].set_memory_budget(gradients=1)
        with pytest.raises(ValueError, match="gradients: expected a whole number of bytes"):
            model.set_memory_budget(gradients=-1)


class _User:
    """A trainer, with its loop in a method of its own and the batch in a local variable."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def window(self, micro: int) -> list[weakref.ref[torch.Tensor]]:
        """Returns the batches of a window that were still there when the last backward was over."""
        batches: list[weakref.ref[torch.Tensor]] = []
        for index in range(micro):
            self.model.set_requires_gradient_sync(index == micro - 1)
            batch = torch.randn(2, WIDTH)
            batches.append(weakref.ref(batch))
            self.model(batch).sum().backward()
        return [batch for batch in batches if batch() is not None]


def test_tensors_of_the_program_are_let_go_in_a_window() -> None:
    """To ask a frame for its locals keeps them, before Python 3.13: the last micro-batch would run beside the batch,
    logits and loss of the one before it."""
    with fake_world(WORLD):
        user = _User(fully_shard(nn.Sequential(*(fully_shard(Block()) for _ in range(2)))))
        assert [len(user.window(3)) for _ in range(2)] == [1, 1]
