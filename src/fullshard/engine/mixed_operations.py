"""A note for the exceptions of torch where a sharded parameter meets a plain tensor, or a full weight is used after its
unit freed it: which one it was, and what works.

It is added where the exception passes a forward or a `guard`, and to one that nobody catches before Python prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import current_backward
from .._torch.dtensor import MIXED, storage_key
from ..param import Owner
from ..schedule import Full
from .names import all_modules, dotted_name, first_few, names_elsewhere, parameter_of
from .unit import Unit, unit_of

_OURS = "fullshard: "
# What torch says of a tensor whose memory is gone.
_FREED = ("out of bounds for storage of size 0", "but its data is not allocated yet")
# Functions of torch that clip, and those that others call them by.
_CLIPS = ("clip_grad_norm_", "clip_grad_norm", "get_total_norm", "clip_grad_value_", "clip_grads_with_norm_")


def note_shards_read(error: BaseException | None, units: Sequence[Unit]) -> None:
    """Add the note to `error`, which passes a forward, if it is one of these exceptions. Once."""
    if error is None or _is_noted_as_freed(error, in_forward=True) or not _is(error, MIXED):
        return
    frames = _frames(error)
    read = list(dict.fromkeys(_read(frames, units)))
    said = f"read were probably {first_few(read)}" if read else "units free their weights afterwards"
    error.add_note(_of_recomputation(said) if _recomputes(frames) else _of_read(said))


def note_mixed(error: BaseException) -> None:
    """Add the note to `error`, which passed no forward, if it is one of these and its frames show what met. Once."""
    if _is_noted_as_freed(error, in_forward=False) or not _is(error, MIXED):
        return
    frames = _frames(error)
    together = next(filter(None, map(_together, reversed(frames))), None)
    if together is not None:
        sharded, plain = together
        error.add_note(
            f"{_OURS}{sharded.name} is sharded, and {names_elsewhere([plain])[id(plain)]}, in one list with it, is "
            f"not. {_cure(frames)}"
        )
        return
    read = list(dict.fromkeys(_read(frames, _all_units())))
    if read:
        said = f"read were probably {first_few(read)}"
        error.add_note(_of_recomputation(said) if _recomputes(frames) else _of_read(said))


def _all_units() -> list[Unit]:
    return list(dict.fromkeys(unit for module in all_modules() if (unit := unit_of(module)) is not None))


def _is(error: BaseException, text: str) -> bool:
    """Whether it is torch's exception with this text, without a note of fullshard."""
    noted = any(note.startswith(_OURS) for note in getattr(error, "__notes__", ()))
    return isinstance(error, RuntimeError) and text in str(error) and not noted


def _is_noted_as_freed(error: BaseException, *, in_forward: bool) -> bool:
    """Whether memory was gone that is a weight's; then the note is there now. `in_forward`: the exception passes one,
    so that it is probably a weight's if none is found."""
    if not any(_is(error, text) for text in _FREED):
        return False
    held = {(storage_key(tensor.untyped_storage()), tensor.numel()) for tensor in _plain_tensors(_frames(error))}
    freed = [
        f"{dotted_name(unit, param.name)} of unit {unit.record.name}"
        for unit in _all_units()
        if unit.record.full is not Full.FULL
        for param in unit.params
        if (storage_key(param.full.untyped_storage()), param.full.numel()) in held
    ]
    if not freed and not in_forward:
        return False
    error.add_note(
        f"{_OURS}{first_few(freed) if freed else 'probably a weight'} was used after the unit had freed it. Use it in "
        f"the forward of its module or in a block of fullshard.unit_open(module), or clone it there"
    )
    return True


def _plain_tensors(frames: Sequence[FrameType]) -> Iterator[Tensor]:
    """Tensors that a frame holds, or that are attributes of a module that it holds."""
    for frame in frames:
        for value in frame.f_locals.values():
            for one in (value, *(vars(value).values() if isinstance(value, nn.Module) else ())):
                if isinstance(one, Tensor) and not isinstance(one, DTensor):
                    yield one


