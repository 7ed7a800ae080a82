"""One process of a run raises: all processes end, and one line says which it was and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_process_that_raises_ends_the_run(tmp_path: Path) -> None:
    """With its traceback and its own words, not with the connection that its peers lost."""
    (tmp_path / "sitecustomize.py").write_text(_RAISES)
    run_dir = tmp_path / "run"
    paths = os.pathsep.join([str(tmp_path), *(os.path.abspath(path) for path in sys.path if path)])
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard", *command(run_dir, "--set", "training.steps=100000")],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": paths},
        timeout=100,
    )
    last_step = (run_dir / "metrics.jsonl").stat().st_mtime
    assert ended.returncode == 1 and time.time() - last_step < 10 and time.monotonic() - begun < 100
    assert "in raises" in ended.stderr and "KeyError: 'a bad token'" in ended.stderr
    assert "rank 1 failed: KeyError: 'a bad token'" in ended.stderr.splitlines()[-1]
    assert json.loads((run_dir / "manifest.json").read_text())["status"] == "failed"
