"""A rank fails and its peers wait for it: they raise in seconds, by name, and all continue together
(comm/data_group.py)."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import PeerFailed, RanksDisagree, fully_shard
from fullshard.comm.data_group import DataGroup
from fullshard.peers import Scope, scope_of
from fullshard.peers.watch import _end
from tests.harness.forked import run_forks

SIZE = 24
SECONDS = 5.0


class Block(nn.Module):
    """A linear layer that can be told to fail."""

    fail: Callable[[], None] | None = None
    fail_backward: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        if self.fail is not None:
            self.fail()
        out: Tensor = self.linear(x).tanh()
        if self.fail_backward is not None and out.requires_grad:
            fail = self.fail_backward
            out.register_hook(lambda _: fail())
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


class Training:
    def __init__(self, rank: int) -> None:
        self.rank, self.model = rank, build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, step: int) -> None:
        self.model(batch(step, self.rank)).square().mean().backward()
        fullshard.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        return [p.to_local().detach().clone() for p in self.model.parameters()]  # type: ignore[attr-defined]


def undisturbed(rank: int, steps: int) -> list[Tensor]:
    training = Training(rank)
    for step in range(steps):
        training.step(step)
    return training.state()


def _equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _raise() -> None:
    raise ValueError("a bad token")


def _scope() -> Scope:
    """Of all ranks."""
    scope = scope_of(range(dist.get_world_size()))
    assert scope is not None
    return scope


@contextmanager
def within(seconds: float) -> Any:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def _failing(rank: int, who: tuple[int, ...], where: str, block: int) -> tuple[list[Tensor], str, int]:
    training = Training(rank)
    training.step(0)
    target = training.model[block]  # type: ignore[index]
    said = ""
    setattr(target, where, _raise if rank in who else None)
    with within(SECONDS):
        try:
            training.step(1)
        except ValueError:
            assert rank in who
        except PeerFailed as error:
            assert rank not in who and error.rank == who[0] and error.step == 1
            said = str(error)
        else:
            raise AssertionError("nobody raised")
    setattr(target, where, None)
    training.optimizer.zero_grad()
    for step in range(1, 4):
        training.step(step)
    return training.state(), said, _scope().renewed


# World, place, block.
RAISE = list(itertools.product([2, 3], ["fail", "fail_backward"], [0, 2]))
ALWAYS = [(2, "fail", 0), (3, "fail_backward", 2)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "where", "block"),
    [case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.slow) for case in RAISE],
)
def test_one_rank_raises(world: int, where: str, block: int) -> None:
    expected = run_forks(world, undisturbed, (4,), 60)
    found = run_forks(world, _failing, ((1,), where, block), 60)
    _equal([state for state, _, _ in found], expected)
    texts = [said for rank, (_, said, _) in enumerate(found) if rank != 1]
    for text in texts:
        assert "rank 1 raised at step 1" in text
        assert re.match(r"expected every rank to take part in the [a-z -]+ of (module \d|the root module), ", text)
        # Why a backward failed is known to a guard alone.
        assert ("ValueError: a bad token" if where == "fail" else "in its backward") in text
    assert {renewed for _, _, renewed in found} == {1}


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["fail", "fail_backward"])
def test_all_ranks_raise_and_nothing_is_cut(where: str) -> None:
    expected = run_forks(2, undisturbed, (4,), 60)
    found = run_forks(2, _failing, ((0, 1), where, 1), 60)
    _equal([state for state, _, _ in found], expected)
    assert {renewed for _, _, renewed in found} == {0}


def _ended(rank: int) -> None:
    training = Training(rank)
    training.step(0)
    if rank == 1:
        _end()  # what the interpreter calls when it ends; forks of a test end otherwise
        time.sleep(SECONDS)
        return
    with within(SECONDS), pytest.raises(PeerFailed, match="rank 1 ended at step 1: its process ended"):
        training.step(1)


def test_a_rank_that_ended_is_named() -> None:
    run_forks(2, _ended, (), 60)


def _clips_alone(rank: int) -> None:
    training = Training(rank)
    training.step(0)
    hook = next(training.model.parameters()).register_post_accumulate_grad_hook(lambda _: _raise() if rank else None)
    with within(SECONDS):
        if rank == 1:
            with pytest.raises(ValueError, match="a bad token"):
                training.step(1)
        else:
            with pytest.raises(PeerFailed, match="rank 1 raised at step 1") as caught:
                training.step(1)
            assert caught.traceback[1].name == "step" and caught.traceback[2].name == "clip_grad_norm_"
    hook.remove()
    training.optimizer.zero_grad()
    for step in range(1, 3):
        training.step(step)


def test_small_messages_between_steps_do_not_hang_either() -> None:
    run_forks(2, _clips_alone, (), 60)


def _ends_early(rank: int) -> None:
    model = build()
    if rank == 1:
        with pytest.raises(KeyError), fullshard.guard(model):
            raise KeyError("the first batch")
    else:
        with within(SECONDS), pytest.raises(PeerFailed, match="rank 1 raised in a guarded block: KeyError"):
            with fullshard.guard(model):
                model(batch(0, rank))
    with fullshard.guard(model):
        model(batch(0, rank)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_rank_that_fails_before_its_first_step_is_named() -> None:
    run_forks(2, _ends_early, (), 60)


def _fails_after_its_first_forward(rank: int) -> None:
    model = build()
    if rank == 1:
        with pytest.raises(KeyError), fullshard.guard(model):
            model(batch(0, rank))
            raise KeyError("the first loss")
    else:
        with within(SECONDS), pytest.raises(PeerFailed, match="step 0 in a guarded block: KeyError: 'the first loss'"):
            with fullshard.guard(model):
                model(batch(0, rank))


def test_a_guarded_block_knows_a_root_that_formed_inside() -> None:
    """Nothing is sent after the forward: only the end of the block can tell."""
    run_forks(2, _fails_after_its_first_forward, (), 60)


def _before_the_first_forward(rank: int) -> list[Tensor]:
    training = Training(rank)
    for _ in range(2):
        with within(SECONDS), pytest.raises((ValueError, PeerFailed)):
            with fullshard.guard(training.model):
                if rank == 1:
                    _raise()
                training.model(batch(0, rank)).sum().backward()
        training.optimizer.zero_grad()
    for step in range(2):
        training.step(step)
    return training.state()


def test_a_rank_that_raises_before_its_first_forward() -> None:
    """Twice; what ranks agree on at their first forward they have not agreed on yet."""
    _equal(run_forks(2, _before_the_first_forward, (), 60), run_forks(2, undisturbed, (2,), 60))


def _clips_on_one_rank(rank: int) -> str:
    training = Training(rank)
    for step in range(2):
        training.model(batch(step, rank)).square().mean().backward()
        if step == 0:
            fullshard.clip_grad_norm_(training.model.parameters(), 1.0)
        elif rank == 1:
            with within(SECONDS), pytest.raises(RanksDisagree) as caught:
                fullshard.clip_grad_norm_(training.model.parameters(), 1.0)
            return str(caught.value)
        training.optimizer.step()
        training.optimizer.zero_grad()
    with within(SECONDS), pytest.raises(RanksDisagree) as caught:
        training.model(batch(2, rank))
    return str(caught.value)


def test_ranks_that_wait_for_each_other_in_different_calls_are_told() -> None:
    texts = run_forks(2, _clips_on_one_rank, (), 60)
    for text in texts:
        assert "found rank" in text and "clip_grad_norm_" in text and "the all-gather of module 0" in text


def _refused(rank: int) -> None:
    training = Training(rank)
    training.step(0)
    scope = _scope()
    data = next(iter(scope.groups.values()))
    assert isinstance(data, DataGroup)
    with within(1), pytest.raises(RuntimeError, match="Invalid scalar type"):
        data.issue(data.group.allreduce, [torch.zeros(2, dtype=torch.int16)]).wait()
    training.step(1)
    assert not scope.renewed


def test_what_a_backend_refuses_to_send_is_no_failure_of_a_peer() -> None:
    run_forks(2, _refused, (), 60)
