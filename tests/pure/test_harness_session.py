"""The rules of a test session itself: hangs end with their stacks, unexplained skips fail, tiers have markers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.harness import draw, hang

ROOT = Path(__file__).parents[2]


def _waits_in_python() -> None:
    time.sleep(60)


def test_a_hang_raises_with_the_stacks_of_all_threads() -> None:
    start = time.monotonic()
    with (
        pytest.raises(hang.Hang, match="the example did not end within 0.3 s") as caught,
        hang.limit(0.3, "the example"),
    ):
        _waits_in_python()
    assert "in _waits_in_python" in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_hang_outside_python_ends_the_process_with_its_stacks() -> None:
    """The signal is blocked, as it is in effect by C code that never returns: only the second stage can end it."""
    code = """
import signal, sys, time
from tests.harness import hang
hang.GRACE_SECONDS = 0.5
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
def stuck_for_good():
    time.sleep(60)
with hang.limit(0.3, "the example", terminal=sys.stderr):
    stuck_for_good()
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert run.returncode != 0
    assert "stuck_for_good" in run.stderr


def _session(folder: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_example.py").write_text("import time, pytest\n" + body)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-p",
        "tests.conftest",
    ]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


SKIPPED = "def test_left_out():\n    pytest.skip('no reason')\n"


@pytest.mark.slow
def test_a_skip_outside_the_list_fails_the_run(tmp_path: Path) -> None:
    run = _session(tmp_path, SKIPPED)
    assert run.returncode == 1, run.stdout
    assert "skipped without being in the allow-list" in run.stdout
    assert "test_example.py::test_left_out" in run.stdout


@pytest.mark.slow
def test_an_expected_failure_outside_the_list_fails_the_run(tmp_path: Path) -> None:
    run = _session(tmp_path, "@pytest.mark.xfail(reason='some day')\ndef test_not_yet():\n    assert False\n")
    assert run.returncode == 1, run.stdout
    assert "test_example.py::test_not_yet" in run.stdout


def test_the_allow_list_is_short_and_of_tests_that_exist() -> None:
    lines = [line for line in (ROOT / "tests" / "allowed_skips.txt").read_text().splitlines() if line[:1] not in "#"]
    assert len(lines) <= 5
    for line in lines:
        pattern, _, reason = line.partition("#")
        assert reason.strip(), f"no reason: {line}"
        assert list(ROOT.glob(pattern.split("::")[0].strip())), f"names no file: {line}"


@pytest.mark.slow
@pytest.mark.parametrize("allowed", ["*::test_left_out  # its reason", None])
def test_a_skip_in_the_list_does_not(tmp_path: Path, allowed: str | None) -> None:
    (tmp_path / "allowed.txt").write_text(allowed or "")
    where = str(tmp_path / "allowed.txt") if allowed else ""
    run = _session(tmp_path, SKIPPED + "def test_run():\n    pass\n", f"--allowed-skips={where}")
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
def test_a_module_that_skips_itself_fails_the_run(tmp_path: Path) -> None:
    run = _session(tmp_path, "pytest.importorskip('a_package_that_is_not_there')\n")
    assert run.returncode != 0, run.stdout
    assert "skipped without being in the allow-list" in run.stdout


@pytest.mark.slow
def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    body = """
@pytest.mark.hang_after(0.3)
def test_hangs():
    time.sleep(60)

def test_next():
    pass
"""
    run = _session(tmp_path, body)
    assert "1 failed, 1 passed" in run.stdout
    assert "call of test_example.py::test_hangs did not end within 0.3 s" in run.stdout


class _Item:
    """As much of a test as the rules about drawing look at."""

    def __init__(self, name: str, *marks: pytest.MarkDecorator) -> None:
        self.path, self.nodeid = Path("tests/threads/test_example.py"), f"tests/threads/test_example.py::{name}"
        self._marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self._marks[marker.name] = marker.mark


def test_each_day_other_slow_tests_run_and_on_n_days_all() -> None:
    slow, quick, drawn = pytest.mark.slow, pytest.mark.quick(4), pytest.mark.drawn(2)
    items: Any = [_Item(f"test_alone_{i}", slow) for i in range(60)]
    items += [_Item(f"test_alike[{i}]", quick) for i in range(80)]
    items += [_Item(f"test_family[{i}]", slow, drawn) for i in range(60)]
    items += [_Item("test_quick")]
    conftest._keep_some_quick(items)
    days = [{i.nodeid for i in items if draw.is_drawn(i.nodeid, conftest._one_in(i), day)} for day in range(8)]
    for name, in_days in (("test_alone", 3), ("test_alike", 8), ("test_family", 2)):
        family = {item.nodeid for item in items if name in item.nodeid}
        assert set().union(*days[:in_days]) >= family, "on n days in a row all of them"
        always = set.intersection(*days) & family
        assert len(always) == (20 if name == "test_alike" else 0), "what is not slow is never left out"
        rest = len(family - always) / in_days
        assert all(rest / 2 < len((day & family) - always) < rest * 2 for day in days), "each day about as many"
    assert all("tests/threads/test_example.py::test_quick" in day for day in days)


def test_this_test_carries_the_marker_of_its_tier(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("pure") is not None


LEAKS = """
import torch, torch.distributed as dist
from tests.harness.errors import RanksFailed
from tests.harness import threads
from tests.harness.threads import run_ranks, running

threads._RELEASE_SECONDS = 0.5

def stuck(rank):
    group = dist.group.WORLD
    if rank == 0:
        time.sleep(2.5)  # in C code: it cannot be ended
        group.allreduce([torch.ones(1)])  # the next test's by now

def test_leaks():
    with pytest.raises(RanksFailed, match="rank 0 hung"):
        run_ranks(2, stuck, timeout=0.2)

def summed(rank):
    value = torch.ones(1)
    for _ in range(50):
        time.sleep(0.01)
        dist.all_reduce(value)
    return value.item() == 2.0**50

@pytest.mark.parametrize("again", range(8))
def test_next(again):
    assert run_ranks(2, summed) == [True, True]
    assert not running() and not dist.is_initialized()
"""


@pytest.mark.slow
def test_a_rank_that_is_left_behind_fails_its_test_alone(tmp_path: Path) -> None:
    """It ends in the middle of the tests after it, having called a collective in their time."""
    run = _session(tmp_path, LEAKS)
    assert "1 failed, 8 passed" in run.stdout, run.stdout
    assert re.search(r"^FAILED \S*test_example.py::test_leaks\b", run.stdout, re.MULTILINE)
    assert "rank 0 could not be ended and is left behind" in run.stdout and "in stuck" in run.stdout


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize("slow", [pytest.param(True, marks=pytest.mark.slow), False])
def test_of_a_quick_family_one_in_n_is_not_slow(slow: bool, case: int, request: pytest.FixtureRequest) -> None:
    """What is slow by itself is not counted. Of a case that was chosen alone, there is no other."""
    items = [
        item for item in request.session.items if item.nodeid.partition("[")[0] == request.node.nodeid.partition("[")[0]
    ]
    here = [item for item in items if not item.callspec.params["slow"]]  # type: ignore[attr-defined]
    assert len(items) == 1 or [
        item.callspec.params["case"] for item in here if not item.get_closest_marker("slow")
    ] == [0, 3, 6]  # type: ignore[attr-defined]
