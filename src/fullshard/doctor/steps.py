"""Steps of the plain and of the sharded model, and what they show: times, exceptions, buffers, reads of partial values.

They run over a fake group, as rank 0 of the world asked for: its collectives bring no values of other ranks.
"""

from __future__ import annotations

import inspect
import itertools
import random
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fullshard
from fullshard._torch import non_persistent_buffers
from fullshard.observe import record
from fullshard.observe.partial_reads import PartialReads
from fullshard.program import Program

from . import fingerprints
from .facts import Failure, Steps

# A first step that takes longer is not taken again.
_SECONDS = 5.0
_HERE = str(Path(fullshard.__file__).parent)
_LIBRARIES = (
    _HERE,
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(torch.__file__).parent),
)


# ---- the plain model -------------------------------------------------------------------------------------------------


def plain_steps(program: Program, model: nn.Module) -> tuple[float | None, Steps]:
    """Take steps with batch 0, and a forward with batch 1 if a step changes persistent buffers. Returns the seconds of
    forward and backward, of two the shorter, and what they showed. Leaves no gradients."""
    passing = _buffers(model, persistent=False)
    at_first = {name: buffer.clone() for name, buffer in (_buffers(model, persistent=True) | passing).items()}
    seconds: float | None = None
    found: dict[str, Any] = {}
    number = 0
    try:
        batch = program.batch(0)
        asked = fingerprints.of_value(batch, "batch(0)")
        number = 1
        other = program.batch(1)
        number = 0
        unsteady = fingerprints.differing(asked, fingerprints.of_value(program.batch(0), "batch(0)"))
        with _keeping_dtypes() as dtypes:
            taken = [_seconds_of_step(program, model, batch)]
        found["computes_half"] = torch.float16 in dtypes
        if not unsteady:  # a step may have written to the batch
            after = fingerprints.of_value(program.batch(0), "batch(0)")
            unsteady = [f"{name}, after a step" for name in fingerprints.differing(asked, after)]
        found["unsteady_batch"] = tuple(unsteady)
        changed = _changed(at_first, _buffers(model, persistent=True))
        if changed:
            number = 1
            found["drifting_buffers"] = _drifting(program, model, other, changed, at_first)
            number = 0
        if taken[0] < _SECONDS:
            taken.append(_seconds_of_step(program, model, program.batch(0)))
        seconds = min(taken)
    except Exception as error:
        found["plain_failure"] = f"the plain model, batch {number}: {line(error)}"
    now = _buffers(model, persistent=False)
    found["changed_buffers"] = tuple(name for name in passing if not _equal(at_first[name], now.get(name)))
    model.zero_grad(set_to_none=True)
    return seconds, Steps(**found)


def _buffers(model: nn.Module, *, persistent: bool) -> dict[str, Tensor]:
    """Returns the buffers by name; of one that several modules share, the first. Those of SyncBatchNorm are left out of
    persistent ones, since it averages them."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        apart = non_persistent_buffers(module)
        if persistent and isinstance(module, nn.SyncBatchNorm):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if (name not in apart) == persistent and not buffer.is_meta:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that differ, by name."""
    return {name: each.clone() for name, each in after.items() if name in before and not _equal(before[name], each)}


def _drifting(
    program: Program, model: nn.Module, batch: Any, changed: dict[str, Tensor], at_first: dict[str, Tensor]
) -> tuple[str, ...]:
    """Returns those of `changed` buffers to which a forward with another batch, from the same values, gives other
    values."""
    for name, buffer in _buffers(model, persistent=True).items():
        if name in changed and buffer.shape == at_first[name].shape:
            with torch.no_grad():
                buffer.copy_(at_first[name])
    _seed(1)
    _loss(program, model, batch)
    now = _buffers(model, persistent=True)
    return tuple(name for name, value in changed.items() if not _equal(value, now.get(name)))


@contextmanager
def _keeping_dtypes() -> Iterator[set[torch.dtype]]:
    """The dtypes of tensors that autograd keeps for backward."""
    found: set[torch.dtype] = set()

    def keep(tensor: Tensor) -> Tensor:
        found.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def _equal(before: Tensor, after: object) -> bool:
    return isinstance(after, Tensor) and fingerprints.of_tensor(before) == fingerprints.of_tensor(after)


