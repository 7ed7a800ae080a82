"""Ranks as threads: results, one error for all ranks, nobody left waiting, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.harness.errors import RanksFailed
from tests.harness.hang import patience
from tests.harness.threads import run_ranks, running

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.threads_only(reason="what is tested here is the threads")


def _sum_of_ranks(rank: int) -> float:
    value = torch.full((3,), float(rank))
    dist.all_reduce(value)
    return value[0].item()


def _assert_clean() -> None:
    hook = sys.excepthook
    assert run_ranks(3, _sum_of_ranks) == [3.0] * 3
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert not running()


def test_no_rank_takes_the_shapes_of_another_one() -> None:
    """A new thread gets the number of one that has ended, and by that number torch keeps the shapes by which a DTensor
    of uneven shards becomes whole. Within ten runs a number goes to another rank."""
    value = torch.arange(15.0).view(5, 3)

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        assert torch.equal(distribute_tensor(value, mesh, [Shard(0), Shard(0)]).full_tensor(), value)

    for _ in range(10):
        run_ranks(4, rank_main)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(4, lambda rank, factor: rank * factor, 10) == [0, 10, 20, 30]
    _assert_clean()


@pytest.mark.parametrize("world", [1, 2, 5])
def test_collectives_see_all_ranks(world: int) -> None:
    assert run_ranks(world, _sum_of_ranks) == [world * (world - 1) / 2] * world


def test_a_failing_rank_frees_those_in_a_collective() -> None:
    def rank_main(rank: int) -> None:
        if rank == 2:
            raise ValueError("rank two is unwell")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank two is unwell") as caught:
        run_ranks(4, rank_main)
    assert time.monotonic() - start < patience(30)
    assert isinstance(caught.value.exception(2), ValueError)
    assert "in rank_main" in str(caught.value), "the traceback of the failing rank belongs to the message"
    assert next(iter(caught.value.reports)) == 2, "the cause comes first"
    assert {caught.value.reports[rank].kind for rank in (0, 1, 3)} == {"released"}
    _assert_clean()


def test_a_failing_rank_frees_those_that_make_a_group() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            raise KeyError("no group for me")
        dist.new_group([0, 1, 2])

    start = time.monotonic()
    with pytest.raises(RanksFailed, match="no group for me"):
        run_ranks(3, rank_main)
    assert time.monotonic() - start < patience(30)
    _assert_clean()


def test_all_ranks_tell_their_own_error() -> None:
    def rank_main(rank: int) -> None:
        raise ValueError(f"reason of rank {rank}")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, rank_main)
    for rank in caught.value.reports:
        assert f"reason of rank {rank}" in str(caught.value)
    _assert_clean()


def test_a_rank_that_waits_alone_is_reported_with_its_stack() -> None:
    def waits_for_a_collective_nobody_else_calls(rank: int) -> None:
        if rank == 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RanksFailed, match="rank 1 hung") as caught:
        run_ranks(2, waits_for_a_collective_nobody_else_calls, timeout=0.5)
    assert "waits_for_a_collective_nobody_else_calls" in caught.value.reports[1].detail
    _assert_clean()


# The exception that ends the rank may arrive in a callback of the garbage collector, where it is lost; the next one
# ends the rank.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*gc_callback:pytest.PytestUnraisableExceptionWarning")
def test_a_rank_in_an_endless_loop_is_reported_and_ended() -> None:
    def loops(rank: int) -> None:
        while rank == 0:
            time.sleep(0.01)

    with pytest.raises(RanksFailed, match="rank 0 hung") as caught:
        run_ranks(2, loops, timeout=0.5)
    assert "in loops" in caught.value.reports[0].detail
    _assert_clean()


def test_functional_collectives_and_sub_groups_are_each_rank_s_own() -> None:
    """Fails without thread isolation: the ranks would find each other's groups in one registry."""

    def rank_main(rank: int) -> tuple[list[float], list[float]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        ranks = DTensor.from_local(torch.tensor([float(rank)]), mesh["shard"], [Shard(0)]).full_tensor()
        full = distribute_tensor(torch.arange(5.0), mesh["shard"], [Shard(0)]).full_tensor()
        return ranks.tolist(), full.tolist()

    results = run_ranks(4, rank_main)
    assert [ranks for ranks, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(full == [0, 1, 2, 3, 4] for _, full in results)
    _assert_clean()


def test_backward_runs_in_the_thread_of_its_rank() -> None:
    """Hooks call collectives in backward; in autograd's own threads they would find no process group."""

    def rank_main(rank: int) -> bool:
        seen: list[int] = []
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda grad: seen.append(threading.get_ident()))
        (weight * rank).sum().backward()
        return seen == [threading.get_ident()]

    assert run_ranks(2, rank_main) == [True, True]


def test_nesting_is_refused() -> None:
    from tests.harness.fake import fake_world

    with fake_world(2), pytest.raises(RuntimeError, match="has no process group"):
        run_ranks(2, _sum_of_ranks)
    _assert_clean()


def test_the_group_of_the_ranks_is_torch_s_own() -> None:
    """Every collective is the method that torch's threaded group has: the harness replaces, renames and adds none. The
    one method that it does replace, the inner one at which ranks meet, asks whether its rank was left behind, and then
    calls torch's. Messages from one rank to another, which torch's group has not, are the harness's (mailbox.py)."""
    from torch.testing._internal.distributed import multi_threaded_pg as torch_s

    def rank_main(rank: int) -> list[str]:
        functions = {name: getattr(value, "__func__", value) for name, value in vars(torch_s.ProcessLocalGroup).items()}
        codes = {name: getattr(function, "__code__", None) for name, function in functions.items()}
        return [name for name, code in codes.items() if code is not None and code.co_filename != torch_s.__file__]

    for found in run_ranks(2, rank_main):
        assert found == ["_start_coll", "send", "recv"]


@pytest.mark.slow
def test_no_thread_of_a_rank_outlives_the_interpreter() -> None:
    """One that does is freed twice in C++, and one process in eight that used DTensors crashed when it ended."""
    program = """
import atexit, threading

@atexit.register
def last() -> None:
    print([type(one).__name__ for one in threading.enumerate()])

from tests.harness.threads import run_ranks
run_ranks(2, int)
print([type(one).__name__ for one in threading.enumerate()])
"""
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert child.returncode == 0, child.stderr
    running, at_the_end = child.stdout.splitlines()
    assert running == "['_MainThread', '_Thread', '_Thread']" and at_the_end == "['_MainThread']"
