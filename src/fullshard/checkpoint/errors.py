"""What a save or a load raises. All of it passes through `except Exception`, and every rank of a call raises the same.

CheckpointError            RuntimeError; also by itself: ranks that disagree, a rank that was lost
  CheckpointMismatch       also ValueError: keys, shapes, dtypes; `problems` lists all of them
  CheckpointDamaged        also ValueError: bytes are not those that were saved
  CheckpointNotFound       also FileNotFoundError: no save to this place ever ended
  CheckpointIOError        also OSError: the disk is full, a file cannot be read; `errno` is that of the rank
  CheckpointBusy           another saver is writing there
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# An error that lists thousands of keys helps nobody; `problems` has all of them.
_SHOWN = 50


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; nothing was changed by the attempt."""


class CheckpointMismatch(CheckpointError, ValueError):
    """State and checkpoint do not fit, or what ranks want to save does not. `problems`: all that was found."""

    def __init__(self, what: str, problems: Sequence[str], remedy: str = "") -> None:
        self.what, self.problems, self.remedy = what, list(problems), remedy
        lines = [what, *(f"  {problem}" for problem in self.problems[:_SHOWN])]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more (the error's `problems` has all)")
        super().__init__("\n".join([*lines, remedy] if remedy else lines))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.problems, self.remedy)


class CheckpointDamaged(CheckpointError, ValueError):
    """Bytes of a checkpoint are not those that were saved, or it breaks a rule of the format."""


class CheckpointNotFound(FileNotFoundError, CheckpointError):
    """There is no checkpoint: nothing there, or a save that never came to its end."""


# OSError comes first, because it is what takes the errno.
class CheckpointIOError(OSError, CheckpointError):
    """The operating system refused; `errno` says how."""


class CheckpointBusy(CheckpointError):
    """Another saver holds the lock of the directory, or moved its pointer in the meantime."""


def io_error(error: OSError, doing: str) -> CheckpointIOError:
    """`error`, with what was being done."""
    number = error.errno or 0
    reason = error.strerror or str(error)
    return CheckpointIOError(number, f"{doing}: {reason}" + (f" [{_symbol(number)}]" if number else ""))


def _symbol(number: int) -> str:
    import errno

    return errno.errorcode.get(number, os.strerror(number))


# ---- as text, from one rank to the others --------------------------------------------------------------------

_CLASSES = {
    kind.__name__: kind
    for kind in (CheckpointError, CheckpointDamaged, CheckpointNotFound, CheckpointIOError, CheckpointBusy)
}


def describe(error: Exception) -> dict[str, object]:
    """`error` as JSON, for `rebuild` on other ranks."""
    if isinstance(error, CheckpointMismatch):
        parts = {"what": error.what, "problems": error.problems, "remedy": error.remedy}
        return {"kind": "CheckpointMismatch", **parts}
    if isinstance(error, OSError) and not isinstance(error, CheckpointError):
        error = io_error(error, "the operating system refused")
    kind = type(error).__name__
    if kind not in _CLASSES:
        return {"kind": "CheckpointError", "text": f"{kind}: {error}", "errno": 0}
    number = error.errno if isinstance(error, OSError) else None
    text = str(error.strerror if number and isinstance(error, OSError) else error)
    return {"kind": kind, "text": text, "errno": number or 0}


def rebuild(described: dict[str, object], rank: int | None) -> CheckpointError:
    """The error of another rank (`rank`: its number in the group, to be named) or of all of them (None)."""
    where = "" if rank is None else f"rank {rank}: "
    if described["kind"] == "CheckpointMismatch":
        problems, remedy = described["problems"], str(described["remedy"])
        assert isinstance(problems, list)
        return CheckpointMismatch(f"{where}{described['what']}", problems, remedy)
    kind, number = _CLASSES[str(described["kind"])], described["errno"]
    text = f"{where}{described['text']}"
    if number and issubclass(kind, OSError):
        return kind(number, text)
    return kind(text)
