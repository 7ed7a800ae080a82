"""The units below one root, and the way from what modules and autograd report to what is done about it.

    report (hooks.py)  ->  event + what the rules must know  ->  lifecycle.rules  ->  commands  ->  executor

A root forms at the first forward (or `unshard`) of a module: that module and every unit below it. A backward is noticed
by its first report and its end by a callback of the engine. Whether one is *still* running is read off that callback's
life: the engine drops it when it is done with a backward, also when an exception ended it. So no flag of ours can
survive a failed step; what survives is found by the next report and discarded (`abandon`), see ADR 0008.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .._torch_compat import current_backward, queue_backward_callback
from ..comm import BufferPool
from ..lifecycle import Command, Event, Full, RunRecord, UnitRecord, rules
from ..param import ShardedParam
from ..policy import Options
from .executor import Executor
from .names import clean_name as clean_name
from .optimizer_steps import count_optimizer_steps
from .uninitialized import has_meta_buffers, prove_initialized
from .unit import WATCHED_FORWARDS, Unit, unit_of
from .watch import Watch


class Root:
    """`units[0]` is the unit of the root module, when that module is one. Make it with `root_of`."""

    def __init__(self, units: Sequence[Unit], names: Sequence[str], *, provisional: bool) -> None:
        self.units = list(units)
        # Made for one unit by an early `unshard`; gives way to the real one.
        self.provisional = provisional
        self.options = options = Options.from_environment()
        device = self.units[0].device
        self.pool = BufferPool(keep=device.type == "cpu")
        self.executor = Executor(
            self.units, self.pool, reductions_in_flight=options.reductions_in_flight, check=options.check
        )
        self.run = RunRecord([unit.record for unit in self.units], prefetch_depth=options.prefetch_depth)
        self.run.is_last_backward = self.units[0].is_last_backward
        self.executor.may_stay_pending = lambda: not self.run.is_last_backward
        self.watch = Watch(self._weight_needed, always=options.watch == "always")
        self._watches_left = 8
        self._backward: weakref.ref[_BackwardEnd] | None = None
        # Called with every event and every command, as they happen (observe/trace.py).
        self.event_listeners: list[Callable[[Event], None]] = []
        self.thread = count_optimizer_steps()
        first = self.units[0]
        first.record.keeps_in_evaluation = first.reshard_after_forward is not None or options.eval_root == "keep"
        for index, (unit, name) in enumerate(zip(self.units, names, strict=True)):
            unit.record.index = index
            unit.record.name = name
            unit.on_gradient = self._gradient_arrived
            unit.on_repaired = self.watch.learn
            unit.attach(self, self.pool, options.communication)
            if options.watch == "never":
                unit.watched = 0
            self.watch.learn(unit)
        # Some of what stands on the modules may never have been written; looked at in the next forward.
        self.unproven = any(unit.unproven for unit in self.units) or has_meta_buffers(first.module)

    # ---- forward -------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> bool:
        """Report that `unit`'s forward begins; whether this is a use of its own, not a repetition in backward."""
        if self.unproven:
            prove_initialized(self.units)
            self.unproven = False
        record, run = unit.record, self.run
        in_backward = current_backward() != -1
        if not in_backward and run.has_leftovers and (run.forward_root in (None, record) or record.index == 0):
            self.abandon()
        if self.run.order and record.index == 0 and not in_backward:
            self._watch_again()
        repeated = in_backward and record.in_backward
        stale = record.full is not Full.SHARDED and unit.is_stale()
        commands = rules.pre_forward(run, record, in_backward=in_backward, stale=stale)
        self._do("pre_forward", record, commands, in_backward=in_backward, stale=stale)
        return not repeated

    def post_forward(self, unit: Unit, *, inputs: bool, outputs: bool) -> None:
        """Report that `unit`'s forward is over. `outputs`: some output requires a gradient; `inputs`: the end of its
        backward will be reported by its inputs."""
        flags = {"in_backward": current_backward() != -1, "inputs": inputs, "outputs": outputs}
        self._do("post_forward", unit.record, rules.post_forward(self.run, unit.record, **flags), **flags)

    def forward_failed(self, unit: Unit) -> None:
        """Report that `unit`'s forward raised."""
        in_backward = current_backward() != -1
        commands = rules.forward_failed(self.run, unit.record, in_backward=in_backward)
        self._do("forward_failed", unit.record, commands, in_backward=in_backward)

    # ---- backward ------------------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit) -> None:
        """Report that a gradient reached an output of `unit`, or that one of its saved weights is needed."""
        self._notice_backward()
        create_graph = torch.is_grad_enabled()
        commands = rules.pre_backward(self.run, unit.record, create_graph=create_graph)
        self._do("pre_backward", unit.record, commands, create_graph=create_graph)

    def inputs_reached(self, unit: Unit) -> None:
        """Report that the gradients of the inputs of one use of `unit` are complete."""
        present = unit.arrived != 0
        commands = rules.inputs_reached(self.run, unit.record, present=present)
        self._do("inputs_reached", unit.record, commands, none=not present)

    def _gradient_arrived(self, unit: Unit, param: ShardedParam, bit: int) -> None:
        record = unit.record
        if record.full is Full.PENDING and not record.in_backward and unit.may_read_early:
            # The memory exists and its message is still arriving: whether the weights were read is not known.
            unit.irregular = True
            raise RuntimeError(
                f"{record.name}: expected the gradient of an output of this module before that of its parameter "
                f"{param.name}, found the parameter's alone while its weights were being gathered; run the step again: "
                f"from now on this module's weights are watched, and such a backward is right"
            )
        self._notice_backward()
        param.take_fresh()
        unit.arrived |= bit
        if unit.arrived == unit.expected:
            self._do("grads_ready", record, rules.grads_ready(self.run, record))

    def _weight_needed(self, unit: Unit) -> None:
        if unit.record.full is Full.FULL and unit.record.in_backward:
            return
        if unit.record.full is not Full.FULL:
            unit.irregular = True
        self.pre_backward(unit)

    def _notice_backward(self) -> None:
        """The first report of a backward: make sure that its end will be noticed."""
        if self._backward is not None and self._backward() is not None:
            return
        if self.run.in_backward:
            self.abandon()
        end = _BackwardEnd(self)
        self._backward = weakref.ref(end)
        queue_backward_callback(end)

    def backward_end(self) -> None:
        """Report that the whole backward is over."""
        self._backward = None
        must_send = self.executor.must_send
        present = [unit.arrived != 0 or (unit.record.sync and must_send(unit)) for unit in self.units]
        commands = rules.backward_end(self.run, self.run.units[0], present)
        self._do("backward_end", self.run.units[0], commands)

    def abandon(self) -> None:
        """Discard what a step left that did not come to its end."""
        failed_in_backward = self.run.in_backward
        self.watch.reset()
        self._backward = None
        self._do("abandon", self.run.units[0], rules.abandon(self.run, self.run.units[0]))
        if failed_in_backward and self.options.watch == "auto":
            # It may have failed because weights were read that nothing announced: watch for that.
            for unit in self.units:
                unit.watched = max(unit.watched, WATCHED_FORWARDS)

    def _watch_again(self) -> None:
        """A forward follows a forward. A backward between them may have failed before it reported anything, because it
        read a weight that nothing announced; so watch this one. Programs that run two forwards pay a few times."""
        if self.options.watch == "auto" and self._watches_left:
            self._watches_left -= 1
            for unit in self.units:
                unit.watched = max(unit.watched, 1)

    # ---- the user's calls ----------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Issue the gather of `unit`."""
        stale = unit.record.full is not Full.SHARDED and unit.is_stale()
        commands = rules.unshard(self.run, unit.record, stale=stale)
        self._do("unshard", unit.record, commands, stale=stale)

    def wait_unshard(self, unit: Unit) -> None:
        """Make the gathered parameters usable."""
        self._do("wait_unshard", unit.record, rules.wait_unshard(self.run, unit.record))

    def reshard(self, unit: Unit) -> None:
        """Free the full parameters of `unit`."""
        self._do("reshard", unit.record, rules.reshard(self.run, unit.record))

    # ---- event to commands to action -----------------------------------------------------------------------

    def _do(self, kind: str, record: UnitRecord, commands: Sequence[Command], **flags: bool) -> None:
        if self.event_listeners:
            event = Event(kind, record.name, tuple(name for name, on in flags.items() if on))
            for listener in self.event_listeners:
                listener(event)
        if commands:
            self.executor.run(commands)


