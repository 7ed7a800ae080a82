"""What ranks send does not rest on when Python collects garbage (`pytest --collect-at-random`, collecting.py)."""

from __future__ import annotations

import gc
import sys

import pytest
import torch.distributed as dist

from tests.harness import collecting, legal, threads
from tests.harness.legal_programs import AFTER, BEFORE, WINDOWS
from tests.harness.threads import run_ranks

# Each thing that legal programs do comes in some program of any thirty.
PROGRAMS = range(200, 230)
FEW = PROGRAMS[:6]


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    "programs", [FEW, pytest.param(PROGRAMS, marks=pytest.mark.slow)], ids=lambda programs: str(len(programs))
)
def test_legal_programs_while_garbage_is_collected_at_random(programs: range) -> None:
    before, found = collecting.collections, []
    for seed in programs:
        with collecting.at_random(seed):
            found.append(legal.count([seed]))
    assert not (alarms := [alarm for one in found for alarm in one.alarms]), "\n".join(
        f"program {alarm.seed}: {alarm.text}" for alarm in alarms
    )
    if programs is PROGRAMS:
        assert {f"step: {name}" for name in (*BEFORE, *WINDOWS, *AFTER)} <= {name for one in found for name in one.of}
    if threads.RANKS == "threads":
        assert collecting.collections - before > 5 * len(programs)


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_same_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank has a collector of its own."""
    monkeypatch.setattr(threads, "RANKS", "gloo")
    for seed in FEW[:4]:
        with collecting.at_random(seed):
            alarms = legal.count([seed]).alarms
        assert not alarms, "\n".join(f"program {alarm.seed}: {alarm.text}" for alarm in alarms)


@pytest.mark.threads_only(reason="what is counted here is this process's collections")
def test_the_points_are_those_of_the_seed_and_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards nothing is left: no profile function, the automatic collector on."""
    monkeypatch.setattr(collecting, "MEAN_CALLS", 50)

    def called(number: int) -> int:
        return number

    def points(rank: int) -> list[int]:
        assert not gc.isenabled()
        profile, seen = sys.getprofile(), []
        if isinstance(profile, collecting._Collector):
            for number in range(1000):
                left = profile.left
                called(number)
                if profile.left > left:
                    seen.append(number)
        dist.barrier()
        return seen

    runs = []
    for seed in (1, 1, 2):
        with collecting.at_random(seed):
            runs.append(run_ranks(8, points))
    assert runs[0] == runs[1] != runs[2]
    some = [tuple(points) for points in runs[0] if points]
    assert 1 < len(some) < 8 and len(set(some)) == len(some)
    assert gc.isenabled() and sys.getprofile() is None and not collecting.seed_of_run() and gc.get_freeze_count() == 0


def test_without_the_mode_nothing_is_collected_by_it() -> None:
    before = collecting.collections

    def rank_main(rank: int) -> bool:
        return gc.isenabled() and not isinstance(sys.getprofile(), collecting._Collector)

    if not collecting.seed_of_run():
        assert all(run_ranks(2, rank_main)) and collecting.collections == before
