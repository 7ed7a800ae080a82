"""The job of the page of large clusters, on a controller and two node daemons."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.harness import slurm
from tests.harness.hosts import REPOSITORY, Hosts
from tests.hosts.test_training import PAGE, lines
from tests.hosts.train import alone

pytestmark = [pytest.mark.hang_after(400), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _slurm_is_there() -> None:
    if lacks := slurm.lacking():
        pytest.skip(lacks)


def job(folder: Path, arguments: str) -> Path:
    """The script of the page, for two nodes with one process each and without GPUs."""
    [script] = re.findall(r'```sh title="job.sbatch"[^\n]*\n(.*?)```', PAGE.read_text(), re.DOTALL)
    for printed, here in (
        ("--nodes=8", "--nodes=2"),
        ("#SBATCH --gpus-per-node=8\n", ""),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("train.py", f"tests/hosts/train.py {arguments}"),
    ):
        assert script.count(printed) == 1, printed
        script = script.replace(printed, here)
    path = folder / "job.sbatch"
    path.write_text(script)
    return path


ENVIRONMENT = {
    "PYTHONPATH": str(REPOSITORY),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


def test_the_job_of_the_page_trains_over_its_nodes(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with Hosts(2) as two, slurm.Cluster(two) as cluster:
        number = cluster.submit(job(tmp_path, f"{two.local} --steps 3"), output, **ENVIRONMENT)
        cluster.wait_for(lambda: cluster.state(number) not in ("PENDING", "RUNNING", "COMPLETING"), 120)
        said = output.read_text()
        assert cluster.state(number) == "COMPLETED", said
    found = lines(said)
    hosts = {line["host"] for line in found if line["event"] == "ends"}
    assert hosts == {"alpha", "beta"}
    steps = {line["step"]: line["loss"] for line in found if line["event"] == "step"}
    assert list(steps.values()) == pytest.approx(alone(3), rel=1e-5)


def test_a_job_that_is_requeued_saves_and_continues(tmp_path: Path) -> None:
    """SIGTERM comes with a grace; the job starts again, from the checkpoint that it made then."""
    output, folder = tmp_path / "out", tmp_path / "run"

    def said() -> list[dict[str, object]]:
        return lines(output.read_text()) if output.exists() else []

    with Hosts(2) as two, slurm.Cluster(two) as cluster:
        script = job(tmp_path, f"{folder} --steps 400 --save-every 1000 --pause 0.1")
        number = cluster.submit(script, output, **ENVIRONMENT)
        cluster.wait_for(lambda: any(line.get("step") == 5 and line["event"] == "step" for line in said()), 120)
        assert not list(folder.glob("step-*"))
        cluster.run("scontrol", "requeue", str(number))
        # Slurm begins the output file anew.
        cluster.wait_for(lambda: len(list(folder.glob("step-*"))) == 1 and bool(said()), 120)
        [saved] = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
        cluster.wait_for(lambda: any(line["event"] == "begins" and line["step"] == saved for line in said()), 120)
        cluster.wait_for(lambda: any(line["event"] == "step" and line["step"] == saved + 3 for line in said()), 120)
        cluster.run("scancel", "--signal=KILL", str(number))
    after = {line["step"]: line["loss"] for line in said() if line["event"] == "step" and line["step"] > saved}
    assert [after[saved + n] for n in (1, 2, 3)] == pytest.approx(alone(saved + 3)[saved:], rel=1e-5)
