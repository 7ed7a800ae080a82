"""The rows of one recorded step, as they come: events, commands, messages and bytes (see/record.py).

A step that is recorded in full attaches itself to the roots of the model and to their data groups, and lets go of them
at its end. Nothing of it is left in steps that are not recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import local_of
from ..comm import DataGroup, Sent
from ..engine import Root, Unit
from ..engine.executor import Executor
from ..engine.unit import InFlight
from ..param import PendingGrad, ShardedParam
from ..schedule import Command, Event

# Positions in the list of a message, which is filled as it goes: `Message` in see/record.py.
_NEED, _ARRIVAL, _READY, _DEVICE_NEED, _DEVICE_READY = 6, 7, 8, 9, 10


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists and dicts of them."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    if isinstance(tensors, dict):
        tensors = tensors.values()
    return sum(map(_nbytes, tensors)) if isinstance(tensors, Iterable) else 0


def message_nbytes(call: str, arguments: Sequence[Any], world: int) -> int:
    """Returns the bytes that a rank receives of others in `call` of a backend with `arguments`, at the least: (W-1)/W
    of the output of an all-gather or all-to-all and of the input of a reduce-scatter, twice that of an all-reduce."""
    if call.endswith("_each"):  # (group, outputs, ...), of other ranks or of all
        received = _nbytes(arguments[1])
        return received if call == "exchange_each" else received - received // world
    if call.endswith("_in_levels"):  # (group, levels, outputs, pieces), or (group, levels, leaving, arriving, dtype)
        received = _nbytes(arguments[2 if call == "gather_in_levels" else 3])
        return received - received // world
    whole = max(_nbytes(arguments[0]), _nbytes(arguments[1]) if "reduce_scatter" in call else 0)
    if "broadcast" in call:
        return whole
    once = whole - whole // world
    return 2 * once if call == "allreduce" else once


def _held(unit: Unit) -> int:
    return sum(param.gradients.held.nbytes for param in unit.params if param.gradients.held is not None)


def _sharded_gradients(unit: Unit) -> int:
    """Bytes of the gradients on the shards, this rank's part."""
    grads = [param.sharded.grad for param in unit.params]
    return sum(local_of(grad).nbytes for grad in grads if grad is not None and not isinstance(grad, PendingGrad))


# ---- the device's clock ----------------------------------------------------------------------------------------------


