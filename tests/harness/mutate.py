"""Break things on purpose: each mutation takes one rule away or turns it around, and some test must go red.

    python -m tests.harness.mutate                   all of them (needs fullshard's environment; minutes)
    python -m tests.harness.mutate R9 next_in_backward     those of some rules
    python -m tests.harness.mutate --in comm/ agree/ledger.py    those in files below src/fullshard that begin so
    python -m tests.harness.mutate --sample          one of every fifth file, of those that pure tests kill: seconds
    python -m tests.harness.mutate --list            what there is (the tables: mutations*.txt beside this file)
    python -m tests.harness.mutate --jobs 4          so many at once (default: one for each core)
    python -m tests.harness.mutate --write FILE.md   and a document of what came of it; FILE.json keeps that, so that a
                                                     later run of some mutations renews these alone

For each mutation the package is copied to a temporary folder, one text in it is replaced, and tests run against the
copy, in a process of their own, until the first failure: those that its table names, or those of the lifecycle (pure,
then the golden traces end to end). Killed: a test failed. Survived: all passed, so the rule is untested or redundant. A
mutation whose text is no longer in the source is an error, and so are tests that are red without any mutation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.context
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent.parent
SOURCES = "src/fullshard/"
PACKAGE = REPOSITORY / SOURCES
# The rules of the schedule first, whose tests are the lifecycle's; the other tables name theirs.
# Of the tests that a mutation names: those of `make test`, and what `make test-full` runs besides.
QUICK, SLOW = "not slow", "slow and not beyond"
# The verdict where these are none.
_NOTHING = "nothing"
TABLES = sorted(Path(__file__).parent.glob("mutations*.txt"), key=lambda path: path.stem)
# In two runs, the direct tests first: most mutations die there, and collecting the others takes longer than that.
STAGES = (
    (
        "tests/pure/test_lifecycle_rules.py",
        "tests/pure/test_lifecycle_calls.py",
        "tests/pure/test_lifecycle_finalize.py",
        "tests/pure/test_lifecycle_modules.py",
        "tests/pure/test_lifecycle_prefetch.py",
        "tests/pure/test_lifecycle_sending.py",
        "tests/pure/test_lifecycle_vocabulary.py",
        "tests/pure/test_lifecycle_worlds.py",
    ),
    (
        "tests/pure/test_lifecycle_programs.py",
        "tests/pure/test_lifecycle_replay.py",
        "tests/pure/test_lifecycle_exhaustive.py",
        "tests/fake/test_golden_fullshard.py",
    ),
)
SECONDS = 600.0
# In the output of a run, before the name of each test: what a crash prints of itself may be cut short.
_BEGINS = "begins: "
# What is slow to import. Nothing that imports fullshard, which has to come from the copy.
PRELOADED = (
    "pytest",
    "hypothesis.stateful",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.checkpoint",
)


class Mutation(NamedTuple):
    """A mistake in one file. `old` has to occur in it exactly once."""

    # The [Rn] of schedule/rules.py, or the name of a function where the rule has no number.
    rule: str
    # Below src/fullshard.
    file: str
    old: str
    new: str
    # What goes wrong in a program.
    breaks: str
    # That are to go red; none: those of the lifecycle.
    tests: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        return tuple((test,) for test in self.tests) or STAGES


def read(text: str) -> list[Mutation]:
    """The mutations of a table, whose form is at the top of mutations.txt.

    Raises `ValueError` with the number of a line that is none of it.
    """
    found: list[Mutation] = []
    file, tests = "", ""
    for block in re.finditer(r"(?:^(?!#).+\n)+", text, re.MULTILINE):
        lines = block[0].splitlines()
        rule, colon, breaks = lines[0].partition(": ")
        own = lines.pop(1).removeprefix("by ") if len(lines) > 1 and lines[1].startswith("by ") else ""
        removed = [line[1:] for line in lines[1:] if line[0] == "-"]
        added = [line[1:] for line in lines[1:] if line[0] == "+"]
        if lines[0].startswith("== " + SOURCES) and len(lines) == 1:
            file, _, tests = lines[0].removeprefix("== " + SOURCES).partition(" by ")
        elif colon and file and removed and lines[1:] == ["-" + r for r in removed] + ["+" + a for a in added]:
            by = tuple((own or tests).split())
            found.append(Mutation(rule, file, "\n".join(removed), "\n".join(added), breaks, by))
        else:
            number = text.count("\n", 0, block.start()) + 1
            raise ValueError(
                f"line {number}: expected 'RULE: TEXT', lines with '-', lines with '+', found {lines[0]!r}"
            )
    return found


MUTATIONS = [mutation for table in TABLES for mutation in read(table.read_text())]


def sample(mutations: Iterable[Mutation]) -> list[Mutation]:
    """Of every fifth file the first mutation that a file of the pure tier kills, or the tests of the lifecycle."""
    found: dict[str, Mutation] = {}
    for mutation in mutations:
        if all(test.startswith("tests/pure/") for test in mutation.tests[:1]):
            found.setdefault(mutation.file, mutation)
    return list(found.values())[::5]


class Outcome(NamedTuple):
    """What became of one mutation. `verdict`: killed, survived, or what went wrong."""

    mutation: Mutation | None
    verdict: str
    # The test that failed first, or the end of the output.
    detail: str
    seconds: float


def apply(mutation: Mutation, package: Path) -> None:
    """Replace the mutation's text in `package` (a copy of src/fullshard).

    Raises `LookupError` when the text does not occur exactly once.
    """
    path = package / mutation.file
    text = path.read_text()
    found = text.count(mutation.old)
    if found != 1:
        raise LookupError(
            f"{mutation.rule} in {mutation.file}: expected to find this text once, found it {found} times; "
            f"write the mutation anew for the source as it is now:\n{mutation.old}"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def attempt(mutation: Mutation | None, package: Path, stages: Sequence[tuple[str, ...]] = ()) -> Outcome:
    """Run tests against a copy of `package` with `mutation` (None: as it is, and all `stages`), in a process of their
    own."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fullshard-mutate-") as folder:
        copy, output = Path(folder).resolve() / "fullshard", Path(folder) / "output.txt"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            try:
                apply(mutation, copy)
            except LookupError as error:
                return Outcome(mutation, "error", str(error), time.monotonic() - start)
        # What `make test` leaves out comes after the rest, and of it what `make test-full` runs.
        for which in (QUICK,) if mutation is None else (QUICK, SLOW):
            for tests in stages or (STAGES if mutation is None else mutation.stages):
                verdict, detail = _run(tests, which, copy.parent, output)
                # A mutation may name tests of one of the two kinds alone.
                if verdict == _NOTHING and (which == SLOW or mutation is None):
                    verdict = "survived"
                if verdict not in ("survived", _NOTHING):
                    break
            if verdict not in ("survived", _NOTHING):
                break
    if mutation is not None and verdict == "killed" and which == SLOW and not _is_green(detail, package):
        verdict, detail = "error", f"{detail} is red without any mutation"
    return Outcome(mutation, verdict, detail, time.monotonic() - start)


