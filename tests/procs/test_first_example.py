"""The example of docs/install.md, copied out of it, trains on two gloo processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
from pathlib import Path

from tests.harness.pool import pool

PAGE = Path(__file__).parents[2] / "docs" / "install.md"


def _run(rank: int, script: str, port: int) -> str:
    """The script as torchrun would run it on this rank; what it printed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_the_first_example_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python[^\n]*\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = pool(2).run(_run, str(script), port, group=False, timeout=100)
    assert second == "", "rank 0 alone speaks"
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss (.*)$", first, flags=re.M)]
    assert len(losses) == len(first.splitlines()) == 4
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.02  # it begins at about 2
