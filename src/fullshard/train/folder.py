"""The run folder: filled during the run and closed with a status; a stopped run continues in it.

| file | written | by |
|---|---|---|
| `config.toml` | at the start | the process that creates the folder |
| `manifest.json` | at the start, again at the end | rank 0 |
| `metrics.jsonl` | one line per step | rank 0 |
| `tensorboard/` | while running, where installed | rank 0 |
| `tokenizer.json` | at the start, for BPE | rank 0 |
| `checkpoints/step-N/` | every `checkpoint.every` steps, at the end, and when stopped | all ranks |
| `model.safetensors`, or `model/` and `adapters/`; `loss.png`, `sample.txt` | at the end | rank 0 |

A file is written under another name and renamed when it is complete, so a reader never sees a partial one; each metrics
line is one append.

With `checkpoint.folder` they are there instead; a run that begins in another run folder continues from them too. A
checkpoint holds model, optimizer and step; of a frozen base nothing, which the folder of the model has. The order of
samples is a function of (seed, step), random numbers of (seed, step, rank), the learning rate of the step. So a run
that continues from step 50 equals the uninterrupted one: bit for bit on the same number of processes, and with the same
samples on any other.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import MicroBatches, __version__, checkpoint
from fullshard.checkpoint.bucket import prove
from fullshard.checkpoint.formats.hf import Entry, SafetensorsWriter
from fullshard.checkpoint.retention import numbered
from fullshard.checkpoint.state import plain_name
from fullshard.checkpoint.store import is_url, location
from fullshard.train.config import (
    CheckpointKeys,
    Config,
    ConfigError,
    invalid,
    key_names,
    load_config,
    show,
    to_toml,
    value_of,
)
from fullshard.train.metrics import StepRecord, read_metrics
from fullshard.train.model import Llama, LlamaShape
from fullshard.train.optimizers import parts_of
from fullshard.train.process import World

CHECKPOINTS = "checkpoints"
# A directory, or a URL.
Place = Path | str
# Between two lines on a save.
PAUSE_SECONDS = 10.0

# Keys that decide which numbers a run computes. Everything else may change when it continues.
_FIXED_SECTIONS = ("model", "adapters", "data", "sharding.precision", "optimizer")
_FIXED_KEYS = ("training.global_batch", "training.sequence_length", "training.seed", "training.clip_norm")


def make_run_dir(config: Config) -> Path:
    """Make the folder of a run and write the configuration into it, or reuse the folder of a run to continue.

    Raises `ConfigError` if the folder contains something else.
    """
    path = Path(config.run.dir).expanduser() if config.run.dir else _dated_dir()
    _check_folder(config.checkpoint.folder)
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


def _check_folder(folder: str) -> None:
    """Raise `ConfigError` unless checkpoints can be saved in `folder`, which may be a URL."""
    try:
        if is_url(location(folder)):
            prove(location(folder))
    except (ValueError, checkpoint.CheckpointError) as error:
        raise invalid("checkpoint.folder", folder, str(error)) from None


def _dated_dir() -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (stamp, *(f"{stamp}-{n}" for n in range(2, 10_000)))
    return next(p for name in names if not (p := Path("runs") / name).exists())


def write_text(path: Path, text: str) -> None:
    """Write the whole file, or leave it unchanged."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def open_manifest(run_dir: Path, facts: dict[str, Any]) -> None:
    """Begin `manifest.json`: versions, time, and the caller's facts about corpus, processes and units. For a continued
    run, `sittings` lists how the earlier ones ended."""
    earlier = read_manifest(run_dir)
    kept = ("status", "started", "ended", "last_step", "reason", "world", "set_aside")
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
    """Give a manifest with status "running" its final status and further facts; a closed one stays unchanged."""
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
    """Undo `make_run_dir` for a run that could not begin, so that its name is free again. A continued run stays."""
    if read_manifest(run_dir):
        return
    for name in ("config.toml", "tokenizer.json"):
        (run_dir / name).unlink(missing_ok=True)
    with suppress(OSError):  # it stays if it contains anything else
        run_dir.rmdir()


