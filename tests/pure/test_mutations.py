"""The table of mutations fits the source; whether each is killed, `python -m tests.harness.mutate` asks (minutes)."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.harness import mutate
from tests.harness.mutate import MUTATIONS, Mutation

RULES = "schedule/rules.py"
ORDER = "schedule/record.py"
SOURCE = {file: (mutate.PACKAGE / file).read_text() for file in {mutation.file for mutation in MUTATIONS}}


@cache
def numbered(file: str) -> set[str]:
    """The [Rn] that stand in a source file."""
    return set(re.findall(r"\[(R\d+)\]", SOURCE[file]))


@cache
def functions(file: str) -> set[str]:
    """The functions of a source file."""
    return {node.name for node in ast.parse(SOURCE[file]).body if isinstance(node, ast.FunctionDef)}


def test_every_rule_is_broken() -> None:
    """Each [Rn] of the rules, each function of the rules, and each function that chooses what to gather ahead."""
    broken = {mutation.rule for mutation in MUTATIONS if mutation.file == RULES}
    assert numbered(RULES) == {f"R{n + 1}" for n in range(len(numbered(RULES)))} <= broken
    # end_sending clears a list.
    decides = {name for name in functions(ORDER) if not name.startswith("_")} - {"end_sending"}
    assert decides <= {mutation.rule for mutation in MUTATIONS if mutation.file == ORDER}


def test_the_table_is_read_as_it_is_written() -> None:
    """Several lines, nothing in their place, and half a line; all blocks."""
    text = "# x: y\n\n== src/fullshard/a/b.py\n\nR1: is: wrong\n-    one\n-two\n\nf: late\n- half\n+ whole\n+\n"
    assert mutate.read(text) == [
        Mutation("R1", "a/b.py", "    one\ntwo", "", "is: wrong"),
        Mutation("f", "a/b.py", " half", " whole\n", "late"),
    ]
    named = mutate.read("== src/fullshard/a.py by tests/x.py tests/y.py\n\nf: late\n-one\n+two\n")
    assert named == [Mutation("f", "a.py", "one", "two", "late", ("tests/x.py", "tests/y.py"))]
    assert named[0].stages == (("tests/x.py",), ("tests/y.py",)) and MUTATIONS[0].stages == mutate.STAGES
    own = mutate.read("== src/fullshard/a.py by tests/x.py\n\nf: late\nby tests/y.py::test_y tests/z.py\n-one\n+two\n")
    assert own == [named[0]._replace(tests=("tests/y.py::test_y", "tests/z.py"))]
    assert [table.name for table in mutate.TABLES][0] == "mutations.txt" and len(mutate.TABLES) > 2
    written = "".join(table.read_text() for table in mutate.TABLES)
    assert len(MUTATIONS) == len(re.findall(r"^\w+: ", written, re.MULTILINE)) > 200


@pytest.mark.parametrize(
    "block",
    ["R1 is wrong\n-a\n+b", "R1: is wrong\n+b", "R1: is wrong\n+b\n-a", "R1: is wrong\n-a\nb", "R1: x\n-a\nby b\n+c"],
)
def test_a_broken_table_is_refused(block: str) -> None:
    """With the number of the line at which the block begins."""
    with pytest.raises(ValueError, match="line 3: expected 'RULE: TEXT'"):
        mutate.read(f"== src/fullshard/a.py\n\n{block}\n")


def test_a_mutation_is_named_after_what_it_breaks() -> None:
    """A number or a function that is in its file, whatever the rules are called one day."""
    for mutation in MUTATIONS:
        if mutation.file in (RULES, ORDER):
            known = numbered(mutation.file) | {name.lstrip("_") for name in functions(mutation.file)}
            assert mutation.rule in known, f"{mutation.rule}: {mutation.breaks}"


def code_of(text: str) -> str:
    """`text` without comments and spaces."""
    return re.sub(r"#.*|\s", "", text)


def test_each_mutation_still_fits() -> None:
    """Its text occurs once, and the change is one."""
    for mutation in MUTATIONS:
        found = SOURCE[mutation.file].count(mutation.old)
        assert found == 1, f"{mutation.file}: write it anew for the source as it is now: {mutation.old!r}"
        assert code_of(mutation.old) != code_of(mutation.new), mutation.breaks


@pytest.mark.sample(12)
@pytest.mark.parametrize("file", SOURCE)
def test_what_a_mutation_makes_is_python(file: str) -> None:
    """Red must mean a failed test."""
    for mutation in MUTATIONS:
        if mutation.file == file:
            text = SOURCE[file].replace(mutation.old, mutation.new)
            compile(text, f"{file} with {mutation.breaks}", "exec", ast.PyCF_ONLY_AST)


def test_a_file_is_run_once_without_a_mutation() -> None:
    """As much of it as some mutation names; and the lifecycle's tests as they are."""
    stages = [("a.py::x",), ("b.py::x",), ("a.py",), ("b.py::y",), *mutate.STAGES]
    runs = mutate.without_mutation(stages)
    assert runs["a.py::x",] == runs["a.py",] == ("a.py",)
    assert runs["b.py::x",] == runs["b.py::y",] == ("b.py::x", "b.py::y")
    assert all(runs[stage] == stage for stage in mutate.STAGES)


