"""A rank alone in a torch collective of the user's hears of, and legal programs that look like it are
not (peers/diagnosis.py).

Processes over gloo, because a rank has to be in a wait that nothing of ours ends. A rank that was told takes the call
after all, which frees the other one, and both train on: what they come to is bitwise what it would have been.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import RanksDisagree, fully_shard
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.hang import patience

SIZE = 24
# The documented bound; some two seconds where the machine is free.
SECONDS = 10.0
# Longer than a rank needs to be told of.
SLOW = 3.0


class Training:
    """Each step leaves its gradients; the next one clears them after its forward."""

    def __init__(self, rank: int, mesh: Any = None) -> None:
        self.rank = rank
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.weight: Any = self.model[0].weight

    def step(self, step: int) -> None:
        tokens = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(100 * step + self.rank))
        loss = self.model(tokens).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, SIZE))

    def state(self) -> list[Tensor]:
        found = [p.to_local().detach().clone() for p in self.model.parameters()]  # type: ignore[attr-defined]
        return [*found, self.optimizer.state[self.weight]["exp_avg"].to_local().clone()]


def gradient_full_tensor(training: Training) -> None:
    training.weight.grad.full_tensor()


def parameter_full_tensor(training: Training) -> None:
    training.weight.full_tensor()


def value_full_tensor(training: Training) -> None:
    training.model.state_dict()["0.weight"].full_tensor()


def state_full_tensor(training: Training) -> None:
    training.optimizer.state[training.weight]["exp_avg"].full_tensor()


def gradient_norm(training: Training) -> None:
    training.weight.grad.norm().full_tensor()


def all_reduce(training: Training) -> None:
    dist.all_reduce(torch.ones(1))


def barrier(training: Training) -> None:
    dist.barrier()


def object_gather(training: Training) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "metrics")


def broadcast_to(training: Training) -> None:
    """From rank 0, which goes on."""
    dist.broadcast(torch.ones(1), 0)


Call = Callable[[Training], None]
CALLS: dict[str, tuple[Call, str]] = {
    "full_tensor of a parameter": (parameter_full_tensor, "in parameter_full_tensor"),
    "full_tensor of a value of a state dict": (value_full_tensor, "in value_full_tensor"),
    "full_tensor": (gradient_full_tensor, "in gradient_full_tensor"),
    "full_tensor of state": (state_full_tensor, "in state_full_tensor"),
    "norm": (gradient_norm, "in gradient_norm"),
    "all_reduce": (all_reduce, "in all_reduce"),
    "barrier": (barrier, "in barrier"),
    "all_gather_object": (object_gather, "in object_gather"),
    "broadcast": (broadcast_to, "in broadcast_to"),
}
QUICK = ("full_tensor of a parameter", "all_reduce")


def _told(do: Callable[[], None]) -> tuple[str, float]:
    """The error that `do` ends with, and the seconds it took."""
    begun = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        do()
    return str(caught.value), time.monotonic() - begun


def _alone(rank: int, names: tuple[str, ...]) -> tuple[list[tuple[str, float]], list[Tensor]]:
    training, found = Training(rank), []
    for step, name in enumerate(names):
        call = CALLS[name][0]
        training.step(2 * step)
        dist.barrier()
        if rank == 1:
            call(training)
        found.append(_told(lambda step=step: training.step(2 * step + 1)))  # type: ignore[misc]
        if rank == 0:
            call(training)
        training.step(2 * step + 1)
    return found, training.state()


def _undisturbed(rank: int, steps: int) -> list[Tensor]:
    training = Training(rank)
    for step in range(steps):
        training.step(step)
    return training.state()


def _compare(names: tuple[str, ...]) -> None:
    by_rank = run_forks(2, _alone, (names,), 45)
    for name, (text, seconds), (told, _) in zip(names, by_rank[0][0], by_rank[1][0], strict=True):
        assert seconds < patience(SECONDS), f"{name}: {seconds:.1f} s"
        assert f"found rank 1 in {name.split()[0].replace('norm', 'full_tensor')} (" in text, text
        assert "test_elsewhere.py:" in text and CALLS[name][1] in text
        assert "while rank 0 waits in " in text, text
        # The other one hears the same when it has come out of its wait.
        assert told == text
    for (_, state), plain in zip(by_rank, run_forks(2, _undisturbed, (2 * len(names),), 60), strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(state, plain, strict=True))


@pytest.mark.slow
@behaviour(
    "a rank that is alone in a collective of torch's (`p.full_tensor()`, all_reduce) is named to the others",
    area="failures",
    torch="none",
    reason="torch hangs until the time limit of the process group",
)
def test_a_rank_alone_in_a_collective_is_named() -> None:
    _compare(QUICK)


@pytest.mark.slow
def test_every_collective_is_named() -> None:
    _compare(tuple(CALLS))


def _question_and_meeting(rank: int) -> tuple[list[tuple[str, float]], list[Tensor]]:
    """Rank 0 waits for the answer to a question, then for the others after its failure; and then frees them."""
    training = Training(rank)
    if rank == 1:
        dist.barrier()  # before its very first forward
    found = [_told(lambda: training.step(0))]
    if rank == 0:
        found.append(_told(lambda: training.step(0)))
        dist.barrier()
    training.step(0)
    return found, training.state()


@pytest.mark.slow
def test_who_waits_for_an_answer_is_told_and_told_again() -> None:
    by_rank = run_forks(2, _question_and_meeting, (), 40)
    ((first, again), _), ((other,), _) = by_rank
    for text, seconds in (first, again):
        assert seconds < patience(SECONDS)
        assert "found rank 1 in barrier (" in text and "in _question_and_meeting" in text
    assert "while rank 0 waits in the units and parameters of the model" in first[0]
    assert "while rank 0 waits in the next step after a failure" in again[0]
    assert other[0] in (first[0], again[0])
    for (_, state), plain in zip(by_rank, run_forks(2, _undisturbed, (1,), 60), strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(state, plain, strict=True))


def _replica(rank: int) -> tuple[str, float]:
    """Rank 3 gathers what only its replica has, and rank 2 is the one that does not come."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training(rank, mesh)
    training.step(0)
    dist.barrier()
    if rank == 3:
        gradient_full_tensor(training)
    found = _told(lambda: training.step(1))
    if rank == 2:
        gradient_full_tensor(training)
    training.step(1)
    return found