class DeviceClock:
    """Marks on the current stream of `device`, read when all of them have passed. Waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> int:
        """Mark the current stream; the number of the mark."""
        event: Any = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        self._marks.append(event)
        return len(self._marks) - 1

    def has_passed(self) -> bool:
        """Whether the device came to all marks."""
        return not self._marks or bool(self._marks[-1].query())

    def synchronize(self) -> None:
        """Wait until it did."""
        if self._marks:
            self._marks[-1].synchronize()

    def read(self) -> list[int]:
        """The time of each mark in nanoseconds since the first one. Only once they have passed."""
        return [round(self._marks[0].elapsed_time(mark) * 1e6) for mark in self._marks]


# ---- rows ------------------------------------------------------------------------------------------------------------


class StepRows:
    """The rows of a step of `roots`. `numbers`: of their units in the header. `state`: bytes of each unit's optimizer
    state, if known yet."""

    def __init__(self, roots: Sequence[Root], numbers: dict[Unit, int], state: dict[int, int]) -> None:
        self._roots, self._numbers = roots, numbers
        device = next(iter(numbers)).device
        self._clock = DeviceClock(device) if device.type != "cpu" else None
        self.events: list[list[Any]] = []
        self.commands: list[list[Any]] = []
        self.messages: dict[tuple[str, int], list[Any]] = {}
        self.levels: list[list[Any]] = []
        self._held: Counter[tuple[int, str]] = Counter()
        # The unit (-1: none), kind and rule of the running command.
        self._running: tuple[int, str, str] = (-1, "", "")
        self._undo: list[Callable[[], None]] = []
        self.begin = perf_counter_ns()
        for unit, number in numbers.items():
            self._level(number, "shards", sum(group.flat.nbytes for group in unit.groups))
            self._level(number, "optimizer", state.get(number, 0))
            self._after(unit, unit.root.executor if isinstance(unit.root, Root) else None, "finish")

    def attach(self) -> None:
        """Record from now on."""
        for root in self._roots:
            names = {unit.record.name: self._numbers[unit] for unit in root.units}
            listen, note = partial(self._event, names), self._command
            root.event_listeners.append(listen)
            root.executor.listeners.append(note)
            root.executor.wrap_actions(partial(self._timed, root.executor))
            self._undo += [
                partial(root.event_listeners.remove, listen),
                partial(root.executor.listeners.remove, note),
                root.executor.unwrap_actions,
            ]
            for group in {group for scope in root.companion.scopes for group in scope.groups.values()}:
                if isinstance(group, DataGroup):
                    group.observer = self
                    self._undo.append(partial(setattr, group, "observer", None))
            for unit in root.units:
                if unit.gradients.on_arrival is not None:
                    self._undo.append(self._hear_gradients(unit, unit.gradients.on_arrival))

    def detach(self) -> None:
        """Record no longer."""
        for unit in self._numbers:
            self._level(self._numbers[unit], "sharded gradients", _sharded_gradients(unit))
        undo, self._undo = self._undo, []
        for each in undo:
            each()

    def is_complete(self, *, wait: bool = False) -> bool:
        """Whether the device came to the end of it; `wait`: until it did."""
        if self._clock is None:
            return True
        if wait:
            self._clock.synchronize()
        return self._clock.has_passed()

    def fields(self) -> dict[str, Any]:
        """The rows for the file. Once it is complete."""
        if self._clock is not None:
            times = self._clock.read()
            for row in self.events:
                row[4] = times[row[4]]
            for row in self.messages.values():
                for place in (_DEVICE_NEED, _DEVICE_READY):
                    row[place] = None if row[place] is None else times[row[place]]
            self._clock = None
        found = {"events": self.events, "commands": self.commands, "messages": list(self.messages.values())}
        return found | {"levels": self.levels}

    def held(self) -> list[list[Any]]:
        """[unit, kind, bytes] of what is held now. Of rows that were not attached: as they were made."""
        for unit, number in self._numbers.items():
            grads = [param.full.grad for param in unit.params if param.full is not None]
            self._held[number, "gradients"] = sum(grad.nbytes for grad in grads if grad is not None)
            self._held[number, "sharded gradients"] = _sharded_gradients(unit)
        return [[unit, kind, nbytes] for (unit, kind), nbytes in self._held.items() if nbytes]

    def now(self) -> int:
        """Nanoseconds since the step began."""
        return perf_counter_ns() - self.begin

    def _mark(self) -> int | None:
        return None if self._clock is None else self._clock.mark()

    # ---- events and commands -------------------------------------------------------------------------------

    def _event(self, names: dict[str, int], event: Event) -> None:
        self.events.append([self.now(), event.kind, names[event.unit], " ".join(event.flags), self._mark()])

    def _command(self, command: Command) -> None:
        self._running = (-1, command.kind, command.rule)

    def _timed(self, executor: Executor, kind: str, action: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def run(unit: Unit) -> None:
            number, rule = self._numbers[unit], self._running[2]
            self._running = (number, kind, rule)
            begin = self.now()
            try:
                action(unit)
            finally:
                self.commands.append([kind, number, rule, begin, self.now(), len(self.events) - 1])
                self._running = (-1, "", "")
                self._after(unit, executor, kind)

        return run

    # ---- messages ------------------------------------------------------------------------------------------

    def sent(self, message: Sent, call: str, arguments: Sequence[Any], begun: int) -> None:
        """`comm.data_group.Observer`."""
        group = message.group
        number, kind, _ = self._running
        nbytes = message_nbytes(call, arguments, len(group.ranks))
        purpose = kind or group.scope.told or group.purpose
        row = [group.name, message.number, number, purpose, nbytes, begun, None, None, None, None, None]
        self.messages[group.name, message.number] = row
        future = message.future if group.device.type == "cpu" else None
        if future is not None:
            future.add_done_callback(lambda _: row.__setitem__(_ARRIVAL, self.now()))

    def waits(self, message: Sent) -> None:
        """`comm.data_group.Observer`."""
        row = self.messages.get((message.group.name, message.number))
        if row is not None and row[_NEED] is None:
            row[_DEVICE_NEED] = self._mark()
            row[_NEED] = self.now()

    def waited(self, message: Sent) -> None:
        """`comm.data_group.Observer`."""
        row = self.messages.get((message.group.name, message.number))
        if row is not None:
            row[_READY] = self.now()
            row[_DEVICE_READY] = self._mark()

    # ---- bytes ---------------------------------------------------------------------------------------------

    def _hear_gradients(self, unit: Unit, inner: Callable[[ShardedParam, int], None]) -> Callable[[], None]:
        number = self._numbers[unit]

        def arrived(param: ShardedParam, bit: int) -> None:
            gradient = param.full.grad
            if gradient is not None:
                self._level(number, "gradients", self._held[number, "gradients"] + gradient.nbytes)
            inner(param, bit)

        def undo() -> None:
            if unit.gradients.on_arrival is arrived:
                unit.gradients.on_arrival = inner

        unit.gradients.on_arrival = arrived
        return undo

    def _level(self, unit: int, kind: str, nbytes: int) -> None:
        if self._held[unit, kind] != nbytes:
            self._held[unit, kind] = nbytes
            self.levels.append([self.now(), unit, kind, nbytes])

    def _after(self, unit: Unit, executor: Executor | None, kind: str) -> None:
        """Note what the command `kind` of `unit` changed."""
        number = self._numbers[unit]
        self._level(number, "full", sum([group.memory.live_nbytes for group in unit.groups]))
        if unit.channels.secondary is not None:
            self._level(number, "secondary", unit.channels.secondary.live_nbytes)
        if kind in ("reduce", "accumulate", "reset"):
            self._level(number, "gradients", 0)
            self._level(number, "held", _held(unit))
        if kind in ("finish", "reset"):
            for each in unit.root.units if unit.root is not None else ():
                self._level(self._numbers[each], "sharded gradients", _sharded_gradients(each))
                self._level(self._numbers[each], "held", _held(each))
        if executor is None:
            return
        flights = [flight for queue in executor.shared.all_in_flight for flight in queue if flight.owner is executor]
        self._in_flight(flights)
        self._level(-1, "staging", max(0, executor.shared.pool.nbytes - sum([_flying(each) for each in flights])))

    def _in_flight(self, flights: Sequence[InFlight]) -> None:
        held: Counter[int] = Counter()
        for flight in flights:
            held[self._numbers[flight.unit]] += _flying(flight)
        for unit in [unit for (unit, kind), nbytes in self._held.items() if kind == "messages" and nbytes]:
            self._level(unit, "messages", held.pop(unit, 0))
        for unit, nbytes in held.items():
            self._level(unit, "messages", nbytes)


def _flying(flight: InFlight) -> int:
    return flight.reduction.held_nbytes + flight.reduction.nbytes


def units_of(model: nn.Module, roots: Sequence[Root]) -> dict[Unit, str]:
    """The units of `roots` and their names in `model`, of all roots in order."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    found: dict[Unit, str] = {}
    for root in roots:
        prefix = prefixes.get(id(root.units[0].module), "")
        for unit in root.units:
            name = unit.record.name
            found[unit] = (prefix if name == "root" else f"{prefix}.{name}") if prefix else name
    return found
