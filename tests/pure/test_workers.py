"""`make test` runs all tests, in several workers side by side."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import ROOT, TIERS, commands, note_left_out, run


def test_every_tier_is_run_and_threads_after_forks() -> None:
    tiers = sorted({path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")})
    assert sorted({tier for of_worker in TIERS.values() for tier in of_worker}) == tiers
    first, one, other = TIERS.values()
    assert first == ("threads", "pure") and one[-1] == other[-1] == "threads" and sorted(one) == sorted(other)


def test_options_reach_every_worker(tmp_path: Path) -> None:
    found = commands(tmp_path, ["-m", "not slow"])
    assert found.keys() == TIERS.keys()
    for name, words in found.items():
        tiers = TIERS[name]
        assert words[:3] == [sys.executable, "-m", "pytest"] and "not slow" in words
        assert words[-len(tiers) :] == [f"tests/{tier}" for tier in tiers]
        assert f"--queue={tmp_path}" in words


def test_each_file_is_run_by_one_worker_and_whole(tmp_path: Path) -> None:
    """And what fails in a file fails the worker that took it."""
    for folder in ("tests", "queue"):
        (tmp_path / folder).mkdir()
    said = "open({!r}, 'a').write({!r})"
    begins, ends = (said.format(str(tmp_path / "said"), word) for word in ("begins ", "ends "))
    for letter in "abcdef":
        tests = "\n".join(f"def test_{n}(x): time.sleep(0.02)" for n in range(4))
        fixture = f"@pytest.fixture(scope='module')\ndef x(): {begins}; yield; {ends}"
        (tmp_path / f"tests/test_{letter}.py").write_text(f"import time\nimport pytest\n{fixture}\n{tests}\n")
    (tmp_path / "tests/test_g.py").write_text("def test_0(): assert False\n")
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.harness.queue"]
    words += [f"--queue={tmp_path / 'queue'}", f"--rootdir={tmp_path}", str(tmp_path / "tests")]
    runs = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [one.communicate(timeout=50)[0] for one in runs]
    ran = [re.findall(r"test_(\w)\.py::test_\d.* (?:PASSED|FAILED)", text) for text in printed]
    assert sorted(ran[0] + ran[1]) == sorted("abcdef" * 4 + "g")
    assert not set(ran[0]) & set(ran[1])
    assert sorted((tmp_path / "said").read_text().split()) == ["begins"] * 6 + ["ends"] * 6
    assert [one.returncode for one in runs] == ["g" in letters for letters in ran]
    # One that came too late for any file has nothing to count.
    assert all("[100%]" in text for text, letters in zip(printed, ran, strict=True) if letters)


@pytest.mark.parametrize(("first", "second", "worst"), [(0, 0, 0), (1, 0, 1), (0, 3, 3), (2, 1, 2)])
def test_the_worst_worker_decides(
    first: int, second: int, worst: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And both are shown, and run at the same time: each waits for the other to have begun."""
    commands = {}
    for mine, other, status in (("a", "b", first), ("b", "a", second)):
        code = f"""
import pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
(here / {mine!r}).touch()
end = time.monotonic() + 30
while not (here / {other!r}).exists() and time.monotonic() < end:
    time.sleep(0.01)
print("worker", {mine!r}, (here / {other!r}).exists())
sys.exit({status})
"""
        commands[mine] = [sys.executable, "-c", code]
    assert run(commands, shown="a", folder=tmp_path) == worst
    printed = capfd.readouterr().out
    assert "worker a True" in printed and "worker b True" in printed
    assert f"a: status {first}; b: status {second}" in printed


def test_what_was_left_out_is_said_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the worker that collects all tests; the other one knows of those of threads alone."""
    for worker, line in (("0", "Left out: 1"), ("1", "Left out: 1, and more")):
        monkeypatch.setenv("TESTS_WORKER", worker)
        note_left_out(tmp_path, line)
    assert run({"a": [sys.executable, "-S", "-c", ""]}, shown="a", folder=tmp_path) == 0
    *_, said, times = capfd.readouterr().out.splitlines()
    assert said == "Left out: 1, and more" and times.startswith("a: status 0;")


def test_a_worker_that_a_signal_ends_leaves_the_test_and_the_stacks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the end of the output, where it is not lost among all that the workers printed."""
    (tmp_path / "test_it.py").write_text(
        "import os, signal\ndef test_well(): pass\ndef test_ends(): os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    folder = tmp_path / "queue"
    folder.mkdir()
    found = commands(folder, ["-p", "no:cacheprovider", f"--rootdir={tmp_path}"])["threads-1"]
    words = [*found[: -len(TIERS["threads-1"])], str(tmp_path / "test_it.py")]
    assert run({"threads-1": words}, shown="threads-1", folder=folder) == 11
    end = capfd.readouterr().out.partition("threads-1 was ended by signal 11")[2]
    assert "It ran test_it.py::test_ends" in end and "in test_ends" in end and "test_well" not in end
