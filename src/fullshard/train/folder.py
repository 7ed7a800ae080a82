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

A checkpoint holds model, AdamW and step. The order of samples is a function of (seed, step), random numbers of (seed,
step, rank), the learning rate of the step: so a run that continues from step 50 does what the undisturbed one did, bit
for bit on as many processes, and on any other number with the same samples.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import MicroBatches, __version__, checkpoint
from fullshard.checkpoint.formats.hf import Entry, SafetensorsWriter
from fullshard.train.config import CheckpointKeys, Config, ConfigError, invalid, key_names, load_config, show, to_toml
from fullshard.train.metrics import StepRecord, read_metrics
from fullshard.train.process import World

CHECKPOINTS = "checkpoints"

# What decides which numbers a run computes. Everything else may differ when it goes on.
_FIXED_SECTIONS = ("model", "data", "precision", "optimizer")
_FIXED_KEYS = ("training.global_batch", "training.sequence_length", "training.seed", "training.clip_norm")


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
        raise invalid("run.dir", str(path), "the folder exists and is not empty", show(str(nearest)))
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
    earlier = read_manifest(run_dir)
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
    _write_manifest(run_dir, manifest)


def close_manifest(run_dir: Path, status: str, **facts: Any) -> None:
    """Give a manifest that says "running" its final status and further facts; one that is closed stays as it is."""
    manifest = read_manifest(run_dir)
    if manifest.get("status") == "running":
        _write_manifest(run_dir, manifest | {"status": status, "ended": _now(), **facts})


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """`manifest.json`; empty before there is one."""
    path = run_dir / "manifest.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write_manifest(run_dir: Path, manifest: dict[str, Any]) -> None:
    write_text(run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def discard_run_dir(run_dir: Path) -> None:
    """Undo `make_run_dir` for a run that could not begin, so that its name is free again. A run that went on stays."""
    if read_manifest(run_dir):
        return
    for name in ("config.toml", "tokenizer.json"):
        (run_dir / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it: then it stays
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
    for key in key_names():
        before, now = attrgetter(key)(old), attrgetter(key)(config)
        if before != now and (key in _FIXED_KEYS or key.partition(".")[0] in _FIXED_SECTIONS):
            problem = f"the run in {path} has {show(before)}, and going on must not change it"
            raise invalid(key, now, problem, show(before))
    manifest = read_manifest(path)
    done = manifest.get("last_step", 0)
    if manifest.get("status") == "completed" and done >= config.training.steps:
        problem = f"the run in it ended well after {done} steps, and training.steps asks for no more"
        raise invalid("run.dir", str(path), problem, show(f"{path}-2"))


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run of ours."""
    return (path / "config.toml").is_file()


def newest_unfinished(folder: Path = Path("runs")) -> Path:
    """The newest run in `folder` that did not end well. Raises `ConfigError` where there is none."""
    runs = filter(is_run, folder.glob("*"))
    open_runs = [path for path in runs if read_manifest(path).get("status") != "completed"]
    if not open_runs:
        raise ConfigError(f"--resume: there is no unfinished run in {folder}/; name the folder of one, --resume FOLDER")
    return max(open_runs, key=lambda path: (path / "config.toml").stat().st_mtime_ns)


def forget_steps_after(run_dir: Path, step: int) -> None:
    """Drop the lines of `metrics.jsonl` after `step`: those steps are made again."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_text(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def last_record(run_dir: Path) -> StepRecord:
    """The last line of `metrics.jsonl`, for a run that continues after its last step."""
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
            raise invalid("run.dir", str(run_dir), problem, show(f"{run_dir}-2")) from None
        yield
    finally:
        os.close(descriptor)


# ---- what a run leaves in it: checkpoints and the model --------------------------------------------------------


class Checkpoints:
    """Those of one run, as each rank has them."""

    def __init__(
        self,
        run_dir: Path,
        keys: CheckpointKeys,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
        micro: MicroBatches | None = None,
    ) -> None:
        self.folder, self.keys, self.world = run_dir / CHECKPOINTS, keys, world
        self.model, self.optimizer = model, optimizer
        self.facts = facts  # what must be the same when the run continues: the corpus, the seed
        self.micro = micro if micro is not None and micro.search != "fixed" else None
        self._under_way: Future[str] | None = None

    def newest(self) -> Path | None:
        """The newest whole checkpoint, by its step; what an interrupted save left is passed over. Rank 0 looks."""
        found = checkpoint.latest(self.folder) if self.world.rank == 0 else None
        (step,) = self.world.largest([-1.0 if found is None else float(found.name.removeprefix("step-"))])
        return self.folder / f"step-{step:.0f}" if step >= 0 else None

    def load(self, path: Path) -> int:
        """Bring model and optimizer to where they were, and return the step. Collective.

        Raises `CheckpointError`, and `RuntimeError` where the run was another one; then nothing has changed.
        """
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        found = checkpoint.inspect(path)
        held: dict[str, Any] = {
            key.removeprefix("run."): entry.value for key, entry in found.values.items() if key.startswith("run.")
        }
        differ = [(key, held.get(key), value) for key, value in self.facts.items() if held.get(key) != value]
        if differ:
            wrong = [f"{key}: {there!r} there, {here!r} here" for key, there, here in differ]
            raise RuntimeError(f"{path} is of another run: {'; '.join(wrong)}. Use the same data, or another run.dir")
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=path, allow_unexpected=("run.*",))
        both = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
        checkpoint.set_state_dict(self.model, self.optimizer, **both)
        if self.micro is not None and held.get("micro_batch"):  # older runs have none
            self.micro.load_state_dict({"size": held["micro_batch"], "fits": 0, "fails": 0})
        return int(held["step"])

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is made after `step` of `last`."""
        return step == last or bool(self.keys.every and step % self.keys.every == 0)

    def save(self, step: int, *, wait: bool) -> None:
        """Make the checkpoint of `step`, and remove old ones. Collective. With `wait` it is whole when this returns;
        without it may be written beside the next steps, and the save after it raises what failed."""
        self._settle()
        path = self.folder / f"step-{step}"
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        # What was found by failing, so that nobody has to fail again; 0: it was given.
        found = 0 if self.micro is None else self.micro.size or 0
        run = {**self.facts, "step": step, "world": self.world.size, "micro_batch": found}
        state = {"model": model_state, "optimizer": optimizer_state, "run": run}
        if self.keys.asynchronous and not wait:
            self._under_way = checkpoint.async_save(state, checkpoint_id=path)
            return
        checkpoint.save(state, checkpoint_id=path)
        self._retain()

    def _settle(self) -> None:
        """Wait for the save that is under way."""
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            pending.result()
            self._retain()

    def _retain(self) -> None:
        if self.world.rank == 0:
            checkpoint.retain(self.folder, keep_last=self.keys.keep_last, keep_every=self.keys.keep_every or None)


def save_model(run_dir: Path, model: nn.Module, *, rank: int) -> None:
    """Write `model.safetensors`, a full state dict. Collective: every rank calls it.

    Tensors are gathered one by one, and the full one is freed before the next is gathered: no rank ever holds more
    than one full tensor for this.
    """
    state = {name: value.detach() for name, value in model.state_dict().items()}
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in state.items()]
    made_by = {"made_by": f"fullshard {__version__}"}
    with SafetensorsWriter(run_dir / "model.safetensors", entries, made_by) if rank == 0 else nullcontext() as file:
        for name, value in state.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if file is not None:
                file.write(name, full)
            del full
