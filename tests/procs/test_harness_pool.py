"""The pool of gloo processes: results, one error for all ranks, hangs with stacks, and a pool that survives."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import hang
from tests.harness.errors import RanksFailed
from tests.harness.faults import Faults
from tests.harness.pool import pool


def _sum_of_ranks(rank: int) -> float:
    value = torch.full((3,), float(rank))
    dist.all_reduce(value)
    return value[0].item()


def _assert_clean(world: int = 2) -> None:
    assert pool(world).run(_sum_of_ranks) == [world * (world - 1) / 2] * world


def _pid(rank: int) -> int:
    return os.getpid()


def _tensor_of_rank(rank: int, scale: float) -> dict[str, Any]:
    return {"rank": rank, "tensor": torch.arange(3.0) * rank * scale, "threads": torch.get_num_threads()}


def test_results_come_in_rank_order_with_their_tensors() -> None:
    results = pool(3).run(_tensor_of_rank, 2.0)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert torch.equal(results[2]["tensor"], torch.tensor([0.0, 4.0, 8.0]))
    assert {result["threads"] for result in results} == {1}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_see_all_ranks(world: int) -> None:
    _assert_clean(world)


def test_processes_are_used_again() -> None:
    first = pool(2).run(_pid)
    assert pool(2).run(_pid) == first
    assert pool(3).run(_pid)[:2] == first, "a larger world adds processes to those there are"
    assert len({*first, os.getpid()}) == 3


_KEPT: list[dist.Store] = []


def _keeps_a_store(rank: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.FileStore)
    _KEPT.append(store.clone())
    return store.path


def _drops_it(rank: int, path: str) -> bool:
    """Whether the file is still there when the last store of it is destroyed."""
    found = os.path.exists(path)
    _KEPT.clear()
    return found


def test_the_file_of_a_store_that_outlives_its_job_stays() -> None:
    """torch makes a file anew that was removed, and its next store waits in it for ever, with the file locked."""
    path = pool(2).run(_keeps_a_store)[0]
    assert all(pool(2).run(_drops_it, path))


def _rank_one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.all_reduce(torch.ones(1))


def test_one_error_with_every_rank_s_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank one is unwell") as caught:
        pool(3).run(_rank_one_raises)
    assert isinstance(caught.value.exception(1), ValueError)
    assert "in _rank_one_raises" in str(caught.value)
    assert next(iter(caught.value.reports)) == 1, "the cause comes first"
    assert set(caught.value.reports) == {0, 1, 2}, "the others were waiting for it, and say where"
    _assert_clean(3)


def _fails_to_join(rank: int) -> int:
    """On rank 1, what is left when a peer goes while this rank is inside `init_process_group`."""
    dist.barrier()  # rank 0 has joined too
    if rank == 1:
        dist.destroy_process_group()
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=_NoStore(), rank=0, world_size=2)
    return os.getpid()


class _NoStore(dist.Store):
    """Fails at the first use, as a peer's closed connection does."""


@pytest.mark.slow
def test_a_process_that_failed_to_join_a_group_is_replaced() -> None:
    """torch counts the group that was not made: the next has another name there, and all ranks would hang."""
    before = pool(2).run(_fails_to_join)
    after = pool(2).run(_pid, timeout=20)
    assert after[0] == before[0] and after[1] != before[1]
    _assert_clean()


class _DoesNotPickle(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _raises_what_does_not_pickle(rank: int) -> None:
    raise _DoesNotPickle("told", "anyway")


def _returns_what_does_not_pickle(rank: int) -> Any:
    return lambda: None


def test_what_cannot_be_carried_over_is_told_as_text() -> None:
    # Without a group: where a rank that raised took it down, one that is late would raise that, which pickles.
    with pytest.raises(RanksFailed, match="told anyway") as caught:
        pool(2).run(_raises_what_does_not_pickle, group=False)
    assert caught.value.exception(0) is None
    with pytest.raises(RanksFailed, match="pickle"):
        pool(2).run(_returns_what_does_not_pickle, group=False)
    _assert_clean()


def test_a_function_that_cannot_be_imported_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="Move the function to module level"):
        pool(2).run(lambda rank: rank)
    _assert_clean()


