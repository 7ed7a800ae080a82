"""Facts of the folder of the checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from .facts import Folder

# File systems that several machines see; "fuse.": of a network, mostly.
SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "9p", "virtiofs", "smb", "cifs", "glusterfs", "wekafs", "fuse")
IN_MEMORY = ("tmpfs", "ramfs")


def look(path: Path, needed: int) -> Folder:
    """The facts of `path`, which need not exist. A file is written in it, or in the folder above that exists, and
    removed."""
    path = path.expanduser().absolute()
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
