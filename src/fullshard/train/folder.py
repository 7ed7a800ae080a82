"""The run folder: filled while the run goes, closed with a status; a run that was stopped goes on in it.

| file | written | by |
|---|---|---|
| `config.toml` | at the start | who makes the folder |
| `manifest.json` | at the start, again at the end | rank 0 |
| `metrics.jsonl` | one line per step | rank 0 |
| `tensorboard/` | while running, where installed | rank 0 |
| `tokenizer.json` | at the start, for BPE | rank 0 |
| `checkpoints/step-N/` | every `checkpoint.every` steps, at the end, and when stopped | all ranks |
| `model.safetensors`, `loss.png`, `sample.txt` | at the end | rank 0 |

A file is written under another name and renamed when it is whole, so a reader never sees half of one; metrics
lines are each one append.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .config import Config, ConfigError, invalid, show
from .config_load import load_config, to_toml
from .metrics import StepRecord, read_metrics

# What decides which numbers a run computes. Everything else may differ when it goes on.
_FIXED_SECTIONS = ("model", "data", "precision", "optimizer")
_FIXED_KEYS = ("global_batch", "sequence_length", "seed", "clip_norm")


def make_run_dir(config: Config) -> Path:
    """Make the folder of a run and put the configuration in it, or take that of a run that this one goes on with.

    Raises `ConfigError` where the folder is of something else.
    """
    path = Path(config.run.dir).expanduser() if config.run.dir else _dated_dir()
    try:
        path.mkdir(parents=True, exist_ok=bool(config.run.dir))
        taken = any(path.iterdir())
    except OSError as error:
        raise invalid("run.dir", str(path), f"cannot be made: {error.strerror or error}") from None
    if taken and is_run(path):
        check_resumable(path, config)
    elif taken:
        nearest = next(p for n in range(2, 10_000) if not (p := path.with_name(f"{path.name}-{n}")).exists())
        raise invalid("run.dir", str(path), "the folder exists and is not empty", json.dumps(str(nearest)))
    try:
        with sole_user(path):
            write_text(path / "config.toml", to_toml(config))
    except OSError as error:
        raise invalid("run.dir", str(path), f"cannot be written to: {error.strerror or error}") from None
    return path


def _dated_dir() -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (stamp, *(f"{stamp}-{n}" for n in range(2, 10_000)))
    return next(p for name in names if not (p := Path("runs") / name).exists())


def write_text(path: Path, text: str) -> None:
    """Write the whole file or leave it as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def open_manifest(run_dir: Path, facts: dict[str, Any]) -> None:
    """Begin `manifest.json`: versions, time, and what the caller knows of corpus, processes and units. Of a run that
    goes on `sittings` keeps how the ones before it went."""
    path = run_dir / "manifest.json"
    earlier = json.loads(path.read_text()) if path.exists() else None
    kept = ("status", "started", "ended", "last_step", "reason", "world")
    sittings = [*earlier.get("sittings", []), {k: earlier[k] for k in kept if k in earlier}] if earlier else []
    manifest = {
        "status": "running",
        "started": _now(),
        "versions": {
            "fullshard": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "sittings": sittings,
        **facts,
    }
    write_text(path, json.dumps(manifest, indent=2) + "\n")


def close_manifest(run_dir: Path, status: str, **facts: Any) -> None:
    """Give a manifest that says "running" its final status and further facts; one that is closed stays as it is."""
    path = run_dir / "manifest.json"
    if not path.exists():
        return
    manifest = json.loads(path.read_text())
    if manifest["status"] == "running":
        manifest |= {"status": status, "ended": _now(), **facts}
        write_text(path, json.dumps(manifest, indent=2) + "\n")


def discard_run_dir(run_dir: Path) -> None:
    """Undo `make_run_dir` for a run that could not begin, so that its name is free again. A run that went on stays."""
    if (run_dir / "manifest.json").exists():
        return
    for name in ("config.toml", "tokenizer.json"):
        (run_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it: then it stays
        run_dir.rmdir()


def remove_parts(run_dir: Path) -> None:
    """Remove what an interrupted writer left behind; whole files are never touched."""
    for part in run_dir.glob("*.part"):
        part.unlink(missing_ok=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# ---- the folder of a run that goes on --------------------------------------------------------------------------


def check_resumable(path: Path, config: Config) -> None:
    """Raise `ConfigError` unless `path` is the folder of a run that `config` may go on with."""
    try:
        old = load_config(path / "config.toml")
    except ConfigError as error:
        raise ConfigError(f"run.dir = {show(str(path))}: its config.toml cannot be read: {error}") from None
    for section in _FIXED_SECTIONS:
        _check_equal(path, section, asdict(getattr(old, section)), asdict(getattr(config, section)))
    before, now = asdict(old.training), asdict(config.training)
    _check_equal(path, "training", {k: before[k] for k in _FIXED_KEYS}, {k: now[k] for k in _FIXED_KEYS})
    manifest = path / "manifest.json"
    if manifest.exists():
        found = json.loads(manifest.read_text())
        done = found.get("last_step", 0)
        if found.get("status") == "completed" and done >= config.training.steps:
            problem = f"the run in it ended well after {done} steps, and training.steps asks for no more"
            raise invalid("run.dir", str(path), problem, json.dumps(str(path) + "-2"))


def _check_equal(path: Path, section: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if value != old[key]:
            problem = f"the run in {path} has {show(old[key])}, and going on must not change it"
            raise invalid(f"{section}.{key}", value, problem, show(old[key]))


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run of ours."""
    return (path / "config.toml").is_file()


def newest_unfinished(folder: Path = Path("runs")) -> Path:
    """The newest run in `folder` that did not end well. Raises `ConfigError` where there is none."""
    runs = [path for path in folder.glob("*") if is_run(path)] if folder.is_dir() else []
    open_runs = []
    for path in runs:
        manifest = path / "manifest.json"
        if not manifest.exists() or json.loads(manifest.read_text()).get("status") != "completed":
            open_runs.append(path)
    if not open_runs:
        raise ConfigError(f"--resume: there is no unfinished run in {folder}/; name the folder of one, --resume FOLDER")
    return max(open_runs, key=lambda path: (path / "config.toml").stat().st_mtime_ns)


def forget_steps_after(run_dir: Path, step: int) -> None:
    """Drop the lines of `metrics.jsonl` behind `step`: those steps are made again."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_text(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def last_record(run_dir: Path) -> StepRecord:
    """The last line of `metrics.jsonl`, for a run that goes on behind its last step."""
    return StepRecord(**read_metrics(run_dir / "metrics.jsonl")[-1])


@contextmanager
def sole_user(run_dir: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises `ConfigError` where another one trains in it."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another process is training in this folder"
            raise invalid("run.dir", str(run_dir), problem, json.dumps(str(run_dir) + "-2")) from None
        yield
    finally:
        os.close(descriptor)