def _rank_zero_never_comes(rank: int) -> None:
    if rank == 0:
        _sleeps_for_ever()
    dist.all_reduce(torch.ones(1))


def _sleeps_for_ever() -> None:
    print("about to sleep", flush=True)
    time.sleep(10_000)


@pytest.mark.slow
def test_a_hang_is_reported_with_all_stacks_within_its_time() -> None:
    _assert_clean()  # so that the start of the processes is not part of the time below
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 hung, then rank 1 hung") as caught:
        pool(2).run(_rank_zero_never_comes, timeout=1.0)
    assert time.monotonic() - start < hang.patience(30)
    assert "_sleeps_for_ever" in caught.value.reports[0].detail
    assert "about to sleep" in caught.value.reports[0].detail, "the rank's output belongs to the report"
    assert "all_reduce" in caught.value.reports[1].detail
    _assert_clean()


@pytest.mark.slow
def test_the_hang_timer_of_the_test_tells_the_ranks_stacks_too() -> None:
    _assert_clean()  # so that the start of the processes is not part of the two seconds
    start = time.monotonic()
    # In place of the timer that runs around this test, which does not come back: the pool's own limit is far away.
    with pytest.raises(hang.Hang, match="_sleeps_for_ever"), hang.limit(2.0, "this test"):
        pool(2).run(_rank_zero_never_comes, timeout=100)
    assert time.monotonic() - start < hang.patience(60)
    _assert_clean()


def _dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_a_process_that_ends_is_named_and_replaced() -> None:
    before = pool(2).run(_pid)
    with pytest.raises(RanksFailed, match="exit code 7") as caught:
        pool(2).run(_dies)
    assert caught.value.reports[1].kind == "died"
    assert caught.value.reports[0].kind == "raised", "it saw the connection close"
    assert not set(before) & set(pool(2).run(_pid))
    _assert_clean()


def _faulty_steps(rank: int, faults: Faults) -> None:
    for step in range(3):
        faults.check(rank=rank, step=step)
        dist.all_reduce(torch.ones(1))


def test_injected_faults_reach_the_processes() -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        pool(2).run(_faulty_steps, Faults().kill_at(rank=0, step=1))
    with pytest.raises(RanksFailed, match="injected fault on rank 1 at step 2"):
        pool(2).run(_faulty_steps, Faults().fail_at(rank=1, step=2))
    _assert_clean()


def _leaves_a_mess(rank: int) -> int:
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), async_op=True)  # never waited for
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)  # never matched
    os.environ["TESTS_MESS"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    return os.getpid()


def _state(rank: int) -> tuple[Any, ...]:
    return (
        os.environ.get("TESTS_MESS"),
        torch.get_default_dtype(),
        torch.randint(1 << 40, (1,)).item(),
        len(dist.distributed_c10d._world.pg_map),
        os.getpid(),
    )


def test_what_a_job_leaves_behind_does_not_reach_the_next() -> None:
    clean = pool(2).run(_state)
    assert pool(2).run(_leaves_a_mess) == [state[-1] for state in clean], "the processes stay"
    assert pool(2).run(_state) == clean
    _assert_clean()


def _warns(rank: int) -> None:
    warnings.warn("from a rank", UserWarning, stacklevel=1)


def test_warnings_are_errors_in_ranks_as_in_tests() -> None:
    with pytest.raises(RanksFailed, match="from a rank"):
        pool(1).run(_warns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool(1).run(_warns)
    _assert_clean(1)


def _no_group(rank: int) -> bool:
    return dist.is_initialized()


def test_a_job_may_do_without_a_group() -> None:
    assert pool(2).run(_no_group, group=False) == [False, False]
