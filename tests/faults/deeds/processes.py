"""What the cases of processes do to a process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.faults.program import Run


def hsdp(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def hold_the_lock(run: Run) -> None:
    """This process is busy in C code that does not release the interpreter's lock, for some seconds."""
    pattern = "a" * 27
    import re

    started = time.monotonic()
    while time.monotonic() - started < 3.0:
        re.match(r"(a+)+$", pattern[:22] + "b")


def busy(run: Run) -> None:
    started = time.monotonic()
    while time.monotonic() - started < 3.0:
        pass


def failing_thread(run: Run) -> None:
    """A thread of the user's raises; it has nothing to do with training."""

    def body() -> None:
        raise ValueError("a thread of the user's")

    threading.excepthook = lambda args: None
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def fork_worker(run: Run) -> None:
    """A process as those of a data loader is forked and ends."""
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def fork_killed_worker(run: Run) -> None:
    """A child of the rank is killed; the rank is not."""
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def loader(run: Run) -> None:
    """A data loader with a worker process is made, read and put away in the middle of training."""
    from torch.utils.data import DataLoader

    found = list(DataLoader([1.0, 2.0], num_workers=1))
    assert len(found) == 2


def ignored_signal(run: Run) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)


def no_descriptors(run: Run) -> None:
    """From now on this process can open no more files."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def exit_in_forward(run: Run) -> None:
    sys.exit(3)


def close_sockets(run: Run) -> None:
    """The network of this rank goes: all of its connections are closed under it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "socket" in os.readlink(f"/proc/self/fd/{name}"):
                shut(int(name))


def shut(number: int) -> None:
    import socket

    with contextlib.suppress(OSError):
        found = socket.socket(fileno=os.dup(number))
        if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
            found.shutdown(socket.SHUT_RDWR)
        found.detach()


def slow_every_step(run: Run) -> None:
    run.model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.7))


def new_group(run: Run) -> None:
    """All ranks make a process group of their own and use it between steps."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)


def barrier(run: Run) -> None:
    dist.barrier()
