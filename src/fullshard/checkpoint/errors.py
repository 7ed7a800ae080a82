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
