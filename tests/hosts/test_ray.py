"""The program of the page of large clusters, on a Ray cluster of two simulated hosts with one worker on each."""

from __future__ import annotations

import ast
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from tests.harness.hosts import REPOSITORY, Host, Hosts
from tests.hosts.test_training import PAGE

SECONDS = 240.0
pytestmark = [pytest.mark.hang_after(3 * SECONDS), pytest.mark.slow]
# A key of this cluster alone, and not one that its user may have; no report to the makers of Ray.
ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
ENVIRONMENT |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
# Ends the process that trains on this host.
_KILL = """
import os, pathlib
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if path.read_bytes().startswith(b"ray::RayTrainWorker"):
        os.kill(int(path.parent.name), 9)
        print("killed")
"""


@pytest.fixture(autouse=True)
def _ray_is_there() -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray Train needs ray[train] (make hosts-setup)")


@contextmanager
def cluster() -> Iterator[Hosts]:
    """Ray on two hosts of one CPU each. It ends with them."""
    with Hosts(2) as two:
        for host in two:
            where = ("--head", "--port", "6379", "--include-dashboard", "false")
            if host is not two[0]:
                where = ("--address", f"{two[0].address}:6379")
            host.run(
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--num-cpus", "1"),
                *("--node-ip-address", host.address, "--object-store-memory", str(80 << 20)),
                *("--temp-dir", str(two.local / "ray")),
                environment=ENVIRONMENT,
                seconds=SECONDS,
            )
        yield two


def program(folder: Path, **changes: str) -> Path:
    """The program of the page, with its storage in `folder`."""
    [text] = re.findall(r'```python title="ray_train.py"[^\n]*\n(.*?)```', PAGE.read_text(), re.DOTALL)
    changes |= {'STORAGE = "/shared"': f'STORAGE = "{folder}"'}
    for printed, here in changes.items():
        assert text.count(printed) == 1, printed
        text = text.replace(printed, here)
    path = folder / "ray_train.py"
    path.write_text(text)
    return path


def environment(two: Hosts) -> dict[str, str]:
    return ENVIRONMENT | {"RAY_ADDRESS": f"{two[0].address}:6379"}


def result(said: str) -> dict[str, float]:
    """What the program printed last."""
    [line] = [line for line in said.splitlines() if line.startswith("{'step'")]
    found: dict[str, float] = ast.literal_eval(line)
    return found


def alone(steps: int) -> torch.nn.Linear:
    """The model after the same training in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        (model(rows) - rows[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def compare(folder: Path, steps: int) -> None:
    """The checkpoint after so many steps has what training in one process makes."""
    plain = alone(steps)
    state = {"model": {name: torch.empty_like(value) for name, value in plain.state_dict().items()}, "step": 0}
    checkpoint.load(state, checkpoint_id=folder / f"step-{steps}", allow_unexpected=["optimizer.*"], no_dist=True)
    assert state["step"] == steps
    torch.testing.assert_close(state["model"], dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def test_the_program_of_the_page_restores_after_a_worker_failed(tmp_path: Path) -> None:
    """A worker is killed between two checkpoints; then a run of the same name continues with one worker."""
    run = tmp_path / "run-1"
    with cluster() as two:
        # Slow enough to be killed in the middle.
        slow = program(tmp_path, **{"        loss.backward()\n": "        loss.backward()\n        time.sleep(0.3)\n"})
        slow.write_text(f"import time\n{slow.read_text()}")
        with two[0].start(sys.executable, str(slow), environment=environment(two)) as job:
            deadline = time.monotonic() + SECONDS
            while not (run / "step-10" / "CURRENT").exists():
                assert time.monotonic() < deadline and job.poll() is None, job.communicate()[0]
                time.sleep(0.05)
            before = (run / "step-5" / "CURRENT").stat().st_mtime_ns
            time.sleep(0.6)
            assert _said(two[1]) == "killed\n"
            said, _ = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, said
        assert "RETRY" in said and result(said)["step"] == 20
        compare(run, 20)
        # It did not begin again.
        assert (run / "step-5" / "CURRENT").stat().st_mtime_ns == before
        fewer = program(tmp_path, **{"num_workers=2": "num_workers=1", '"steps": 20': '"steps": 30'})
        said = two[0].run(sys.executable, str(fewer), environment=environment(two), seconds=SECONDS)
        assert result(said)["step"] == 30
    assert sorted(int(path.name.partition("-")[2]) for path in run.glob("step-*")) == [5, 10, 15, 20, 25, 30]
    # Of twenty steps on two ranks and ten on one.
    compare(run, 30)
    assert len(list((run / "step-20").glob("g*/data-*"))) == 2 and len(list((run / "step-30").glob("g*/data-*"))) == 1


def _said(host: Host) -> str:
    return host.run(sys.executable, "-c", _KILL)