class _BackwardEnd:
    """What the engine calls when a backward is over. It lives exactly as long as the engine keeps that backward."""

    __slots__ = ("__weakref__", "_root")

    def __init__(self, root: Root) -> None:
        self._root = root

    def __call__(self) -> None:
        self._root.backward_end()


def root_of(unit: Unit) -> Root:
    """The root `unit` belongs to; formed from its module and what is below it when there is none yet.

    Raises `RuntimeError` when parameters are still on the meta device, and `ValueError` when a parameter belongs to
    two units.
    """
    root = unit.root
    if root is not None and not root.provisional:
        return root
    names, units = [], []
    for name, module in unit.module.named_modules():
        below = unit_of(module)
        if below is not None and below not in units:
            if below.root is not None and not below.root.provisional:
                raise RuntimeError(
                    f"{name}: expected the outermost sharded module to run first, found that this module already "
                    f"ran as a root; call the forward of {type(unit.module).__name__} before that of its "
                    f"parts, or do not shard it"
                )
            names.append(clean_name(name) or "root")
            units.append(below)
    _refuse_meta(names, units)
    for below in units:
        _settle(below)
    if unit.reshard_after_forward is None:
        # The root's backward follows its forward at once.
        unit.record.reshard_after_forward = False
    return Root(units, names, provisional=False)


