"""A training job whose processes are killed, stopped and told to stop at random moments, until it has come to its end.

    python -m tests.harness.chaos --kills 10 --seed 1

One run of `fullshard train` nobody disturbs. Another one is disturbed, again and again, and started with the same
command whenever it has ended. At the end of both: parameters, AdamW's state and the figures of all steps must be equal
bit by bit. And whenever a process is killed or told to stop, all processes of the run have to end within a bound; one
that is only held up for a moment (SIGSTOP, SIGCONT) must not end.

Processes are known by a word in their environment, so those that a killed launcher leaves behind are seen, too. What is
random depends on `--seed`; how far the processes have come at that moment does not, and is shown. Linux only.

Exit code: 0 the end is that of the undisturbed run; 1 it is not, or something did not end in time or as it should
have. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fullshard import checkpoint

RANKS = 2
# Of the run, for each blow: those in front of it, and those that are made while only the launcher is held up.
STEPS_FOR_A_BLOW, MOST_BEFORE = 28, 24
SETTINGS = (
    "model.layers=2",
    "model.dim=32",
    "training.global_batch=8",
    "training.micro_batch=2",
    "training.sequence_length=32",
    "training.device=cpu",
    "training.threads=1",
    "metrics.eval_every=7",
    "metrics.eval_windows=9",
    "metrics.plot=false",
    "metrics.tensorboard=false",
    "checkpoint.every=4",
    "checkpoint.grace_seconds=30",
    "sample.tokens=0",
)
FIGURES = ("step", "loss", "samples", "grad_norm", "lr", "tokens", "val_loss")
# Until all processes have ended: what the trainer promises, and what starting, the step under way and a checkpoint may
# take on a machine that does other things, too.
END_SECONDS = 30.0
START_SECONDS = 120.0
_WORD = "TESTS_CHAOS"


@dataclass(frozen=True)
class Blow:
    """What is done to one process. `target`: "launcher" or a rank. `steps`: how many steps of this sitting come before
    it; -1: none has to, it comes `delay` seconds behind the process. `held`: seconds between SIGSTOP and SIGCONT."""

    signum: signal.Signals
    target: str
    steps: int
    delay: float
    held: float = 0.0

    @property
    def codes(self) -> tuple[int, ...]:
        """Exit codes of the command that are right. 0: the blow came when the run was over."""
        if self.signum == signal.SIGKILL:
            return (-signal.SIGKILL,) if self.target == "launcher" else (1, 0)
        if self.signum == signal.SIGTERM:
            return (75, 143, 0)
        return (130, 0) if self.signum == signal.SIGINT else ()

    def __str__(self) -> str:
        held = f", {self.held:.1f} s" if self.held else ""
        return f"{self.signum.name} {self.target}{held}"


@dataclass
class Told:
    """A blow, and what came of it."""

    what: str
    sitting: int
    after_step: int  # lines in metrics.jsonl at that moment
    code: int | None  # of the command; None: the run went on
    seconds: float  # until all processes had ended
    wrong: str = ""


def blows(seed: int, kills: int) -> list[Blow]:
    """`kills` blows that end a sitting, and about half as many that hold a process up for a moment."""
    draw = random.Random(seed)
    chosen: list[Blow] = []
    while sum(bool(blow.codes) for blow in chosen) < kills:
        target = draw.choice(["launcher", *(f"rank {rank}" for rank in range(RANKS))])
        signum = draw.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP], [5, 2, 1, 4])[0]
        if signum == signal.SIGINT:
            target = "launcher"  # what Ctrl-C reaches; a rank alone that gets it is a failure like others
        early = draw.random() < 0.2
        steps = -1 if early else draw.randrange(1, MOST_BEFORE)
        delay = draw.uniform(0, 4.0) if early else draw.uniform(0, 0.08)
        held = draw.uniform(0.3, 0.5 if target == "launcher" else 2.0) if signum == signal.SIGSTOP else 0.0
        chosen.append(Blow(signum, target, steps, delay, held))
    return chosen


class Job:
    """The run in one folder, sitting after sitting."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.word = folder, steps, uuid.uuid4().hex
        self.sittings = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._earlier = -1  # sittings that the run folder knew when this one began

    def start(self) -> None:
        settings = [
            part
            for one in (*SETTINGS, f"run.dir={self.folder}", f"training.steps={self.steps}")
            for part in ("--set", one)
        ]
        outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        environment = {key: value for key, value in os.environ.items() if key not in outer}
        self._earlier = manifest(self.folder)[0]
        self.sittings += 1
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fullshard", "train", *settings],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**environment, _WORD: self.word, "OMP_NUM_THREADS": "1"},
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def new_steps(self) -> int:
        """Steps that this sitting has made."""
        sittings, after = manifest(self.folder)
        return len(figures(self.folder)) - after if sittings > self._earlier else 0

    def pids(self) -> list[int]:
        """Its processes that live, ranks and all."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            if f"{_WORD}={self.word}".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                return False
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def pid_of(self, target: str) -> int | None:
        """The process of that name; None where it is not there (yet)."""
        if target == "launcher":
            return self.process.pid if self.process.poll() is None else None
        for pid in self.pids():
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={target.removeprefix('rank ')}".encode() in words:
                return pid
        return None

    def wait(self, limit: float) -> float:
        """Seconds until all of its processes have ended; those that are left after `limit` are killed."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit:
            if self.process.poll() is not None and not self.pids():
                return time.monotonic() - begun
            time.sleep(0.05)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return limit

    def strike(self, blow: Blow) -> Told | None:
        """Wait for the moment, strike, and see what comes of it. None: the run had come to its end before."""
        if wrong := self._wait_for(blow):
            return Told(
                str(blow), self.sittings, len(figures(self.folder)), self.process.returncode, self.wait(0), wrong
            )
        pid = self.pid_of(blow.target)
        if pid is None:
            return None
        told = Told(str(blow), self.sittings, len(figures(self.folder)), None, 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, blow.signum)
            if blow.held:
                time.sleep(blow.held)
                os.kill(pid, signal.SIGCONT)
        if blow.codes:
            told.seconds = self.wait(END_SECONDS)
            told.code = self.process.returncode
            if told.seconds >= END_SECONDS:
                told.wrong = f"not ended within {END_SECONDS:.0f} s"
            elif told.code not in blow.codes:
                told.wrong = f"expected an exit code among {', '.join(map(str, blow.codes))}"
        return told

    def _wait_for(self, blow: Blow) -> str:
        """Until the process is there and so many steps were made. What went wrong meanwhile, "" for nothing."""
        begun = time.monotonic()
        while self.pid_of(blow.target) is None or self.new_steps() < blow.steps:
            if self.process.poll() is not None:
                return "" if self.process.returncode in (0, 2) else "it ended by itself"
            if time.monotonic() - begun > START_SECONDS:
                return f"not so far after {START_SECONDS:.0f} s"
            time.sleep(0.02)
        time.sleep(blow.delay)
        return ""


