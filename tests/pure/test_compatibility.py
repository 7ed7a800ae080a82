"""docs/compatibility.md is what the marks on the tests and the recorded results say, and both are honest."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard._torch.names import NEWEST
from tests.harness import behaviours, recording
from tests.harness.behaviours import ROOT, Case, behaviour, case_of, release, rows_of
from tests.harness.compatibility import (
    PAGE,
    Recorded,
    Result,
    document,
    left_out,
    load,
    newest_document,
    problems,
    render,
)


def test_the_page_is_what_marks_and_results_say() -> None:
    """Red after a new mark: run `python -m tests.harness.behaviours --write tests/.../test_x.py` (no files: all)."""
    assert problems(behaviours.collect()) == []


def test_a_changed_page_is_noticed() -> None:
    cases = behaviours.collect()
    assert any("is not what marks" in problem for problem in problems(cases, page=PAGE.read_text() + "\n"))
    assert any("is recorded for" in problem for problem in problems(cases[1:] if len(cases) > 1 else []))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"area": "no such area"}, "area is one of"),
        ({"area": "state", "torch": "worse"}, "torch is one of"),
        ({"area": "state", "torch": "better"}, "a reason is expected"),
        ({"area": "state", "reason": "because"}, "a reason is expected"),
        ({"area": "state", "since": "3"}, "since is a release"),
    ],
)
def test_marks_that_the_page_could_not_show_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        behaviour("a title", **arguments)


# ---- what is wrong with marks and results --------------------------------------------------------------------


def _case(
    torch: str, implementation: str, *, reason: str = "", test: str = "tests/threads/test_x.py::test_y", since: str = ""
) -> Case:
    return Case("state", "a title", torch, reason, test, implementation, True, since)  # type: ignore[arg-type]


def _recorded(path: Path, torch: str, cases: list[Case], outcomes: dict[str, str]) -> Path:
    results = [
        vars(Result(*c.key, outcome, failed=int(outcome != "pass")))
        for c in cases
        if (outcome := outcomes.get(c.implementation))
    ]
    path.write_text(json.dumps({"about": {"torch": torch, "machine": "m"}, "results": results}))
    return path


def _documents(
    cases: list[Case], outcomes: dict[str, str], folder: Path, newest: dict[str, str] | None = None
) -> tuple[Path, Path]:
    """What came of the cases with torch 2.8 and, with `newest`, with 2.9."""
    first = _recorded(folder / "compatibility_torch-2.8.0_2000-01-01.json", "2.8.0", cases, outcomes)
    name = "compatibility_newest_torch-2.9.0_2000-01-01.json"
    return first, _recorded(folder / name, "2.9.0", cases, newest or {})


def _said(cases: list[Case], outcomes: dict[str, str], folder: Path, newest: dict[str, str] | None = None) -> str:
    """The problems of these cases with these outcomes, on a page that is written as it should be."""
    path, then = _documents(cases, outcomes, folder, newest)
    page = render(cases, Recorded.of(path), Recorded.of(then))
    return "\n".join(problems(cases, page=page, path=path, newest=then))


def test_verdicts_are_held_against_what_torch_did(tmp_path: Path) -> None:
    same = [_case("same", "torch"), _case("same", "fullshard")]
    better = [_case("better", "torch", reason="r"), _case("better", "fullshard", reason="r")]
    both = {"torch": "pass", "fullshard": "pass"}
    assert _said(same, both, tmp_path) == ""
    assert "torch: wrong" in _said(same, both | {"torch": "wrong"}, tmp_path)
    assert "fullshard: hang" in _said(same, both | {"fullshard": "hang"}, tmp_path)
    assert "fullshard: skipped" in _said(same, both | {"fullshard": "skipped"}, tmp_path)
    assert "was not recorded for torch" in _said(same, {"fullshard": "pass"}, tmp_path)
    assert _said(better, both | {"torch": "hang"}, tmp_path) == ""
    assert "torch passes it, too" in _said(better, both, tmp_path)
    assert "fullshard: error" in _said(better, {"torch": "error", "fullshard": "error"}, tmp_path)


def test_what_became_right_is_said(tmp_path: Path) -> None:
    """In a column and a list of the newest torch, as far as it ran; a promise that it breaks is a problem."""
    better = [_case("better", "torch", reason="r"), _case("better", "fullshard", reason="r")]
    outcomes = {"torch": "hang", "fullshard": "pass"}

    def page(newest: dict[str, str]) -> str:
        return render(better, *map(Recorded.of, _documents(better, outcomes, tmp_path, newest)))

    assert "| hang | pass | better than 2.8, same as 2.9: r |" in page({"torch": "pass"})
    assert "* a title (state)" in page({"torch": "pass"}) and "1 better than 2.8, same as 2.9" in page(
        {"torch": "pass"}
    )
    assert "| hang | as before | **better**: r |" in page({"torch": "hang"}) and "None." in page({"torch": "hang"})
    assert "| hang | error | **better**: r |" in page({"torch": "error"})
    assert "| hang | not run | **better**: r |" in page({})
    assert _said(better, outcomes, tmp_path, {"torch": "pass"}) == ""
    same = [_case("same", "torch"), _case("same", "fullshard")]
    passes = {"torch": "pass", "fullshard": "pass"}
    assert "torch 2.9: wrong" in _said(same, passes, tmp_path, {"torch": "wrong"})


def test_what_a_newer_torch_has_first(tmp_path: Path) -> None:
    """Its run for torch is recorded with the newest alone."""
    same = [_case("same", "torch", since="2.9"), _case("same", "fullshard", since="2.9")]
    outcomes, passes = {"fullshard": "pass"}, {"torch": "pass"}
    assert _said(same, outcomes, tmp_path, passes) == _said(same, outcomes, tmp_path) == ""
    page = render(same, *map(Recorded.of, _documents(same, outcomes, tmp_path, passes)))
    assert "| not there before 2.9 | pass | same |" in page
    better = [_case("better", name, since="2.9", reason="r") for name in ("torch", "fullshard")]
    assert "torch passes it, too" in _said(better, outcomes, tmp_path, passes)
    assert _said(better, outcomes, tmp_path, {"torch": "error"}) == ""
    assert "is recorded for torch" in _said(same, outcomes | passes, tmp_path)


def test_marks_that_prove_less_than_they_say() -> None:
    def wrong(*cases: Case) -> str:
        return "\n".join(rows_of(cases)[1])

    assert "does not run for torch" in wrong(_case("same", "fullshard"))
    assert "does not run for fullshard" in wrong(_case("same", "torch"))
    assert "no `impl`" in wrong(_case("better", "fullshard", reason="r"))
    assert "runs for torch by itself" in wrong(
        _case("none", "torch", reason="r"), _case("none", "fullshard", reason="r")
    )
    assert "marks of one row agree" in wrong(_case("same", "torch"), _case("none", "fullshard", reason="r"))


# ---- what the marks make of a module -------------------------------------------------------------------------


def test_rows_from_marks_on_tests_and_on_cases() -> None:
    module = types.ModuleType("example")
    both = pytest.mark.parametrize("impl", ["torch", "fullshard"])
    number = pytest.mark.parametrize(
        "n, m", [(1, 2), pytest.param(3, 4, marks=behaviour("other", area="errors", torch="none", reason="r"))]
    )

    def test_one(n: int, m: int, impl: str) -> None: ...
    def test_two(impl: str) -> None: ...
    def test_unmarked(impl: str) -> None: ...

    test_one = behaviour("n is {n}", area="state")(both(number(test_one)))
    test_two = behaviour("two", area="state", torch="better", reason="r")(test_two)
    for function in (test_one, test_two, test_unmarked):
        function.__module__ = "example"
        setattr(module, function.__name__, function)
    cases = list(behaviours.cases_of_module(module, "tests/pure/example.py"))
    assert {(case.title, case.test.split("::")[1], case.implementation) for case in cases} == {
        (title, name, implementation)
        for title, name in (("n is 1", "test_one"), ("other", "test_one"), ("two", "test_two"))
        for implementation in ("torch", "fullshard")
    }
    assert [case.implementation for case in cases if case.only_when_written] == ["torch"]
    assert case_of("x", [], {}) is None


# ---- recording -----------------------------------------------------------------------------------------------

EXAMPLE = """
import os, pytest
from tests.harness import worlds
from tests.harness.behaviours import behaviour
both = pytest.mark.parametrize("impl", ["torch", "fullshard"])

