"""Simulated hosts are hosts to everything that asks: names, addresses, processes, folders, clocks, bytes on a wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import hosts
from tests.harness.hosts import REPOSITORY, Host, Hosts


def _said(host: hosts.Host, code: str) -> str:
    return host.run(sys.executable, "-c", code).strip()


def test_each_is_a_machine_of_its_own() -> None:
    with Hosts(3) as three:
        names = [_said(host, "import socket; print(socket.gethostname())") for host in three]
        assert names == ["alpha", "beta", "gamma"]
        assert len({_said(host, "print(open('/proc/sys/kernel/random/boot_id').read())") for host in three}) == 3
        clocks = [float(_said(host, "import time; print(time.monotonic())")) for host in three]
        assert clocks[1] - clocks[0] > 3000 and clocks[2] - clocks[1] > 3000
        first = three[0]
        first.run("sh", "-c", f"echo here > {first.local}/file")
        assert [(host.folder / "file").exists() for host in three] == [True, False, False]
        assert three[2].run("ls", str(first.local)) == ""
        # Processes of one are not seen by another, nor by name.
        assert _said(three[1], "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))") == "2"


def test_what_a_host_sends_is_counted_without_headers() -> None:
    nbytes = 10_000_000
    serve = (
        "import socket; s = socket.create_server(('0.0.0.0', 5000)); print('up', flush=True); c, _ = s.accept()\n"
        "while c.recv(1 << 20): pass"
    )
    send = f"import socket; c = socket.create_connection(('beta', 5000)); c.sendall(bytes({nbytes})); c.close()"
    with Hosts(2, rate="1gbit") as (alpha, beta):
        with beta.start(sys.executable, "-c", serve) as server:
            assert server.stdout is not None and server.stdout.readline() == "up\n"
            before = alpha.sent()
            alpha.run(sys.executable, "-c", send)
            assert server.wait() == 0
        sent = alpha.sent().since(before)
        again = sent_again(alpha)
    # Beside the contents: what TCP sent again, counted by the host, at most 1,448 bytes a packet; options and address
    # requests of a few packets that begin and end the connection. Headers would be 460,000 bytes more.
    assert 0 <= sent.payload - nbytes <= 1448 * again + 2000
    assert sent.packets > nbytes / 1500


def sent_again(host: Host) -> int:
    """The TCP packets that a host has sent more than once."""
    names, values = (line.split() for line in host.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def test_nothing_is_left_of_hosts_whose_maker_was_killed(tmp_path: Path) -> None:
    """Namespaces, devices and processes are the maker's, and end with it."""
    code = (
        "import time; from tests.harness.hosts import Hosts\n"
        "two = Hosts(2); runs = [host.start('sleep', '600.5') for host in two]\n"
        "print(two.local.parent, flush=True); time.sleep(600)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert maker.stdout is not None
    mark = maker.stdout.readline().strip().encode()
    assert mark
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 20
    while left := [pid for pid in _commands() if mark in _commands().get(pid, b"")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not [pid for pid, words in _commands().items() if b"600.5" in words]


def _commands() -> dict[str, bytes]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found[name] = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
    return found


def test_what_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hosts.NEEDS, "no-such-command", "no-such-package")
    assert hosts.lacking() == "simulated hosts need no-such-package"