def _loss(program: Program, model: nn.Module, batch: Any) -> Tensor:
    loss = program.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"expected a loss of one element, found {what}")
    return loss


def _seconds_of_step(program: Program, model: nn.Module, batch: Any) -> float:
    """Returns the seconds of one forward and backward."""
    _seed(0)
    start = time.perf_counter()
    _loss(program, model, batch).backward()
    taken = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return taken


@contextmanager
def sync_as_batch_norm(model: nn.Module) -> Iterator[None]:
    """SyncBatchNorm runs on devices alone, and here none is needed: it computes as a BatchNorm of this rank."""
    modules = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in modules:
        module.forward = nn.BatchNorm1d.forward.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


# ---- the sharded model -----------------------------------------------------------------------------------------------


def sharded_steps(
    program: Program, model: nn.Module, optimizer: Optimizer, nbytes: dict[str, int], plain: Steps
) -> tuple[float | None, Steps, str]:
    """Forward and backward, timed, and an optimizer step; then the same once more, watched. `nbytes`: of each unit when
    it is full, by name. Returns the seconds of forward and backward, of two the shorter; what `plain` and these steps
    showed; and why the last could not be watched, "" if it could."""
    seconds: float | None = None
    stage = "forward"
    taken: list[float] = []
    try:
        while len(taken) < 2 and sum(taken) < _SECONDS:
            model.zero_grad(set_to_none=True)
            batch = program.batch(0)
            _seed(0)
            stage, start = "forward", time.perf_counter()
            loss = _loss(program, model, batch)
            stage = "backward"
            loss.backward()
            taken.append(time.perf_counter() - start)
        seconds = min(taken)
        stage = "optimizer step"
        if not _needs_closure(optimizer):
            optimizer.step()
        model.zero_grad(set_to_none=True)
    except Exception as error:
        return seconds, replace(plain, sharded_failure=failure_of(error, stage, model)), ""
    watched, why = _watched_step(program, model, optimizer, nbytes)
    return seconds, replace(plain, **watched), why


def _watched_step(
    program: Program, model: nn.Module, optimizer: Optimizer, nbytes: dict[str, int]
) -> tuple[dict[str, Any], str]:
    """Watches what the runtime and the user's code do in a step: fields of `Steps`. What it raises is no fault of the
    program, which has just taken such a step: there are operations that torch cannot watch."""
    found: dict[str, Any] = {}
    why = ""
    watch = PartialReads(model.named_parameters())
    try:
        batch = program.batch(0)
        with watch:
            with _recorded(model) as commands:
                loss = _loss(program, model, batch)
            found["open_in_forward"] = _open_at_once(commands, nbytes)
            with _recorded(model) as commands:
                loss.backward()
            found["open_in_backward"] = _open_at_once(commands, nbytes)
            if not _needs_closure(optimizer):
                optimizer.step()
    except Exception as error:
        why = line(error)
    found["partial_reads"] = tuple(map(str, watch.found))
    if watch.found_message:  # the model's own messages may keep its buffers equal
        found["drifting_buffers"] = ()
    return found, why


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether its step computes losses itself, as LBFGS does, with a function that only the user's loop has."""
    given = inspect.signature(optimizer.step).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """The commands of the runtime, all of them once it is over. None where units of the model ran as roots of their
    own, which a record of the whole model would refuse."""
    found: list[tuple[str, str]] = []
    with ExitStack() as stack:
        try:
            trace = stack.enter_context(record(model))
        except RuntimeError:
            trace = None
        yield found
        found += trace.commands if trace is not None else []


def _open_at_once(commands: Iterable[tuple[str, str]], nbytes: dict[str, int]) -> tuple[str, ...]:
    """The units that are full at the moment at which they hold most. The root is left out."""
    now: dict[str, None] = {}
    most: tuple[str, ...] = ()
    for kind, unit in commands:
        if kind == "unshard" and unit != "root":
            now[unit] = None
        elif kind == "reshard":
            now.pop(unit, None)
        if sum(nbytes.get(name, 0) for name in now) > sum(nbytes.get(name, 0) for name in most):
            most = tuple(now)
    return most


