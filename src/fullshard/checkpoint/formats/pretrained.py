"""`load_pretrained`: a model on the meta device, sharded, filled from a folder of safetensors files, row by row."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...agree import mark_restored
from ...api import allocate, forget_values, materialize
from ...comm import Messenger, messenger
from ...policy.arguments import (
    expect,
    expect_callable,
    expect_flag,
    expect_group,
    expect_keys,
    expect_module,
    expect_whole,
)
from ..agreement import Heard, Message, agree
from ..errors import CheckpointMismatch, CheckpointNotFound
from ..files import shown_progress
from ..plan import matches
from ..state import dtype_name, named_tensors, part_of, plain_name
from .convert import RefusedCheckpoint, detect
from .hf import HfSource
from .readings import Fit, Reading, fit, pretrained_in

T = TypeVar("T", bound=nn.Module)

_REMEDY = (
    "load_pretrained takes allow_missing=[...] (names to initialise as in a new model) and allow_unexpected=[...] "
    "(stored tensors to leave out), in which * stands for anything"
)


def load_pretrained(
    model: T,
    path: str | os.PathLike[str],
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    init: Callable[[nn.Module], object] | None = None,
    seed: int = 0,
    progress: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> T:
    """Fill `model` from the safetensors files in the folder `path`, each rank with its rows alone.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        for block in model.get_decoder().layers:
            fully_shard(block)
        fully_shard(model)
        fullshard.load_pretrained(model, path)

    Any model: of transformers, under PEFT, or of your own. What is on the meta device gets memory; what has values is
    overwritten. Every rank of `process_group` (default: all) calls it, and reads only the rows that it holds: nothing
    is sent, and besides its share a rank holds one tensor's rows at a time. Parameters keep their dtype; stored
    floating-point values are cast to it.

    path: a folder with `model.safetensors` or `model.safetensors.index.json`, or one safetensors file. Not a name on a
        hub: `huggingface_hub.snapshot_download` fetches that and returns its folder.
    allow_missing: names of the model that need not be stored, or may be stored in another shape (a new head); they are
        initialised as `materialize(model, init=init, seed=seed)` does.
    allow_unexpected: stored names that the model need not have.
    progress: the first rank shows a bar, or lines where there is no terminal, on stderr.

    Tied parameters are read once, from whichever of their names is stored. For a model of transformers, names are
    converted as `from_pretrained` does: with or without the prefix of the base model, renamed, or put together
    (experts). Under PEFT the base is loaded, and adapters that the files lack are initialised. Buffers that are not
    stored (`inv_freq`) are computed.

    Returns `model`. Raises the same on all ranks: `CheckpointMismatch` (names, shapes or dtypes that do not fit, all of
    them; files that differ between ranks; a tied parameter stored with two values), `CheckpointNotFound`,
    `CheckpointDamaged`, `CheckpointIOError`. Names, shapes and sizes of files are checked before anything is changed;
    after a later error what was to be loaded counts as uninitialised, and a forward refuses it.
    """
    expect_module("model", model)
    fits = isinstance(path, (str, os.PathLike)) and bool(str(path))
    expect("path", fits, "the path of a folder or a file", path, "pass a string or a Path")
    missing, unexpected = expect_keys("allow_missing", allow_missing), expect_keys("allow_unexpected", allow_unexpected)
    expect_callable("init", init, "a function of a module or None", or_none=True)
    expect_whole("seed", seed)
    expect_flag("progress", progress)
    expect_group("process_group", process_group)
    found = messenger(process_group)
    job = _PretrainedJob(model, Path(path), found, missing, unexpected)
    job.run(progress=progress and found.rank == 0)
    materialize(model, init=init, seed=seed)
    return model


class _Target(NamedTuple):
    """A tensor of the model under all its names, and what is stored for it; more than one for tied parameters."""

    names: list[str]
    readings: list[Reading]


class _PretrainedJob:
    """One load on one rank."""

    def __init__(
        self, model: nn.Module, path: Path, messages: Messenger, missing: Sequence[str], unexpected: Sequence[str]
    ) -> None:
        self._model, self._path, self._messages = model, path, messages
        self._allow_missing, self._allow_unexpected = missing, unexpected
        self._what = f"loading {path.resolve()}"
        self._targets: list[_Target] = []
        self._conversions: list[Any] | None = None

    def run(self, *, progress: bool) -> None:
        with contextlib.ExitStack() as opened:
            agree(self._messages, self._what, lambda: self._match(opened), self._refuse)
            try:
                agree(self._messages, self._what, lambda: self._fill(progress), lambda _: {})
            except BaseException:
                # Rows of some tensors may be there on some ranks and not on others.
                forget_values(self._model, self._tensors())
                raise
        inner, _ = pretrained_in(self._model)
        if inner is not None and self._conversions is not None:
            inner._weight_conversions = self._conversions  # as `from_pretrained`: `save_pretrained` undoes these
        with contextlib.suppress(ValueError):  # nothing is sharded
            mark_restored(self._tensors(), source=f"the files {self._files[:16]}")

    # ---- matching ------------------------------------------------------------------------------------------

    def _match(self, opened: contextlib.ExitStack) -> Message:
        self._source = opened.enter_context(_opened(self._path))
        held = named_tensors(self._model)
        found = fit(self._model, held, self._source)
        self._conversions = found.conversions
        # A state dict may have one parameter as several tensors, where it is divided over other axes.
        tied = {plain_name(name): id(p) for name, p in self._model.named_parameters(remove_duplicate=False)}
        groups: dict[int, list[str]] = {}
        for name, tensor in held.items():
            groups.setdefault(tied.get(name, id(tensor)), []).append(name)
        problems: list[str] = []
        for names in groups.values():
            self._match_one(names, held[names[0]], found, problems)
        # In the order of the files.
        order = {key: number for number, key in enumerate(self._source.tensors)}
        self._targets.sort(key=lambda target: order[target.readings[0].keys[0]])
        unexpected = [key for key in found.unexpected if not matches(key, self._allow_unexpected)]
        self._files = self._source.fingerprint()
        return {"files": self._files, "problems": problems, "unexpected": unexpected}

    def _match_one(self, names: list[str], tensor: Tensor, found: Fit, problems: list[str]) -> None:
        stored = {reading.keys[0]: (name, reading) for name in names if (reading := found.readings.get(name))}
        allowed = any(matches(name, self._allow_missing) for name in names)
        readings = []
        for name, reading in stored.values():
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            floats = tensor.dtype.is_floating_point and reading.dtype.startswith(("float", "bfloat"))
            if reading.shape != shape and not allowed:
                problems.append(f"shape: {name} is {shape} here, {reading.shape} in the files")
            elif reading.dtype != dtype and not floats:
                problems.append(f"dtype: {name} is {dtype} here, {reading.dtype} in the files")
            elif reading.shape == shape:
                readings.append(reading)
        if readings:
            self._targets.append(_Target(names, readings))
        elif not stored and not allowed and not found.optional.intersection(names):
            problems.append(f"missing: {' = '.join(names)}")

    def _refuse(self, heard: Heard) -> Message:
        """Compare all ranks, on the first. Of a pipeline each has a part: unexpected is what none has a place for."""
        messages = heard.messages
        files = messages[0]["files"]
        others = sorted(rank for ranks, one in heard.groups if one["files"] != files for rank in ranks)
        problems = dict.fromkeys(problem for message in messages for problem in message["problems"])
        if others:
            problems[f"files: rank(s) {', '.join(map(str, others[:8]))} have other files than rank 0"] = None
        unexpected = set(messages[0]["unexpected"]).intersection(*(one["unexpected"] for one in messages[1:]))
        problems.update({f"unexpected: {key}": None for key in sorted(unexpected)})
        if problems:
            raise CheckpointMismatch(f"{self._what}: expected files that fit the model, found", list(problems), _REMEDY)
        return {}

    # ---- reading -------------------------------------------------------------------------------------------

    def _fill(self, progress: bool) -> Message:
        allocate(self._model)
        held = named_tensors(self._model)
        parts = [part_of(held[target.names[0]]) for target in self._targets]
        problems = [
            f"{t.names[0]}: {part}" for t, part in zip(self._targets, parts, strict=True) if isinstance(part, str)
        ]
        if problems:
            raise CheckpointMismatch(f"{self._what}: expected parameters that can be filled, found", problems, _REMEDY)
        total = sum(part.nbytes for part in parts if not isinstance(part, str))
        with shown_progress(total, f"loading {self._path.name}", lines=True) if progress else _silent() as advance:
            for target, part in zip(self._targets, parts, strict=True):
                assert not isinstance(part, str)
                if part.local is None or part.box is None or not part.local.numel():
                    continue
                for number, reading in enumerate(target.readings):
                    # No name for the rows: they would live on while the next ones are read.
                    self._take(
                        target, part.local, reading.read(self._source, part.box, part.local.dtype), first=not number
                    )
                advance(part.nbytes)
        return {}

    def _take(self, target: _Target, local: Tensor, rows: Tensor, *, first: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if first:
                local.copy_(rows)
            elif not torch.equal(local, rows.to(local)):
                raise CheckpointMismatch(
                    f"{self._what}: expected one value for a tied parameter, found",
                    [f"{' = '.join(target.names)}: one parameter here, stored with different values"],
                    "build the model untied (config.tie_word_embeddings = False)",
                )

    def _tensors(self) -> list[Tensor]:
        held = named_tensors(self._model)
        return [held[target.names[0]] for target in self._targets]


@contextlib.contextmanager
def _silent():  # type: ignore[no-untyped-def]
    yield lambda nbytes: None


def _opened(path: Path) -> HfSource:
    if not path.exists():
        raise CheckpointNotFound(
            f"{path}: there is no such file or folder; load_pretrained reads files on disk: "
            f"huggingface_hub.snapshot_download fetches a model of a hub and returns its folder"
        )
    found = detect(path)
    if found.kind != "hf":
        raise RefusedCheckpoint(
            f"{path}: expected safetensors files, found {found.says}; use fullshard.checkpoint.load for one that "
            f"fullshard saved, and fullshard.checkpoint.formats.load_into for other formats"
        )
    return HfSource(Path(found.path))
