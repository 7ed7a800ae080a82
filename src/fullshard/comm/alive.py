"""Whether a process of this machine still exists: a killed one is known to be gone before its silence tells."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_PROC = Path("/proc")


@cache
def _machine() -> str:
    """Machine, and the namespace of its process numbers; empty where that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def identity() -> str:
    """This process, for `is_gone` in another one: machine, number, and when it began. No spaces."""
    began = _began(os.getpid())
    return f"{_machine()} {os.getpid()} {began}".replace(" ", ",") if _machine() and began else ""


def is_gone(process: str) -> bool:
    """Whether the process of that `identity` was one of this machine, and has ended. False where nobody can tell."""
    machine, _, rest = process.partition(",")
    if not process or machine != _machine():
        return False
    number, _, began = rest.partition(",")
    return _began(int(number)) != began


def _began(process: int) -> str:
    """The moment at which a process began, in ticks since the machine did; empty for one that has ended."""
    try:
        # Behind the name, which may hold anything: the state, and nineteen fields later the moment.
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
