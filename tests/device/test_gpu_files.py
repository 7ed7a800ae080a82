"""The tests and benchmarks for hardware run on the device "simulated", so that they work at once on a real one.

What a part of benchmarks/gpu.py found is there, whatever becomes of the part."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ranks
from benchmarks.gpu_names import NAMES
from benchmarks.gpu_parts import GRACE_SECONDS, Part, Result, run
from benchmarks.gpu_step import sorted_events
from tests.gpu.conftest import without_waits

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def command(*arguments: str, timeout_s: float = 110) -> str:
    """What a command of this interpreter prints; fails with its errors."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def parts_of(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])["results"]
    return found


# ---- parts that go wrong ---------------------------------------------------------------------------------------------

_PART = """
import os, signal, subprocess, sys, time
from benchmarks.gpu_parts import row, shows_stacks
"""
FAULTS = {
    "a part that hangs and ignores SIGTERM": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrow('first')\nwhile True: time.sleep(1)",
        ["first"],
        "ran past 1 s",
        "",
    ),
    "a part that dies after half its rows": (
        "for i in range(4):\n    row(str(i))\n    if i == 1: os.kill(os.getpid(), signal.SIGSEGV)",
        ["0", "1"],
        "ended with SIGSEGV",
        "",
    ),
    "a row that is half written": (
        'row("first")\nsys.stdout.write(\'{"what": "second", "ms": 1\')\nsys.stdout.flush()\nos._exit(7)',
        ["first"],
        "ended with status 7",
        "",
    ),
    "rows of two ranks on one line": (
        'sys.stdout.write(\'{"what": "first"}{"what": "second", "ms": 1}\\n\\n\')',
        ["first", "second"],
        "",
        "",
    ),
    "a row after another's text on its line": (
        "sys.stdout.write('NCCL version 2.28.3')\nsys.stdout.flush()\nrow('first')\nprint('{not json}')",
        ["first"],
        "",
        "",
    ),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module that a part can run."""
    paths = [str(tmp_path), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def write(code: str) -> str:
        (tmp_path / "faulty_part.py").write_text(_PART + code)
        return "faulty_part"

    yield write


# The longest is slow: ranks that ignore signals are ended below.
_SLOW = "a part that hangs and ignores SIGTERM"


@pytest.mark.parametrize("fault", [pytest.param(name, marks=[pytest.mark.slow] * (name == _SLOW)) for name in FAULTS])
def test_rows_survive(fault: str, module: Any) -> None:
    code, rows, error, warned = FAULTS[fault]
    shown: list[str] = []
    # Those that end by themselves may take long to begin.
    limit = 1.2 if fault == _SLOW else 60.0
    result = run(Part("faulty", [module(code)], limit), limit, shown.append)
    assert [row["what"] for row in result.rows] == rows
    assert result.error == error and result.ok is (error == "")
    assert warned in "\n".join(result.warned)
    # Nothing is swallowed, and nothing is said twice.
    assert len(shown) == len(set(shown)) >= len(rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize("ends", [True, False], ids=["the part ends", "the part hangs"])
def test_ranks_do_not_stay(ends: bool, module: Any) -> None:
    """Ranks that ignore signals, one of them in a session of its own; a part that hangs shows where."""
    code = """
shows_stacks()
def stuck():
    time.sleep(1000)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
for own in (False, True):
    row("rank", pid=subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=own).pid)
