"""Runs the marked tests for both implementations and notes what came of each; a pytest plugin and who calls it.

torch's part of a row that is "better" fails: it may raise, hang, or take the process down. So all run in a child, every
case is noted when it starts and when it ends, and the one that had not ended when the child died is noted as what ended
it; then a new child runs the rest.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import behaviours, worlds
from tests.harness.behaviours import ROOT, Case, case_of
from tests.harness.compatibility import Result, document, load, merged, newest_document, save, save_newest
from tests.harness.errors import RanksFailed
from tests.harness.hang import Hang

# A case of torch that is expected to fail may hang; it is not waited for as long as for ours.
HANG_SECONDS_WHEN_BETTER = 15.0
_DETAIL_CHARACTERS = 120


# ---- the plugin ----------------------------------------------------------------------------------------------


def case_of_item(item: pytest.Item) -> Case | None:
    path = item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else item.path.as_posix()
    name = getattr(item, "originalname", item.name)
    callspec = getattr(item, "callspec", None)
    return case_of(f"{path}::{name}", item.own_markers, callspec.params if callspec else {})


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give `impl` to marked tests that ask for it and do not say what it is: fullshard; torch too when we record."""
    marks = list(metafunc.definition.iter_markers())
    if not any(mark.name == "behaviour" for mark in marks) and not _marks_on_parameters(marks):
        return
    given = {
        name.strip()
        for mark in marks
        if mark.name == "parametrize"
        for name in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
    }
    chosen = behaviours.implementations_of(metafunc.function, dict.fromkeys(given))
    if not chosen:
        return
    from tests.harness import implementations

    known = {"fullshard": implementations.FULLSHARD, "torch": implementations.TORCH}
    recording = metafunc.config.getoption("--record-behaviours")
    metafunc.parametrize("impl", [known[name] for name in chosen if recording or name == "fullshard"], ids=repr)


def _marks_on_parameters(marks: list[pytest.Mark]) -> bool:
    values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
    return any(mark.name == "behaviour" for value in values for mark in getattr(value, "marks", ()))


class Recorder:
    """Runs marked tests only, those that `path` does not have yet, and writes to it: one JSON line for each event.

    With `ranks` "gloo" it runs fullshard's in the threads tier, on `world` ranks where the test says so. With
    `torch_alone` it runs torch's half, and the tests that compare both themselves.
    """

    def __init__(self, path: Path, ranks: str, world: int, torch_alone: bool = False) -> None:
        self.path, self.ranks, self.world, self.torch_alone = path, ranks, world, torch_alone
        self.done = {event["id"] for event in _events(path)}

    def _id(self, item: pytest.Item) -> str:
        return f"{self.ranks} {self.world}: {item.nodeid}"

    def _wanted(self, item: pytest.Item, case: Case | None) -> bool:
        if case is None or self._id(item) in self.done:
            return False
        if self.torch_alone:
            return case.implementation == "torch" or case.torch == "equal"
        if self.ranks == "threads":
            return True
        return case.implementation == "fullshard" and "/threads/" in item.nodeid

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        cases = {item: case_of_item(item) for item in items}
        kept = [item for item in items if self._wanted(item, cases[item])]
        # Last those that may leave a mess: nothing of ours runs after them.
        kept.sort(key=lambda item: bool(cases[item] and cases[item].only_when_written))
        for item in kept:
            if (case := cases[item]) and case.only_when_written:
                item.add_marker(pytest.mark.filterwarnings("ignore"))  # torch's warnings are no failures of torch
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        case = case_of_item(item)
        assert case is not None
        worlds.SEEN.clear()
        self.outcome, self.detail = "pass", ""
        about = {"area": case.area, "title": case.title, "test": case.test, "implementation": case.implementation}
        _append(self.path, {"id": self._id(item), "state": "started", **about})
        result = yield
        ended = {"state": "ended", "outcome": self.outcome, "detail": self.detail, "worlds": sorted(worlds.SEEN)}
        _append(self.path, {"id": self._id(item), **ended, **about})
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.skipped:
            self.outcome, self.detail = "skipped", str(call.excinfo.value) if call.excinfo else ""
        elif report.failed and self.outcome == "pass" and call.excinfo is not None:
            self.outcome, self.detail = describe(call.excinfo.value)
        return report


