"""Commands to actions: one method per command, nothing decided. The only place where tensors and messages meet.

After `run` returned, the commands given to it have been done on this rank: messages are issued in the order of the
commands, the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..comm import BufferPool, Reduction
from ..lifecycle import Command, CommandChecker
from ..param import ParamGroup
from .unit import Unit


class _InFlight(NamedTuple):
    group: ParamGroup
    trainable: tuple[int, ...]
    reduction: Reduction


class Executor:
    """Runs commands for the units of one root. `units[i]` is the unit of record index i."""

    def __init__(self, units: Sequence[Unit], pool: BufferPool, *, reductions_in_flight: int, check: bool) -> None:
        self.units = list(units)
        self.pool = pool
        self._limit = reductions_in_flight
        self._in_flight: deque[_InFlight] = deque()
        # Units with gradients to commit when the backward ends, in the order of their commands.
        self._touched: dict[Unit, None] = {}
        # Units whose held gradients are under way: their accumulation window closes with this backward.
        self._closing: dict[Unit, None] = {}
        self._checker = CommandChecker() if check else None
        # Whether more backwards were announced, so that gathers may be in flight when one of them ends.
        self.may_stay_pending: Callable[[], bool] = lambda: False
        self.listeners: list[Callable[[Command], None]] = []
        self._actions: dict[str, Callable[[Unit], None]] = {
            "gather": self._gather,
            "wait": self._wait,
            "free": self._free,
            "drop": self._drop,
            "shelve": self._shelve,
            "expose": self._expose,
            "reduce": self._reduce,
            "hold": self._hold,
            "finish": self._finish,
            "discard": self._discard,
        }

    def run(self, commands: Sequence[Command]) -> None:
        """Do the commands, in order."""
        for command in commands:
            if self._checker is not None and not (command.kind == "finish" and self.may_stay_pending()):
                self._checker.command(command.kind, command.unit.name)
            for listener in self.listeners:
                listener(command)
            self._actions[command.kind](self.units[command.unit.index])

    def holds(self, unit: Unit) -> bool:
        """Whether some rank may hold gradients of earlier backwards that no message of this one carries yet."""
        return unit.window_open and unit not in self._closing

    # ---- full parameters -----------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        unit.repair()
        unit.note_versions()
        for channel in unit.gathers:
            channel.issue()

    def _wait(self, unit: Unit) -> None:
        for channel in unit.gathers:
            channel.complete()
        unit.show_full()

    def _free(self, unit: Unit) -> None:
        unit.show_shards()
        for group in unit.groups:
            group.memory.release()

    def _drop(self, unit: Unit) -> None:
        for channel in unit.gathers:
            channel.cancel()

    def _shelve(self, unit: Unit) -> None:
        unit.show_shards()

    def _expose(self, unit: Unit) -> None:
        unit.show_full()

    # ---- gradients -----------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        self._touched[unit] = None
        accumulated, with_held = unit.window_open, self.holds(unit)
        # Only the first message of a backward carries what earlier ones left. The window closes when it ends well.
        if with_held:
            self._closing[unit] = None
        unit.arrived = 0
        for position, group in enumerate(unit.groups):
            if not group.trainable:
                continue
            dtype = group.precision.reduce
            gradients = [group.params[i].to_send(dtype, with_held=with_held) for i in group.trainable]
            reduction = unit.reduce_channel(position).issue(gradients, accumulated=accumulated)
            self._in_flight.append(_InFlight(group, group.trainable, reduction))
        while len(self._in_flight) > self._limit:
            self._collect_oldest()

    def _hold(self, unit: Unit) -> None:
        self._touched[unit] = None
        unit.arrived = 0

    def _collect_oldest(self) -> None:
        group, trainable, reduction = self._in_flight.popleft()
        for i, part in zip(trainable, reduction.collect(), strict=True):
            if part is not None:
                param = group.params[i]
                param.reduced = part if param.reduced is None else param.reduced + part

    def _finish(self, root: Unit) -> None:
        while self._in_flight:
            self._collect_oldest()
        for unit in self._touched:
            if unit.host_link is not None:
                unit.host_link.finish()
        for unit in self._touched:
            for group in unit.groups:
                for i in group.trainable:
                    group.params[i].commit(group.precision.reduce)
        self._touched.clear()
        for unit in self.units:
            unit.arrived = 0
            unit.window_open = not unit.record.sync or (unit.window_open and unit not in self._closing)
        self._closing.clear()

    def _discard(self, root: Unit) -> None:
        while self._in_flight:
            self._in_flight.popleft().reduction.abandon()
        self._touched.clear()
        self._closing.clear()
        for unit in self.units:
            unit.arrived = 0
            for param in unit.params:
                param.discard()
