"""Behaviours that users rely on: the mark that a conformance test carries, and the rows that the marks make.

    @behaviour("slicing a sharded container gives a plain one", area="surface")
    @for_each_implementation
    def test_slicing(impl): ...

`docs/compatibility.md` is made of these rows and of what came of running the tests for torch's FSDP2 and for fullshard:

    python -m tests.harness.behaviours --write              # all marked tests, a few minutes
    python -m tests.harness.behaviours --write tests/threads/test_x.py   # these files; the other results are kept
    python -m tests.harness.behaviours --write --newest PYTHON           # what FSDP2 of PYTHON's torch does
    python -m tests.harness.behaviours --check              # no run: is the page what marks and results say?

The results of both implementations are a dated document beside the page, one line for each test and implementation.
Those of the newest torch's FSDP2 are another one. The page is a function of the marks and of these two, and
`tests/pure/test_compatibility.py` compares it: under the pinned torch, without the newest. PYTHON is an interpreter
with the newest torch, as `make versions` makes it. A row without a result of the newest says so.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

# In the order of the page.
AREAS = (
    "surface",
    "errors",
    "parameters",
    "strategies",
    "placement",
    "when parameters are full",
    "prefetch",
    "mixed precision",
    "gradients",
    "autograd",
    "recomputation",
    "compile",
    "communication",
    "clipping",
    "training",
    "offload",
    "initialisation",
    "extensions",
    "state",
    "checkpoints",
    "failures",
    "packages",
)

Verdict = Literal["same", "equal", "better", "different", "none"]


def behaviour(
    title: str, *, area: str, torch: Verdict = "same", reason: str = "", since: str = ""
) -> pytest.MarkDecorator:
    """Mark a test as the proof of one row of `docs/compatibility.md`; several tests may show the same row.

    `title` says what holds, as a user would say it. Names in braces are the test's parameters, so that
    `"refuses: {case}"` makes a row of each case. The mark may also stand on one case, `pytest.param(x, marks=behaviour(
    ...))`, and then goes before the one on the test. `area`: one of `AREAS`. `torch` says how torch's FSDP2 compares:

    * `"same"`: it passes, too. The test runs for both, under `@for_each_implementation`, always.
    * `"equal"`: the test makes both and compares them itself; it does not take `impl`.
    * `"better"`: we pass and it fails. The test takes `impl` and is *not* under `@for_each_implementation`: it runs for
      fullshard, and for torch only when the page is written, which notes how torch fails (a wrong result, an error, a
      hang, a crash). That torch fails is checked, so that the row goes when torch has mended it.
    * `"different"`: both have it and behave otherwise. The test may run for both (with `impl`, asserting each one's own
      behaviour) or for fullshard alone.
    * `"none"`: torch has no such thing.

    `reason` is wanted for all but "same" and "equal": what is better or different, and why. `since`: the first torch
    whose FSDP2 has it, like "2.15"; the test's run for torch is left out with an older one. Raises ValueError for a
    mark that the page could not show.
    """
    if area not in AREAS:
        raise ValueError(f"behaviour({title!r}): area is one of {', '.join(AREAS)}, not {area!r}; or add yours there")
    if torch not in get_args(Verdict):
        raise ValueError(f"behaviour({title!r}): torch is one of {', '.join(get_args(Verdict))}, not {torch!r}")
    if (torch in ("same", "equal")) == bool(reason):
        raise ValueError(
            f"behaviour({title!r}): a reason is expected exactly when torch is neither 'same' nor 'equal'; torch is "
            f"{torch!r}, the reason {reason!r}"
        )
    if since and not re.fullmatch(r"2\.\d+", since):
        raise ValueError(f"behaviour({title!r}): since is a release of torch like '2.15', not {since!r}")
    return pytest.mark.behaviour(title, area=area, torch=torch, reason=reason, since=since)


def release(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15" and of "2.15.0"; (0, 0) of ""."""
    major, minor = (version.split(".") if version else "00")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Case:
    """One run of a marked test, before it runs. `implementation`: "torch" or "fullshard"; a test without `impl` is ours
    alone, and `asks` is false for it."""

    area: str
    title: str
    torch: Verdict
    reason: str
    test: str  # tests/threads/test_x.py::test_y
    implementation: str
    asks: bool
    since: str = ""

    @property
    def only_when_written(self) -> bool:
        return self.torch == "better" and self.implementation == "torch"

    def is_in(self, torch: str) -> bool:
        """Whether that version of torch has what the test asks its implementation for."""
        return self.implementation != "torch" or release(torch) >= release(self.since)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.area, self.title, self.test, self.implementation


def case_of(test: str, marks: Iterable[Any], params: dict[str, Any]) -> Case | None:
    """The case that a test with these marks (its own first, its parameters' after them) and parameters is."""
    found = [mark for mark in marks if mark.name == "behaviour"]
    if not found:
        return None
    mark = found[-1]
    title = mark.args[0].format(**params)
    implementation = getattr(params.get("impl"), "name", params.get("impl", "fullshard"))
    return Case(area=mark.kwargs["area"], title=title, torch=mark.kwargs["torch"], reason=mark.kwargs["reason"],
                test=test, implementation=implementation, asks="impl" in params,
                since=mark.kwargs["since"])  # fmt: skip