@behaviour("{how}", area="state", torch="better", reason="r")
@both
@pytest.mark.hang_after(0.3)
@pytest.mark.parametrize("how", ["wrong", "error", "hang", "crash", "pass", "skip"])
def test_fails_for_torch(how, impl):
    worlds.note("threads", 2)
    if impl == "fullshard" or how == "pass":
        return
    if how == "wrong":
        assert 1 == 2, "one is not two"
    if how == "error":
        raise RuntimeError("as torch says")
    if how == "hang":
        import time
        time.sleep(30)
    if how == "crash":
        os.kill(os.getpid(), 9)
    pytest.skip("not here")

def test_unmarked():
    raise SystemExit("not run")
"""


@pytest.mark.slow
def test_failures_of_torch_are_recorded_as_they_happen(tmp_path: Path) -> None:
    """Also the end of the process; what was to run after it runs in the next one."""
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    events = tmp_path / "events.jsonl"
    options = ("-c", str(behaviours.ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest")
    recording._run_all([str(tmp_path / "test_example.py")], events, options)
    results = recording._results(recording._events(events))
    said = {(r.title, r.implementation): (r.outcome, r.detail) for r in results}
    assert {key: value for key, value in said.items() if key[1] == "torch"} == {
        ("wrong", "torch"): ("wrong", "one is not two"),
        ("error", "torch"): ("error", "RuntimeError: as torch says"),
        ("hang", "torch"): ("hang", ""),
        ("crash", "torch"): ("crash", "SIGKILL"),
        ("pass", "torch"): ("pass", ""),
        ("skip", "torch"): ("skipped", "not here"),
    }
    assert all(outcome == ("pass", "") for (_, who), outcome in said.items() if who == "fullshard") and len(said) == 12
    assert {tuple(r.worlds) for r in results if r.outcome != "crash"} == {("threads 2",)}


def test_the_document_is_of_the_pinned_torch() -> None:
    """What torch itself does is run in `make test-full` alone. Red after a new pin: run that, and
    `python -m tests.harness.behaviours --write`."""
    path = document()
    assert path is not None
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert [load(path)[0]["torch"]] == pinned


@pytest.mark.parametrize(("find", "name"), [(document, "torch"), (newest_document, "newest_torch")])
def test_a_document_names_the_torch_that_it_is_of(find: Callable[[], Path | None], name: str) -> None:
    path = find()
    assert path is not None
    about, results = load(path)
    assert path.name == f"compatibility_{name}-{about['torch']}_{about['date']}.json"
    assert all(result.date <= about["date"] for result in results)


@pytest.mark.slow
def test_every_mark_ran_with_the_newest_torch() -> None:
    """A new mark may wait for it until the next release; the page says so. Red: run
    `python -m tests.harness.behaviours --write --newest PYTHON FILES`; `make versions ARGS=--make` makes a PYTHON."""
    assert left_out(behaviours.collect()) == []


def test_the_newest_document_is_of_the_newest_torch_that_is_declared() -> None:
    path = newest_document()
    assert path is not None
    assert release(load(path)[0]["torch"]) == NEWEST
