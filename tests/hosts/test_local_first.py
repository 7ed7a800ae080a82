"""Saves by way of the disks of hosts: a host that dies in an upload, one that lost its disk, one whose disk is full."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts import REPOSITORY, Host, Hosts
from tests.hosts.test_training import _KILL, ended, until

ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "FULLSHARD_SILENCE": "5"}
PROGRAM = "tests/hosts/by_disks.py"
pytestmark = [pytest.mark.slow, pytest.mark.hang_after(600)]


class Cluster:
    """Two hosts with a bucket that both reach, and a disk of its own on each."""

    def __init__(self, hosts: Hosts, bucket: Path) -> None:
        self.hosts, self.bucket, self.disk = [*hosts], bucket, hosts.local / "run"
        self._port = 29600

    def start(self, *words: object, ranks: tuple[int, ...] = (0, 1)) -> list[subprocess.Popen[str]]:
        """A process of the program for each rank; `ranks`: the host of each."""
        self._port += 1
        runs = []
        for rank, host in enumerate(ranks):
            own = {"MASTER_ADDR": self.hosts[ranks[0]].name, "MASTER_PORT": str(self._port)}
            own |= {"WORLD_SIZE": str(len(ranks)), "RANK": str(rank)}
            command = (sys.executable, PROGRAM, str(self.bucket), str(self.disk), *map(str, words))
            runs.append(self.hosts[host].start(*command, environment=ENVIRONMENT | own))
        return runs

    def run(self, *words: object, ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
        said = [ended(run) for run in self.start(*words, ranks=ranks)]
        found = [json.loads(line) for one in said for line in one.splitlines() if line.startswith("{")]
        assert len(found) == len(ranks), said
        return found

    def newest(self, *hosts: int) -> list[int]:
        """The step that each rank restores."""
        return [one["step"] for one in self.run("recover", ranks=hosts)]

    def interrupted(self, step: int) -> None:
        """A save in whose upload the second host dies."""
        first, second = self.start("save", step, "--hold", "1")
        list(until(second, '"holds"'))
        self.hosts[1].run(sys.executable, "-c", _KILL)
        second.communicate()
        (said,) = (json.loads(line) for line in ended(first).splitlines() if line.startswith("{"))
        assert said["event"] == "failed" and "rank 1" in said["error"], said

    def left(self, host: Host) -> list[str]:
        folder = host.folder / "run"
        return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_host_that_dies_in_an_upload(tmp_path: Path) -> None:
    with Hosts(2) as two:
        cluster = Cluster(two, tmp_path)
        assert [one["event"] for one in cluster.run("save", 1)] == ["saved", "saved"]
        assert not cluster.left(two[0]) and not cluster.left(two[1])
        cluster.interrupted(2)
        assert cluster.left(two[0]) == ["data-00000.safetensors"] and cluster.left(two[1]) == ["data-00001.safetensors"]
        # Without the host its file is nowhere: what both hosts have in common is the older one. Nothing is removed.
        assert cluster.newest(0) == [1] and cluster.left(two[0])
        # It is back, and other ranks are where: four on two hosts, in the other order.
        assert cluster.newest(1, 1, 0, 0) == [2] * 4
        assert not cluster.left(two[0]) and not cluster.left(two[1])
        # One whose disk is lost with it.
        cluster.interrupted(3)
        shutil.rmtree(two[1].folder / "run")
        assert cluster.newest(0, 1) == [2, 2]
        assert [one["event"] for one in cluster.run("save", 4)] == ["saved", "saved"]
        assert cluster.newest(0, 1) == [4, 4] and not cluster.left(two[0]) and not cluster.left(two[1])


def test_a_full_disk_of_one_host_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    with Hosts(2) as two:
        cluster = Cluster(two, tmp_path)
        cluster.run("save", 1)
        two[1].run("sh", "-c", f"mkdir -p {cluster.disk} && mount -t tmpfs -o size=256k full {cluster.disk}")
        for one in cluster.run("save", 2, "--numel", 1_000_000):
            assert one["kind"] == "CheckpointIOError" and "rank 1" in one["error"], one
            assert "No space left on device" in one["error"] and str(cluster.disk) in one["error"], one
        assert cluster.newest(0, 1) == [1, 1] and not cluster.left(two[0])
        assert two[1].run("find", str(cluster.disk), "-type", "f") == ""
        # A smaller one fits.
        assert [one["event"] for one in cluster.run("save", 3)] == ["saved", "saved"]
