"""The root of a model: turns reports of modules and autograd into commands for its units.

    report (hooks.py)  ->  event + what the rules must know  ->  schedule.rules  ->  commands  ->  executor

`root_of` forms a root. The first report of a backward marks its begin, backward.py its end. The next report after a
failed step discards its leftovers (`reset`), so no stale flag survives; see ADR 0008.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import cast

import torch
from torch import nn

from .._torch import (
    current_backward,
    in_transform,
    saved_tensor_hooks_allowed,
    without_transforms,
)
from ..comm import Locations, located, settle_uploads, uploading
from ..param import ShardedParam
from ..policy import Controls, Options
from ..policy.options import check_known_names
from ..schedule import Command, Event, Full, RunRecord, UnitRecord, Use, rules
from ..schedule.optional import is_second
from .backward import NOT_RUNNING, RunningBackward, SavedTensorHooks
from .executor import Executor
from .finalization import lost_gradients, note_under_way, refuse_below, refuse_unfinished
from .foreign import note_mixed
from .names import clean_name, parameter_names
from .optimizer_steps import expect_backward, follow_steps, note_backward
from .optional_units import arrange, note_stale, refuse_out_of_place, refuse_recomputed_early
from .stream import ModelStream
from .uninitialized import prove_initialized
from .unit import HOOKED_FORWARDS, Shared, Unit, unit_of

# ---- root ------------------------------------------------------------------------------------------------------------


class Root:
    """`units[0]` is the unit of the root module, when that module is one. Make it with `root_of`."""

    def __init__(self, units: Sequence[Unit], names: Sequence[str], *, provisional: bool) -> None:
        self.units = list(units)
        # Whether it was made for one unit by an early `unshard`; the real root replaces it.
        self.provisional = provisional
        self.options = options = Options.current()
        for unit in self.units:
            unit.resolve(unit.settings.controls, options)
        first = self.units[0]
        device = first.device
        self._backward = RunningBackward(follow_steps(), self.backward_end, self._backward_failed)
        # The companion does what this root has to do with the other ranks, beside messages.
        self.companion = first.settings.accompany(self)
        # Whether the ranks of each group are on several nodes, and how their messages go.
        self._locations: Locations = {}
        self.executor = Executor(
            self.units,
            first.settings.shared or Shared(keep=device.type == "cpu"),
            companion=self.companion,
            reductions_in_flight=options.reductions_in_flight,
            send_buffers=options.send_buffers_on(device.type),
            thread=self.thread,
            check=options.check,
        )
        # The stream on which all commands of a step run, on a device.
        self.stream = None if device.type == "cpu" else ModelStream(device)
        self.run = RunRecord([unit.record for unit in self.units], prefetch_depth=options.prefetch_depth)
        self.limit_bytes()
        ending = self.run.ending
        ending.is_last = first.settings.is_last_backward
        ending.manual = first.settings.manual_finalization
        self.executor.may_stay_pending = lambda: not ending.ends_step
        self.executor.is_final = lambda: (ending.is_last or ending.is_manual) and self._backward.spends
        self.reads = SavedTensorHooks(self._weight_needed, always=options.watch == "always")
        # Called with every event and every command, as they happen (observe/trace.py).
        self.event_listeners: list[Callable[[Event], None]] = []
        for index, (unit, name) in enumerate(zip(self.units, names, strict=True)):
            unit.record.index = index
            unit.record.name = name
            unit.take_grad_dtypes()
        self.companion.forms()
        if any(unit.settings.manual_finalization for unit in self.units[1:]):
            refuse_below(self)
        self.companion.connects(self.units)
        for unit in self.units:
            self._locate(unit, unit.settings.controls)
        first.record.plan.keeps_in_evaluation = first.settings.reshard_after_forward is not None
        for unit in self.units:
            unit.gradients.on_arrival = partial(self._gradient_arrived, unit)
            unit.attach(self, self.shared.pool)
            self.reads.learn(unit)
        if not provisional and any(unit.settings.optional for unit in self.units):
            arrange(self.units)
        # Whether parameters or buffers may be uninitialised, which the next forward checks; and whether all ranks will
        # make the same checks. A load with `assign=True` leaves buffers on the meta device.
        on_meta = any(buffer.is_meta for buffer in first.module.buffers())
        self.some_unproven = on_meta or any(unit.unproven for unit in self.units)
        self._checks_agreed = False

    # The root is asked for what others own. C functions: hooks call them often in a step.
    shared = cast(Shared, property(attrgetter("executor.shared")))
    thread = cast(int, property(attrgetter("_backward.thread")))

    def repaired(self, unit: Unit) -> None:
        """Register the full parameters of `unit`, which may be new objects."""
        self.reads.learn(unit)

    def met_by_hand(self, *, renewed: bool) -> None:
        """All ranks met after a failure, outside of a step, as they otherwise do at a forward."""
        self._backward.settle()
        if renewed or self.run.has_leftovers:
            self.reset()

    def _meets(self) -> bool:
        """If a rank failed since, wait for all ranks to meet. Returns whether they had diverged."""
        for scope in self.companion.scopes:
            failures = scope.failures
            if failures.must_meet or failures.cause is not None or scope.faults or scope.states:
                return self.companion.meets()
        return False

    # ---- forward -------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, running: Callable[[int], bool], *, in_method: bool) -> tuple[bool, bool]:
        """Report that a forward of `unit` begins. `running`: whether another forward of the unit is running in a given
        generation of the root; `in_method`: whether a registered method is running.

        Returns whether this is a new use, not recomputation in backward; and whether another forward of `unit` is
        running."""
        if in_transform():
            with without_transforms():
                return self.pre_forward(unit, running, in_method=in_method)
        if self._backward.end is not NOT_RUNNING:
            self._backward.settle()
        if not self._checks_agreed and not self.provisional:
            if self._meets():
                self.reset()
            # All ranks must make the same checks, but some may have memory without values while others have values.
            self.some_unproven = self.companion.unproven(self.units, self.some_unproven)
            self._checks_agreed = True  # only now: if a peer fails before it gets here, all ranks ask again
        if self.some_unproven:
            prove_initialized(self.units)
            self.some_unproven = False
        record, run = unit.record, self.run
        in_backward = current_backward() != -1
        outermost = run.forward_root in (None, record) or record.index == 0
        if not in_backward and outermost and not in_method:
            # After a meeting also discard what a successful forward left: other ranks may not have it.
            if self._meets() or run.has_leftovers:
                self.reset()
            if run.ending.waits or run.ending.sent or self.shared.finalizing is not None:
                refuse_unfinished(self, f"the forward of {record.name}")
        nested = running(run.generation)
        if record.joining is not None and not in_backward:
            refuse_out_of_place(run, record)
            nested = nested or is_second(record)
        elif record.joining is not None and not record.in_backward:
            refuse_recomputed_early(run, record)
        if run.forward_root is None and not in_backward:
            for other in self.units if torch.is_grad_enabled() else ():
                if other.gradients.stepper is not None:
                    other.gradients.stepper.refuse_half_a_step()
            self.companion.forward_begins(unit, nested=nested)
            if self.stream is not None:
                self.stream.begins(unit.holds_memory() for unit in self.units)
            self._wait_for_optimizer()
            if torch.is_grad_enabled():
                expect_backward(self)
            if record.joining is not None:
                note_stale(self.units, self.thread)
        if self.run.order and record.index == 0 and not in_backward and not nested:
            self._expect_reads_again()
        repeated = in_backward and record.in_backward
        stale = record.full is not Full.SHARDED and not nested and unit.seal.is_broken(self.thread)
        grad = torch.is_grad_enabled()
        commands = rules.pre_forward(run, record, in_backward=in_backward, nested=nested, stale=stale, grad=grad)
        self._do("pre_forward", record, commands, in_backward=in_backward, nested=nested, stale=stale)
        return not repeated, nested

    def post_forward(
        self, unit: Unit, ran: Callable[[], bool], *, nested: bool, inputs: bool, outputs: bool
    ) -> Use | None:
        """Report that a forward of a module of `unit` is over. `ran`: notes that the module ran, and returns whether
        other modules of the unit did not run yet. `outputs`: some output requires a gradient; `inputs`: input hooks
        will report the end of its backward; `nested`: another forward of the unit is running.

        Returns the use of the unit that ended, if any."""
        in_backward = current_backward() != -1
        repeated = in_backward and unit.record.in_backward
        more = not nested and not repeated and ran()
        # Without saved-tensor hooks, nodes may read weights without a report.
        opaque = outputs and not saved_tensor_hooks_allowed()
        flags = {"in_backward": in_backward, "nested": nested, "inputs": inputs, "outputs": outputs, "more": more}
        flags["opaque"] = opaque
        is_outermost = not nested and self.run.forward_root is unit.record
        self._do("post_forward", unit.record, rules.post_forward(self.run, unit.record, **flags), **flags)
        if is_outermost:
            # After the messages of units that only other ranks ran: ranks compare the same ones.
            try:
                self.companion.forward_ends()
            except BaseException as error:
                # What each rank expects next differs too: the next forward begins with a meeting.
                self.run.refuse_forward(unit.record)
                self.companion.failed(error, f"the end of the forward of {unit.record.name}")
                raise
            if uploading and not torch.is_grad_enabled():
                settle_uploads()
        sending = unit.record.sending
        return sending.open[-1] if sending.open and not sending.begins else None

    def forward_failed(self, unit: Unit, *, nested: bool) -> None:
        """Report that a forward of `unit` raised."""
        flags = {"in_backward": current_backward() != -1, "nested": nested}
        if not flags["in_backward"] and not nested and self.run.forward_root is unit.record:
            self.companion.forward_ends(raised=True)
            # An evaluation without sharded parameters sends nothing, so no peer waits for it.
            if torch.is_grad_enabled() or any(links.shard.world > 1 for other in self.units for links in other.links):
                self.companion.failed(sys.exception(), f"the forward of {unit.record.name}")
        self._do("forward_failed", unit.record, rules.forward_failed(self.run, unit.record, **flags), **flags)

    # ---- backward ------------------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit, use: Use | None = None, *, needed: bool = False) -> None:
        """Report that a gradient reached an output of `use` of `unit`; `needed`: one of its saved weights is read."""
        if self._backward.end() is None:
            self._notice_backward()
        if self.executor.waiting.limit is not None:
            self.executor.expect_gradient(unit)
        self._backward.reached.setdefault((unit, use), unit.record.full is not Full.FULL)
        flags = {"create_graph": torch.is_grad_enabled(), "needed": needed}
        self._do("pre_backward", unit.record, rules.pre_backward(self.run, unit.record, use=use, **flags), **flags)

    def inputs_reached(self, unit: Unit) -> None:
        """Report that the gradients of the inputs of one use of `unit` are complete."""
        present = unit.gradients.arrived != 0
        commands = rules.inputs_reached(self.run, unit.record, present=present)
        self._do("inputs_reached", unit.record, commands, none=not present)

    def _gradient_arrived(self, unit: Unit, param: ShardedParam, bit: int) -> None:
        record = unit.record
        if record.full is Full.PENDING and not record.in_backward and unit.may_read_early:
            # The all-gather into this memory is in flight: the weights may have been read too early.
            unit.reads.is_irregular = True
            raise RuntimeError(
                f"{record.name}: expected the gradient of an output of this module before that of its parameter "
                f"{param.name}, found the parameter's alone while its weights were being gathered; run the step again: "
                f"from now on this module's weights are watched, and such a backward is correct"
            )
        if self._backward.end() is None:
            self._notice_backward()
        self._backward.brought = True
        stream = self.stream
        if stream is not None and stream.current() != stream.stream:
            stream.reads(param.full.grad)
            with stream.ordered():
                param.gradients.take_fresh()
        else:
            param.gradients.take_fresh()
        gradients = unit.gradients
        gradients.arrived |= bit
        # Reentrant checkpointing runs a nested backward for each use of the unit: count those of this one.
        backward, (before, came) = current_backward(), gradients.came
        gradients.came = backward, (came if before == backward else 0) | bit
        if self.executor.waiting.limit is not None and param.gradients.fresh is not None:
            self.executor.gradient_came(unit, param.gradients.fresh.nbytes)
        if gradients.came[1] == gradients.expected:
            self._do("grads_ready", record, rules.grads_ready(self.run, record))

    def _weight_needed(self, unit: Unit) -> None:
        if unit.gradients.stepper is not None and any(group.shares_memory for group in unit.groups):
            self.executor.stepping.refuse_weights(unit)
        if unit.record.full is Full.FULL and unit.record.in_backward:
            if self.stream is not None and self.stream.lead():
                # It was gathered on the model's stream, and only a watched read has this one wait for that.
                unit.reads.is_irregular = True
            return
        if unit.record.full is not Full.FULL:
            unit.reads.is_irregular = True
        self.pre_backward(unit, needed=True)

    def _notice_backward(self) -> None:
        """The first report of a backward: register the callback for its end."""
        if self._backward.end is not NOT_RUNNING:
            self._backward.settle()
        if self.run.in_backward:
            self.reset()
        if self.run.ending.waits or self.run.ending.sent or self.shared.finalizing is not None:
            refuse_unfinished(self, "a backward")
        self._backward.begin()

    def backward_end(self) -> None:
        """Report that the whole backward is over."""
        self._backward.forget()
        must_send = self.executor.must_send
        present = [unit.gradients.arrived != 0 or (unit.record.plan.sync and must_send(unit)) for unit in self.units]
        backward = self._backward
        if backward.brought:
            note_backward(self)
        backward.note_split(more_follow=self.executor.may_stay_pending())
        spent = backward.spends and backward.brought
        # Most backwards are spent: record the flag in traces only if it matters.
        matters = any([unit.record.pins.count for unit in self.units])
        commands = rules.backward_end(self.run, self.run.units[0], present, spent=spent)
        try:
            self._do("backward_end", self.run.units[0], commands, spent=spent and matters)
        except BaseException as error:
            # No later report would publish this: for the rules the backward is over. User hooks run here, too.
            self.companion.failed(error, "the end of the backward")
            raise
        if self.run.ending.is_manual:
            note_under_way(self)

    def _backward_failed(self, error: BaseException | None) -> None:
        """The running backward raised `error`, or an unknown exception if None."""
        # The caller got an exception, so the missing gradients need no second error.
        note_backward(self)
        if error is not None:
            note_mixed(error)
        self.companion.failed(error, "its backward")
        if self.run.in_backward:
            self._do("backward_failed", self.run.units[0], rules.backward_failed(self.run, self.run.units[0]))

    def has_leftovers(self) -> bool:
        """Whether a forward or a backward failed, or runs."""
        self._backward.settle()
        return self.run.has_leftovers

    def finalize(self) -> None:
        """Send what the backwards of the step kept; `wait_finalize` must follow. Raises `RuntimeError` where a split
        backward lost gradients (`lost_gradients`)."""
        inputs_only, self._backward.inputs_only = self._backward.inputs_only, set()
        for unit in self.units:
            unit.gradients.take_assigned()
        lost = lost_gradients(self.units, {unit for unit, _ in inputs_only})
        if lost is not None:
            self.reset()
            raise lost
        note_backward(self)
        must_send = self.executor.must_send
        present = [unit.gradients.arrived != 0 or (unit.record.plan.sync and must_send(unit)) for unit in self.units]
        first = self.run.units[0]
        try:
            self._do("finalize", first, rules.finalize(self.run, first, present))
        except BaseException as error:
            self.companion.failed(error, "finalize_backward")
            self.reset()
            raise
        note_under_way(self)

    def wait_finalize(self) -> None:
        """Wait for the reductions of the step, and write `.grad`."""
        first = self.run.units[0]
        self._release_shared()
        commands = rules.wait_finalize(self.run, first)
        note_under_way(self)
        try:
            self._do("wait_finalize", first, commands)
        except BaseException as error:
            # As at the end of a backward: no later report would publish this.
            self.companion.failed(error, "finalize_backward")
            raise

    def _release_shared(self) -> None:
        if self.run.ending.waits:
            self.shared.finalizing = None

    def reduce_held(self) -> None:
        """Reduce the gradients held from no_sync backwards, outside of a backward (pipeline schedules up to 2.14)."""
        if current_backward() != -1:
            raise RuntimeError(
                "held gradients: expected no backward to be running when they are reduced explicitly, found one; do it "
                "after the backward, or let the last one reduce them with set_requires_gradient_sync(True)"
            )
        self.finalize()
        self.wait_finalize()

    def reset(self) -> None:
        """Discard the leftovers of an unfinished step."""
        failed_in_backward = self.run.in_backward
        self.reads.reset()
        self._backward.forget()
        self._release_shared()
        self._do("reset", self.run.units[0], rules.reset(self.run, self.run.units[0]))
        note_under_way(self)
        if failed_in_backward and self.options.watch == "auto":
            # The backward may have failed on weights read without a report: watch for that.
            for unit in self.units:
                unit.reads.left = max(unit.reads.left, HOOKED_FORWARDS)

    def _expect_reads_again(self) -> None:
        """Watch saved weights in a forward that follows a forward: a backward in between may have failed before its
        first report, on a weight read without a report. Bounded, for programs that run two forwards per step."""
        if self.options.watch == "auto" and self.reads.again_left:
            self.reads.again_left -= 1
            for unit in self.units:
                unit.reads.left = max(unit.reads.left, 1)

    # ---- the user's calls ----------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Issue the all-gather of `unit`."""
        if current_backward() == -1:
            self._backward.settle()
            self._meets()
            if self.stream is not None and self.run.forward_root is None:
                self.stream.begins(unit.holds_memory() for unit in self.units)
        stale = unit.record.full is not Full.SHARDED and unit.seal.is_broken(self.thread)
        commands = rules.unshard(self.run, unit.record, stale=stale)
        self._do("unshard", unit.record, commands, stale=stale)

    def wait_unshard(self, unit: Unit) -> None:
        """Make the gathered parameters usable."""
        self._do("wait_unshard", unit.record, rules.wait_unshard(self.run, unit.record))

    def reshard(self, unit: Unit) -> None:
        """Free the full parameters of `unit`."""
        self._do("reshard", unit.record, rules.reshard(self.run, unit.record))

    def limit_bytes(self) -> None:
        """Apply the user's `set_memory_budget` on the root."""
        first, *below = self.units
        set_ = [u for u in below if (u.settings.prefetch_nbytes, u.settings.gradient_nbytes) != (None, None)]
        if set_:
            raise RuntimeError(
                f"set_memory_budget(prefetch, gradients): expected to be called on the root, found that it was called "
                f"on {type(set_[0].module).__name__} below {type(first.module).__name__}; call it on the root"
            )
        self.run.prefetch_nbytes = first.settings.prefetch_nbytes
        self.executor.waiting.limit = first.settings.gradient_nbytes

    def share(self, shared: Shared) -> None:
        """Use the buffers and the in-flight queues of `shared` from now on."""
        if shared is self.shared:
            return
        if (
            self.run.ending.waits
            or self.executor.has_in_flight
            or any(unit.record.full is Full.PENDING for unit in self.units)
        ):
            raise RuntimeError(
                f"share_comm_ctx: expected {self.units[0].record.name} to have no message under way, found one; call "
                f"it before the first forward, or between steps"
            )
        self.executor.shared = shared
        for unit in self.units:
            unit.attach(self, shared.pool)

    def settings_change(self, unit: Unit, controls: Controls) -> None:
        """Reduce and gather `unit` as `controls` say. Collective over the root."""
        self.companion.connects([unit])
        self._locate(unit, controls)
        self.companion.did("settings", unit)

    def _locate(self, unit: Unit, controls: Controls) -> None:
        """Find out which links of `unit` span several nodes, if that matters under `controls`. Collective."""
        strategy = controls.strategy(self.options.communication)
        links = [located(links, strategy, self._locations) for links in unit.links]
        unit.links, unit.channels.strategy = links, strategy

    def _wait_for_optimizer(self) -> None:
        """Wait for the event of `set_post_optim_event`: gathers are issued on this stream and come after it."""
        first = self.units[0]
        event, first.settings.post_optim_event = first.settings.post_optim_event, None
        if event is not None and first.device.type != "cpu":
            event.wait()

    # ---- event to commands to action -----------------------------------------------------------------------

    def _do(self, kind: str, record: UnitRecord, commands: Sequence[Command], **flags: bool) -> None:
        if self.event_listeners:
            event = Event(kind, record.name, tuple(name for name, on in flags.items() if on))
            for listener in self.event_listeners:
                listener(event)
        stream = self.stream
        if stream is not None and stream.current() != stream.stream:
            # Also without commands: what this stream reads next was written by the model's.
            with stream.ordered(), without_transforms() if in_transform() else nullcontext():
                self.executor.run(commands)
        elif commands:
            if in_transform():
                # Otherwise a torch.func transform would treat the writes to full parameters as part of the model.
                with without_transforms():
                    self.executor.run(commands)
            else:
                self.executor.run(commands)


