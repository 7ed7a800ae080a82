"""Starting the processes of a run with torchrun's elastic agent, and reporting how they ended.

The agent starts one process per rank, watches them, and ends all of them when one fails or a signal arrives. Everything
stays on this machine: the processes meet through a file, and gloo and NCCL are bound to the loopback interface.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.config import Config, ConfigError
from fullshard.train.folder import close_manifest, discard_run_dir, read_manifest, remove_parts
from fullshard.train.metrics import read_metrics
from fullshard.train.process import (
    LAUNCHER_PID,
    RUN_DIR,
    STOP_SIGNALS,
    STOPPED,
    STORE_PATH,
    device_kind,
    threads_per_process,
)

EXIT_FAILED = 1
EXIT_USAGE = 2  # and 128 + number of the signal for an interrupted run: 130 for Ctrl-C, 143 for SIGTERM
EXIT_STOPPED = 75  # SIGTERM: stopped after a step, with a checkpoint (EX_TEMPFAIL of sysexits.h: try again)

# The program of each process. SIGINT gets its default handler first, so that Ctrl-C during the import of torch ends the
# process without a traceback; `process.stop_on_signals` replaces it later. The filter silences torch's warning, once
# per process, about a missing numpy, which is not needed here.
_PROGRAM = """
import signal, warnings
signal.signal(signal.SIGINT, signal.SIG_DFL)
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
from fullshard.cli import main
raise SystemExit(main())
"""


def num_processes(config: Config, asked: int | None) -> int:
    """`--nproc`, else the product of the degrees, else one per CUDA device, else 2 shards per replica. Raises
    `ConfigError` for impossible numbers."""
    kind = device_kind(config)
    keys = config.sharding.sharding
    degree, copies = keys.data_parallel_shard_degree, keys.data_parallel_replicate_degree
    devices = torch.cuda.device_count() if kind == "cuda" else 0
    layers = config.sharding.parallelism.tensor_parallel_degree
    known = min(degree, copies) > 0
    count = asked or (degree * copies * layers if known else devices or 2 * max(degree, copies) * layers)
    if asked is not None and asked < 1:
        raise ConfigError(f"--nproc {asked}: expected at least 1; nearest valid: 1")
    if devices and count > devices:
        raise ConfigError(
            f"--nproc {count}: there are {devices} CUDA device(s), and each process needs one; nearest valid: {devices}"
        )
    return count


def launch(config: Config, run_dir: Path, world: int) -> int:
    """Run `world` processes to their end and return the exit code of the command. Prints one line when it is not 0."""
    # Silence the agent's log of the failure; it is reported below, once.
    agent_log = logging.getLogger("torch.distributed.elastic")
    agent_log.addHandler(logging.NullHandler())
    agent_log.propagate = False
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        _prepare_environment(config, run_dir, world, Path(folder) / "store")
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            with waking_stopped():
                elastic_launch(agent, sys.executable)("-c", _PROGRAM, "train", str(run_dir / "config.toml"))
            return 0
        except SignalException as stop:
            return _say_stopped(run_dir) or _interrupted(run_dir, int(stop.sigval))
        except ChildFailedError as error:
            return ended_badly(run_dir, [Failure.of(rank, f) for rank, f in error.failures.items()])


def _prepare_environment(config: Config, run_dir: Path, world: int, store: Path) -> None:
    os.environ[STORE_PATH] = str(store)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ[RUN_DIR] = str(run_dir)
    # Thread pools are sized when torch is loaded, so this must be in the environment of the new process.
    os.environ["OMP_NUM_THREADS"] = str(threads_per_process(config, world))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    # The agent kills a process that does not end by itself (stopped, or stuck in the kernel) after this time.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(config.checkpoint.grace_seconds) + 10))


_LOOK_SECONDS = 0.5


@contextmanager
def waking_stopped() -> Iterator[None]:
    """Wakes stopped children (SIGSTOP, a debugger that left) with a pending SIGTERM, inside.

    A stopped process receives only SIGKILL, which the agent sends half a minute after a process failed. Woken, it ends
    like the others. Linux only; elsewhere it takes the agent's half minute.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            for children in Path("/proc/self/task").glob("*/children"):
                with suppress(OSError):  # a thread or process that ended meanwhile
                    for pid in map(int, children.read_text().split()):
                        if _is_stopped_and_asked_to_end(pid):
                            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=look, name="fullshard: wakes stopped processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_stopped_and_asked_to_end(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    # One bit per pending signal. A process stopped by a debugger that is still attached has state "t".
    waiting = re.search(r"^ShdPnd:\s*(\w+)$", status, flags=re.M)
    stopped = re.search(r"^State:\s*T", status, flags=re.M)
    return bool(stopped and waiting and int(waiting[1], 16) >> (signal.SIGTERM - 1) & 1)


