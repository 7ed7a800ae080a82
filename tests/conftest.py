"""What holds for every test: its tier, its hang timer, one thread per process, and no unexplained skip.

A tier is a folder of tests/; the tests in it carry its name as a marker. Limits per tier, in seconds, are in
`HANG_SECONDS`; `@pytest.mark.hang_after(seconds)` sets another one for a test that needs it.
"""

from __future__ import annotations

import os

# Before torch is imported: it reads these once. More threads than cores make every tier slower and none more telling.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import fnmatch  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Generator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests import workers  # noqa: E402
from tests.harness import collecting, cuda_builds, hang, recording, samples  # noqa: E402
from tests.harness.worlds import OTHER_WORLD  # noqa: E402

HANG_SECONDS = {
    "pure": 60.0,
    "fake": 60.0,
    "threads": 60.0,
    "device": 120.0,
    "procs": 120.0,
    "hosts": 120.0,
    "gpu": 120.0,
}
ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"

# The quick profile draws the same examples each time: a red test is the change's fault and not the draw's. The full
# one explores.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        default=str(ALLOWED_SKIPS),
        help="file of glob patterns of test ids that may be skipped; any other skip fails the run ('' allows all)",
    )
    parser.addoption(
        "--ranks",
        choices=["threads", "gloo"],
        default="threads",
        help="what the ranks of the threads tier are; gloo: processes, slower, and fullshard alone "
        "(tests/harness/forked.py)",
    )
    parser.addoption(
        "--world",
        type=int,
        default=2,
        help="how many ranks the tests of the threads tier have that hold with any number (WORLD in "
        "tests/harness/threads.py); those that ask for another number are skipped",
    )
    parser.addoption(
        "--collect-at-random",
        nargs="?",
        type=int,
        const=0,
        metavar="SEED",
        help="collect garbage at random points, others on each rank, and on some ranks never (write =SEED; "
        "tests/harness/collecting.py)",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="leave out what the markers `sample(..., full=m)` do, and say at the end what that was "
        "(tests/harness/samples.py)",
    )
    parser.addoption("--part", metavar="K/N", help="of all tests the K-th of each N, from 0 on")
    parser.addoption(
        "--both", action="store_true", help="with --ranks=gloo: torch's half of the conformance, too, which is left out"
    )
    parser.addoption(
        "--torch-half",
        action="store_true",
        help="torch's half of the conformance is not slow: another torch is installed (tools/versions.py)",
    )
    parser.addoption(
        "--pairs",
        action="store_true",
        help="with --ranks=gloo: parameters and gradients go from rank to rank (comm/group.py), however small",
    )
    parser.addoption(
        "--record-behaviours",
        default="",
        help="run the tests with a behaviour mark only, for torch too, and write what came of them to this file "
        "(use python -m tests.harness.behaviours)",
    )
    parser.addoption(
        "--record-torch-alone", action="store_true", help="with --record-behaviours: torch's half, and not ours"
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest's capture points stderr elsewhere while a test runs; the last words of a hung run must reach the
    # terminal.
    config.stash[_TERMINAL] = os.fdopen(os.dup(2), "w")
    config.pluginmanager.register(_SkipsNeedAReason(config), "fullshard-skips")
    config.addinivalue_line("markers", "behaviour(title, area, torch, reason, since): tests/harness/behaviours.py")
    config.addinivalue_line("markers", "needs(names, half): tests/harness/installed.py")
    config.addinivalue_line("markers", "fails_before(release, reason, half): tests/harness/installed.py")
    config.addinivalue_line("markers", "threads_only(reason): left out where ranks are gloo processes (--ranks=gloo)")
    if config.getoption("--world") != 2:
        from tests.harness import threads

        threads.WORLD = config.getoption("--world")
    if config.getoption("--ranks") != "threads":
        from tests.harness import threads

        threads.RANKS = config.getoption("--ranks")
    if config.getoption("--collect-at-random") is not None:
        collecting.begin(config.getoption("--collect-at-random"))
    if config.getoption("--pairs"):
        from fullshard.layout import gather

        gather.PAIRWISE_PARAMETER_NBYTES = gather.PAIRWISE_GRADIENT_NBYTES = 0
    if config.getoption("--record-behaviours"):
        path, ranks = Path(config.getoption("--record-behaviours")), config.getoption("--ranks")
        alone = config.getoption("--record-torch-alone")
        recorder = recording.Recorder(path, ranks, config.getoption("--world"), alone)
        config.pluginmanager.register(recorder, "recorder")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    recording.parametrize(metafunc)


_TERMINAL = pytest.StashKey[Any]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--ranks") != "threads":
        ours_alone = not config.getoption("--both")
        _leave_out(
            config,
            items,
            lambda item: bool(item.get_closest_marker("threads_only")) or (ours_alone and samples.is_torch_s(item)),
        )
    _leave_out_what_came_later(config, items)
    for item in items:
        tier = _tier(item)
        if tier:
            item.add_marker(tier)
        if samples.is_torch_s(item) and not config.getoption("--torch-half"):
            # It shows that torch does what we say of it, which another torch alone can change:
            # test_the_document_is_of_the_pinned_torch.
            item.add_marker(pytest.mark.slow)
        _skip_what_torch_lacks(item)
        _expect_failures_of_an_older_torch(item)
        if tier == "gpu":
            item.add_marker(pytest.mark.skipif(not _has_accelerator(), reason="no accelerator on this machine"))
    samples.mark(items)
    if config.getoption("--full"):
        collected = len(items)
        left_out = _leave_out(config, items, lambda item: item.get_closest_marker("beyond") is not None)
        config.stash[_LEFT_OUT] = samples.said([item.nodeid for item in left_out], collected)
    if config.getoption("--part"):
        part, of = map(int, config.getoption("--part").split("/"))
        kept = set(items[part::of])
        _leave_out(config, items, lambda item: item not in kept)


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], which: Callable[[pytest.Item], bool]
) -> list[pytest.Item]:
    """Take out of `items` those that `which` is true of, and return them."""
    left_out = [item for item in items if which(item)]
    config.hook.pytest_deselected(items=left_out)
    known = set(left_out)
    items[:] = [item for item in items if item not in known]
    return left_out