# ---- forming ---------------------------------------------------------------------------------------------------------
# A root forms at the first forward (or `unshard`) of a module, from that module and every unit below it.


# The root that runs a unit, if one formed. A C function: hooks call it dozens of times a step.
formed = cast("Callable[[Unit], Root | None]", attrgetter("root"))


def root_of(unit: Unit) -> Root:
    """The root of `unit`; if there is none yet, it forms from the module of `unit` and everything below.

    Raises `RuntimeError` if parameters are still on the meta device, and `ValueError` if a parameter belongs to two
    units, or if `cast_forward_inputs` names an argument that no unit has.
    """
    root = formed(unit)
    if root is not None and not root.provisional:
        return root
    if in_transform():
        # What is made here stays: tensors of a transform would have no memory, and end with it.
        with without_transforms():
            return root_of(unit)
    if len(unit.modules) > 1:
        raise RuntimeError(
            f"expected a single module as the root, found the list {[type(m).__name__ for m in unit.modules]} passed "
            f"to fully_shard; apply fully_shard to the model that contains them, and run that first"
        )
    names: dict[Unit, str] = {}
    for name, module in unit.module.named_modules():
        below = unit_of(module)
        if below is None:
            continue
        if below.root is not None and not below.root.provisional:
            raise RuntimeError(
                f"{name}: expected the outermost sharded module to run first, found that this module already "
                f"ran as a root; call the forward of {type(unit.module).__name__} before that of its "
                f"parts, or do not shard it"
            )
        name = clean_name(name) or "root"
        names[below] = f"{names[below]}+{name}" if below in names else name
    units = list(names)
    _refuse_meta(unit.module, units)
    check_known_names(
        "mp_policy.cast_forward_inputs", [(one.settings.policy.cast_forward_inputs, one.modules) for one in units]
    )
    for below in units:
        _settle(below)
    if unit.settings.reshard_after_forward is None:
        # The root's backward follows its forward at once.
        unit.record.plan.reshard_after_forward = False
    return Root(units, list(names.values()), provisional=False)