def _run(tests: tuple[str, ...], which: str, folder: Path, output: Path) -> tuple[str, str]:
    """Verdict and detail of `tests`, of those that `which` selects, with the package in `folder`."""
    output.unlink(missing_ok=True)
    process = _processes().Process(target=_run_tests, args=(tests, which, str(folder), str(output)))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "error", f"no end after {SECONDS:.0f} seconds"
    if process.exitcode == 5:
        return _NOTHING, ""
    return judge(process.exitcode, output.read_text() if output.exists() else "")


def _is_green(test: str, package: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="fullshard-mutate-") as folder:
        copy = Path(folder).resolve() / "fullshard"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        # Selected alone it is its whole family, and may be a quick test.
        return _run((test.partition(" ")[0],), "", copy.parent, Path(folder) / "output.txt")[0] == "survived"


def _processes() -> multiprocessing.context.ForkServerContext:
    """Processes that begin with torch and pytest loaded, which takes longer than most of the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _run_tests(tests: tuple[str, ...], which: str, folder: str, output: str) -> None:
    """In the new process: run `tests`, of those that `which` selects, with the package in `folder`."""
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        told = os.dup(file.fileno())
    os.chdir(REPOSITORY)
    os.environ["HYPOTHESIS_PROFILE"] = "quick"
    loaded = [name for name in sys.modules if name.partition(".")[0] == "fullshard"]
    assert not loaded, f"the package is loaded already, not from the copy: {loaded}"
    sys.path[:0] = [folder, str(REPOSITORY)]
    # For the processes that tests start.
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(REPOSITORY)])
    import fullshard

    assert Path(fullshard.__file__).is_relative_to(folder), f"expected the copy in {folder}, found {fullshard.__file__}"
    import pytest

    class _Begins:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            os.write(told, f"\n{_BEGINS}{nodeid}\n".encode())

    code = int(
        pytest.main(
            # Asserts need no words here, and rewriting them takes as long as all other imports.
            [
                "-x",
                "-q",
                "--tb=no",
                "--no-header",
                "--assert=plain",
                "-m",
                which,
                "-p",
                "no:cacheprovider",
                *tests,
            ],
            [_Begins()],
        )
    )
    sys.stdout.flush()
    # Past whatever the tests left running.
    os._exit(code)


def judge(returncode: int, output: str) -> tuple[str, str]:
    """Verdict and detail of a run of pytest. Only a failed test kills, or one that crashed the process: a copy that
    cannot be imported is no proof."""
    if returncode == 0:
        return "survived", ""
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if returncode == 1 and failed:
        return "killed", failed[1]
    begun = re.findall(rf"^{_BEGINS}(\S+)", output, re.MULTILINE)
    if returncode in (-signal.SIGSEGV, -signal.SIGABRT) and begun:
        return "killed", f"{begun[-1]} (the process crashed)"
    return "error", f"pytest ended with {returncode}:\n{output[-2000:]}"


def without_mutation(stages: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """For each stage the tests that are run once without a mutation: all that stages name of its file, together."""
    by_file: dict[str, list[str]] = {}
    for stage in stages:
        if len(stage) == 1:
            by_file.setdefault(stage[0].partition("::")[0], []).append(stage[0])
    together = {file: (file,) if file in tests else tuple(dict.fromkeys(tests)) for file, tests in by_file.items()}
    return {stage: together[stage[0].partition("::")[0]] if len(stage) == 1 else stage for stage in stages}


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The document at `path`, of these outcomes and of those of earlier runs that are kept beside it. What the tables
    do not have any more is left out, and what was never tried is said to be "not run"."""
    kept_at = path.with_suffix(".json")
    kept = {tuple(one[:4]): one[4:] for one in json.loads(kept_at.read_text())} if kept_at.exists() else {}
    for outcome in outcomes:
        assert outcome.mutation is not None
        detail = outcome.detail.splitlines()[0] if outcome.detail else ""
        kept[_key(outcome.mutation)] = [outcome.verdict, detail, round(outcome.seconds, 1)]
    found = [Outcome(mutation, *kept.get(_key(mutation), ("not run", "", 0.0))) for mutation in MUTATIONS]
    lines = [json.dumps([*_key(one.mutation), *one[1:]]) for one in found if one.mutation is not None]
    kept_at.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    path.write_text(document(found))


