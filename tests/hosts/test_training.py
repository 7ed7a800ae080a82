"""Training over several hosts, started as the page of large clusters says; hosts that vanish; folders and clocks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts import REPOSITORY, Hosts
from tests.hosts.train import alone

SILENCE = 5
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "FULLSHARD_SILENCE": str(SILENCE)}
PROGRAM = "tests/hosts/train.py"
PAGE = REPOSITORY / "docs" / "how-to" / "large-clusters.md"
# A run over two hosts on a busy machine.
BOUND = 100.0
pytestmark = pytest.mark.hang_after(3 * BOUND)


def torchrun(per_host: int = 1, nodes: str = "2") -> tuple[str, ...]:
    """The command of each host: that of the page for plain machines."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(per_host))
    return *launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "alpha:29500", "--rdzv-id", "run-1"


def lines(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def ended(run: subprocess.Popen[str]) -> str:
    said, _ = run.communicate(timeout=BOUND)
    return said


def until(run: subprocess.Popen[str], words: str) -> Iterator[str]:
    """The lines of `run` until one has `words`."""
    assert run.stdout is not None
    for line in run.stdout:
        yield line
        if words in line:
            return
    raise AssertionError(f"{words} was not said")


def losses(said: str) -> list[float]:
    return [line["loss"] for line in lines(said) if line["event"] == "step"]


def started(two: Hosts, command: tuple[str, ...], *arguments: str, **environment: str) -> list[subprocess.Popen[str]]:
    return [host.start(*command, PROGRAM, *arguments, environment=ENVIRONMENT | environment) for host in two]


@pytest.mark.slow
def test_a_rendezvous_over_two_hosts_trains_as_one_process() -> None:
    with Hosts(2) as two:
        said = [ended(run) for run in started(two, torchrun(2), str(two.local), "--steps", "3")]
    assert all('"ends"' in one for one in said), said
    ranks = {line["rank"]: line for one in said for line in lines(one) if line["event"] == "begins"}
    assert [ranks[rank]["host"] for rank in range(4)] == ["alpha", "alpha", "beta", "beta"]
    # Two nodes, which each rank of them knows as one.
    nodes = [ranks[rank]["node"] for rank in range(4)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    for one in said:
        assert losses(one)[::2] == pytest.approx(alone(3), rel=1e-5)


# Ends all processes of a host but its first, which holds it.
_KILL = """
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    if int(name) not in (1, os.getpid()):
        os.kill(int(name), 9)
"""


@pytest.mark.slow
def test_an_elastic_job_continues_with_the_hosts_that_are_there(tmp_path: Path) -> None:
    """A host dies: the other continues alone, from the last checkpoint. It comes back: both continue. The command is
    that of the page, for one to two nodes."""
    [printed] = re.findall(r'title="elastic.sh"[^\n]*\n(.*?)\n```', PAGE.read_text(), re.DOTALL)
    exported, _, printed = printed.partition("\n")
    name, _, value = exported.removeprefix("export ").partition("=")
    words = printed.replace("\\\n", " ").split()
    for old, new in (("6:8", "1:2"), ("head:29500", "alpha:29500"), ("torchrun", "-m torch.distributed.run")):
        assert words.count(old) == 1
        words[words.index(old)] = new
    words[words.index("--nproc-per-node") + 1] = "1"
    # Where a rank fails with a host, and where the other agent finds that it is gone.
    words[-1:] = ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5", PROGRAM]
    command = (sys.executable, *" ".join(words).split(), str(tmp_path), "--steps", "100000", "--save-every", "5")
    slower = ("--pause", "0.1")
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1", name: value}
    with Hosts(2) as two:
        first = two[0].start(*command, *slower, environment=environment)
        second = two[1].start(*command, *slower, environment=environment)
        seen = list(until(first, '"step": 12'))
        assert json.loads(seen[-1])["world"] == 2
        # Its processes, not the machine: it comes back.
        two[1].run(sys.executable, "-c", _KILL)
        second.communicate()
        seen += list(until(first, '"world": 1'))
        seen += list(until(first, '"event": "step"'))
        alone_from = json.loads(seen[-1])["step"]
        assert 5 < alone_from <= 13 + 5
        second = two[1].start(*command, *slower, environment=environment)
        seen += list(until(first, '"world": 2'))
        for _ in range(3):
            seen += list(until(first, '"event": "step"'))
        for host in two:
            host.end()
        first.communicate(), second.communicate()
    found = [line for line in lines("".join(seen)) if line["event"] == "step"]
    assert [world for world, _ in groupby(line["world"] for line in found)] == [2, 1, 2]
    plain = alone(max(line["step"] for line in found))
    assert [line["loss"] for line in found] == pytest.approx([plain[line["step"] - 1] for line in found], rel=1e-4)


@pytest.mark.slow
def test_variables_alone_are_enough() -> None:
    """As an operator for Kubernetes starts processes: no launcher, the variables of `env://`."""
    with Hosts(2) as two:
        runs = []
        for rank, host in enumerate(two):
            own = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29501", "WORLD_SIZE": "2", "RANK": str(rank)}
            command = (sys.executable, PROGRAM, str(two.local), "--steps", "2")
            runs.append(host.start(*command, environment=ENVIRONMENT | own))
        for said in map(ended, runs):
            assert losses(said) == pytest.approx(alone(2), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        pytest.param(1, "end", marks=pytest.mark.slow),
        pytest.param(1, "cut", marks=pytest.mark.slow),
        (0, "cut"),
        pytest.param(0, "end", marks=pytest.mark.slow),
    ],
)
def test_the_rank_of_a_host_that_vanishes_is_named(victim: int, how: str) -> None:
    """Without power or cable nothing says that it is gone. The first host serves the store too."""
    with Hosts(2) as two:
        # Without a launcher, which ends processes and waits for its own store.
        runs = []
        for rank, host in enumerate(two):
            own = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29501", "WORLD_SIZE": "2", "RANK": str(rank)}
            command = (sys.executable, PROGRAM, str(two.local), "--steps", "100000", "--pause", "0.05")
            runs.append(host.start(*command, environment=ENVIRONMENT | own))
        survivor = runs[1 - victim]
        list(until(survivor, '"step": 5'))
        two[victim].end() if how == "end" else two[victim].cut()
        said = ended(survivor)
        assert survivor.returncode != 0
        assert "PeerFailed: expected every rank to take part in" in said, said
        assert f"found that rank {victim} gave no sign of life" in said, said
        two[victim].end()
        runs[victim].communicate()


@pytest.mark.slow
def test_a_folder_that_only_one_host_sees_is_refused_by_name() -> None:
    with Hosts(2) as two:
        said = [
            ended(run) for run in started(two, torchrun(), str(two.local / "run"), "--steps", "2", "--save-every", "1")
        ]
        assert not list(two[0].folder.glob("run/step-1/manifest*"))
    for one in said:
        assert "CheckpointError" in one and "expected a directory that all hosts share" in one, one
        assert "found that host alpha made" in one and "host beta" in one and "nothing was written" in one, one


@pytest.mark.slow
def test_checkpoints_of_a_shared_folder_are_continued(tmp_path: Path) -> None:
    """A second run, with the hosts in the other order and two ranks on each, continues the first."""
    with Hosts(2) as two:
        said = [ended(run) for run in started(two, torchrun(), str(tmp_path), "--steps", "2", "--save-every", "2")]
        assert all('"ends"' in one for one in said), said
        said = [ended(run) for run in started(two, torchrun(2), str(tmp_path), "--steps", "4", "--save-every", "2")]
    for one in said:
        assert losses(one)[::2] == pytest.approx(alone(4)[2:], rel=1e-5), one


@pytest.mark.slow
def test_records_of_all_hosts_are_seen_together(tmp_path: Path) -> None:
    """Each host has its own folder and its own clock, an hour apart: the files are put together, and one may be
    missing."""
    with Hosts(2) as two:
        runs = started(two, torchrun(), str(tmp_path), "--steps", "3", "--see", str(two.local / "see"))
        said = [ended(run) for run in runs]
        assert all('"ends"' in one for one in said), said
        for host in two:
            for path in (host.folder / "see").iterdir():
                (tmp_path / "both").mkdir(exist_ok=True)
                (tmp_path / "both" / path.name).write_bytes(path.read_bytes())
    whole = _seen(tmp_path / "both")
    assert "on rank 0 of 2" in whole and "exposed messages" in whole, whole
    (tmp_path / "both" / "from1-rank1.jsonl").unlink()
    alone_ = _seen(tmp_path / "both")
    assert "rank 1" in alone_, alone_


def _seen(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "fullshard", "see", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_host_with_several_ranks_that_vanishes_is_named_on_all_ranks_of_the_other() -> None:
    """Their messages go in two levels, which threads of their own pass on."""
    with Hosts(2) as two:
        runs = []
        for rank in range(4):
            own = {"MASTER_ADDR": "alpha", "MASTER_PORT": "29501", "WORLD_SIZE": "4", "RANK": str(rank)}
            command = (sys.executable, PROGRAM, str(two.local), "--steps", "100000", "--pause", "0.05")
            runs.append(two[rank // 2].start(*command, environment=ENVIRONMENT | own))
        list(until(runs[0], '"step": 5'))
        two[1].end()
        said = [ended(run) for run in runs[:2]]
        for run, one in zip(runs[:2], said, strict=True):
            assert run.returncode != 0 and "PeerFailed: expected every rank to take part in" in one, one
            assert "gave no sign of life" in one and re.search(r"found that ranks? [23]", one), one
        for run in runs[2:]:
            run.communicate()