"""
    result = run(Part("ranks", [module(code + ("" if ends else "stuck()"))], 1.2), 1.2, lambda _: None)
    pids = [row["pid"] for row in result.rows]
    assert ends or "in stuck" in "\n".join(result.warned)
    assert len(pids) == 2 and result.error == ("" if ends else "ran past 1 s")
    for pid in pids:
        # Gone, or a zombie that the system has not collected yet.
        with suppress(FileNotFoundError):
            assert " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_run_that_is_ended_has_written_what_it_found(module: Any, tmp_path: Path) -> None:
    """By SIGTERM in the middle of its second part."""
    name = module("row('found', number=3)\nif sys.argv[1:]: time.sleep(1000)")
    code = (
        "import benchmarks.gpu as g\n"
        f"g.parts = lambda device, tiny=False: [g.Part('a', ['{name}'], 20), g.Part('b', ['{name}', 'hang'], 20)]\n"
        "g.main()"
    )
    out, log = tmp_path / "found", tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", code, "--out", str(out)], stdout=file)
    written = out.with_name("found.json")
    try:
        while log.read_text().count('{"what": "found"') < 2 and process.poll() is None:
            time.sleep(0.02)
    finally:
        process.terminate()
        process.wait(20)
    results = json.loads(written.read_text())["results"]
    assert [results[part]["rows"] for part in "ab"] == [[{"what": "found", "number": 3}]] * 2
    assert results["b"]["error"] == "was interrupted"
    assert "| found | 3 |" in out.with_name("found.md").read_text()


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_the_limits_add_up_to_what_is_allowed() -> None:
    found = gpu.parts("cuda")
    assert gpu.longest_seconds(found) <= 60 * gpu.MINUTES < 600
    assert [part.name for part in found][:3] == ["nccl pair", "faults", "tests"] and found[-1].name == "compiled"


@pytest.mark.parametrize("used", [0.0, 0.3, 1.0])
def test_what_a_part_leaves_over_others_may_use(used: float) -> None:
    """Whatever share of its time each part takes, the end is kept, and no part gets less than its limit."""
    found = gpu.parts("cuda")
    left = 60 * gpu.MINUTES - gpu.OWN_SECONDS
    for place, part in enumerate(found):
        allowed = gpu.allowed_seconds(part, found[place + 1 :], left)
        assert allowed >= part.limit_s
        left -= used * allowed + GRACE_SECONDS
    assert left >= -1e-6


def test_a_part_that_has_no_time_is_named() -> None:
    results = gpu.run_all([Part("late", ["benchmarks.nothing"], 30)], "simulated", 0.0, None, {})
    (row,) = results["late"].rows
    assert "left" in row["could_not"] and not results["late"].ok


# ---- what is read and written ----------------------------------------------------------------------------------------


def test_tables_have_every_row() -> None:
    rows: Sequence[dict[str, Any]] = [
        {"what": "step", "way": "fsdp2", "ms": 1.23456},
        {"what": "step", "way": "fullshard", "could_not": "a | b"},
        {"what": "kernels", "most": {"gemm": 3}},
    ]
    text = gpu.markdown({"step": Result(rows=list(rows), error="ran past 3 s", warned=["stack"])}, {"device": "H100"})
    assert "| step | fsdp2 | 1.235 |  |" in text and "a \\| b" in text and "gemm 3" in text
    assert text.startswith("# H100") and "ran past 3 s" in text and "stack" in text
    answer = json.loads(gpu.as_json({"step": Result(rows=list(rows))}, {}))
    assert answer["results"]["step"]["rows"] == rows and not answer["results"]["step"]["ok"]


def test_kernels_are_counted_by_stream() -> None:
    """Events as kineto writes them, with some that lack what others have."""
    events = [
        {"cat": "kernel", "name": "gemm", "args": {"stream": 7}},
        {"cat": "kernel", "name": "gemm", "args": {"stream": 7}},
        {"cat": "gpu_memcpy", "name": "copy", "args": {"stream": 20}},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"ph": "M"},
    ]
    found = sorted_events(events)
    assert found == {"compute": {"gemm": 2}, "other": {"copy": 1}, "waits": {"cudaStreamSynchronize": 1}}


def test_ranks_of_one_device_are_hosts_of_their_own() -> None:
    names = {gpu_ranks.environment("nccl pair", rank)["NCCL_HOSTID"] for rank in range(2)}
    assert len(names) == 2 and "NCCL_HOSTID" not in gpu_ranks.environment("two devices", 0)


class FakeCuda:
    """The modes of `torch.cuda`, which warns at the first call that sets one, after setting it."""

    def __init__(self) -> None:
        self.mode, self.has_warned = 0, False

    def set(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [0, 1])
def test_the_mode_that_shows_waits_is_restored(fails: bool, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its own warning would be an error, and after an exception."""
    cuda = FakeCuda()
    cuda.mode = before
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", cuda.set)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: cuda.mode)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(ValueError) if fails else nullcontext(), without_waits(torch.device("cuda")):  # noqa: PT011
        assert cuda.mode == 2
        if fails:
            raise ValueError
    assert cuda.mode == before and cuda.has_warned


# ---- the scripts themselves ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tests_for_hardware() -> None:
    """All of them, none left out."""
    printed = command("pytest", "-q", "-p", "tests.harness.on_simulated", "-p", "no:cacheprovider", "tests/gpu")
    last = printed.strip().splitlines()[-1]
    assert " passed" in last and "skipped" not in last, printed