def manifest(folder: Path) -> tuple[int, int]:
    """How many sittings were before the one that took over the folder last, and the step behind which that one began;
    (-1, 0) before the first."""
    try:
        found = json.loads((folder / "manifest.json").read_text())
    except OSError:
        return -1, 0
    return len(found["sittings"]), int(found["resumed_after_step"])


def figures(folder: Path) -> list[tuple[object, ...]]:
    """What the run tells of its steps, but for times and memory. A line that is being written does not count."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [tuple(record.get(key) for key in FIGURES) for record in records]


def differences(found: Path, expected: Path) -> list[str]:
    """What is not equal bit by bit: the figures of each step, and all tensors of the last checkpoint."""
    wrong = []
    ours, theirs = figures(found), figures(expected)
    if ours != theirs:
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        wrong.append(
            f"{len(ours)} steps, expected {len(theirs)}"
            if first is None
            else f"line {first + 1} of metrics.jsonl: {ours[first]}, expected {theirs[first]}"
        )
    paths = [checkpoint.latest(folder / "checkpoints") for folder in (found, expected)]
    if None in paths or paths[0].name != paths[1].name:  # type: ignore[union-attr]
        return [*wrong, f"last checkpoints: {paths[0]}, expected {paths[1]}"]
    with checkpoint.open_checkpoint(paths[0]) as a, checkpoint.open_checkpoint(paths[1]) as b:  # type: ignore[arg-type]
        if a.manifest.tensors.keys() != b.manifest.tensors.keys():
            return [*wrong, "the checkpoints have other tensors"]
        wrong += [f"{key} differs" for key in a.manifest.tensors if not torch.equal(a.tensor(key), b.tensor(key))]
        if not a.manifest.tensors:
            wrong.append("the checkpoints have no tensors")
    return wrong


def steps_for(chosen: Sequence[Blow]) -> int:
    """Of the run: so many that it is not over before all of `chosen` have come."""
    return STEPS_FOR_A_BLOW * (len(chosen) + 1)


def disturbed(folder: Path, chosen: Sequence[Blow]) -> list[Told]:
    """Strike in turn, starting the run again whenever it has ended; then let it come to its end."""
    job, told = Job(folder, steps_for(chosen)), []
    job.start()
    for blow in chosen:
        if job.process.poll() is not None:
            if job.process.returncode == 0:
                break  # it is over
            job.start()
        what = job.strike(blow)
        if what is not None:
            told.append(what)
            print_row(what)
    for _ in range(3):
        if job.process.poll() is not None:
            job.start()
        seconds = job.wait(START_SECONDS + END_SECONDS)
        code = job.process.returncode
        # 2: there was nothing left to do.
        wrong = "" if code in (0, 2) else "expected the run to come to its end"
        told.append(Told("nothing", job.sittings, len(figures(folder)), code, seconds, wrong))
        print_row(told[-1])
        if not wrong:
            break
    return told


def print_row(told: Told) -> None:
    code = "goes on" if told.code is None else f"code {told.code}"
    row = (
        f"{told.sitting:>3}  {told.what:<24}  step {told.after_step:>3}  {code:<9}  {told.seconds:5.1f} s  {told.wrong}"
    )
    print(row.rstrip(), flush=True)


def run(folder: Path, chosen: Sequence[Blow]) -> tuple[list[Told], list[str]]:
    """Both runs in `folder`: what was done, and what is wrong at the end (nothing, if all is well)."""
    straight = Job(folder / "straight", steps_for(chosen))
    straight.start()
    straight.wait(START_SECONDS + END_SECONDS)
    if straight.process.returncode != 0:
        return [], [
            f"the undisturbed run ended with code {straight.process.returncode}: {tail(folder / 'straight.log')}"
        ]
    told = disturbed(folder / "disturbed", chosen)
    wrong = [f"sitting {one.sitting}, {one.what}: {one.wrong} (code {one.code})" for one in told if one.wrong]
    if len(told) <= len(chosen):  # the last one is the end
        wrong.append(f"expected {len(chosen)} blows, found {len(told) - 1}: the run was over before the others")
    return told, wrong + differences(folder / "disturbed", straight.folder)


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1000:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how often the run is made to end (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="chooses processes, signals and moments (default: 1)")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parsed = parser.parse_args(arguments)
    begun = time.monotonic()
    folder = parsed.keep or Path(tempfile.mkdtemp(prefix="fullshard-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("sitting, what, steps made, how the command ended, until all processes had ended", flush=True)
    told, wrong = run(folder, blows(parsed.seed, parsed.kills))
    for line in wrong:
        print(f"WRONG: {line}")
    if wrong:
        print(tail(folder / "disturbed.log") if (folder / "disturbed.log").exists() else "")
    if not parsed.keep:
        shutil.rmtree(folder, ignore_errors=True)
    summary = {
        "seed": parsed.seed,
        "ended": sum(one.code is not None for one in told if one.what != "nothing"),
        "held_up": sum(one.code is None for one in told),
        "longest_end_seconds": round(max((t.seconds for t in told if t.what != "nothing"), default=0.0), 1),
        "seconds": round(time.monotonic() - begun, 1),
        "wrong": wrong,
        "told": [asdict(one) for one in told],
    }
    print(json.dumps(summary))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
