"""A process of this machine that has ended, or is stopped, is told from one that is busy or elsewhere; and where one of
our own threads is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fullshard.peers import store as process

HOST = process.Host()
TORCH = os.path.dirname(torch.__file__) + os.sep


def test_this_process_is_there() -> None:
    assert HOST.identity()
    what, used = HOST.condition(HOST.identity())
    assert what == "exists" and used > 0


def test_nobody_knows_of_other_machines() -> None:
    machine, number, began = HOST.identity().split()
    assert HOST.condition("") == ("unknown", 0)
    assert HOST.condition(f"{machine}x {number} {began}")[0] == "unknown"
    assert HOST.condition(f"{machine}x 999999999 {began}")[0] == "unknown"


def test_another_process_of_the_same_number() -> None:
    machine, number, began = HOST.identity().split()
    assert HOST.condition(f"{machine} {number} {int(began) + 1}")[0] == "gone"
    assert HOST.condition(f"{machine} 999999999 {began}")[0] == "gone"


def test_stopped_and_then_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        machine = process.machine()
        identity = f"{machine} {child.pid} {process._fields(child.pid)[process._BEGAN]}"
        assert HOST.condition(identity)[0] == "exists"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert HOST.condition(identity)[0] == "stopped"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert HOST.condition(identity)[0] == "gone", "nobody has collected it yet"
        child.wait()
    assert HOST.condition(identity)[0] == "gone"


def test_time_in_the_kernel_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that reads or copies much."""
    fields = ["S"] + [str(number) for number in range(101, 140)]
    monkeypatch.setattr(process, "_fields", lambda _: fields)
    assert HOST.condition(f"{process.machine()} 7 {fields[process._BEGAN]}") == ("exists", 111 + 112)
    for state, what in (("t", "stopped"), ("T", "stopped"), ("Z", "gone"), ("X", "gone"), ("D", "exists")):
        fields[process._STATE] = state
        assert HOST.condition(f"{process.machine()} 7 {fields[process._BEGAN]}")[0] == what


def test_a_process_that_computes_uses_time() -> None:
    before = HOST.condition(HOST.identity())[1]
    end = time.monotonic() + 5
    while HOST.condition(HOST.identity())[1] <= before:
        assert time.monotonic() < end


def test_where_a_thread_is_is_told_by_a_line_of_the_user_s() -> None:
    """Not by one of torch's, or of the package's: the line that called these."""
    begun, ends, places = threading.Event(), threading.Event(), []

    def where() -> str:
        begun.set()
        ends.wait(10)
        return ""

    thread = threading.Thread(target=where)
    thread.start()
    try:
        begun.wait(10)
        places = [HOST.place(thread.ident or 0, TORCH), HOST.place(-1, TORCH)]
    finally:
        ends.set()
        thread.join()
    # The innermost line that is neither torch's nor ours, whoever wrote it.
    assert "threading.py:" in places[0] and " in wait" in places[0]
    assert places[1] == ""


def test_what_was_called_of_torch_s() -> None:
    """By the name of the function that the user's line called."""
    result: torch.futures.Future[int] = torch.futures.Future()

    def waits() -> None:
        result.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    ident, end = thread.ident or 0, time.monotonic() + 10
    try:
        while HOST.called(ident, TORCH) != "wait":
            assert time.monotonic() < end
        assert HOST.place(ident, TORCH).startswith(f"{__file__}:")
        assert HOST.place(ident, TORCH).endswith(" in waits")
        assert HOST.is_within(ident, TORCH + "futures", TORCH)
        assert not HOST.is_within(ident, TORCH + "distributed", TORCH)
    finally:
        result.set_result(1)
        thread.join()
    assert HOST.called(ident, TORCH) == "" and not HOST.is_within(ident, TORCH, TORCH)


# A thread looks while others begin and end, and each allocation in `frames` collects garbage, which runs Python.
_LOOKING = """
import gc, importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("process", sys.argv[1])
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)
gc.callbacks.append(lambda *_: [None for _ in range(200)])
sys.setswitchinterval(1e-6)
gc.set_threshold(1)
end = time.monotonic() + 1

def deep(levels):
    deep(levels - 1) if levels else time.sleep(1e-4)

def works():
    while time.monotonic() < end:
        deep(2)

def looks():
    while time.monotonic() < end:
        assert threading.get_ident() in process.frames()

def begins():
    while time.monotonic() < end:
        thread = threading.Thread(target=deep, args=(1,))
        thread.start()
        thread.join()

threads = [threading.Thread(target=job) for job in (looks, begins, works, works, works, works, looks)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
print("ended")
"""


def test_looking_at_threads_that_begin_and_end_stops_nobody() -> None:
    """In Python before 3.11.9 `sys._current_frames` alone stops all threads for ever, nearly each time."""
    command = [sys.executable, "-c", _LOOKING, process.__file__]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "ended\n"


def test_a_decorator_is_not_what_the_user_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As around torch's collectives, and around `clip_grad_norm_`."""
    frame: Any = None
    for file, name in (("train.py", "step"), ("c10d.py", "wrapper"), ("c10d.py", "all_reduce"), ("c10d.py", "_wait")):
        code = SimpleNamespace(co_filename=file if name == "step" else TORCH + file, co_name=name)
        frame = SimpleNamespace(f_code=code, f_back=frame)
    monkeypatch.setattr(process, "frames", lambda: {1: frame})
    assert HOST.called(1, TORCH) == "all_reduce"