def _of_read(said: str) -> str:
    return (
        f"{_OURS}a sharded parameter was read outside of the forward of its module: {said}. Call the module, open its "
        f"unit around the read (with fullshard.unit_open(module): ...), or register the method that reads it "
        f"(fullshard.register_fsdp_forward_method)"
    )


def _recomputes(frames: Sequence[FrameType]) -> bool:
    """Whether torch runs a part of a forward again, in backward."""
    return current_backward() != -1 or any(f.f_code.co_name == "recompute_fn" for f in frames)


def _of_recomputation(said: str) -> str:
    return (
        f"{_OURS}a part of a unit's forward was recomputed in backward while the unit was sharded: {said}. The "
        f"backward came by a tensor that is no output of the unit, such as an item of a list. Run the step again: from "
        f"now on the unit is gathered first. If that fails too, pass a tensor to torch.utils.checkpoint "
        f"(use_reentrant=False) as an argument, or let the unit return the tensor"
    )


def _frames(error: BaseException) -> list[FrameType]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _read(frames: Sequence[FrameType], units: Sequence[Unit]) -> Iterator[str]:
    """Names of parameters that are sharded now, and that a frame of the exception holds, or names as attributes."""
    for unit in units:
        for param in unit.params if unit.record.full is not Full.FULL else ():
            name = dotted_name(unit, param.name)
            if any(_names(frame, param.sharded, name.split(".")[-2:]) for frame in reversed(frames)):
                yield f"{name} of unit {unit.record.name}"


def _names(frame: FrameType, sharded: Tensor, path: Sequence[str]) -> bool:
    """Whether the frame holds the parameter, reads it of a module that it holds, or names its module and itself."""
    attributes = {*frame.f_code.co_names}
    for value in frame.f_locals.values():
        if value is sharded:
            return True
        if isinstance(value, nn.Module) and path[-1] in attributes:
            own = vars(value).get("_parameters", {}).get(path[-1])
            if own is sharded:
                return True
    return {*path} <= attributes


def _together(frame: FrameType) -> tuple[Owner, Tensor] | None:
    """A sharded and a plain parameter that a list of the frame has both, or the gradients of both."""
    for value in frame.f_locals.values():
        if isinstance(value, (list, tuple)):
            held = [one for one in value if isinstance(one, Tensor) and one.is_leaf and _is_trained(one)]
            kinds = {isinstance(one, DTensor): one for one in reversed(held)}
            if len(kinds) == 2:
                sharded, plain = _parameter(kinds[True]), _parameter(kinds[False])
                owner = None if sharded is None else Owner.of(sharded)
                if owner is not None and plain is not None:
                    return owner, plain
    return None


def _is_trained(tensor: Tensor) -> bool:
    """Whether it may be a gradient, or is a parameter with one."""
    return not tensor.requires_grad or tensor.grad is not None


def _parameter(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.requires_grad else parameter_of(tensor)


def _cure(frames: Sequence[FrameType]) -> str:
    if any(frame.f_code.co_name in _CLIPS for frame in frames):
        return "Call fullshard.clip_grad_norm_(model.parameters(), max_norm) instead, which takes both"
    if any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames):
        return "Call fullshard.step_on_shards(optimizer), or build it without foreach and fused"
    return "Take them one by one, or on local tensors (p.to_local())"


# ---- exceptions that nobody catches ----------------------------------------------------------------------------------

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _note_and_report(
    before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Adds the note, then does what `sys.excepthook` did before."""
    with suppress(Exception):  # the program's own exception is what matters
        note_mixed(error)
    before(kind, error, trace)


_installed = False


def note_uncaught() -> None:
    """Let exceptions that nobody catches get the note. Again does nothing, unless the hook was reset."""
    global _installed
    if not _installed or sys.excepthook is sys.__excepthook__:
        _installed = True
        sys.excepthook = partial(_note_and_report, sys.excepthook)
