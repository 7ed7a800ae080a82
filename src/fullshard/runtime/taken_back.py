"""A hook of the user's raised when gradients had been handed over: what the backward brought is taken back.

Post-accumulate hooks see `.grad` with what the backward brought, in all parameters. So they run behind everything, when
a window of accumulation has been added to. Where one raises, its caller tries the micro-batch again, or goes on with
the next step, and would have it twice. What earlier backwards left is therefore kept until the last hook returned: a
copy of the shards of `.grad`, where there are gradients to add to, and only in models with such hooks. What a hook did
itself (a step with its parameter) stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ..param import ShardedParam
from .open_windows import note_window
from .unit import Unit


class TakenBack:
    """Made before gradients are handed over; as a context manager it surrounds the hooks."""

    def __init__(self, units: Sequence[Unit], touched: Sequence[ShardedParam]) -> None:
        hooked = any(param.has_hooks for param in touched)
        self._bring_back = [param.standing() for param in touched] if hooked else []
        self._windows = [(unit, unit.window_open, unit.partial_open) for unit in units] if hooked else []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            return
        for bring_back in self._bring_back:
            bring_back()
        for unit, window_open, partial_open in self._windows:
            unit.window_open, unit.partial_open = window_open, partial_open
            note_window(unit)