_LEFT_OUT = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What `--full` left out. Of several workers, tests/workers.py says it."""
    line = config.stash.get(_LEFT_OUT, None)
    if line is not None and config.getoption("queue", None) is None:
        terminalreporter.line(line)
    elif line is not None:
        workers.note_left_out(config.getoption("queue"), line)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported never becomes garbage: without this each full collection looks at all of torch, which is an
    eighth of the time of the threads tier."""
    cuda_builds.settle_if_imported()
    gc.collect()
    gc.freeze()


def _leave_out_what_came_later(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Torch's half of a behaviour that a newer torch than the installed one has first."""
    from tests.harness import installed

    def came_later(item: pytest.Item) -> bool:
        case = recording.case_of_item(item) if samples.is_torch_s(item) else None
        return case is not None and not case.is_in(installed.version())

    _leave_out(config, items, came_later)


def _skip_what_torch_lacks(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        from tests.harness import installed

        lacks = [name for name in marker.args if not installed.has(name)]
        if lacks and (samples.is_torch_s(item) or marker.kwargs.get("half") != "torch"):
            item.add_marker(pytest.mark.skip(reason=f"{installed.LACKS} {', '.join(lacks)}"))


def _expect_failures_of_an_older_torch(item: pytest.Item) -> None:
    for marker in item.iter_markers("fails_before"):
        from tests.harness import installed

        release, reason = marker.args
        if installed.release() < release and (samples.is_torch_s(item) or marker.kwargs["half"] == "both"):
            item.add_marker(pytest.mark.xfail(strict=True, reason=f"{installed.DIFFERS} {reason}"))


def _tier(item: pytest.Item) -> str | None:
    here = Path(__file__).parent
    tier = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
    return tier if tier in HANG_SECONDS else None


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _limited(item: pytest.Item, stage: str) -> Generator[None, Any, Any]:
    mark = item.get_closest_marker("hang_after")
    # In the full profile a property has eight times as many examples.
    explores = os.environ.get("HYPOTHESIS_PROFILE") == "full"
    seconds = float(mark.args[0]) if mark else HANG_SECONDS.get(_tier(item) or "", 60.0) * (20 if explores else 1)
    if item.config.getoption("--record-behaviours"):
        case = recording.case_of_item(item)
        if case is not None and case.only_when_written:
            seconds = min(seconds, recording.HANG_SECONDS_WHEN_BETTER)
    with hang.limit(hang.patience(seconds), f"{stage} of {item.nodeid}", terminal=item.config.stash[_TERMINAL]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A rank that outlives its test fails this test, and is kept from the next ones (tests/harness/threads.py)."""
    failure: BaseException | None = None
    try:
        return (yield from _limited(item, "call"))
    except BaseException as error:
        failure = error
        raise
    finally:
        threads = sys.modules.get("tests.harness.threads")
        left = threads.left_behind() if threads is not None else ""
        if left and failure is None:
            pytest.fail(left, pytrace=False)
        elif left and left not in str(failure):
            failure.add_note(left)  # type: ignore[union-attr]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item, "teardown"))


def _is_of_another_torch(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Whether the test was skipped, or expected to fail, because torch is not the pinned one."""
    from tests.harness import installed

    if installed.is_pinned():
        return False
    reason = str(getattr(report, "wasxfail", "")) or str(report.longrepr)
    return f"{installed.LACKS} " in reason or f"{installed.DIFFERS} " in reason


class _SkipsNeedAReason:
    """Fail the run when a test was skipped, or was expected to fail, that the allow-list does not name: it proves
    nothing, quietly."""

    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("--allowed-skips")
        lines = Path(path).read_text().splitlines() if path else ["*"]
        self.patterns = [line.split("#")[0].strip() for line in lines]
        self.patterns = [pattern for pattern in self.patterns if pattern]
        self.unexplained: list[str] = []
        # With --world, those that ask for another number of ranks than that are left out.
        self.other_world = config.getoption("--world") != 2

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if self.other_world and report.skipped and f"Skipped: {OTHER_WORLD} " in str(report.longrepr):
            return
        if report.skipped and _is_of_another_torch(report):
            return
        if report.skipped:  # an expected failure is a kind of skip to pytest, and to us
            if not any(fnmatch.fnmatchcase(report.nodeid, pattern) for pattern in self.patterns):
                self.unexplained.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexplained and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexplained:
            terminalreporter.section("skipped without being in the allow-list: the run fails", red=True)
            for nodeid in self.unexplained:
                terminalreporter.line(nodeid)
