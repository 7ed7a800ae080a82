"""Facts of this machine, this installation, and the folder of the checkpoints."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard import __version__
from fullshard._torch.names import NEWEST as NEWEST
from fullshard._torch.names import OLDEST as OLDEST
from fullshard.checkpoint import CheckpointError
from fullshard.checkpoint.bucket import prove
from fullshard.checkpoint.store import is_url, location
from fullshard.program import ProgramError

from .facts import Folder, Machine


def look(*, needs_port: bool) -> Machine:
    """The facts of this machine, now. `needs_port`: the launcher opens MASTER_PORT, as torchrun does; raises
    `ProgramError` if that is no port."""
    try:
        installed = importlib.metadata.version("fullshard")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    asked = os.environ.get("MASTER_PORT", "29500") if needs_port else "0"
    if not asked.isdecimal() or int(asked) > 65535:
        raise ProgramError(f"MASTER_PORT = {asked}: expected a number from 0 to 65535")
    port = int(asked)
    shm = Path("/dev/shm")
    return Machine(
        torch=torch.__version__,
        fullshard=__version__,
        installed=installed,
        backends=frozenset(
            name
            for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
            if dist.is_available() and there
        ),
        devices=torch.cuda.device_count(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        loopback=_loopback(),
        interface=_interface(),
        port=port,
        port_is_free=not port or _is_free(port),
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def version_of(text: str) -> tuple[int, ...]:
    """
    >>> version_of("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:2])


def _loopback() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return ""
    except OSError as error:
        return f"127.0.0.1: {error.strerror or error}"


def _interface() -> str:
    """Says which interfaces gloo is set to use that do not exist, or ""."""
    there = {name for _, name in socket.if_nameindex()}
    asked = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    missing = [name for name in asked if name not in there]
    return f"GLOO_SOCKET_IFNAME names {', '.join(missing)}; there are {', '.join(sorted(there))}" if missing else ""


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


# ---- folder ----------------------------------------------------------------------------------------------------------

# File systems that several machines see; "fuse.": of a network, mostly.
SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "9p", "virtiofs", "smb", "cifs", "glusterfs", "wekafs", "fuse")
IN_MEMORY = ("tmpfs", "ramfs")


def look_at_folder(given: str | Path, needed: int) -> Folder:
    """The facts of `given`, which need not exist. A file is written in it, or in the folder above that exists, and
    removed; of a URL, an object. Raises `ValueError` for what is neither."""
    url = location(given)
    if is_url(url):
        try:
            prove(url)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
        return Folder(url, problem, None, "", needed)
    path = Path(url if "://" in str(given) else given).expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"0")
            file.flush()
        problem = ""
    except OSError as error:
        problem = f"{there}: {error.strerror or error}"
    return Folder(str(path), problem, shutil.disk_usage(there).free, _file_system(there), needed)


def _file_system(path: Path) -> str:
    """The type of the file system of `path`, "" where the system does not tell."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    real = path.resolve()
    # The last mount of the longest folder above; blanks are written as \040.
    found = [(len(at), i, kind) for i, (at, kind) in enumerate(mounts) if real.is_relative_to(at.replace(r"\040", " "))]
    return max(found)[2] if found else ""
