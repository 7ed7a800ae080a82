"""`weights` and `transfer` over gloo: real messages, a rank that dies or raises in a transfer, a slow consumer."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import PeerFailed, fully_shard, transfer, weights
from fullshard.comm import exchange
from tests.harness.forked import run_forks
from tests.harness.killed import DONE, run_killed
from tests.harness.models import seeded
from tests.threads.test_weights import plain, sharded

pytestmark = pytest.mark.hang_after(120)


def _model(seed: int = 0) -> Any:
    return seeded(lambda: nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))), seed)


def test_weights_over_gloo_with_a_slow_consumer() -> None:
    """Rank 0 takes longer with each bucket than the time limit of a message would be; the others wait for it between
    buckets, in no message of a bucket, and leave the loop after it."""

    def rank_main(rank: int) -> float:
        model = sharded(rank)
        found = {}
        left = 0.0
        for bucket in weights(model, bucket_nbytes=200):
            found.update(bucket)
            if rank == 0:
                time.sleep(0.05)
                left = time.monotonic()
        expected = plain()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return left if rank == 0 else time.monotonic()

    first, *others = run_forks(3, rank_main, (), 60.0)
    assert all(other >= first for other in others), "a rank left the loop before the slow one"


def _dies(group: Any, message: Any, peer: int) -> Any:
    os._exit(9)


def test_a_source_rank_that_dies_is_named_and_the_target_is_lost() -> None:
    """Ranks 0 and 1 hold the source, ranks 2 and 3 the target. Rank 1 ends at its second message."""

    def rank_main(rank: int) -> None:
        trainers, engines = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        model: Any = _model(seed=1 if rank >= 2 else 0)
        fully_shard(model, mesh=engines if rank >= 2 else trainers)
        source = model if rank < 2 else None
        move = transfer(source, model if rank >= 2 else None, limit_nbytes=1024)
        if rank == 1:
            sends = exchange._send

            def ends(group: Any, message: Any, peer: int) -> Any:
                exchange._send = _dies  # type: ignore[assignment]
                return sends(group, message, peer)

            exchange._send = ends
        with pytest.raises(PeerFailed, match="rank 1") as caught:
            move.run()
        assert caught.value.rank == 1
        if rank >= 2:
            assert all(bool(parameter.to_local().isnan().all()) for parameter in model.parameters())
            assert caught.value.__notes__[0].startswith("transfer: 8 tensor(s) of the target on this rank are lost")

    one, dead, *targets = run_killed(4, rank_main, None)
    assert (one, *targets) == (DONE, DONE, DONE) and dead == 9


def test_a_source_rank_that_raises_is_named_and_the_next_run_restores_the_target() -> None:
    def rank_main(rank: int) -> str:
        full = dict(_model().state_dict())
        target: Any = _model(seed=1)
        fully_shard(target)
        move = transfer(full if rank == 2 else None, target, limit_nbytes=512)
        if rank == 2:
            sends, count = exchange._send, 0

            def fails(group: Any, message: Any, peer: int) -> Any:
                nonlocal count
                count += 1
                if count == 5:
                    raise MemoryError("no room for a message")
                return sends(group, message, peer)

            exchange._send = fails
        try:
            move.run()
        except (PeerFailed, MemoryError) as error:
            found = f"{type(error).__name__}: {error}"
        assert all(bool(parameter.to_local().isnan().all()) for parameter in target.parameters())
        move.run()
        for name, tensor in target.state_dict().items():
            assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), full[name])
        assert torch.isfinite(target(torch.ones(1, 40))).all()
        dist.barrier()
        return found

    *others, own = run_forks(3, rank_main, (), 60.0)
    assert own == "MemoryError: no room for a message"
    assert all("rank 2 raised in transfer: MemoryError: no room for a message" in other for other in others), others