# ---- exceptions ------------------------------------------------------------------------------------------------------

# What torch says of shards, and what to do. Errors of this package have it in their text.
_MIXED = "got mixed torch.Tensor and DTensor"
_CURES = (
    (
        _MIXED,
        {
            "optimizer step": "plain and sharded parameters in one step: give each kind an optimizer of its own, or "
            "foreach=False; fullshard.step_on_shards for others' optimizers (docs/troubleshooting.md)",
            "": "a weight is read where its unit is not full: call the module, or open its unit around the read (with "
            "fullshard.unit_open(module): ...), or register_fsdp_forward_method for a method that reads it",
        },
    ),
    (
        "does not have a sharding strategy registered",
        {
            "": "an operation that knows no shards: in an optimizer take fullshard.step_on_shards, elsewhere compute "
            "in the module's forward, where parameters are full"
        },
    ),
    (
        "appears to not have been used in the graph",
        {
            "": "torch.autograd.grad for parameters: forward computes with gathered ones, and gradients come to .grad "
            "of the shards alone; call loss.backward() and read .grad, or take gradients of inputs and outputs"
        },
    ),
    (
        "in-place operations that require placement changes",
        {"": "an optimizer that knows no shards: fullshard.step_on_shards (docs/troubleshooting.md, Muon)"},
    ),
)
_OURS = "the text says what to do"
_OTHERS = {
    "optimizer step": "an optimizer that knows no shards, or one that fails with plain parameters too: "
    "fullshard.step_on_shards(optimizer) steps plain tensors, where elements do not depend on each other",
    "": "forward and backward of the plain model do not raise this: look at what reads or changes parameters outside "
    "of their module's forward; `fullshard verify` runs it in processes and prints the whole traceback",
}


def failure_of(error: Exception, stage: str, model: nn.Module) -> Failure:
    """`error` of `stage` ("forward", "backward", "optimizer step"), with its place in the user's code, and the cure."""
    frames = _frames(error)
    text = line(error)
    where = next((frame for frame in reversed(frames) if _is_users(frame[0])), None)
    if where is not None:
        frame, number = where
        text += f" (at {Path(frame.f_code.co_filename).name}:{number} in {frame.f_code.co_name})"
    told = str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("fullshard: ")]
    read: list[str] = []
    if _MIXED in told and stage != "optimizer step" and not any("read were probably" in note for note in notes):
        read = list(dict.fromkeys(_read(frames, model)))
    if read:
        text += f"; read were probably {', '.join(read[:4])}"
    if notes:
        return Failure(stage, f"{text}; {notes[0].removeprefix('fullshard: ')}", _OURS)
    for phrase, cures in _CURES:
        if phrase in told:
            return Failure(stage, text, cures.get(stage, cures[""]))
    is_ours = bool(frames) and frames[-1][0].f_code.co_filename.startswith(_HERE)
    return Failure(stage, text, _OURS if is_ours else _OTHERS.get(stage, _OTHERS[""]))


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames that the exception passed, the innermost last, each with its line."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((*_LIBRARIES, "<"))


def _read(frames: list[tuple[FrameType, int]], model: nn.Module) -> Iterator[str]:
    """Names of parameters that a frame of the user's holds, or names as attributes; of `blocks[0].weight` it names
    `blocks` and `weight`."""
    users = [frame for frame, _ in reversed(frames) if _is_users(frame)]
    for frame, (name, parameter) in itertools.product(users, model.named_parameters()):
        spoken = [part for part in name.split(".") if not part.isdecimal()]
        held = any(value is parameter for value in frame.f_locals.values())
        if held or (len(spoken) > 1 and set(spoken[-2:]) <= {*frame.f_code.co_names}):
            yield name


def line(error: BaseException) -> str:
    """The exception as one line: its class and the first line of its text."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