@pytest.mark.slow
def test_a_gather_within_one_replica_is_told_to_all() -> None:
    for text, seconds in run_forks(4, _replica, (), 60):
        assert "found rank 3 in full_tensor (" in text and "which needs ranks 2 and 3, while rank 2 waits" in text
        assert seconds < patience(SECONDS)


# ---- programs that are right -------------------------------------------------------------------------------


def slow_loader(training: Training, group: Any) -> None:
    """Rank 1 waits for its data."""
    if training.rank == 1:
        time.sleep(SLOW)


def slow_third_rank(training: Training, group: Any) -> None:
    """Rank 1 waits for rank 2, in a group that rank 0 is not in."""
    if training.rank == 2:
        time.sleep(SLOW)
    if training.rank:
        dist.all_reduce(torch.ones(1), group=group)


def issued_before(training: Training, group: Any) -> Any:
    """Rank 1 waits for rank 2 in what rank 0 has issued and waits for later. Between 1 and 2 many messages went, which
    the counters of process groups count."""
    for _ in range(5):
        if training.rank == 1:
            dist.send(torch.ones(1), 2)
        elif training.rank == 2:
            dist.recv(torch.ones(1), 1)
    if training.rank == 2:
        time.sleep(SLOW)
    work: Any = dist.all_reduce(torch.ones(1), async_op=training.rank == 0)
    return work.wait if training.rank == 0 else None


def issued_here_and_waiting_there(training: Training, group: Any) -> Any:
    """Rank 1 has issued what rank 0 comes to later, and waits in another group for rank 2."""
    work: Any = dist.all_reduce(torch.ones(1), async_op=True) if training.rank else None
    slow_third_rank(training, group)
    return work.wait if training.rank else lambda: dist.all_reduce(torch.ones(1))


LEGAL = (slow_loader, slow_third_rank, issued_before, issued_here_and_waiting_there)


def _legal(rank: int, which: int) -> list[Tensor]:
    group = dist.new_group([1, 2])
    training = Training(rank)
    training.step(0)
    later = LEGAL[which](training, group)
    training.step(1)
    if later is not None:
        later()
    training.step(2)
    return training.state()


def _check_legal(program: Any) -> None:
    plain = run_forks(3, _undisturbed, (3,), 60)
    for mine, other in zip(run_forks(3, _legal, (LEGAL.index(program),), 60), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("program", LEGAL, ids=lambda program: program.__name__)
def test_programs_that_are_right_are_left_alone(program: Any) -> None:
    _check_legal(program)