# ---- how they ended --------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """How one process ended badly."""

    rank: int
    exit_code: int  # negative: killed by that signal
    message: str  # "ValueError: ..." or ""
    traceback: str
    seconds: float  # the time of the failure

    @staticmethod
    def of(rank: int, failure: ProcessFailure) -> Failure:
        said = failure.error_file_data.get("message", "")
        text, extra = (said["message"], said["extraInfo"]) if isinstance(said, dict) else ("", {})
        return Failure(rank, failure.exitcode, text, extra.get("py_callstack", ""), failure.timestamp)

    @property
    def stopped_by(self) -> int | None:
        """The stop signal that ended this process, if one did."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        return number if number in STOP_SIGNALS else None

    @property
    def order(self) -> tuple[int, float]:
        """The cause comes first: an exception of its own, a kill, a stop; then processes that only lost their peer.

        A peer that is silent (stopped, or stuck in the kernel) is a cause like a kill, and the earlier of the two
        counts: the launcher itself kills such a process half a minute after another one reported it.
        """
        signs = ("onnection closed", "onnection reset", "onnection refused")
        lost_peer = self.message.startswith("PeerFailed") or any(sign in self.message for sign in signs)
        if self.message and not lost_peer:
            return (0, self.seconds)
        if (self.exit_code < 0 and self.stopped_by is None) or "gave no sign of life" in self.message:
            return (1, self.seconds)
        return (2 if self.stopped_by else 3, self.seconds)


def ended_badly(run_dir: Path, failures: list[Failure]) -> int:
    """Find the cause among all failures, print it in one line, and return the exit code of the command."""
    if any(f.exit_code == EXIT_STOPPED for f in failures) and (code := _say_stopped(run_dir)):
        return code
    cause = min(failures, key=lambda f: f.order)
    if cause.exit_code == EXIT_USAGE:
        discard_run_dir(run_dir)
        print(f"fullshard: {cause.message.partition(': ')[2]}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    if cause.stopped_by is not None and not any(f.message for f in failures if f.order[0] == 0):
        return _interrupted(run_dir, cause.stopped_by)
    if cause.traceback and not cause.message.startswith(FloatingPointError.__name__):  # its message is enough
        print(cause.traceback.rstrip(), file=sys.stderr)
    if cause.exit_code < 0:
        what = f"was killed by {signal.Signals(-cause.exit_code).name}"
        what += " (out of memory?)" if cause.exit_code == -signal.SIGKILL else ""
    else:
        what = f"failed: {cause.message}" if cause.message else f"ended with code {cause.exit_code}"
    say_end(run_dir, "failed", f"rank {cause.rank} {what}")
    return EXIT_FAILED


def _say_stopped(run_dir: Path) -> int:
    """The exit code of a run that stopped with a checkpoint, after reporting it in a line; 0 for any other run."""
    manifest = read_manifest(run_dir)
    if manifest.get("status") != STOPPED:
        return 0
    remove_parts(run_dir)
    what = f"{manifest['reason']}; to continue: fullshard train --resume {run_dir}"
    print(f"fullshard: {what}", file=sys.stderr, flush=True)
    return EXIT_STOPPED


def _interrupted(run_dir: Path, signum: int) -> int:
    say_end(run_dir, "interrupted", f"interrupted by {signal.Signals(signum).name}")
    return 128 + signum


def say_end(run_dir: Path, status: str, what: str) -> None:
    """Close the folder of a run that did not complete, and report it in one line."""
    remove_parts(run_dir)
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    step = records[-1]["step"] if records else 0
    close_manifest(run_dir, status, reason=what, last_step=step)
    where = f"after step {step}; all files are complete: {run_dir}"
    print(f"fullshard: {what} ({where})", file=sys.stderr, flush=True)
