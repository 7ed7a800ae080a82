"""Ranks with real messages on the devices of one machine, check by check; each prints its rows as soon as it has them.

    python -m benchmarks.gpu_ranks --kind "nccl pair"
    python -m benchmarks.gpu_ranks --kind "world 1" --device simulated --tiny     without hardware: times are left out

    nccl pair     two ranks of NCCL on one device. NCCL refuses two ranks of one host there; each gets an NCCL_HOSTID of
                  its own, loopback sockets, no P2P and no shared memory. It may refuse that too: then a row says so
    nccl names    the same over each name that torch has for NCCL, and over groups of one rank
    world 1       one rank of NCCL;  gloo pair: two ranks of gloo with tensors of one device
    two devices   two ranks of NCCL with a device each
    sanitized     two short steps of one rank, under compute-sanitizer

A check (gpu_checks.py) that raises, hangs or ends its process costs its row, which says why, and a start of new ranks
for the checks after it.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.device import SIMULATED, device_of, machine, module_of
from benchmarks.gpu_checks import CHECK_SECONDS, CHECKS, TRAINING, Rank
from benchmarks.gpu_parts import reason, row, shows_stacks

# The first check takes so much longer, because ranks start.
START_SECONDS = 25.0


class Kind(NamedTuple):
    """`backend`: on CUDA; elsewhere the backend of the device. `devices`: one for all ranks, or one for each. `host`:
    tensors of the host go over gloo, as by torch's default; without it NCCL is alone."""

    backend: str
    world: int
    checks: tuple[str, ...]
    devices: int = 1
    host: bool = True


KINDS = {
    "nccl pair": Kind(
        "nccl",
        2,
        ("message", "laziness", "data groups", "coalesced", "plain", "clip", "mixed", "HSDP", "waits", "abort"),
        host=False,
    ),
    "nccl names": Kind("nccl", 2, ("message", "names", "other class"), host=False),
    "world 1": Kind("nccl", 1, ("message", "laziness", *TRAINING, "checkpoint", "waits", "copies", "peak", "steps")),
    "gloo pair": Kind("gloo", 2, ("message", "data groups", *TRAINING, "checkpoint", "abort")),
    "two devices": Kind(
        "nccl", 2, ("message", "data groups", "bandwidth", "steps", "plain", "HSDP", "peak", "abort"), devices=2
    ),
    "sanitized": Kind("nccl", 1, ("short steps",)),
}


# ---- on each rank ----------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """The checks, on this rank. A check that failed anywhere ends all ranks."""
    warnings.filterwarnings("ignore", module="torch")
    kind = KINDS[options.kind]
    device = device_of(options.device, options.rank if kind.devices > 1 else 0)
    backend = kind.backend if device.type == "cuda" else dist.get_default_backend_for_device(device)
    folder = Path(options.folder)
    at = Rank(options.rank, kind.world, device, backend, folder, options.tiny, options.rounds)
    if at.rank == 0 and options.checks[0] == kind.checks[0]:
        row("machine", **machine(device))
    both = f"cpu:gloo,{device.type}:{backend}" if kind.host and backend != "gloo" else backend
    dist.init_process_group(both, init_method=f"file://{folder}/rendezvous", rank=at.rank, world_size=at.world)
    for name in options.checks:
        try:
            for figures in CHECKS[name](at):
                if at.rank == 0:
                    row(name, **figures)
            gc.collect()
            module_of(device).empty_cache()
        except Exception as error:
            row(name, rank=at.rank, could_not=reason(error))
            _note(at, name, "failed")
            # Groups may be at different messages now.
            os._exit(3)
        _note(at, name, "ok")
        while (ends := _ends(folder, at.world, name)).count("") and "failed" not in ends:
            time.sleep(0.01)
        if "failed" in ends:
            os._exit(3)
    dist.destroy_process_group()


def _note(at: Rank, check: str, what: str) -> None:
    path = at.folder / f"end of {check} {at.rank}"
    path.with_suffix(".new").write_text(what)
    path.with_suffix(".new").replace(path)


def _ends(folder: Path, world: int, check: str) -> list[str]:
    """What each rank said of a check; "" before it has ended there."""
    paths = [folder / f"end of {check} {rank}" for rank in range(world)]
    return [path.read_text() if path.exists() else "" for path in paths]


# ---- in the process that asks ----------------------------------------------------------------------------------------


def environment(kind: str, rank: int) -> dict[str, str]:
    """What NCCL and gloo find. For two ranks on one device: hosts of their own, which share nothing but sockets."""
    found = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}
    if KINDS[kind].world > KINDS[kind].devices:
        found |= {
            "NCCL_HOSTID": f"fullshard-{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_CUMEM_HOST_ENABLE": "0",
        }
    return found


def supervise(options: argparse.Namespace) -> None:
    """Run all checks, with new ranks after each one that failed."""
    kind = KINDS[options.kind]
    left = list(options.checks or kind.checks)
    while left:
        broken = run_ranks(options, left)
        if broken is None:
            return
        first, left = left[0], left[left.index(broken) + 1 :]
        if broken == first == "message":
            for name in left:
                row(name, could_not="not tried, because ranks cannot send a message")
            return


def run_ranks(options: argparse.Namespace, checks: Sequence[str]) -> str | None:
    """Start ranks for these checks; the check that failed, or None."""
    kind = KINDS[options.kind]
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_ranks", "--device", options.device, "--kind", options.kind]
        command += ["--folder", folder, "--rounds", str(options.rounds), *(["--tiny"] if options.tiny else [])]
        command += ["--checks", *checks]
        if options.kind == "sanitized" and (sanitizer := shutil.which("compute-sanitizer")):
            command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *command]
        # In this session, so that ending the part ends them; rows go straight to where this process prints.
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env={**os.environ, **environment(options.kind, rank)})
            for rank in range(kind.world)
        ]
        try:
            # Machines that try the script may be slow and shared.
            return _watch(ranks, Path(folder), checks, 4.0 if options.device == SIMULATED else 1.0)
        finally:
            for rank in ranks:
                rank.kill()
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(5)


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, checks: Sequence[str], patience: float
) -> str | None:
    """Until all have ended, or one check did not: which. `patience`: a factor of the limits."""
    end = time.monotonic() + (START_SECONDS + CHECK_SECONDS) * patience
    for check in checks:
        while (ends := _ends(folder, len(ranks), check)).count(""):
            ended = [rank.poll() for rank in ranks]
            late = time.monotonic() > end
            died = [(place, code) for place, code in enumerate(ended) if code is not None and not ends[place]]
            if "failed" in ends:
                return check
            if died or late:
                # What was said meanwhile counts: a rank says how a check ended, and then ends.
                if _ends(folder, len(ranks), check) != ends:
                    continue
                codes = "; ".join(f"rank {place} ended with {code}" for place, code in died)
                missing = [place for place, what in enumerate(ends) if not what]
                row(check, could_not=codes or f"no end after its {CHECK_SECONDS * patience:.0f} s on ranks {missing}")
                return check
            time.sleep(0.02)
        if "failed" in ends:
            return check
        end = time.monotonic() + CHECK_SECONDS * patience
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(end - time.monotonic(), 0.1))
    codes = [rank.poll() for rank in ranks]
    if any(codes):
        row("end", could_not=f"ranks ended with {codes}")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--kind", choices=KINDS, default="world 1")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, help="only these; default: all of the kind")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="small blocks, to try the script itself")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shows_stacks()
    if options.rank is None:
        supervise(options)
    else:
        work(options)


if __name__ == "__main__":
    main()
