"""Runs commands, one method per command: which are run, the rules decided. The only place where tensors and messages
meet.

`run` issues messages in the order of its commands, which is the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from types import TracebackType
from typing import Protocol

from torch import Tensor
from torch.profiler import record_function

from .._torch import post_accumulate_grad_hooks, profiling, registered_hooks, with_tensor_hooks
from ..comm import HostCopy, Outgoing
from ..param import ParamGroup, ShardedParam
from ..schedule import Command, CommandChecker
from .optimizer_steps import note_window
from .seam import Companion
from .stepping import Stepping
from .stream import ModelStream
from .unit import InFlight, Shared, Unit

# ---- taken back ------------------------------------------------------------------------------------------------------
# Restores `.grad` when a user's post-accumulate hook raises.
#
# Post-accumulate hooks expect the new gradients on all parameters, so they run last, after the accumulation window was
# updated. If one raises and the caller retries the micro-batch, its gradients would be added twice. A copy of the
# previous `.grad` shards is therefore kept until the last hook returns, only in models with such hooks and where there
# are gradients to add to. Side effects of a hook (a step with its parameter) stay.


class TakenBack:
    """Created before gradients are written to `.grad`; as a context manager it wraps the hooks."""

    def __init__(self, units: Sequence[Unit], touched: Sequence[ShardedParam]) -> None:
        self._bring_back = [param.gradients.standing() for param in touched]
        self._windows = [(unit, unit.gradients.windows) for unit in units]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            return
        for bring_back in self._bring_back:
            bring_back()
        for unit, windows in self._windows:
            unit.gradients.windows = windows
            note_window(unit, any(windows))


# ---- gradient observers ----------------------------------------------------------------------------------------------


class GradientObserver(Protocol):
    """Hears of the gradients of a root's backwards (extras/invariants.py)."""

    def sends(self, unit: Unit, group: ParamGroup, gradients: Sequence[Tensor | None]) -> None:
        """The full gradients of the trainable parameters of `group` are about to be reduced."""

    def receives(self) -> None:
        """A backward ends: the reduced gradients are on `ShardedParam.reduced`, and nothing was written to `.grad`.
        What it raises discards them."""

    def discards(self) -> None:
        """A step failed: what it sent is discarded."""


# ---- executor --------------------------------------------------------------------------------------------------------


