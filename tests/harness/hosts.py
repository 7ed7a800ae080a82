"""Simulated hosts: machines with a name, an address, processes and folders of their own, on a link of known rate.

    with Hosts(2, rate="1gbit") as (alpha, beta):
        alpha.run("python", "train.py", check=True)
        beta.end()                                  # as if its power went

A host is a set of Linux namespaces: network, host name, mounts, processes, monotonic clock. Nothing of it has a name in
the system: a process holds it, and ends with the process that made it, even one that was killed. With that process end
its namespaces, devices and all processes in it.

    what a host has     how
    address             10.77.0.N on `eth0`, a pair of virtual devices to a bridge in namespaces of its own
    rate                a token bucket (tc tbf) on both ends of the pair, so each direction has it; and one in front
                        of the loopback, if processes of a host shall reach each other slowly
    name                `hosts.NAMES`, its own /etc/hosts with the names of all
    boot id             a file over the kernel's, because two hosts never share it
    LOCAL               a path that is another folder on each host
    clock               `time.monotonic()` differs by an hour from host to host

It needs root, and the commands in NEEDS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

NEEDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
NAMES = ("alpha", "beta", "gamma", "delta")
REPOSITORY = Path(__file__).parent.parent.parent
_NETWORK = "10.77.0"
_START_SECONDS = 20.0
# What of the environment a host's processes get: no address, and no rank, of the process that made the hosts.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VIRTUAL_ENV", "TMPDIR")


def lacking() -> str:
    """Why there can be no simulated hosts here; "" if there can."""
    missing = sorted({package for command, package in NEEDS.items() if shutil.which(command) is None})
    if missing:
        return f"simulated hosts need {', '.join(missing)}"
    if os.geteuid() != 0:
        return "simulated hosts need root, who may make network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--time", "--fork", "sh", "-c", _TRIAL],
        capture_output=True,
        text=True,
    )
    return f"the kernel refuses simulated hosts: {tried.stderr.strip()}" if tried.returncode else ""


_TRIAL = (
    "set -e; ip link add bridge0 type bridge; ip link add one type veth peer name other; "
    "tc qdisc add dev one root tbf rate 1gbit burst 256kb limit 1mb"
)


class Traffic(NamedTuple):
    """What the interface of a host has sent. packets: as the interface counted them, see `payload`."""

    nbytes: int
    packets: int

    # Ethernet, IPv4, TCP with timestamps.
    HEADER = 14 + 20 + 32

    @property
    def payload(self) -> int:
        """Bytes without headers. Segmentation is off on these interfaces, so a packet is what a wire would carry."""
        return self.nbytes - self.HEADER * self.packets

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.nbytes - before.nbytes, self.packets - before.packets)


class _Holder:
    """The process that holds a set of namespaces, and the first in its own."""

    def __init__(self, script: str, *options: str) -> None:
        # The sentence of `read` ends when this process does, however it does; so does `setpriv`'s signal.
        self._run = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL"]
            + ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", *options]
            + ["sh", "-c", f"set -e\n{script}\necho ready\nread end || true"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._run.stdout is not None and self._run.stderr is not None
        if self._run.stdout.readline() != "ready\n":
            said = self._run.stderr.read()
            self.end()
            raise RuntimeError(f"a simulated host could not be made: {said}")
        self.pid = int(Path(f"/proc/{self._run.pid}/task/{self._run.pid}/children").read_text().split()[0])

    def inside(self, *words: str) -> list[str]:
        """The command that runs `words` there."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--pid", "--time", "--", *words]

    def run(self, command: str) -> str:
        done = subprocess.run(self.inside("sh", "-ec", command), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        self._run.kill()
        self._run.wait()
        for stream in (self._run.stdin, self._run.stdout, self._run.stderr):
            if stream is not None:
                stream.close()


class Host:
    """One of them. name, address: as the others know it. local: the path that is another folder on each host, and where
    its folder is in truth."""

    def __init__(self, number: int, folder: Path, local: Path, table: Path) -> None:
        self.name, self.address, self.local = NAMES[number], f"{_NETWORK}.{number + 1}", local
        self.folder = folder / self.name
        self.folder.mkdir()
        boot = folder / f"{self.name}.boot"
        boot.write_text(f"{uuid.uuid4()}\n")
        self._holder = _Holder(
            f"mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount --bind {self.folder} {local}; "
            f"mount --bind {table} /etc/hosts; mount --bind {boot} /proc/sys/kernel/random/boot_id; "
            f"hostname {self.name}; ip link set lo up",
            "--time",
            "--monotonic",
            str(3600 * number),
        )
        self._pairs = 0

    def connect(self, switch: _Holder, number: int, rate: str | None) -> None:
        """Put a pair of devices between this host and the bridge of `switch`."""
        port = f"port{number}"
        make = ["ip", "link", "add", "eth0", "netns", str(self._holder.pid)]
        subprocess.run([*make, "type", "veth", "peer", "name", port, "netns", str(switch.pid)], check=True)
        # Without segmentation in the device each packet is counted, and a bucket never sees one that it cannot hold.
        self._holder.run(
            f"ip link set eth0 gso_max_segs 1; ip address add {self.address}/24 dev eth0; ip link set eth0 up; "
            f"ip route add default dev eth0"
        )
        switch.run(f"ip link set {port} gso_max_segs 1; ip link set {port} master bridge0; ip link set {port} up")
        if rate is not None:
            self._holder.run(f"tc qdisc add dev eth0 {_bucket(rate)}")
            switch.run(f"tc qdisc add dev {port} {_bucket(rate)}")

    def slow_within(self, rate: str) -> None:
        """Let its processes send to each other at `rate`, all together."""
        self._holder.run(f"tc qdisc add dev lo {_bucket(rate)}")

    def start(
        self, *words: str, environment: Mapping[str, str] | None = None, folder: Path = REPOSITORY, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in `folder`. It gets the environment of this process without ranks and
        addresses, and what `environment` says. Its output is captured as text."""
        own = {name: os.environ[name] for name in _KEPT if name in os.environ} | dict(environment or {})
        enter = ("sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(self._holder.inside(*enter), env=own, **(pipes | options))

    def run(self, *words: str, seconds: float = 60.0, **options: Any) -> str:
        """Run a command to its end and return its output. Raises `AssertionError` with it if that is not 0."""
        with self.start(*words, **options) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
                raise AssertionError(f"{self.name}: {words} did not end in {seconds} s:\n{said}") from None
        assert process.returncode == 0, f"{self.name}: {words} returned {process.returncode}:\n{said}"
        return said

    def sent(self) -> Traffic:
        """What its interface has sent since the host was made."""
        [one] = json.loads(self._holder.run("ip -s -j link show dev eth0"))
        return Traffic(one["stats64"]["tx"]["bytes"], one["stats64"]["tx"]["packets"])

    def cut(self) -> None:
        """Pull its cable."""
        self._holder.run("ip link set eth0 down")

    def end(self) -> None:
        """End the host with all that runs on it, in one moment, and without a word to others."""
        self._holder.end()


def _bucket(rate: str) -> str:
    return f"root tbf rate {rate} burst 256kb limit 200mb"


class Hosts:
    """`count` hosts on one switch, `rate` (as tc writes it) in each direction of each link, `within` between processes
    of one host; None: as the kernel can."""

    def __init__(self, count: int, rate: str | None = None, within: str | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._switch: _Holder | None = None
        self._hosts: list[Host] = []
        self.local = self._folder / "local"
        self.local.mkdir()
        table = self._folder / "hosts"
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{_NETWORK}.{i + 1} {NAMES[i]}\n" for i in range(count)))
        try:
            self._switch = _Holder("ip link add bridge0 type bridge; ip link set bridge0 up", "--time")
            for number in range(count):
                self._hosts.append(Host(number, self._folder, self.local, table))
                self._hosts[-1].connect(self._switch, number, rate)
                if within is not None:
                    self._hosts[-1].slow_within(within)
            self._wait_for_links()
        except BaseException:
            self.close()
            raise

    def _wait_for_links(self) -> None:
        """A port of a bridge forwards after a moment."""
        deadline = time.monotonic() + _START_SECONDS
        for other in self._hosts[1:]:
            probe = f"import socket; socket.create_connection(({other.address!r}, 9), 1)"
            while "refused" not in self._hosts[0].start("python3", "-c", probe).communicate()[0]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self._hosts[0].name} does not reach {other.name}")

    def close(self) -> None:
        for host in self._hosts:
            host.end()
        if self._switch is not None:
            self._switch.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