def test_waits_name_the_tests_that_kill_them() -> None:
    """Those of the lifecycle are for its rules alone."""
    for mutation in MUTATIONS:
        assert mutation.tests or mutation.file.startswith("schedule/"), f"{mutation.file} {mutation.rule}"


def test_the_document_counts() -> None:
    """Every end of a wait has its line; of rules those that survived."""
    rule = MUTATIONS[0]
    guard = next(mutation for mutation in MUTATIONS if mutation.tests and mutation.file != rule.file)
    killed = mutate.Outcome(guard, "killed", "tests/pure/test_x.py::test_y - AssertionError", 1.0)
    text = mutate.document([killed, mutate.Outcome(rule, "survived", "", 1.0), killed._replace(mutation=rule)])
    assert "\n2 of 3 killed. " in text and f"| `{rule.file}` | 1 | 2 |" in text
    assert f"| `{guard.file}` {guard.rule} | {guard.breaks} | killed | tests/pure/test_x.py::test_y |" in text
    assert text.count(rule.breaks) == 1


def test_a_run_of_some_mutations_renews_these(tmp_path: Path) -> None:
    """What others came to is kept; what never ran is no success."""
    first, second = MUTATIONS[:2]
    document = tmp_path / "mutations.md"
    left_out = len(MUTATIONS)
    for outcome, text in (
        (mutate.Outcome(first, "survived", "", 1.0), f"0 of 1 killed. {left_out - 1} were not run."),
        (mutate.Outcome(second, "killed", "tests/x.py::test_x", 1.0), f"1 of 2 killed. {left_out - 2} were not run."),
        (mutate.Outcome(first, "killed", "tests/x.py::test_y", 1.0), f"2 of 2 killed. {left_out - 2} were not run."),
    ):
        mutate.write(document, [outcome])
        assert text in document.read_text()
    assert first.breaks not in document.read_text()


def test_no_mutation_is_there_twice() -> None:
    """Killed is counted by mutation."""
    assert max(Counter((mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS).values()) == 1


def test_the_tests_that_kill_are_there() -> None:
    """All tests of the lifecycle, and the golden traces on the engine."""
    found = {
        path.relative_to(mutate.REPOSITORY).as_posix() for path in Path(__file__).parent.glob("test_lifecycle_*.py")
    }
    assert {path for stage in mutate.STAGES for path in stage} == found | {"tests/fake/test_golden_fullshard.py"}
    for test in {test for mutation in MUTATIONS for test in mutation.tests}:
        file, _, function = test.partition("::")
        text = (mutate.REPOSITORY / file).read_text()
        assert not function or f"\ndef {function.partition('[')[0]}(" in text, test


def test_a_mutation_changes_one_file_of_the_copy(tmp_path: Path) -> None:
    """And the package not at all."""
    copy = tmp_path / "fullshard"
    shutil.copytree(mutate.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.read_text() for path in copy.rglob("*.py")}
    mutate.apply(MUTATIONS[0], copy)
    assert [path for path in before if path.read_text() != before[path]] == [copy / MUTATIONS[0].file]
    assert (mutate.PACKAGE / RULES).read_text() == SOURCE[RULES]


def test_a_text_that_is_not_found_is_an_error() -> None:
    """Before anything is written."""
    with pytest.raises(LookupError, match="found it 0 times"):
        mutate.apply(MUTATIONS[0]._replace(old="no such rule"), mutate.PACKAGE)
    with pytest.raises(LookupError, match=r"R1 in schedule/rules.py: .* found it [1-9]\d+ times"):
        mutate.apply(MUTATIONS[0]._replace(old="unit."), mutate.PACKAGE)


def test_only_a_failed_test_kills() -> None:
    """A copy that cannot be imported, or a run without tests, is an error and no success."""
    failed = "..F\nFAILED tests/pure/test_x.py::test_y[a] - assert False\n1 failed"
    assert mutate.judge(1, failed) == ("killed", "tests/pure/test_x.py::test_y[a]")
    assert mutate.judge(0, "3 passed") == ("survived", "")
    crash = "\nbegins: tests/pure/test_x.py::test_y[a]\n.\nbegins: tests/pure/test_x.py::test_z\nFatal Python error"
    assert mutate.judge(-11, crash) == ("killed", "tests/pure/test_x.py::test_z (the process crashed)")
    assert mutate.judge(-11, "Fatal Python error: Segmentation fault")[0] == mutate.judge(1, crash)[0] == "error"
    for code, output in ((1, "assert: tested another package"), (2, failed), (4, ""), (5, "no tests ran"), (-9, "")):
        assert mutate.judge(code, output)[0] == "error"


def _are_killed(*arguments: str) -> None:
    """By itself: this process may have a fork server."""
    command = [sys.executable, "-m", "tests.harness.mutate", *arguments]
    run = subprocess.run(command, cwd=mutate.REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.hang_after(300)
def test_a_sample_of_mutations_is_killed() -> None:
    assert len(mutate.sample(MUTATIONS)) >= 10
    _are_killed("--sample", "--jobs", "1")


@pytest.mark.slow
@pytest.mark.hang_after(3600)
@pytest.mark.parametrize("tenth", range(10))
def test_mutations_are_killed(tenth: int) -> None:
    """All of the tables."""
    _are_killed("--tenth", str(tenth), "--jobs", "1")