def remove_parts(run_dir: Path) -> None:
    """Remove the remains of an interrupted writer; complete files are never touched."""
    for part in run_dir.glob("*.part"):
        part.unlink(missing_ok=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# ---- the folder of a continued run -----------------------------------------------------------------------------


def check_resumable(path: Path, config: Config) -> None:
    """Raise `ConfigError` unless `path` is the folder of a run that `config` may continue."""
    try:
        old = load_config(path / "config.toml")
    except ConfigError as error:
        raise ConfigError(f"run.dir = {show(str(path))}: its config.toml cannot be read: {error}") from None
    for key in key_names():
        before, now = value_of(old, key), value_of(config, key)
        if before != now and (key in _FIXED_KEYS or key.rpartition(".")[0] in _FIXED_SECTIONS):
            problem = f"the run in {path} has {show(before)}, and a continued run must not change it"
            raise invalid(key, now, problem, show(before))
    manifest = read_manifest(path)
    done = manifest.get("last_step", 0)
    if manifest.get("status") == "completed" and done >= config.training.steps:
        problem = f"the run in it is complete after {done} steps, and training.steps asks for no more"
        raise invalid("run.dir", str(path), problem, show(f"{path}-2"))


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of one of our runs."""
    return (path / "config.toml").is_file()


def newest_unfinished(folder: Path = Path("runs")) -> Path:
    """The newest run in `folder` that is not complete. Raises `ConfigError` if there is none."""
    runs = filter(is_run, folder.glob("*"))
    open_runs = [path for path in runs if read_manifest(path).get("status") != "completed"]
    if not open_runs:
        raise ConfigError(f"--resume: no unfinished run in {folder}/; name the folder of one, --resume FOLDER")
    return max(open_runs, key=lambda path: (path / "config.toml").stat().st_mtime_ns)


def forget_steps_after(run_dir: Path, step: int) -> None:
    """Drop the lines of `metrics.jsonl` after `step`: those steps will run again."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_text(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def last_record(run_dir: Path) -> StepRecord:
    """The last line of `metrics.jsonl`, for a run that continues after its last step."""
    return StepRecord(**read_metrics(run_dir / "metrics.jsonl")[-1])


@contextmanager
def sole_user(run_dir: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises `ConfigError` if another process trains in it."""
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


# ---- the results of a run: checkpoints and the model -----------------------------------------------------------


def folder_of(run_dir: Path, keys: CheckpointKeys) -> Place:
    """Where the checkpoints of the run in `run_dir` are."""
    if not keys.folder:
        return run_dir / CHECKPOINTS
    found = location(os.path.expanduser(keys.folder))
    return found if is_url(found) else Path(found)


def place_of(folder: Place, step: int) -> Place:
    """The place of the checkpoint of `step`."""
    return f"{folder}/step-{step}" if isinstance(folder, str) else folder / f"step-{step}"


class Checkpoints:
    """The checkpoints of one run, on each rank."""

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
        self.folder, self.keys, self.world = folder_of(run_dir, keys), keys, world
        self._local = os.path.expanduser(keys.local) if keys.local else None
        self.model, self.optimizers = model, parts_of(optimizer)
        self.facts = facts  # must be equal when the run continues: the corpus, the seed
        self.micro = micro if micro is not None and micro.search != "fixed" else None
        # The saves in the background, oldest first: one, or two with a queue.
        self._under_way: list[checkpoint.SaveFuture] = []
        # Whether one of them has failed on some process: all learn of it with the figures of a step.
        self.failed_somewhere = False
        # The (new path, reason), on rank 0, of damaged checkpoints that `resume` set aside.
        self.aside: list[tuple[Path | str, str]] = []
        # Called with a line about a long save, on any thread.
        self.say: Callable[[str], object] = lambda _: None

    def resume(self) -> tuple[int, Place | None]:
        """Load the newest whole checkpoint: the step after which to continue, and the checkpoint, or (0, None).
        Collective.

        A damaged one is renamed by rank 0 when all ranks know of it, and the one before is tried. So it cannot be in
        the way when its step is saved again. What an interrupted save left on the disks of hosts is sent before that.
        """
        if self._local is not None:
            checkpoint.recover(self.folder, local=self._local)
        while (path := self.newest()) is not None:
            try:
                return self.load(path), path
            except checkpoint.CheckpointDamaged as error:
                if self.world.rank == 0:
                    self._set_aside(path, str(error))
        return 0, None

    def newest(self) -> Place | None:
        """The newest checkpoint that pointer, manifest and sizes do not show to be damaged, by its step. Collective;
        rank 0 looks, skips interrupted saves, and sets aside damaged ones that are newer."""
        found = self._look() if self.world.rank == 0 else -1
        (step,) = self.world.largest([float(found)])
        return place_of(self.folder, int(step)) if step >= 0 else None

    def _look(self) -> int:
        for step, found in reversed(numbered(str(self.folder))):
            path = place_of(self.folder, step)
            if PurePath(found).name != PurePath(path).name:
                continue
            try:
                with checkpoint.open_checkpoint(path) as opened:
                    problem = opened.sizes_problem()
            except checkpoint.CheckpointNotFound:
                continue  # the next save of this step clears what an interrupted one left
            except checkpoint.CheckpointDamaged as error:
                problem = str(error)
            if problem is None:
                return step
            self._set_aside(path, problem)
        return -1

    def _set_aside(self, path: Place, problem: str) -> None:
        self.aside.append((checkpoint.set_aside(path), problem))

    def load(self, path: Place) -> int:
        """Restore model and optimizer, and return the step. Collective.

        Raises `CheckpointError`, and `RuntimeError` if it belongs to another run; then nothing has changed.
        """
        model_state, optimizer_state = self._state()
        damage = None
        try:
            found = checkpoint.inspect(path)
        except checkpoint.CheckpointDamaged as error:
            damage = error
        if self.world.largest([float(damage is not None)])[0]:
            raise damage or checkpoint.CheckpointDamaged(f"{path}: another process found it damaged")
        held: dict[str, Any] = {
            key.removeprefix("run."): entry.value for key, entry in found.values.items() if key.startswith("run.")
        }
        differ = [(key, held.get(key), value) for key, value in self.facts.items() if held.get(key) != value]
        if differ:
            wrong = [f"{key}: {there!r} there, {here!r} here" for key, there, here in differ]
            raise RuntimeError(
                f"{path} belongs to another run: {'; '.join(wrong)}. Use the same data, or another run.dir"
            )
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=path, allow_unexpected=("run.*",))
        # Of a frozen base nothing was saved or changed; the others were filled where they are.
        whole = None if self._frozen() else model_state
        checkpoint.set_state_dict(self.model, self.optimizers, model_state_dict=whole, optim_state_dict=optimizer_state)
        if self.micro is not None and held.get("micro_batch"):  # older runs have none
            self.micro.load_state_dict({"size": held["micro_batch"], "fits": 0, "fails": 0})
        return int(held["step"])

    def _frozen(self) -> set[str]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {plain_name(name) for name, parameter in named if not parameter.requires_grad}

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of model and optimizer that a checkpoint holds: without frozen weights, which the folder of the
        model has, and what packed ones have beside them."""
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizers)
        frozen = self._frozen()
        for name in list(model_state) if frozen else ():
            if name in frozen or any(name.startswith(f"{outer}.") for outer in frozen):
                del model_state[name]
        return model_state, optimizer_state

    def due(self, step: int, last: int) -> bool:
        """Whether a checkpoint is due after `step` of `last`."""
        return step == last or bool(self.keys.every and step % self.keys.every == 0)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this process."""
        return any(future.failed() for future in self._under_way)

    def save(self, step: int, *, wait: bool, metrics: Mapping[str, float] | None = None) -> None:
        """Save the checkpoint of `step`, and remove old ones. Collective. With `wait` it is complete on return;
        without, it may be written in the background, and `settle` or the next save raises its failure."""
        queues = self.keys.queue and self.keys.asynchronous and not wait
        self.settle(leave=1 if queues else 0)
        path, progress = place_of(self.folder, step), Line(f"step-{step}", self.say)
        model_state, optimizer_state = self._state()
        # Store the size found by failing, so that no resumed run has to fail again; 0: the size was given.
        found = 0 if self.micro is None else self.micro.size or 0
        run = {**self.facts, "step": step, "world": self.world.size, "micro_batch": found}
        state = {"model": model_state, "optimizer": optimizer_state, "run": run}
        if (self.keys.asynchronous and not wait) or self._local is not None:
            bound = self.keys.staging_mib << 20 or None
            self._under_way.append(
                checkpoint.async_save(
                    state,
                    checkpoint_id=path,
                    metrics=metrics,
                    staging_nbytes=bound,
                    queue=self.keys.queue,
                    progress=progress,
                    local=self._local,
                )
            )
            if wait or not self.keys.asynchronous:
                self.settle()
            return
        checkpoint.save(state, checkpoint_id=path, metrics=metrics, progress=progress)
        self._retain()

    def settle(self, leave: int = 0) -> None:
        """Wait until at most `leave` saves are in progress; raise the failure of one of the others. Collective."""
        while len(self._under_way) > leave:
            self._under_way.pop(0).result()
            self._retain()

    def _retain(self) -> None:
        keys, error = self.keys, None
        if self.world.rank == 0:
            try:
                checkpoint.retain(
                    self.folder,
                    keep_last=keys.keep_last,
                    keep_every=keys.keep_every or None,
                    keep_best=keys.keep_best or None,
                    metric=keys.metric if keys.keep_best else None,
                )
            except checkpoint.CheckpointError as found:
                error = found
        if self.world.largest([float(error is not None)])[0]:
            raise error or checkpoint.CheckpointError(f"{self.folder}: rank 0 could not remove old checkpoints")


class Line:
    """Says how far a save is, every ten seconds of one that takes longer; called by any thread, one at a time."""

    def __init__(self, name: str, say: Callable[[str], object]) -> None:
        self._name, self._say, self._due = name, say, time.monotonic() + PAUSE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PAUSE_SECONDS
            self._say(f"{self._name}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB of this process are saved")


def save_model_of_checkpoint(run_dir: Path, shape: LlamaShape, path: Place) -> None:
    """Write `model.safetensors` from the checkpoint `path`, in one process. One tensor after the other is read."""
    with torch.device("meta"):
        named = dict(Llama(shape).named_parameters())
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in named.items()]
    made_by = {"made_by": f"fullshard {__version__}"}
    with SafetensorsWriter(run_dir / "model.safetensors", entries, made_by) as file:
        for name, value in named.items():
            state = {"model": {name: torch.empty_like(value, device="cpu")}}
            checkpoint.load(state, checkpoint_id=path, no_dist=True, allow_unexpected=("*",))
            file.write(name, state["model"][name])


def save_model(run_dir: Path, model: nn.Module, *, rank: int) -> None:
    """Write `model.safetensors`, a full state dict. Collective: every rank calls it.

    Tensors are gathered one by one, and each full one is freed before the next is gathered: no rank ever holds more
    than one full tensor.
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
