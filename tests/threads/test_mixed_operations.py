"""Where sharded and plain parameters meet in an operation of torch: the exception has a note with both and the cure."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from fullshard.engine.foreign import note_mixed, note_uncaught
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.test_foreign_steps import Adapted, _backward, _sharded


def _noted(run: Callable[[], object], said: str = "got mixed") -> list[str]:
    with pytest.raises(RuntimeError, match=said) as caught:
        run()
    note_mixed(caught.value)
    return list(getattr(caught.value, "__notes__", ()))


class ByHand(torch.optim.SGD):
    """Steps all parameters of a group at once, and counts them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_add_(params, [p.grad for p in params], alpha=-1.0)


@pytest.mark.slow
def test_clips_of_torch() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        clips: list[Callable[[], object]] = [
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=False),
            lambda: nn.utils.clip_grad_norm_([model.scale, *model.base.parameters()], 1.0, norm_type=float("inf")),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=True),
        ]
        for clip in clips:
            (note,) = _noted(clip)
            assert "base.weight is sharded, and Adapted.scale, in one list with it, is not" in note
            assert "fullshard.clip_grad_norm_(model.parameters(), max_norm)" in note

    run_ranks(2, run)


def test_a_step_of_an_optimizer_of_others() -> None:
    def run(rank: int) -> None:
        plain = seeded(Adapted)
        model = _sharded(plain)
        _backward(model, plain)
        (note,) = _noted(ByHand(model.parameters(), lr=1.0).step)
        assert "Adapted.scale" in note and "fullshard.step_on_shards(optimizer)" in note
        fullshard.step_on_shards(ByHand(model.parameters(), lr=1.0), elementwise=True).step()
        ByHand(plain.parameters(), lr=1.0).step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert tolerance.close(getattr(mine, "full_tensor", lambda one=mine: one)(), theirs)

    run_ranks(2, run)


def test_a_guard_adds_it() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        with pytest.raises(RuntimeError, match="got mixed") as caught, fullshard.guard(model, optimizer):
            _backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert any("fullshard.clip_grad_norm_" in note for note in caught.value.__notes__)

    run_ranks(2, run)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def test_a_weight_that_is_read_after_the_forward() -> None:
    """No forward of fullshard is among the frames."""
    gc.collect()  # models of other tests, whose heads have this name too

    def run(rank: int) -> None:
        model: Any = seeded(Head)
        fully_shard(model.head)
        fully_shard(model)

        def loss(model: Any) -> Tensor:
            hidden = model(torch.ones(2, 4))
            return nn.functional.linear(hidden, model.head.weight)

        (note,) = _noted(lambda: loss(model))
        assert "read were probably head.weight of unit head" in note and "fullshard.unit_open(module)" in note

    run_ranks(2, run)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("take", "use"),
    [
        (lambda head: head.weight, nn.functional.linear),
        (lambda head: head.weight.detach(), nn.functional.linear),
        (lambda head: head.weight.t(), torch.mm),
        (lambda head: head.weight, lambda hidden, weight: hidden[:, None] @ weight.t()[None].expand(2, 4, 8)),
    ],
    ids=["itself", "detached", "transposed", "in a batch"],
)
def test_a_full_weight_that_is_used_after_its_unit_freed_it(take: Any, use: Any) -> None:
    def run(rank: int) -> None:
        model: Any = seeded(Head)
        fully_shard(model.head)
        fully_shard(model)

        def loss(clones: bool) -> Tensor:
            hidden = model(torch.ones(2, 4))
            with fullshard.unit_open(model.head):
                weight = take(model.head)
                weight = weight.clone() if clones else weight
            found: Tensor = use(hidden, weight)
            return found

        (note,) = _noted(lambda: loss(False), "not allocated|storage of size 0")
        assert "head.weight of unit head was used after the unit had freed it" in note and "bias" not in note
        loss(True).sum().backward()

    run_ranks(2, run)


def test_memory_that_is_no_weight_s_gets_no_note_and_within_a_forward_a_guess() -> None:
    def read() -> None:
        torch.ones(3).set_(torch.zeros(0).untyped_storage(), 0, (3,), (1,)).sum()  # type: ignore[call-overload]

    class Reads(Head):
        def forward(self, x: Tensor) -> Tensor:
            read()
            return super().forward(x)

    def run(rank: int) -> None:
        assert not _noted(read, "storage of size 0")
        (note,) = _noted(lambda: fully_shard(Reads())(torch.ones(2, 4)), "storage of size 0")
        assert "probably a weight was used after" in note

    run_ranks(1, run)


def test_other_exceptions_and_other_mixtures_get_none() -> None:
    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        for error in (RuntimeError("got mixed signals"), ValueError("got mixed torch.Tensor and DTensor")):
            note_mixed(error)
            assert not getattr(error, "__notes__", ())
        weight, other = model.base.weight, torch.ones(128, 64)
        gradient = weight.grad
        assert not _noted(lambda: gradient * other)
        (note,) = _noted(lambda: weight * other)
        assert "read were probably base.weight" in note

    run_ranks(2, run)


def _uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def test_an_exception_that_nobody_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of the program is called as before, once, with the note there; and a hook that raises nothing new."""
    seen: list[list[str]] = []
    monkeypatch.setattr(
        sys, "excepthook", lambda kind, error, trace: seen.append(list(getattr(error, "__notes__", ())))
    )
    monkeypatch.setattr("fullshard.engine.foreign._installed", False)
    found: list[BaseException] = []

    def run(rank: int) -> None:
        model = _sharded(seeded(Adapted))
        _backward(model)
        if rank == 0:
            with pytest.raises(RuntimeError, match="got mixed") as caught:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            _uncaught(caught.value)
            _uncaught(KeyboardInterrupt())
            found.append(caught.value)

    run_ranks(2, run)
    (note,), nothing = seen
    assert "base.weight is sharded, and Adapted.scale" in note and not nothing

    def broken(error: BaseException) -> None:
        raise ValueError

    note_uncaught()
    monkeypatch.setattr("fullshard.engine.foreign.note_mixed", broken)
    sys.excepthook(type(found[0]), found[0], None)
    assert len(seen) == 3


@pytest.mark.slow
def test_a_program_that_ends_with_it() -> None:
    code = """
    import torch
    import torch.distributed as dist
    from torch import nn
    import fullshard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Net()
    fullshard.fully_shard(model, ignored_params={model.scale})
    model(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "fullshard: weight is sharded, and Net.scale, in one list" in done.stderr, done.stderr