def early_root_of(unit: Unit) -> Root:
    """The root of `unit`, or a provisional one of its own: `unshard` may come before the root is known."""
    if unit.root is not None:
        return unit.root
    _refuse_meta([unit.record.name], [unit])
    return Root([unit], [unit.record.name], provisional=True)


def _settle(unit: Unit) -> None:
    """What was gathered under a provisional root is complete before the buffers change hands."""
    if unit.root is not None and unit.record.full is Full.PENDING:
        unit.root.wait_unshard(unit)


def _refuse_meta(names: Sequence[str], units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.record.full is Full.SHARDED:
            unit.repair()
    on_meta = [
        param.name if name == "root" else f"{name}.{param.name}"
        for name, unit in zip(names, units, strict=True)
        for param in unit.params
        if param.local.is_meta
    ]
    if on_meta:
        shown = ", ".join(on_meta[:8]) + (f" and {len(on_meta) - 8} more" if len(on_meta) > 8 else "")
        raise RuntimeError(
            f"expected parameters with data before the first use, found {shown} on the meta device; "
            f"call module.to_empty(device=...) and initialise the parameters "
            f"(reset_parameters, init_weights or a checkpoint)"
        )
    for unit in units:
        refuse_off_host(unit)


def refuse_off_host(unit: Unit) -> None:
    """With offload, shards are on the host: `RuntimeError` (torch's type) when something put them elsewhere."""
    elsewhere = {param.name: param.local.device for param in unit.params if param.local.device.type != "cpu"}
    if unit.host_link is not None and elsewhere:
        raise RuntimeError(
            f"{unit.record.name}: expected parameters on the CPU, because CPUOffloadPolicy is given, found "
            f"{', '.join(f'{name} on {device}' for name, device in elsewhere.items())}; load a CPU state dict, or call "
            f"module.to_empty(device='cpu') and initialise"
        )


def module_units(module: nn.Module) -> list[Unit]:
    """The units of `module` and of everything below it."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]
