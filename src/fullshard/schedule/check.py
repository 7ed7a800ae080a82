"""Invariants of a command sequence, checked by tests, by a simulator, and by the executor with FULLSHARD_CHECK=1.

1  unshard only what is sharded; wait and cancel only what is pending; reshard only what has memory; expose only what
   is shelved; unshard_secondary only where a secondary shard is kept
2  gradients are reduced or accumulated only in a backward, and a backward ends with nothing pending
3  every rank that sees equal events issues equal commands (compare two `CommandChecker.log`s)
4  at most `max_full` units have full memory at once, not counting those that stay full
"""

from __future__ import annotations

from collections.abc import Iterable

from .record import Full

# Command -> legal state before -> state after.
_LEGAL: dict[str, dict[Full, Full]] = {
    "unshard": {Full.SHARDED: Full.PENDING},
    "wait": {Full.PENDING: Full.FULL},
    "cancel": {Full.PENDING: Full.SHARDED},
    "reshard": {Full.FULL: Full.SHARDED, Full.SHELVED: Full.SHARDED, Full.SECONDARY: Full.SHARDED},
    "shelve": {Full.FULL: Full.SHELVED, Full.SECONDARY: Full.SECONDARY},
    "expose": {Full.SHELVED: Full.FULL},
    "reshard_secondary": {Full.FULL: Full.SECONDARY},
    "unshard_secondary": {Full.SECONDARY: Full.PENDING},
}


class LifecycleError(RuntimeError):
    """A command is illegal in the state of its unit. The message ends with the last commands of that unit."""


class CommandChecker:
    """Tracks commands and raises `LifecycleError` at the first illegal one.

    `max_full`: limit on units with full memory, not counting those named in `stays_full` (None: no limit).

    >>> CommandChecker().run([("unshard", "a"), ("unshard_secondary", "a")])
    Traceback (most recent call last):
    ...
    fullshard.schedule.check.LifecycleError: a: unshard_secondary needs SECONDARY, found PENDING; last commands: unshard
    """

    def __init__(self, *, max_full: int | None = None, stays_full: Iterable[str] = ()) -> None:
        self.full: dict[str, Full] = {}
        self.log: list[tuple[str, str]] = []
        self._max_full = max_full
        self._stays_full = frozenset(stays_full)

    def run(self, commands: Iterable[tuple[str, str]]) -> None:
        """Check a whole sequence of (kind, unit name)."""
        for kind, unit in commands:
            self.command(kind, unit)

    def command(self, kind: str, unit: str) -> None:
        """Check and apply the next command."""
        state = self.full.get(unit, Full.SHARDED)
        if kind in _LEGAL:
            becomes = _LEGAL[kind]
            if state not in becomes:
                wanted = " or ".join(full.name for full in becomes)
                recent = [k for k, u in self.log if u == unit][-10:]
                raise LifecycleError(
                    f"{unit}: {kind} needs {wanted}, found {state.name}; last commands: {', '.join(recent) or 'none'}"
                )
            self.full[unit] = becomes[state]
        self.log.append((kind, unit))
        if kind == "finish":
            pending = [name for name, full in self.full.items() if full is Full.PENDING]
            if pending:
                raise LifecycleError(f"finish: expected no all-gather in flight, found those of {', '.join(pending)}")
        if self._max_full is not None and kind in ("unshard", "unshard_secondary", "wait", "expose"):
            live = [
                n for n, f in self.full.items() if f not in (Full.SHARDED, Full.SECONDARY) and n not in self._stays_full
            ]
            if len(live) > self._max_full:
                raise LifecycleError(
                    f"{kind} {unit}: expected at most {self._max_full} units with memory, found {', '.join(live)}"
                )