def early_root_of(unit: Unit) -> Root:
    """The root of `unit`, or a provisional one for this unit: `unshard` may be called before the root is known."""
    root = formed(unit)
    if root is not None:
        return root
    if in_transform():
        with without_transforms():
            return early_root_of(unit)
    _refuse_meta(unit.module, [unit])
    return Root([unit], [unit.record.name], provisional=True)


def _settle(unit: Unit) -> None:
    """Complete a gather of the provisional root before its buffers are replaced. What it gathered on another stream is
    freed there, and gathered again."""
    root = formed(unit)
    if root is not None and unit.record.full is Full.PENDING:
        root.wait_unshard(unit)
    if root is not None and root.stream is not None and root.stream.current() != root.stream.stream:
        root.reshard(unit)


def _refuse_meta(model: nn.Module, units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.record.full is Full.SHARDED:
            unit.repair()
    if any(param.local.is_meta for unit in units for param in unit.params):
        on_meta = [name for param, name in parameter_names(model, units).items() if param.local.is_meta]
        shown = ", ".join(on_meta[:8]) + (f" and {len(on_meta) - 8} more" if len(on_meta) > 8 else "")
        raise RuntimeError(
            f"expected parameters with data before the first use, found {shown} on the meta device; "
            f"call module.to_empty(device=...) and initialise the parameters "
            f"(reset_parameters, init_weights or a checkpoint)"
        )
    for unit in units:
        refuse_off_host(unit)


def refuse_off_host(unit: Unit) -> None:
    """Raise `RuntimeError` (as torch does) if shards with CPU offload are not on the host."""
    elsewhere = {param.name: param.local.device for param in unit.params if param.local.device.type != "cpu"}
    if unit.host_link is not None and elsewhere:
        raise RuntimeError(
            f"{unit.record.name}: expected parameters on the CPU, because CPUOffloadPolicy is given, found "
            f"{', '.join(f'{name} on {device}' for name, device in elsewhere.items())}; load a CPU state dict, or call "
            f"module.to_empty(device='cpu') and initialise"
        )
