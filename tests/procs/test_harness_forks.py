"""`--ranks=gloo`: rank functions of the threads tier, closures included, as processes over gloo."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.harness.errors import RanksFailed
from tests.harness.forked import run_forks


def test_a_closure_runs_on_every_rank_with_gloo() -> None:
    parent, factor = os.getpid(), torch.tensor(3.0)

    def rank_main(rank: int, offset: int) -> tuple[bool, str, float]:
        x = (factor * (rank + offset)).requires_grad_()
        (x * x).backward()  # autograd works in a fork, also when the parent has used it
        assert x.grad is not None
        dist.all_reduce(x.grad)
        return os.getpid() != parent, dist.get_backend(), x.grad.item()

    (factor.clone().requires_grad_() * 2).backward()
    for world in (1, 3):
        expected = sum(2 * 3.0 * (rank + 1) for rank in range(world))
        assert run_forks(world, rank_main, (1,), 30.0) == [(True, "gloo", expected)] * world


@pytest.mark.slow
def test_failures_are_told_by_rank() -> None:
    def raises(rank: int) -> None:
        if rank == 1:
            raise KeyError("of rank 1")
        dist.barrier()

    with pytest.raises(RanksFailed, match="rank 1 raised") as caught:
        run_forks(2, raises, (), 30.0)
    assert isinstance(caught.value.exception(1), KeyError)

    def dies(rank: int) -> None:
        os._exit(3)

    with pytest.raises(RanksFailed, match="rank 0 died(.|\n)*without an answer: exit code 3"):
        run_forks(1, dies, (), 30.0)

    def is_killed(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailed, match="rank 0 died(.|\n)*without an answer: SIGKILL"):
        run_forks(1, is_killed, (), 30.0)

    def hangs(rank: int) -> None:
        import time

        time.sleep(60)

    with pytest.raises(RanksFailed, match="rank 0 hung"):
        run_forks(1, hangs, (), 0.3)
