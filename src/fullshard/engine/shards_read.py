"""A note for the exception of torch where a sharded parameter meets a plain tensor: which one it was, and the cures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from ..schedule import Full
from .optimizer_steps import dotted_name, first_few
from .unit import Unit

_MIXED = "got mixed torch.Tensor and DTensor"


def note_shards_read(error: BaseException | None, units: Sequence[Unit]) -> None:
    """Add the note to `error`, which passes a forward, if it is that exception. Once."""
    if not isinstance(error, RuntimeError) or _MIXED not in str(error):
        return
    if any("unit_open" in note for note in getattr(error, "__notes__", ())):
        return
    read = list(dict.fromkeys(_read(error.__traceback__, units)))
    said = f"read were probably {first_few(read)}" if read else "units free their weights after forward"
    error.add_note(
        f"fullshard: a sharded parameter was read outside of the forward of its module: {said}. Call the module, open "
        f"its unit around the read (with fullshard.unit_open(module): ...), or register the method that reads it "
        f"(fullshard.register_fsdp_forward_method)"
    )


def _read(trace: TracebackType | None, units: Sequence[Unit]) -> Iterator[str]:
    """Names of parameters that are sharded now, and that a frame of the exception holds, or names as attributes."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for unit in units:
        for param in unit.params if unit.record.full is not Full.FULL else ():
            name = dotted_name(unit, param.name)
            for frame in reversed(frames):
                held = any(value is param.sharded for value in frame.f_locals.values())
                if held or set(name.split(".")[-2:]) <= {*frame.f_code.co_names}:
                    yield f"{name} of unit {unit.record.name}"
                    break
