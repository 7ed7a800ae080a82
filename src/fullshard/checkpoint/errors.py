"""The errors of saves and loads. `except Exception` catches all of them, and every rank of a call raises the same one.

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

# A message that lists thousands of keys does not help; `problems` has all of them.
_SHOWN = 50


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; nothing was changed by the attempt."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The state does not fit the checkpoint, or the state to save does not fit together. `problems`: all of them."""

    def __init__(self, what: str, problems: Sequence[str], remedy: str = "") -> None:
        self.what, self.problems, self.remedy = what, list(problems), remedy
        lines = [what, *(f"  {problem}" for problem in self.problems[:_SHOWN])]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more (the error's `problems` has all)")
        super().__init__("\n".join([*lines, remedy] if remedy else lines))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.problems, self.remedy)


class CheckpointDamaged(CheckpointError, ValueError):
    """A checkpoint's bytes are not those that were saved, or it breaks a rule of the format."""


class CheckpointNotFound(FileNotFoundError, CheckpointError):
    """No checkpoint was found: nothing is at its path, or only an unfinished save."""


# OSError comes first, because it takes the errno.
class CheckpointIOError(OSError, CheckpointError):
    """The operating system refused the operation; `errno` says why."""


class CheckpointBusy(CheckpointError):
    """A second saver holds the lock of the directory, or moved its pointer in the meantime."""


def io_error(error: OSError, doing: str) -> CheckpointIOError:
    """`error` with the operation, `doing`, that it interrupted."""
    number = error.errno or 0
    reason = error.strerror or str(error)
    return CheckpointIOError(number, f"{doing}: {reason}" + (f" [{_symbol(number)}]" if number else ""))


def _symbol(number: int) -> str:
    import errno

    return errno.errorcode.get(number, os.strerror(number))
