"""docs/compatibility.md is what the marks on the tests and the recorded results say, and both are honest."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any

import pytest

from tests.harness import behaviours, recording
from tests.harness.behaviours import ROOT, Case, behaviour, case_of, rows_of
from tests.harness.compatibility import PAGE, Result, document, load, problems, render


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
    ],
)
def test_marks_that_the_page_could_not_show_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        behaviour("a title", **arguments)


# ---- what is wrong with marks and results --------------------------------------------------------------------


def _case(torch: str, implementation: str, *, reason: str = "", test: str = "tests/threads/test_x.py::test_y") -> Case:
    return Case("state", "a title", torch, reason, test, implementation, True)  # type: ignore[arg-type]


def _said(cases: list[Case], outcomes: dict[str, str], folder: Path) -> str:
    """The problems of these cases with these outcomes, on a page that is written as it should be."""
    path = folder / "compatibility_torch-9.9_2000-01-01.json"
    results = [
        vars(Result(c.area, c.title, c.test, c.implementation, outcomes[c.implementation]))
        for c in cases
        if c.implementation in outcomes
    ]
    path.write_text(json.dumps({"about": {"torch": "9.9", "machine": "m"}, "results": results}))
    page = render(cases, *load(path), path.name)
    return "\n".join(problems(cases, page=page, path=path))


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


def test_the_document_names_the_torch_that_it_is_of() -> None:
    path = document()
    assert path is not None
    about, results = load(path)
    assert path.name == f"compatibility_torch-{about['torch']}_{about['date']}.json"
    assert all(result.date <= about["date"] for result in results)
