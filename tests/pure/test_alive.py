"""A process of this machine that has ended is told from one that is stopped, busy or elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from fullshard.comm import alive


def test_this_process_is_there() -> None:
    assert alive.identity()
    assert not alive.is_gone(alive.identity())


def test_nobody_knows_of_other_machines() -> None:
    machine, number, began = alive.identity().split(",")
    assert not alive.is_gone("")
    assert not alive.is_gone(f"{machine}x,{number},{began}")
    assert not alive.is_gone(f"{machine}x,999999999,{began}")


def test_another_process_of_the_same_number() -> None:
    machine, number, began = alive.identity().split(",")
    assert alive.is_gone(f"{machine},{number},{int(began) + 1}")


def test_stopped_and_then_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        machine, _, _ = alive.identity().split(",")
        process = f"{machine},{child.pid},{alive._began(child.pid)}"
        assert not alive.is_gone(process)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert not alive.is_gone(process)
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert alive.is_gone(process), "nobody has collected it yet"
        child.wait()
    assert alive.is_gone(process)