def _key(mutation: Mutation) -> tuple[str, ...]:
    return mutation.file, mutation.rule, mutation.breaks, f"{mutation.old} -> {mutation.new}"


def document(outcomes: Sequence[Outcome]) -> str:
    """What came of them, as Markdown: a line for each file, and one for each mutation of a wait."""
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    left_out = sum(outcome.verdict == "not run" for outcome in outcomes)
    rest = f" {left_out} were not run." if left_out else ""
    lines = [
        "# Mutations",
        "",
        f"{killed} of {len(outcomes) - left_out} killed.{rest} Each takes one rule of the source away, or "
        "turns it around, and a test has to go red. Made by `python -m tests.harness.mutate --write FILE`; the tables "
        f"are {', '.join(f'[{table.name}](../tests/harness/{table.name})' for table in TABLES)}.",
        "",
        "| file | killed | of |",
        "|---|---|---|",
    ]
    by_file: dict[str, list[tuple[Mutation, Outcome]]] = {}
    for outcome in outcomes:
        assert outcome.mutation is not None
        by_file.setdefault(outcome.mutation.file, []).append((outcome.mutation, outcome))
    for file, entries in by_file.items():
        tried = [outcome.verdict for _, outcome in entries if outcome.verdict != "not run"]
        lines.append(f"| `{file}` | {tried.count('killed')} | {len(tried)}{'' if tried else ' (not run)'} |")
    lines += ["", "| in | what goes wrong | verdict | by |", "|---|---|---|---|"]
    for file, entries in by_file.items():
        for mutation, outcome in entries:
            if outcome.verdict != "not run" and (mutation.tests or outcome.verdict != "killed"):
                by = outcome.detail.partition(" - ")[0] if outcome.verdict == "killed" else ""
                lines.append(f"| `{file}` {mutation.rule} | {mutation.breaks} | {outcome.verdict} | {by} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all were killed. 1: some survived. 2: the tests are red without a mutation, or one could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.mutate", description="Break each rule; expect red.")
    parser.add_argument("rules", nargs="*", metavar="RULE", help="such as R9 or next_in_backward; default: all")
    parser.add_argument("--in", dest="files", nargs="+", default=[""], metavar="FILE", help="below src/fullshard")
    parser.add_argument("--tenth", type=int, choices=range(10), help="a tenth of these, neighbours in the tables")
    parser.add_argument(
        "--sample", action="store_true", help="of every fifth file one; tests without a mutation are not run"
    )
    parser.add_argument("--write", type=Path, help="a Markdown document of the outcomes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="the package to break a copy of")
    parser.add_argument("--list", action="store_true", help="show the mutations and run nothing")
    options = parser.parse_args(arguments)
    unknown = set(options.rules) - {mutation.rule for mutation in MUTATIONS}
    if unknown:
        parser.error(f"expected rules of the table, found {', '.join(sorted(unknown))}; --list shows them")
    chosen = [
        mutation
        for mutation in MUTATIONS
        if (not options.rules or mutation.rule in options.rules) and mutation.file.startswith(tuple(options.files))
    ]
    if options.tenth is not None:
        # Neighbours share the tests that are run without a mutation, too.
        first, last = (len(chosen) * tenth // 10 for tenth in (options.tenth, options.tenth + 1))
        chosen = chosen[first:last]
    if options.sample:
        # `make test` runs their tests without a mutation, too.
        chosen, runs = sample(chosen), {}
    else:
        runs = without_mutation(dict.fromkeys(stage for mutation in chosen for stage in mutation.stages))
    if options.list:
        for mutation in chosen:
            print(f"{mutation.rule:18} {mutation.breaks}")
        return 0
    # torch reads it when it is loaded; the new processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.monotonic()
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        untouched = {run: pool.submit(attempt, None, options.package, (run,)) for run in dict.fromkeys(runs.values())}
        outcomes = []
        for outcome in pool.map(lambda mutation: attempt(mutation, options.package), chosen):
            mutation = outcome.mutation
            assert mutation is not None
            baselines = [untouched[runs[stage]].result() for stage in mutation.stages if stage in runs]
            red = next((baseline for baseline in baselines if baseline.verdict != "survived"), None)
            if red is not None:
                outcome = outcome._replace(verdict="error", detail=f"red without any mutation, too: {red.detail}")
            outcomes.append(outcome)
            name = f"{mutation.rule:18} {mutation.breaks}"
            print(f"{outcome.verdict:8} {name}\n{'':9}{outcome.detail} ({outcome.seconds:.1f} s)", flush=True)
    by_verdict = {verdict: [o for o in outcomes if o.verdict == verdict] for verdict in ("killed", "survived", "error")}
    for outcome in by_verdict["survived"]:
        assert outcome.mutation is not None
        print(f"SURVIVED {outcome.mutation.rule}: {outcome.mutation.breaks}")
    print(f"{len(by_verdict['killed'])}/{len(outcomes)} killed in {time.monotonic() - start:.0f} s")
    if options.write is not None:
        write(options.write, outcomes)
    return 2 if by_verdict["error"] else int(bool(by_verdict["survived"]))


if __name__ == "__main__":
    sys.exit(main())