def implementations_of(function: Any, given: dict[str, Any]) -> list[str]:
    """What `impl` is for a marked test that asks for it without being parametrised by it; empty if not."""
    if "impl" in given or "impl" not in inspect.signature(function).parameters:
        return []
    return ["fullshard", "torch"]


# ---- collection, without a run -------------------------------------------------------------------------------


def marked_files(folder: Path = TESTS) -> list[Path]:
    """The test files in which a mark is made."""
    files = sorted(folder.glob("*/test_*.py"))
    return [path for path in files if re.search(r"^from tests\.harness\.behaviours import ", path.read_text(), re.M)]


def cases_of_module(module: ModuleType, path: str) -> Iterator[Case]:
    """What pytest would run of a module's marked functions, from their marks; its files' fixtures are not asked."""
    for name, function in vars(module).items():
        if not name.startswith("test") or getattr(function, "__module__", None) != module.__name__:
            continue
        own = list(getattr(function, "pytestmark", []))
        for params, extra in _parameter_sets([mark for mark in own if mark.name == "parametrize"]):
            for impl in implementations_of(function, params) or [None]:
                case = case_of(f"{path}::{name}", [*own, *extra], params if impl is None else {**params, "impl": impl})
                if case is not None:
                    yield case


def _parameter_sets(marks: list[Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """(parameters, marks on them) of every combination of the `parametrize` marks."""
    axes = []
    for mark in marks:
        names, values = mark.args[:2] if len(mark.args) > 1 else (mark.args[0], mark.kwargs["argvalues"])
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        axis = []
        for value in values:
            extra = list(getattr(value, "marks", ())) if hasattr(value, "marks") else []
            plain = value.values if hasattr(value, "marks") else (value if len(names) > 1 else (value,))
            axis.append((dict(zip(names, plain, strict=True)), [getattr(mark, "mark", mark) for mark in extra]))
        axes.append(axis)
    for combination in itertools.product(*axes):
        params = {name: value for chosen, _ in combination for name, value in chosen.items()}
        yield params, [mark for _, extra in combination for mark in extra]


def collect() -> list[Case]:
    """The cases of all marked files, which are imported for it."""
    cases: list[Case] = []
    for path in marked_files():
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        cases += cases_of_module(importlib.import_module(name), path.relative_to(ROOT).as_posix())
    return cases


# ---- rows ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the page. `runs[test]` are the implementations that the test runs for."""

    area: str
    title: str
    torch: Verdict
    reason: str
    since: str = ""
    runs: dict[str, set[str]] = field(default_factory=dict)


def rows_of(cases: Iterable[Case]) -> tuple[list[Row], list[str]]:
    """The rows in the order of the page, and what is wrong with the marks."""
    rows: dict[tuple[str, str], Row] = {}
    wrong: list[str] = []
    for case in cases:
        row = rows.setdefault((case.area, case.title), Row(case.area, case.title, case.torch, case.reason, case.since))
        if (row.torch, row.reason, row.since) != (case.torch, case.reason, case.since):
            wrong.append(
                f"{case.test}: {case.title!r} is {case.torch!r} ({case.reason!r}, since {case.since!r}) here and "
                f"{row.torch!r} ({row.reason!r}, since {row.since!r}) elsewhere; marks of one row agree"
            )
        row.runs.setdefault(case.test, set()).add(case.implementation)
    for row in rows.values():
        for test, implementations in row.runs.items():
            if "fullshard" not in implementations:
                wrong.append(f"{test}: {row.title!r} does not run for fullshard")
            if row.torch == "same" and "torch" not in implementations:
                wrong.append(
                    f"{test}: {row.title!r} is 'same', but does not run for torch; use @for_each_implementation"
                )
            if row.torch == "better" and "torch" not in implementations:
                wrong.append(f"{test}: {row.title!r} is 'better', but the test has no `impl` to run it for torch")
            if row.torch in ("none", "equal") and "torch" in implementations:
                wrong.append(f"{test}: {row.title!r} is {row.torch!r}, but the test runs for torch by itself")
    return sorted(rows.values(), key=lambda row: (AREAS.index(row.area), row.title.lower())), wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.behaviours", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="run marked tests and write the page and the results")
    action.add_argument("--check", action="store_true", help="compare the page with the marks and the results")
    action.add_argument("--list", action="store_true", help="the rows that the marks make")
    parser.add_argument("--quick", action="store_true", help="with --write: leave out the second run, over gloo")
    parser.add_argument(
        "--newest", type=Path, metavar="PYTHON", help="with --write: run torch's half alone, with this interpreter"
    )
    parser.add_argument("files", nargs="*", type=Path, help="run these test files only; default: all with marks")
    parsed = parser.parse_args(arguments)
    from tests.harness import compatibility, recording  # they import this module

    # This file runs as __main__; what the tests import is the module of its name.
    module = importlib.import_module("tests.harness.behaviours")
    if parsed.write:
        files = [path.resolve().relative_to(ROOT).as_posix() for path in parsed.files]
        if parsed.newest is None:
            recording.record(files, gloo=not parsed.quick)
        else:
            recording.record_newest(files, parsed.newest)
    cases = module.collect()
    if parsed.list:
        for row in module.rows_of(cases)[0]:
            print(f"{row.area}: {row.title} [{row.torch}] {', '.join(row.runs)}")
        return 0
    if parsed.write:
        compatibility.write_page(cases)
    problems = compatibility.problems(cases)
    print("\n".join(problems) or "the page is what marks and results say")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
