"""A Slurm cluster of simulated hosts: a controller on the first, a node daemon on each, as Debian packages them.

with Hosts(2) as two, Cluster(two) as cluster:
    job = cluster.submit("job.sbatch", "out")
    cluster.wait_for(lambda: cluster.state(job) == "COMPLETED")
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.harness.hosts import REPOSITORY, Hosts

NEEDS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
# What a job that is asked to end has before it is killed.
GRACE_SECONDS = 30
_SECONDS = 60.0
# cred_expire: a job that was requeued waits so long before it starts again, 120 s by default.
_CONFIGURATION = """
ClusterName=simulated
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
JobRequeue=1
KillWait={grace}
ReturnToService=2
SlurmdTimeout=30
MinJobAge=600
TmpFS=/tmp
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def lacking() -> str:
    """Why there can be no Slurm here; "" if there can."""
    missing = sorted({package for command, package in NEEDS.items() if shutil.which(command) is None})
    return f"Slurm needs {', '.join(missing)} (make hosts-setup)" if missing else ""


class Cluster:
    """Slurm on `hosts`, which share all folders but `hosts.local`. Daemons end with their hosts, and at the latest with
    this. folder: of its state and logs; environment: of a command that talks to it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.folder = hosts, Path(tempfile.mkdtemp(prefix="slurm-"))
        self._daemons: list[subprocess.Popen[str]] = []
        for name in ("munge", "state", *(f"spool/{host.name}" for host in hosts)):
            (self.folder / name).mkdir(parents=True)
        cpus = os.cpu_count() or 1
        shape = f"CPUs={cpus} Sockets=1 CoresPerSocket={cpus} State=UNKNOWN"
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} {shape}" for host in hosts)
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text(
            _CONFIGURATION.format(controller=hosts[0].name, folder=self.folder, nodes=nodes, grace=GRACE_SECONDS)
        )
        # Without it Slurm asks systemd for one; processes are followed by their parents here.
        plugin = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/{plugin}\nIgnoreSystemd=yes\n")
        self.environment = {"SLURM_CONF": str(self.configuration)}
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        first = self.hosts[0]
        # One for all hosts: its socket is a file that all of them see.
        words = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        munge = [f"--{word}={self.folder}/munge/{word.split('-')[0]}" for word in words]
        self._daemons.append(first.start("munged", "--foreground", "--force", *munge, stdout=subprocess.DEVNULL))
        quiet = {"environment": self.environment, "stdout": subprocess.DEVNULL}
        self._daemons.append(first.start("slurmctld", "-D", "-c", **quiet))
        for host in self.hosts:
            self._daemons.append(host.start("slurmd", "-D", "-N", host.name, **quiet))
        self.wait_for(lambda: self.run("sinfo", "--noheader", "--format=%T %D") == f"idle {len(list(self.hosts))}\n")

    def run(self, *words: str, **environment: str) -> str:
        """What a command on the first host says, errors too."""
        return self.hosts[0].start(*words, environment=self.environment | environment).communicate()[0]

    def submit(self, script: Path, output: Path, **environment: str) -> int:
        """Submit a job, whose processes get this `environment`. Returns its number."""
        said = self.run(
            "sbatch", "--parsable", f"--output={output}", f"--chdir={REPOSITORY}", str(script), **environment
        )
        assert said.strip().isdigit(), said
        return int(said)

    def state(self, job: int) -> str:
        """As `scontrol` names it."""
        said = self.run("scontrol", "show", "job", str(job))
        return said.partition("JobState=")[2].partition(" ")[0]

    def wait_for(self, is_there: Callable[[], bool], seconds: float = _SECONDS) -> None:
        """Raises `AssertionError` with the ends of the logs."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                raise AssertionError(f"Slurm did not come so far:\n{self.run('sinfo')}{self.run('squeue')}{logs}")
            time.sleep(0.2)

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
