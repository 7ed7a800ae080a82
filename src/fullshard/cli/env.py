"""`fullshard env`: versions, platform, devices and settings, for a report of a bug. Nothing private is printed.

A process of its own imports torch: an installation that raises, hangs or crashes when it is imported is reported, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard import __version__

_EXAMPLES = """\
examples:
  fullshard env            what a report of a bug needs; copy it whole
  fullshard env --json     the same for programs

Home folder, host and user names, addresses, and values that may be secrets are left out.

exit codes: 0 printed, also where torch cannot be imported
"""

# A driver that does not answer makes the first look at devices wait for ever.
TORCH_SECONDS = 120.0

# Variables that change what torch, its backends or fullshard do. Others may hold anything, and are not read.
_PREFIXES = (
    "FULLSHARD_",
    "TORCH",
    "PYTORCH_",
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "CUDA_",
    "CUBLAS_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "HF_HUB_OFFLINE",
)
_NAMES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MALLOC_CONF",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTHONHASHSEED",
    "PYTHONOPTIMIZE",
    "PYTHONPATH",
    "PYTHONWARNINGS",
    "RANK",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "VIRTUAL_ENV",
    "WORLD_SIZE",
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|(?:^|_)KEY(?:$|_)", re.I)


def add_command(commands: Any) -> None:
    """Add `env` to the parser of the command line."""
    env = commands.add_parser(
        "env",
        help="print versions, devices and settings for a report of a bug",
        description="Print what a report of a bug needs: versions, platform, devices, packages and settings.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    facts = environment()
    print(json.dumps(facts, indent=1) if arguments.json else as_text(facts))
    return 0


def environment() -> dict[str, dict[str, Any]]:
    """All facts, by section. Values are texts, numbers, lists of texts or None where something is not there."""
    facts = {
        "fullshard": _installation(),
        "python": _python(),
        "platform": _platform(),
        "torch": _torch_from_a_process(TORCH_SECONDS),
        "packages": _packages(),
        "variables": variables(os.environ),
    }
    return {section: {name: _without_names(value) for name, value in facts[section].items()} for section in facts}


def as_text(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """The facts as lines, by section."""
    lines: list[str] = []
    for section, values in facts.items():
        lines += ["", section]
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            shown = "; ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"  {name:{width}}  {'none' if shown in (None, '') else shown}")
        if not values:
            lines.append("  none")
    return "\n".join(lines[1:])


# ---- sections --------------------------------------------------------------------------------------------------


def _installation() -> dict[str, Any]:
    try:
        installed = importlib.metadata.distribution("fullshard")
    except importlib.metadata.PackageNotFoundError:
        return {"version": __version__, "from": str(Path(__file__).parents[1]), "installed": None}
    direct = json.loads(installed.read_text("direct_url.json") or "{}")
    editable = ", editable" if direct.get("dir_info", {}).get("editable") else ""
    return {
        "version": __version__,
        "from": str(Path(__file__).parents[1]),
        "installed": f"{installed.version}{editable}",
    }


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "build": platform.python_compiler(),
    }


def _platform() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    shared = Path("/dev/shm")
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": f"{cores or os.cpu_count()} usable of {os.cpu_count()}",
        "memory": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "shared memory": f"{_gib(shutil.disk_usage(shared).free)} free" if shared.is_dir() else None,
        "open files": "{} of {}".format(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        "network interfaces": [name for _, name in socket.if_nameindex()],
    }


def _packages() -> dict[str, Any]:
    """The version of each package that an extra of fullshard names."""
    try:
        required = importlib.metadata.requires("fullshard") or []
    except importlib.metadata.PackageNotFoundError:
        return {"unknown": "fullshard runs from a source tree, not from an installation"}
    names = {re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in required if "extra ==" in text}
    found: dict[str, Any] = {}
    for name in sorted(names - {"fullshard"}, key=str.lower):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns those of `environ` that change what happens, without what may be secret.

    >>> variables({"NCCL_DEBUG": "INFO", "HOME": "/home/me", "MASTER_ADDR": "10.1.2.3", "TORCH_AUTH_KEY": "abc"})
    {'MASTER_ADDR': '<address>', 'NCCL_DEBUG': 'INFO', 'TORCH_AUTH_KEY': '<left out>'}
    """
    names = [name for name in environ if name.startswith(_PREFIXES) or name in _NAMES]
    shown: dict[str, Any] = {}
    for name in sorted(names):
        value = environ[name]
        if _SECRET.search(name):
            value = "<left out>"
        elif name.endswith("_ADDR") and value not in ("localhost", "127.0.0.1", "::1", ""):
            value = "<address>"
        shown[name] = value
    return shown


# ---- torch -----------------------------------------------------------------------------------------------------


def _torch_from_a_process(seconds: float) -> dict[str, Any]:
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    facts: dict[str, Any] = {"installed": installed}
    try:
        command = [sys.executable, "-P", "-c", "from fullshard.cli.env import print_torch; print_torch()"]
        # It finds the torch that this process would import.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return {**facts, "import": f"no answer within {seconds:g} s"}
    if ran.returncode == 0:
        return {**facts, "import": "works", **json.loads(ran.stdout.splitlines()[-1])}
    last = [line for line in ran.stderr.splitlines() if line.strip()][-3:]
    ended = f"signal {-ran.returncode}" if ran.returncode < 0 else f"exit code {ran.returncode}"
    return {**facts, "import": [f"fails with {ended}", *last]}


def print_torch() -> None:
    """Prints what torch says of itself and of the devices, as JSON."""
    import torch
    import torch.distributed as dist

    there = dist.is_available()
    backends = {
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "mpi": there and dist.is_mpi_available(),
        "ucc": there and dist.is_ucc_available(),
    }
    kind = torch.accelerator.current_accelerator()
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            devices.append(f"cuda:{index} {of.name}, {_gib(of.total_memory)}, capability {of.major}.{of.minor}")
    elif kind is not None:
        devices = [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    facts = {
        "version": str(torch.__version__),
        "from": str(Path(torch.__file__).parent),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if backends["nccl"] and devices else None,
        "driver": _driver() if devices else None,
        "backends": [name for name, usable in backends.items() if usable],
        "devices": devices,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(facts))


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except OSError:
        return None


# ---- how it is written -----------------------------------------------------------------------------------------


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


_ADDRESS = re.compile(r"\b(?!127\.0\.0\.)(?:\d{1,3}\.){3}\d{1,3}\b")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")


def _without_names(value: Any) -> Any:
    """Texts without the home folder, the names of the host and the user, addresses, and passwords in addresses."""
    if isinstance(value, list):
        return [_without_names(one) for one in value]
    if not isinstance(value, str):
        return value
    home = str(Path.home())
    if len(home) > 1:
        value = value.replace(home, "~")
    for name, written in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) > 1:
            value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", written, value)
    return _ADDRESS.sub("<address>", _CREDENTIALS.sub("", value))


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""
