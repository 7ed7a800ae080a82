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
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import __version__
from fullshard.checkpoint.foreign.safetensors_file import Entry, SafetensorsWriter
from fullshard.train.config import Config, invalid
from fullshard.train.config_load import to_toml


def make_run_dir(config: Config) -> Path:
    """Make the folder of a run and put the configuration in it, or take that of a run that this one goes on with.

    Raises `ConfigError` where the folder is of something else.
    """
    from fullshard.train.resume import check_resumable, is_run, sole_user

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


def save_model(run_dir: Path, model: nn.Module, *, rank: int) -> None:
    """Write `model.safetensors`, a full state dict. Collective: every rank calls it.

    Tensors are gathered one by one, and the full one is let go before the next is gathered: no rank ever holds more
    than one full tensor for this.
    """
    state = {name: value.detach() for name, value in model.state_dict().items()}
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in state.items()]
    if rank != 0:
        for value in state.values():
            _full(value)
        return
    with SafetensorsWriter(run_dir / "model.safetensors", entries, {"made_by": f"fullshard {__version__}"}) as file:
        for name, value in state.items():
            file.write(name, _full(value))


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
