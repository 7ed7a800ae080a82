"""The table of torch's test classes names tests that are there, and that run for whom it says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.harness import torch_suite

ROOT = Path(__file__).parents[2]


@functools.cache
def _functions(path: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def _runs_for_both(function: ast.FunctionDef) -> bool:
    """Under the mark, or parametrised by `impl` in another way."""
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    return "for_each_implementation" in marks or any(
        re.match(r"pytest\.mark\.parametrize\(\(?['\"\w, ]*'impl'", mark) for mark in marks
    )


def test_tests_for_both_run_for_both() -> None:
    for test in torch_suite.tests("both"):
        path, _, name = test.partition("::")
        assert name in _functions(path), f"{test} is not there"
        assert _runs_for_both(_functions(path)[name]), f"{test} does not run for both implementations"


def test_tests_for_ours_are_there() -> None:
    """A name that ends with `test_` is a whole file."""
    for test in torch_suite.tests("ours"):
        path, _, name = test.partition("::")
        assert name in _functions(path) or (name == "test_" and any(each.startswith(name) for each in _functions(path)))


def test_what_is_ours_alone_has_its_reason() -> None:
    for row in torch_suite.ROWS:
        assert bool(row.why) == bool(row.ours), f"{row.theirs}: a reason goes with tests for ours alone"
        assert row.both or row.ours


def test_the_page_is_of_the_table() -> None:
    assert torch_suite.PAGE.read_text() == torch_suite.page(), "python -m tests.harness.torch_suite --write"
