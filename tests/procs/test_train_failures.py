"""One process of a run raises, or is stopped: all processes end, and one line says which it was and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.train.launch import waking_stopped
from tests.procs.test_train_cli import command, environment, linux_only

pytestmark = linux_only

# Rank 1 raises in its fifth forward. The trainer knows nothing of it.
_RAISES = """
import os
if os.environ.get("RANK") == "1":
    import fullshard.train.model as model
    forward, calls = model.Llama.forward, []
    def raises(self, *args, **kwargs):
        calls.append(0)
        if len(calls) == 5:
            raise KeyError("a bad token")
        return forward(self, *args, **kwargs)
    model.Llama.forward = raises
"""

# torch's launcher kills what has not ended 30 s after SIGTERM. On a busy machine that is no time: here it waits longer.
_PATIENT = """
import os
if "RANK" not in os.environ:
    from torch.distributed.elastic.multiprocessing.api import PContext
    assert PContext.close.__defaults__ == (None, 30)
    PContext.close.__defaults__ = (None, 600)
"""


def _with_sitecustomize(folder: Path, text: str) -> dict[str, str]:
    """The environment in which every Python runs `text` first."""
    (folder / "sitecustomize.py").write_text(text)
    paths = os.pathsep.join([str(folder), *(os.path.abspath(path) for path in sys.path if path)])
    return {**environment(), "PYTHONPATH": paths}


def _state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_process_that_is_told_to_end_is_woken() -> None:
    """And one that nobody told to end stays as it is."""
    told, other = (subprocess.Popen(["sleep", "100"]) for _ in range(2))
    try:
        for process in (told, other):
            process.send_signal(signal.SIGSTOP)
            # A busy machine stops it when its turn comes.
            deadline = time.monotonic() + 20
            while _state(process) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
        with waking_stopped():
            told.send_signal(signal.SIGTERM)
            assert told.wait(timeout=20) == -signal.SIGTERM
        assert _state(other) == "T" and other.poll() is None
    finally:
        for process in (told, other):
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.hang_after(500)
@pytest.mark.parametrize(("silence", "seconds"), [(4, 4), (None, 60)])
def test_a_stopped_process_ends_the_run(silence: int | None, seconds: int, tmp_path: Path) -> None:
    """Its peer names it after `FULLSHARD_SILENCE`; then all end within seconds, not when torchrun's patience does."""
    run_dir = tmp_path / "run"
    command_line = [sys.executable, "-m", "fullshard", *command(run_dir, "--set", "training.steps=100000")]
    environ = _with_sitecustomize(tmp_path, _PATIENT)
    if silence:
        environ["FULLSHARD_SILENCE"] = str(silence)
    run = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        metrics = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        children = [int(pid) for f in Path(f"/proc/{run.pid}/task").glob("*/children") for pid in f.read_text().split()]
        stopped = next(pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(stopped, signal.SIGSTOP)
        # It would take 600 s more if nobody woke it.
        _, said = run.communicate(timeout=seconds + 240)
        assert run.returncode == 1 and f"rank 1 gave no sign of life for {seconds} s" in said
    finally:
        run.kill()
        run.wait()


@pytest.mark.slow
def test_a_process_that_raises_ends_the_run(tmp_path: Path) -> None:
    """With its traceback and its own words, not with the connection that its peers lost."""
    run_dir = tmp_path / "run"
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard", *command(run_dir, "--set", "training.steps=100000")],
        capture_output=True,
        text=True,
        env=_with_sitecustomize(tmp_path, _RAISES),
        timeout=100,
    )
    last_step = (run_dir / "metrics.jsonl").stat().st_mtime
    assert ended.returncode == 1 and time.time() - last_step < 10 and time.monotonic() - begun < 100
    assert "in raises" in ended.stderr and "KeyError: 'a bad token'" in ended.stderr
    assert "rank 1 failed: KeyError: 'a bad token'" in ended.stderr.splitlines()[-1]
    assert json.loads((run_dir / "manifest.json").read_text())["status"] == "failed"
