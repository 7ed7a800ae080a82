"""Where code of others meets sharded parameters that it cannot take.

A note for the exceptions of torch where a sharded parameter meets a plain tensor, or a full weight is used after its
unit freed it: which one it was, and what works. It is added where the exception passes a forward or a `guard`, and to
one that nobody catches before Python prints it. And an error before that of optimizers and wrappers, which names no
parameter and comes in the middle of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch import current_backward
from .._torch.modules import MIXED, REFUSES_CHANGED_PLACEMENTS, left_out_of_ddp, storage_key
from ..param import Owner
from ..schedule import Full
from .names import all_modules, clean_name, dotted_name, first_few, names_elsewhere, parameter_of
from .optimizer_steps import refuses_steps
from .unit import Unit, module_units, unit_of

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


# ---- steps of others -------------------------------------------------------------------------------------------------

# On an optimizer that steps on shards (api/optimizer.py).
ON_SHARDS = "_fullshard_mirrors"
# On one that steps whole matrices on their owners (extras/owners.py), which steps the rest on shards.
ON_OWNERS = "_fullshard_owners"


@refuses_steps((None,), lasts=True)
def _refuse_foreign(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if ON_SHARDS in optimizer.__dict__:
        return False
    room = type(optimizer).__module__.partition(".")[0]
    found = False
    for group in optimizer.param_groups:
        ours = {id(p): owner for p in group["params"] if (owner := Owner.of(p)) is not None}
        if ours and room == "bitsandbytes":
            _refuse_bitsandbytes(optimizer, [owner.name for owner in ours.values()])
        if ours and room == "torch" and isinstance(optimizer, _MUON) and REFUSES_CHANGED_PLACEMENTS:
            _refuse_few_rows(optimizer, group["params"])
        how = next((name for name in ("foreach", "fused") if group.get(name) is True), None)
        if how is None or not ours or len(ours) == len(group["params"]) or room != "torch":
            continue
        found = True
        trained = [p for p in group["params"] if p.grad is not None]
        for plain in (p for p in trained if id(p) not in ours):
            beside = next((p for p in trained if id(p) in ours and _alike(p, plain)), None)
            if beside is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: expected parameters of one kind for {how}=True, found "
                    f"{ours[id(beside)].name}, which is sharded, beside {names_elsewhere([plain])[id(plain)]}, which "
                    f"is not; call fullshard.step_on_shards(optimizer), or build it with {how}=False"
                )
    return not found


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether one of the lists that torch made has both."""
    return a.dtype is b.dtype and a.device == b.device


def _refuse_bitsandbytes(optimizer: Optimizer, names: list[str]) -> None:
    name = type(optimizer).__name__
    cure = "call fullshard.step_on_shards(optimizer, elementwise=True): each rank steps its own rows"
    if "LAMB" in name or "LARS" in name:
        cure = "take one whose update of an element depends on no other element, such as its AdamW"
    raise RuntimeError(
        f"{name}.step: expected plain parameters, as its kernels do, found {first_few(names)}, which fully_shard "
        f"sharded; {cure}"
    )


_MUON: tuple[type[Optimizer], ...] = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))


def _refuse_few_rows(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Where ranks have no rows of a matrix, the update comes out whole, and torch does not add it to shards."""
    for p in params:
        owner = Owner.of(p) if p.grad is not None else None
        if owner is None or not isinstance(p, DTensor):
            continue
        for axis, placement in enumerate(p.placements):
            ranks = p.device_mesh.size(axis)
            if not isinstance(placement, Shard) or p.shape[placement.dim] >= ranks:
                continue
            cure = "call fullshard.step_on_owners(optimizer), or give it to AdamW"
            if p.shape[1 - placement.dim] >= ranks:
                cure += f", or shard dim {1 - placement.dim} of such a matrix (shard_placement_fn of fully_shard)"
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected matrices with a row for each rank, found {owner.name} of "
                f"shape {tuple(p.shape)}, sharded over {ranks} ranks along dim {placement.dim}: torch makes its update "
                f"whole, and cannot add it to a shard; {cure}"
            )


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def _refuse_around(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or name != "module" or not isinstance(parent, DistributedDataParallel):
        return
    left = left_out_of_ddp(child)
    names = [one for one in _sharded_names(child) if one not in left]
    if names:
        raise NotImplementedError(  # torch's type, for a module that is a unit itself
            f"DistributedDataParallel: expected a module whose gradients nobody else averages, found "
            f"{type(child).__name__}, of which fully_shard sharded {first_few(names)} and averages the gradients; "
            f"call fully_shard on the whole model instead, with a mesh of two axes for copies of shards, or "
            f"fullshard.replicate for what is to be whole on every rank"
        )


def _sharded_names(model: nn.Module) -> Iterator[str]:
    ours = {id(param.sharded) for unit in module_units(model) for param in unit.params}
    return (clean_name(name) for name, parameter in model.named_parameters() if id(parameter) in ours)


register_module_module_registration_hook(_refuse_around)
