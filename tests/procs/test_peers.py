"""A rank fails and its peers wait for it: they raise in seconds, by name, and all continue together
(comm/data_group.py)."""

from __future__ import annotations

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
from tests.harness.pool import pool

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


@pytest.mark.parametrize(("who", "where"), [((1,), "fail"), ((1,), "fail_backward"), ((0, 1), "fail")])
def test_ranks_that_raise(who: tuple[int, ...], where: str) -> None:
    """Connections are made anew once where one raises alone; where all raise, nothing is cut."""
    expected = pool(2).run(undisturbed, 4)
    found = pool(2).run(_failing, who, where, 2)
    _equal([state for state, _, _ in found], expected)
    assert {renewed for _, _, renewed in found} == {int(who == (1,))}
    for text in [said for rank, (_, said, _) in enumerate(found) if rank not in who]:
        assert "rank 1 raised at step 1" in text
        assert re.match(r"expected every rank to take part in the [a-z -]+ of (module \d|the root module), ", text)
        # Why a backward failed is known to a guard alone.
        assert ("ValueError: a bad token" if where == "fail" else "in its backward") in text


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
    pool(2).run(_fails_after_its_first_forward)


def _before_the_first_forward(rank: int) -> list[Tensor]:
    training = Training(rank)
    for _ in range(2):
        error = ValueError if rank == 1 else PeerFailed
        said = "a bad token" if rank == 1 else "rank 1 raised in a guarded block: ValueError: a bad token"
        with within(SECONDS), pytest.raises(error, match=said):
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
    _equal(pool(2).run(_before_the_first_forward), pool(2).run(undisturbed, 2))


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
    texts = pool(2).run(_clips_on_one_rank)
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
    pool(2).run(_refused)