def check_steps(rows: Sequence[dict[str, Any]]) -> None:
    """Each way has its rows, fullshard is as NCCL has it, and no time is said."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["what"], []).append(row)
    ways = ["bare", "fsdp2", "fullshard"]
    assert [row["way"] for row in by_kind["memory"]][:3] == ways and len(by_kind["step"]) % 6 == 0
    assert all(row["ms"] is row["host_ms"] is row["exposed_ms"] is None for row in by_kind["step"])
    (gradients,) = by_kind["gradients"]
    assert gradients["apart"] <= 1e-5
    # Large parameters travel by themselves, several in one launch; an exchange of gradients is gloo's way.
    messages = gradients["messages_of_fullshard"]
    assert messages["coalesced all-gather"] > 0 and "all-to-all" not in messages
    assert any("reduce-scatter" in name for name in messages)


@pytest.mark.slow
def test_steps_on_simulated_messages() -> None:
    """The smallest form of the script, and of what it is worth most for."""
    results = parts_of(command("benchmarks.gpu", "--device", "simulated", "--tiny", "--parts", "step 8B"))
    assert results["step 8B"]["ok"], results
    check_steps(results["step 8B"]["rows"])


@pytest.mark.slow
def test_each_name_of_nccl() -> None:
    """Data groups beside a group of each name, for two ranks and for one, and a cut; the other class alone."""
    results = parts_of(command("benchmarks.gpu", "--device", "simulated", "--tiny", "--parts", "nccl names"))
    assert results["nccl names"]["ok"], results
    rows = [row for row in results["nccl names"]["rows"] if row["what"] == "names"]
    assert not any("could_not" in row for row in results["nccl names"]["rows"]), results
    assert [(row["name"], row["ranks"]) for row in rows] == [(name, n) for name in NAMES for n in (2, 1)]
    for row in rows:
        assert row["bound"] in ("None", row["device"])
        assert row["ranks"] == 1 or (row["data_group"] == "ProcessGroupNCCL" and row["after_cut"].startswith("refused"))


@pytest.mark.slow
@pytest.mark.hang_after(900)
def test_the_benchmarks_for_hardware(tmp_path: Path) -> None:
    """Every part runs, bytes are those of `report`, and no time is said."""
    arguments = ("--device", "simulated", "--tiny", "--minutes", "14", "--out", str(tmp_path / "found"))
    printed = command("benchmarks.gpu", *arguments, timeout_s=880)
    results = parts_of(printed)
    assert list(results) == [part.name for part in gpu.parts("cuda")]
    failed = {name: [row for row in one["rows"] if "could_not" in row] for name, one in results.items()}
    assert not any(failed.values()) and all(one["ok"] for one in results.values()), (failed, printed[-6000:])
    check_steps(results["step 8B"]["rows"])
    checks = {"world 1", "gloo pair", "nccl pair", "nccl names", "two devices", "sanitizer"}
    for part in checks:
        kind = "sanitized" if part == "sanitizer" else part
        assert {row["what"] for row in results[part]["rows"]} == {"machine", *gpu_ranks.KINDS[kind].checks}, part
    for row in (row for part in checks for row in results[part]["rows"]):
        if row["what"] == "peak" and row["report_mib"] is not None:
            assert abs(row["peak_over_report"] - 1) <= 0.05, row
        if row["what"] == "steps":
            assert row["ms"] is None
        # Three steps of SGD in float32, each of a few roundings of the largest element.
        if "apart" in row and row["what"] != "mixed":
            assert row["apart"] <= 2e-6, row
    assert all(row["ms"] is None for row in results["plan"]["rows"] if row["what"] == "plan")
    assert json.loads((tmp_path / "found.json").read_text())["results"] == results
    assert "## compiled" in (tmp_path / "found.md").read_text() and "no hardware" in printed


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("check", "code", "said"),
    [
        ("raises", "raise ValueError('wrong')", "ValueError: wrong"),
        ("dies", "__import__('os')._exit(9)", "ended with 9"),
        ("hangs", "__import__('time').sleep(1000)", "no end after"),
    ],
)
def test_a_check_that_goes_wrong_costs_its_row(check: str, code: str, said: str, tmp_path: Path) -> None:
    """On one rank of two; the checks after it run with new ranks."""
    (tmp_path / "faulty_ranks.py").write_text(
        f"""
import sys
import benchmarks.gpu_ranks as ranks
def faulty(at):
    if at.rank == 1:
        {code}
    yield {{"fine": True}}
ranks.CHECKS["clip"] = faulty
ranks.CHECK_SECONDS = 4.0
popen = ranks.subprocess.Popen
ranks.subprocess.Popen = lambda command, **more: popen(
    [part if part != "benchmarks.gpu_ranks" else "faulty_ranks" for part in command], **more)
