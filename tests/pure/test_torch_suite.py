"""The table of torch's test classes names tests that are there, and that run for whom it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.harness import torch_suite

ROOT = Path(__file__).parents[2]


def _function(test: str) -> tuple[ast.FunctionDef | None, str]:
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return (found[0] if found else None), text


def _runs_for_both(function: ast.FunctionDef) -> bool:
    """Under the mark, or parametrised by `impl` in another way."""
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    return "for_each_implementation" in marks or any(
        re.match(r"pytest\.mark\.parametrize\(\(?['\"\w, ]*'impl'", mark) for mark in marks
    )


@pytest.mark.parametrize("test", sorted(set(torch_suite.tests("both"))))
def test_tests_for_both_run_for_both(test: str) -> None:
    function, _ = _function(test)
    assert function is not None, f"{test} is not there"
    assert _runs_for_both(function), f"{test} does not run for both implementations"


@pytest.mark.parametrize("test", sorted(set(torch_suite.tests("ours"))))
def test_tests_for_ours_are_there(test: str) -> None:
    function, text = _function(test)
    assert function is not None or (test.endswith("::test_") and "\ndef test_" in text), f"{test} is not there"


def test_what_is_ours_alone_has_its_reason() -> None:
    for row in torch_suite.ROWS:
        assert bool(row.why) == bool(row.ours), f"{row.theirs}: a reason goes with tests for ours alone"
        assert row.both or row.ours


def test_the_page_is_of_the_table() -> None:
    assert torch_suite.PAGE.read_text() == torch_suite.page(), "python -m tests.harness.torch_suite --write"