def describe(error: BaseException) -> tuple[str, str]:
    """(outcome, detail) of what a test raised; of ranks that failed, the first."""
    if isinstance(error, RanksFailed):
        first = next(iter(error.reports.values()))
        if first.exception is not None:
            return describe(first.exception)
        if first.kind in ("hung", "died"):
            return {"hung": "hang", "died": "crash"}[first.kind], ""
        last = [line for line in first.detail.splitlines() if re.match(r"[\w.]+(:|$)", line)]
        return "error", _short(last[-1] if last else first.detail)
    if isinstance(error, Hang):
        return "hang", ""
    message = str(error)
    if isinstance(error, pytest.fail.Exception) or (isinstance(error, AssertionError) and _of_the_test(error)):
        return "wrong", _short(message)
    return "error", _short(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _of_the_test(error: AssertionError) -> bool:
    """Whether a test (or a comparison of torch.testing that it called) asserted, and not the implementation."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if "/torch/testing/_comparison" not in file]
    return not files or not re.search(r"/torch/|/src/fullshard/", files[-1])


def _short(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # what a headline announces is the message
    line = re.sub(r"0x[0-9a-f]{6,}", "0x...", line).replace("`", "'").replace("[", "(").replace("]", ")")
    return line if len(line) <= _DETAIL_CHARACTERS else line[: _DETAIL_CHARACTERS - 3].rstrip() + "..."


def _append(path: Path, event: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- who calls it --------------------------------------------------------------------------------------------


def record(files: list[str], *, gloo: bool = True) -> Path:
    """Run the marked tests of `files` (none: of all) for both implementations, and those of the threads tier for ours
    once more with gloo processes as ranks (unless `gloo` is false), and where any number of ranks will do with one and
    with four; return the dated document.

    Results of files that did not run stay as they were; those of tests that are no more are dropped when all run.
    Raises RuntimeError if pytest could not collect.
    """
    import torch

    run = files or [path.relative_to(ROOT).as_posix() for path in behaviours.marked_files()]
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        _run_all(run, events)
        for world in (2, 1, 4) if gloo else ():
            _run_all(run, events, ("--ranks=gloo", f"--world={world}"))
        new = _results(_events(events))
    version, today = torch.__version__.split("+")[0], datetime.date.today().isoformat()
    machine = f"CPU ({platform.machine()}), gloo, Python {platform.python_version()}"
    return save({"torch": version, "date": today, "machine": machine}, _with_kept(document(), version, files, new))


def record_newest(files: list[str], python: Path) -> Path:
    """Run torch's half of the marked tests of `files` (none: of all) with the interpreter `python`, note what came of
    it as what the newest FSDP2 does, and return the dated document. Raises as `record` does."""
    run = files or [path.relative_to(ROOT).as_posix() for path in behaviours.marked_files()]
    facts = subprocess.run(
        [python, "-c", "import platform, torch; print(torch.__version__.split('+')[0], platform.python_version())"],
        capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        _run_all(run, events, ("--record-torch-alone",), str(python))
        new = _results(_events(events))
    machine = f"CPU ({platform.machine()}), gloo, Python {facts[1]}"
    about = {"torch": facts[0], "date": datetime.date.today().isoformat(), "machine": machine}
    return save_newest(about, _with_kept(newest_document(), facts[0], files, new))


def _with_kept(path: Path | None, version: str, files: list[str], new: list[Result]) -> list[Result]:
    """`new`, and of the document at `path` what is of other files than `files`; where these are all (none is named),
    nothing."""
    about, old = load(path)
    if not files:
        return merged([], new)
    if about and about["torch"] != version:
        raise RuntimeError(
            f"the recorded results are torch {about['torch']}'s, and this is {version}; run all tests, without files"
        )
    there = ((result, result.test.split("::")[0]) for result in old)
    return merged([result for result, file in there if (ROOT / file).exists() and file not in files], new)


def _run_all(files: list[str], path: Path, options: tuple[str, ...] = (), python: str = sys.executable) -> None:
    """Children, one after the other, until every case has ended, by itself or with its child."""
    while True:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--allowed-skips=", *options]
        child = subprocess.run(
            [*command, f"--record-behaviours={path}", *files], cwd=ROOT, capture_output=True, text=True
        )
        events = _events(path)
        ended = {event["id"] for event in events if event["state"] == "ended"}
        open_ = [event for event in events if event["state"] == "started" and event["id"] not in ended]
        if not open_:
            if child.returncode not in (0, 1, 5):  # all passed, some failed, nothing left to run
                raise RuntimeError(
                    f"pytest ended with {child.returncode}:\n{child.stdout[-4000:]}\n{child.stderr[-2000:]}"
                )
            return
        # A signal took it, or the second stage of the hang timer did.
        outcome, detail = ("crash", signal.Signals(-child.returncode).name) if child.returncode < 0 else ("hang", "")
        _append(path, {**open_[0], "state": "ended", "outcome": outcome, "detail": detail, "worlds": []})
        if len(files) > 1:  # what ended one case may end the next ones beside it: not all files are read again for each
            _run_all([open_[0]["test"].split("::")[0]], path, options, python)


def _results(events: list[dict[str, Any]]) -> list[Result]:
    """One result for each row, test and implementation, of the cases that ended."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        left_out = event.get("outcome") == "skipped" and f"{worlds.OTHER_WORLD} " in event["detail"]
        if event["state"] == "ended" and not left_out:
            groups[tuple(event[key] for key in ("area", "title", "test", "implementation"))].append(event)
    results, today = [], datetime.date.today().isoformat()
    for key, group in groups.items():
        bad = [event for event in group if event["outcome"] != "pass"]
        outcome, detail = (bad[0]["outcome"], bad[0]["detail"]) if bad else ("pass", "")
        seen = sorted({world for event in group for world in event["worlds"]})
        results.append(Result(*key, outcome, detail, len(group), len(bad), seen, today))
    return results