ranks.main()
"""
    )
    found = environment()
    found["PYTHONPATH"] += os.pathsep + str(tmp_path)
    arguments = ["--device", "simulated", "--tiny", "--kind", "nccl pair", "--checks", "message", "clip", "coalesced"]
    done = subprocess.run(
        [sys.executable, "-m", "faulty_ranks", *arguments],
        env=found,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    by_kind = {row["what"]: row for row in rows}
    assert said in next(row["could_not"] for row in rows if row["what"] == "clip" and "could_not" in row), rows
    assert by_kind["message"]["ranks"] == 2 and by_kind["coalesced"]["one_launch"], rows


@pytest.mark.slow
def test_fitted_shares_are_less_wrong() -> None:
    """Truths that a plan with other shares predicts are met again, for a line that was not used too."""
    from dataclasses import replace

    from benchmarks.gpu_plan import LINES, Predictor, Truth, fitted
    from fullshard.plan import find_hardware

    base = find_hardware("h100")
    true = replace(base, matmul=0.68, stream=0.75)
    lines = [line for line in LINES if line.name in ("8B blocks", "1B blocks", "1B blocks, 4 x 1024")]
    found = [(one, Truth(one.plan(true).seconds, 0.0, 0.0)) for one in (Predictor(line, base) for line in lines)]
    after = fitted(found[:2], base, limit_s=60)
    errors = [
        [abs(one.plan(hardware).seconds / truth.seconds - 1) for one, truth in found] for hardware in (base, after)
    ]
    assert max(errors[1]) < 0.05 < min(errors[0]), errors


def test_messages_take_what_a_ring_takes() -> None:
    """Seconds of a message, from the formula: 8 ranks, 50 GB/s, 800 MB in all."""
    from benchmarks.gpu_messages import LATENCY_SECONDS, ring_seconds

    assert math.isclose(ring_seconds("all-gather", 8, 800e6, 50e9), LATENCY_SECONDS + 7 / 8 * 800e6 / 50e9)
    assert math.isclose(ring_seconds("all-reduce", 8, 800e6, 50e9), LATENCY_SECONDS + 2 * 7 / 8 * 800e6 / 50e9)
    assert ring_seconds("reduce-scatter", 8, 800e6, math.inf) == 0.0


# ---- lines that only CUDA runs, with its calls replaced --------------------------------------------------------------


@pytest.mark.parametrize("compiles", [True, False])
def test_a_stream_waits_by_a_kernel_or_by_cycles(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVRTC the sleep of torch, calibrated, replaces the kernels."""
    from benchmarks import gpu_messages

    calls: list[tuple[Any, ...]] = []

    def compile_kernel(source: str, name: str) -> Any:
        assert f"void {name}(" in source
        if not compiles:
            raise OSError("CUDA_HOME environment variable is not set")
        return lambda grid, block, args, stream: calls.append((name, grid, block, args[-1], stream))  # noqa: ARG005

    class FakeClock:
        def __init__(self, device: torch.device) -> None:
            pass

        def mark(self) -> None:
            pass

        def seconds(self) -> list[float]:
            return [0.01] * 5

    # Asked for by what finds a toolkit.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_kernel, raising=False)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(("sleep", cycles)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: "at")
    monkeypatch.setattr(gpu_messages, "Clock", FakeClock)
    monkeypatch.setattr(gpu_messages, "synchronize", lambda device: None)  # noqa: ARG005
    timer = gpu_messages.Timer(torch.device("cuda"))
    calls.clear()
    at: Any = "at"
    timer.begin(at)
    timer.until(at, 0.002)
    timer.until(at, 10.0)
    if compiles:
        # An argument is an int of C.
        assert timer.kind == "globaltimer"
        assert [(call[0], call[3]) for call in calls] == [("begin", "at"), ("until", 2_000_000), ("until", 2**31 - 1)]
    else:
        assert timer.kind.startswith("cycles at 2.00 GHz (OSError")
        assert calls == [("sleep", 4_000_000), ("sleep", 20_000_000_000)]


def test_waits_are_counted_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the warnings of CUDA's mode, all of them, and not its warning of itself; the mode is restored."""
    from benchmarks.device import waits_noted

    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", cuda.set)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: cuda.mode)
    with waits_noted(torch.device("cuda")) as seen:
        assert cuda.mode == 1
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert cuda.mode == 0 and len(seen) == 2 and len(set(seen)) == 1
    assert seen[0].startswith("test_gpu_files.py:")


def test_what_cannot_run_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without starting a process; and what this machine has, runs."""
    by_name = {part.name: part for part in gpu.parts("cuda")}
    for count, expected in ((1, "1 device"), (2, "")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert gpu.cannot(by_name["two devices"], "cuda") == expected
    monkeypatch.setenv("PATH", "")
    assert "compute-sanitizer" in gpu.cannot(by_name["sanitizer"], "cuda")
    assert gpu.cannot(by_name["plan"], "cuda") == ""