class WaitingGradients:
    """Bytes of gradients that the running backward brought and that are not sent yet. `limit`: of these and of the
    messages under way together (`set_memory_budget`); None: no limit, and nothing is counted."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.nbytes = 0
        self._of: dict[Unit, int] = {}

    def add(self, unit: Unit, nbytes: int) -> None:
        self._of[unit] = self._of.get(unit, 0) + nbytes
        self.nbytes += nbytes

    def take(self, unit: Unit) -> None:
        """The gradients of `unit` are sent, or held for a later backward."""
        self.nbytes -= self._of.pop(unit, 0)

    def of(self, unit: Unit) -> int:
        return self._of.get(unit, 0)

    def clear(self) -> None:
        self._of.clear()
        self.nbytes = 0


class _Backward:
    """Notes what commands of the running backward did."""

    def __init__(self) -> None:
        # Units with gradients to commit at its end, in the order of their commands.
        self.touched: dict[Unit, None] = {}
        # Units whose held gradients are under way: their accumulation window closes with this backward.
        self.closing: set[Unit] = set()
        # Units whose partial sums are under way.
        self.carrying: set[Unit] = set()
        # The gradients, by group, of which the host does not know yet whether any rank produced them. On a device.
        self.unresolved: dict[ParamGroup, tuple[Sequence[ShardedParam], HostCopy | None]] = {}

    def clear(self) -> None:
        self.touched.clear()
        self.closing.clear()
        self.carrying.clear()
        self.unresolved.clear()


_AS_IT_IS = nullcontext()


def _stream_of(unit: Unit) -> ModelStream | None:
    assert unit.root is not None
    return unit.root.stream


class Executor:
    """Runs commands for the units of one root. `units[i]` is the unit of record index i."""

    def __init__(
        self,
        units: Sequence[Unit],
        shared: Shared,
        *,
        reductions_in_flight: int,
        companion: Companion,
        send_buffers: int | None = None,
        thread: int,
        check: bool,
    ) -> None:
        """`companion`: of the root; hears of messages before they are sent. `thread`: runs the model."""
        self.units, self.thread = list(units), thread
        self.shared = shared
        self._limit = reductions_in_flight
        # Default limit on send buffers for units without their own setting; None: no limit.
        self._send_buffers = send_buffers
        self.waiting = WaitingGradients()
        self._backward = _Backward()
        self._checker = CommandChecker() if check else None
        self._companion = companion
        # Whether this is not the last backward (`set_is_last_backward(False)`): prefetches may be pending at its end;
        # and whether the running backward is the last of its window.
        self.may_stay_pending: Callable[[], bool] = lambda: False
        self.is_final: Callable[[], bool] = lambda: True
        self.listeners: list[Callable[[Command], None]] = []
        self.gradient_observers: list[GradientObserver] = []
        self._actions: dict[str, Callable[[Unit], None]] = {
            "unshard": self._unshard,
            "wait": self._wait,
            "reshard": self._reshard,
            "cancel": self._cancel,
            "shelve": self._shelve,
            "expose": self._expose,
            "reshard_secondary": self._reshard_secondary,
            "unshard_secondary": self._unshard_secondary,
            "reduce": self._reduce,
            "accumulate": self._accumulate,
            "finish": self._finish,
            "reset": self._reset,
        }

    @cached_property
    def stepping(self) -> Stepping:
        """The steps in the backward, of units that have a stepper."""
        return Stepping(self.thread, self.is_final, partial(self._companion.did, "step"))

    def wrap_actions(self, wrapped: Callable[[str, Callable[[Unit], None]], Callable[[Unit], None]]) -> None:
        """Run `wrapped(kind, action)` for each action of a command from now on, until `unwrap_actions`."""
        for kind, action in self._actions.items():
            self._actions[kind] = wrapped(kind, action)

    def unwrap_actions(self) -> None:
        """Run the actions themselves again."""
        for kind in self._actions:
            self._actions[kind] = getattr(self, f"_{kind}")

    def run(self, commands: Sequence[Command]) -> None:
        """Run the commands in order, each in a profiler range if a profiler is active."""
        scopes = self._companion.scopes
        for position, command in enumerate(commands):
            if self._checker is not None and not (command.kind == "finish" and self.may_stay_pending()):
                self._checker.command(command.kind, command.unit.name)
            try:
                for listener in self.listeners:
                    listener(command)
                for scope in scopes:
                    scope.doing = command.told
                    if scope.failures.cause is not None:
                        scope.refuse_failure()
                if profiling():
                    with record_function(f"fullshard::{command.kind} ({command.unit.name})"):
                        self._actions[command.kind](self.units[command.unit.index])
                else:
                    self._actions[command.kind](self.units[command.unit.index])
            except BaseException:
                self._unwind(commands[position:])
                raise
        for scope in scopes:
            scope.doing = ""

    def _unwind(self, commands: Sequence[Command]) -> None:
        """Clean up after the first of `commands` failed: the rules already noted all of them as done.

        The next event discards the failed step according to those notes. So memory noted as freed must be freed, also
        for the failed command, which may have been refused because a peer failed. Messages noted as arrived must be
        dropped, or the next all-gather would wait for them. No event follows the end of a backward, so `finish` is
        discarded here.
        """
        if self._checker is not None:
            for command in commands[1:]:
                self._checker.command(command.kind, command.unit.name)
        for command in commands:
            if command.kind in ("reshard", "cancel", "shelve"):
                self._actions[command.kind](self.units[command.unit.index])
            elif command.kind == "wait":
                self._cancel(self.units[command.unit.index])
        if commands[-1].kind == "finish":
            self._reset(self.units[commands[-1].unit.index])

    @property
    def replicating_nbytes(self) -> int:
        """Bytes of messages in flight between replicas."""
        return sum(flight.reduction.nbytes for flight in self.shared.replicating if flight.owner is self)

    def must_send(self, unit: Unit) -> bool:
        """Whether `unit` must be reduced although the running backward brought no unsent gradient to this rank.

        All ranks get the same answer. True if some rank may hold gradients or partial sums of earlier backwards that no
        message carries yet, or if unused parameters are reduced as zeros.
        """
        return (
            (unit.gradients.window_open and unit not in self._backward.closing)
            or (unit.gradients.partial_open and unit.settings.all_reduces and unit not in self._backward.carrying)
            or (
                unit.settings.controls.zero_unused
                and unit.gradients.expected != 0
                and unit not in self._backward.touched
            )
        )

    @property
    def has_in_flight(self) -> bool:
        """Whether reductions of these units are under way."""
        return any(map(self._has_own, self.shared.all_in_flight))

    def _has_own(self, flights: Iterable[InFlight]) -> bool:
        for flight in flights:
            if flight.owner is self:
                return True
        return False

    # ---- full parameters -----------------------------------------------------------------------------------

    def _unshard(self, unit: Unit) -> None:
        if not unit.seal.take(self.thread):
            unit.repair()
            unit.seal.take(self.thread)
        self._companion.before(unit, "unshard")
        unit.channels.arriving = unit.channels.gathers
        for channel in unit.channels.gathers:
            channel.issue()

    def _unshard_secondary(self, unit: Unit) -> None:
        # The secondary shards stem from the last all-gather, so its noted versions stay valid. Modules show shards in
        # the meantime, so that users find shards if this backward fails.
        secondary = unit.channels.secondary
        assert secondary is not None
        secondary.show_shards()
        self._companion.before(unit, "unshard_secondary")
        unit.channels.arriving = secondary.gathers
        for channel in secondary.gathers:
            channel.issue()

    def _wait(self, unit: Unit) -> None:
        if unit.gradients.stepper is not None:
            self.stepping.refuse_weights(unit)
        for channel in unit.channels.arriving:
            channel.complete()
        self._expose(unit)
        if unit.channels.secondary is not None:
            unit.channels.secondary.release()

    def _reshard(self, unit: Unit) -> None:
        self._shelve(unit)
        for group in unit.groups:
            group.memory.release()
        if unit.channels.secondary is not None:
            unit.channels.secondary.release()

    def _cancel(self, unit: Unit) -> None:
        for channel in unit.channels.arriving:
            channel.cancel()
        if unit.channels.arrive_from_secondary:
            if unit.channels.secondary is not None:
                unit.channels.secondary.release()

    def _shelve(self, unit: Unit) -> None:
        for group in unit.groups:
            group.swap.show_shards()
        if unit.channels.secondary is not None:
            unit.channels.secondary.show_shards()

    def _expose(self, unit: Unit) -> None:
        # With the `requires_grad` of the sharded ones.
        changed = not unit.gradients.is_known
        for group in unit.groups:
            changed |= group.show_full()
        if changed:
            unit.gradients.learn()
            assert unit.root is not None
            unit.root.repaired(unit)

    def _reshard_secondary(self, unit: Unit) -> None:
        assert unit.channels.secondary is not None
        unit.channels.secondary.keep()

    # ---- gradients -----------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        if unit.gradients.stepper is not None:
            self.stepping.sends(unit)
        backward = self._backward
        backward.touched[unit] = None
        # Only the first message of a backward carries held gradients. The window closes if the backward succeeds.
        accumulated = unit.gradients.window_open
        with_held = accumulated and unit not in backward.closing
        if with_held:
            backward.closing.add(unit)
        with_partials = unit.gradients.partial_open and unit not in backward.carrying
        if with_partials:
            backward.carrying.add(unit)
        unit.gradients.arrived = 0
        keep = not unit.settings.all_reduces
        flags = ("accumulated",) * accumulated + ("partials",) * with_partials + ("keep",) * keep
        self._companion.before(unit, "reduce", flags)
        if self.waiting.limit is not None:
            # The received message takes as much memory again.
            self._shrink(self.waiting.limit - self.waiting.of(unit))
            self.waiting.take(unit)
        limit = unit.settings.controls.send_buffers or self._send_buffers
        for position, group in enumerate(unit.groups):
            if not group.trainable:
                continue
            if limit is not None:
                self._make_room(limit)
            gradients = group.take_gradients(with_held=with_held)
            if unit.settings.controls.zero_unused:
                pairs = zip(group.trainable, gradients, strict=True)
                gradients = [
                    group.params[i].gradients.zero() if gradient is None else gradient for i, gradient in pairs
                ]
            for observer in self.gradient_observers:
                observer.sends(unit, group, gradients)
            channel = unit.channels.reduces[position].get(group.trainable) or unit.channels.reduce(position)
            partials = [group.params[i].gradients.live_partial() for i in group.trainable] if with_partials else ()
            carried = self._companion.carry(unit, position, channel, keep=keep)
            reduction = channel.issue(gradients, Outgoing(accumulated, partials, keep, carried))
            self._put(InFlight(self, unit, group, group.trainable, reduction))
        if limit is None:
            while len(self.shared.in_flight) > self._limit:
                self._advance_oldest(self.shared.in_flight)
        if self.waiting.limit is not None:
            self._shrink(self.waiting.limit)

    def _put(self, flight: InFlight) -> None:
        """Queue `flight` by the stage of its message: among the replicas, or over the shards."""
        if flight.reduction.is_replicating:
            self.shared.replicating.append(flight)
            while len(self.shared.replicating) > self._limit:
                self._advance_oldest(self.shared.replicating)
        else:
            self.shared.in_flight.append(flight)

    def gradient_came(self, unit: Unit, nbytes: int) -> None:
        """The running backward brought `nbytes` of gradients to `unit`. Called only if a byte limit is set."""
        if unit.record.plan.sync:
            self.waiting.add(unit, nbytes)
            self.expect_gradient(unit)

    def expect_gradient(self, unit: Unit) -> None:
        """Make room for the largest gradient of `unit` that may still come."""
        if self.waiting.limit is not None and unit.record.plan.sync and self.shared.in_flight:
            self._shrink(self.waiting.limit - unit.gradients.largest_missing_nbytes())

    def _shrink(self, nbytes: int) -> None:
        """Wait for the oldest messages until gradients and messages fit in `nbytes`, or no message is left."""
        in_flight = self.shared.in_flight
        excess = self.waiting.nbytes - nbytes
        for flight in in_flight:
            excess += flight.reduction.held_nbytes
        if excess <= 0:
            return
        for flight in list(in_flight):
            # Issuing a second message here could break the common order of messages.
            if flight is not in_flight[0] or flight.reduction.has_next:
                return
            excess -= flight.reduction.held_nbytes
            self._advance_oldest(in_flight)
            if excess <= 0:
                return

    def _make_room(self, send_buffers: int) -> None:
        """Wait until fewer than `send_buffers` buffers are in use."""
        in_flight, replicating = self.shared.all_in_flight
        while len(in_flight) >= send_buffers:
            self._advance_oldest(in_flight)
        while sum(f.reduction.keeps_send_buffer for f in replicating) + len(in_flight) >= send_buffers:
            self._advance_oldest(replicating)

    def _accumulate(self, unit: Unit) -> None:
        self._backward.touched[unit] = None
        self.waiting.take(unit)
        unit.gradients.arrived = 0

    def _advance_oldest(self, flights: deque[InFlight]) -> None:
        """Wait for the oldest message of `flights`; issue the next message of its reduction, or collect the result."""
        flight = flights.popleft()
        stream = None if flight.owner is self else _stream_of(flight.unit)
        with _AS_IT_IS if stream is None else stream.ordered():
            if flight.reduction.has_next:
                flight.reduction.advance()
                self._put(flight)
            else:
                self._collect(flight)

    def _collect(self, flight: InFlight) -> None:
        # Of another root, where roots share their queues.
        owner = flight.owner
        assert isinstance(owner, Executor)
        unresolved = owner._backward.unresolved
        if unresolved:
            owner._drop_absent([flight.group])
        parts = flight.reduction.collect()
        present = flight.reduction.present
        if present is not None:
            params = [flight.group.params[i] for i in flight.trainable]
            if flight.unit.gradients.stepper is None and all(
                p.gradients.reduced is p.gradients.fresh_partial is None for p in params
            ):
                unresolved[flight.group] = (params, present)
            else:
                parts = [part if there else None for part, there in zip(parts, present.flags(), strict=True)]
        flight.group.receive(flight.trainable, parts, partial=flight.reduction.keeps)
        if flight.unit.gradients.stepper is not None:
            owner.stepping.collected(flight)

    def _drop_absent(self, groups: Iterable[ParamGroup]) -> None:
        """Wait for the flags of gradients that arrived for `groups`, and drop those that no rank produced."""
        for group in groups:
            params, present = self._backward.unresolved.pop(group, ((), None))
            if present is not None:
                for param, there in zip(params, present.flags(), strict=True):
                    if not there:
                        param.gradients.reduced = param.gradients.fresh_partial = None

    def _finish(self, root: Unit) -> None:
        # Follow-up messages move to the second queue, so one pass in this order drains both.
        for flights in self.shared.all_in_flight:
            while flights and self._has_own(flights):
                self._advance_oldest(flights)
        if self._backward.unresolved:
            # The latest first: when its flags are on the host, those of the others are, and the host waits once.
            self._drop_absent([*reversed(self._backward.unresolved)])
        for unit in self._backward.touched:
            if unit.host_link is not None:
                unit.host_link.finish()
        for unit in self.units:
            if unit.host_link is not None:
                unit.host_link.settle()
        self._companion.backward_ends()
        for observer in self.gradient_observers:
            observer.receives()
        touched: list[tuple[Unit, int, ShardedParam]] = []
        shards: list[Tensor] = []
        for unit in self._backward.touched:
            for position, group in enumerate(unit.groups):
                for i in group.trainable:
                    touched.append((unit, position, group.params[i]))
                    shards.append(group.params[i].sharded)
        # Before any gradient is committed: if a hook raises, the step leaves no trace.
        if any(map(registered_hooks, shards)):
            for i in with_tensor_hooks(shards):
                unit, position, param = touched[i]
                if param.gradients.run_tensor_hooks():
                    self._companion.did("hook", unit, position, param.name)
        # Most models have none.
        hooked = any(map(post_accumulate_grad_hooks, shards))
        undo = TakenBack(self.units, [param for _, _, param in touched]) if hooked else None
        arrived = [(unit, position, param) for unit, position, param in touched if param.gradients.commit()]
        assert root.root is not None
        stream = root.root.stream
        if stream is not None and stream.reader is not None:
            stream.leaves([param.sharded.grad for _, _, param in arrived])
        ends = steps = False
        for unit in self.units:
            gradients, sync = unit.gradients, unit.record.plan.sync
            gradients.arrived = 0
            steps = steps or gradients.stepper is not None
            if not sync:
                gradients.show_held()
            gradients.window_open = not sync or (gradients.window_open and unit not in self._backward.closing)
            kept = sync and not unit.settings.all_reduces and unit.is_replicated
            gradients.partial_open = kept or (gradients.partial_open and unit not in self._backward.carrying)
            is_open = gradients.window_open or gradients.partial_open
            note_window(unit, is_open)
            ends = ends or (not is_open and unit in self._backward.touched)
        self._backward.clear()
        self.waiting.clear()
        # Not after micro-batches that hold their gradients: that would free the buffers the last micro-batch needs.
        if ends:
            self.shared.pool.end_of_backward(id(self))
        if undo is not None:
            # User hooks run last: they may read any gradient, and may raise.
            with undo:
                for unit, position, param in arrived:
                    if post_accumulate_grad_hooks(param.sharded) and param.gradients.run_hooks():
                        self._companion.did("hook", unit, position, param.name)
        if steps:
            self.stepping.finish([(unit, param) for unit, _, param in arrived])

    def _reset(self, root: Unit) -> None:
        for flights in self.shared.all_in_flight:
            for _ in range(len(flights)):
                flight = flights.popleft()
                if flight.owner is self:
                    flight.reduction.abandon()
                else:
                    flights.append(flight)
        self._backward.clear()
        self.waiting.clear()
        if any(unit.gradients.stepper is not None for unit in self.units):
            self.stepping.discard()
        self._companion.discards()
        for observer in self.gradient_observers:
            observer.discards()
        for unit in self.units:
            unit.gradients.arrived = 0
            for param in unit.params:
                param.gradients.discard()
