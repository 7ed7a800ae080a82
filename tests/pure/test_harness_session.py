"""The rules of a test session itself: hangs end with their stacks, unexplained skips fail, tiers have markers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import hang, samples

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
    assert time.monotonic() - start < hang.patience(5)


@pytest.mark.slow
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
def test_a_skip_and_an_expected_failure_outside_the_list_fail_the_run(tmp_path: Path) -> None:
    run = _session(tmp_path, SKIPPED + "@pytest.mark.xfail(reason='some day')\ndef test_not_yet():\n    assert False\n")
    assert run.returncode == 1, run.stdout
    assert "skipped without being in the allow-list" in run.stdout
    assert "test_example.py::test_left_out" in run.stdout and "test_example.py::test_not_yet" in run.stdout


def test_the_allow_list_is_short_and_of_tests_that_exist() -> None:
    lines = [line for line in (ROOT / "tests" / "allowed_skips.txt").read_text().splitlines() if line[:1] not in "#"]
    assert len(lines) <= 7
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize("slow", [pytest.param(True, marks=pytest.mark.slow), False])
def test_of_a_family_some_run(slow: bool, case: int, request: pytest.FixtureRequest) -> None:
    """What is slow by itself is not counted. Of a case that was chosen alone, there is no other."""
    family: dict[tuple[bool, int], pytest.Item] = {
        (item.callspec.params["slow"], item.callspec.params["case"]): item  # type: ignore[attr-defined]
        for item in request.session.items
        if item.nodeid.partition("[")[0] == request.node.nodeid.partition("[")[0]
    }
    if len(family) == 14:
        quick = {key for key, item in family.items() if not item.get_closest_marker("slow")}
        assert quick == {(False, 0), (False, 3), (False, 6)}


FAMILIES = """
@pytest.mark.slow
def test_long(): pass

@pytest.mark.sample(2, full=3)
@pytest.mark.parametrize("b", ["x", "y", [1]])
@pytest.mark.parametrize("a", range(3))
def test_family(a, b): pass

@pytest.mark.sample(full=1)
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_some_slow(a): pass
"""


def _ids(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Those of the tests that passed in a run with -rA."""
    return sorted(re.findall(r"^PASSED \S*::test_(\S+)", run.stdout, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ids", "said"),
    [
        (
            ["--full"],
            ["family[0-x]", "family[1-y]", "family[2-b2]", "long", "some_slow[1]"],
            "Left out, of 13 tests 8, which `make test-all` runs: "
            "test_example.py::test_family (6), test_example.py::test_some_slow (2).",
        ),
        (["-m", "not slow"], ["family[0-x]", "family[2-b2]", "some_slow[1]"], None),
        (["-m", "not slow", "-k", "1-y"], [], None),
        (["--part", "1/5"], ["family[1-b2]", "family[0-x]", "some_slow[2]"], None),
    ],
)
def test_what_a_run_leaves_out(tmp_path: Path, arguments: list[str], ids: list[str], said: str | None) -> None:
    """By the same choice each time, and by name at the end."""
    run = _session(tmp_path, FAMILIES, "-rA", *arguments)
    assert run.returncode == (0 if ids else 5), run.stdout
    assert _ids(run) == sorted(ids)
    assert ("Left out" in run.stdout) is (said is not None) and (said or "") in run.stdout


@pytest.mark.slow
def test_without_arguments_all_tests_run_and_with_full_no_line_is_missing(tmp_path: Path) -> None:
    """That nothing was left out is said, too."""
    run = _session(tmp_path, FAMILIES, "-q", "--collect-only")
    assert run.stdout.count("::test_") == 13 and "Left out" not in run.stdout
    run = _session(tmp_path, "def test_alone(): pass\n", "--full")
    assert "Nothing was left out of 1 tests." in run.stdout
    (tmp_path / "queue").mkdir()
    run = _session(tmp_path, FAMILIES, "--full", "-p", "tests.harness.queue", f"--queue={tmp_path / 'queue'}")
    assert "Left out" not in run.stdout
    (said,) = (tmp_path / "queue").glob("*.left-out")
    assert said.read_text().startswith("Left out, of 13 tests 8,")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "1, 2", "1, half=2"])
def test_a_sample_of_no_number_is_refused(tmp_path: Path, words: str) -> None:
    run = _session(tmp_path, f"@pytest.mark.sample({words})\ndef test_alone(): pass\n")
    assert run.returncode != 0 and "expected sample(n), sample(n, full=m) or sample(full=m)" in run.stdout + run.stderr


def test_a_sample_shows_each_value_of_each_argument() -> None:
    """Of three arguments, as many as the longest list has values; then each pair."""
    cases = [{"a": a, "b": b, "c": c} for a in range(2) for b in range(5) for c in range(3)]
    for n in (5, 15):
        chosen = [cases[index] for index in samples.choose(cases, n)]
        assert len(chosen) == n
        assert {(name, value) for case in chosen for name, value in case.items()} == {
            (name, value) for case in cases for name, value in case.items()
        }
    assert len({(case["b"], case["c"]) for case in chosen}) == 15
    assert samples.choose(cases, 5, first=[7, 8]) == samples.choose(cases, 5, first=[7, 8])
    assert {7, 8} < set(samples.choose(cases, 5, first=[7, 8])) and len(samples.choose(cases, 99)) == len(cases)
