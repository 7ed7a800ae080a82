"""Module and autograd hooks that report events. No decision about sharding is made here.

    module pre-hook    (first)  -> pre_forward; inputs are cast, hooks put on those that require a gradient
    module hook        (last)   -> post_forward; hooks put on the nodes of outputs that require a gradient
    output's node, before it runs in backward -> pre_backward
    input tensor, when its gradient is complete -> inputs_reached
    full parameter, when its gradient is accumulated -> grads_ready, once all of the unit are

Output hooks are on the autograd *node*, which stays in the graph after an in-place edit of the output. Input hooks are
on the *tensor*: they run before the hooks of its node, so the end of this unit's backward is reported before the
backward of the unit that produced the input begins.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import current_backward, saved_tensor_hooks_allowed
from .._torch.modules import call, outside_graphs, runs_last
from ..param import ShardedParam
from ..policy.options import chosen
from ..schedule import Use
from .arguments import Arguments, cast_outputs, tensors_requiring_grad
from .channels import UnitGradients
from .foreign import note_shards_read
from .full_params import opened_of
from .root import Root, formed, root_of
from .seal import State
from .unit import Unit, module_units

# ---- hooks -----------------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """A running forward of the unit."""

    # The exception being handled when the forward began; a different one at its end was raised by the forward.
    handling: BaseException | None
    # Whether it is a use of its own, and no recomputation in backward.
    own_use: bool
    # Whether it is inside another forward of the unit.
    nested: bool
    # A registered method: its end is always noticed. A forward's end is missed after a KeyboardInterrupt.
    method: bool
    watched: bool
    inputs: Sequence[_InputHook]
    # State of the full parameters when the forward began.
    before: State | None
    # Arguments of which the forward got copies.
    arguments: Arguments | None


def hooks_of(unit: Unit) -> UnitHooks:
    """The hooks on the modules of `unit`."""
    return cast("UnitHooks", unit.hooks)


class UnitHooks:
    """The hooks on one unit's modules, and the running forwards, innermost last."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._running: list[_Running] = []
        self._generation = 0
        # Whether no forward ran yet.
        self._first = True
        # Whether a warning said that a forward edits a tensor argument that is a copy.
        self._warned_of_edit = False
        # The open pass over several modules: modules that did not run yet, and its inputs.
        self._left: set[nn.Module] = set()
        self._inputs: _InputsReached | None = None
        # The callbacks for torch, created once.
        self.outside = outside_graphs(call)
        self._before = before = outside_graphs(self._forward_begins)
        self._after = after = outside_graphs(self._forward_ends)
        self._on_outputs = outside_graphs(_outputs_needed)
        self._on_input = outside_graphs(_InputsReached.one)
        unit.gradients.on_accumulated = outside_graphs(_accumulated)
        for module in unit.modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # always_call: a forward that raises must pop the saved-tensor hooks it pushed.
            module.register_forward_hook(after, prepend=False, with_kwargs=True, always_call=True)
        unit.hooks = self

    def call(self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `method(*args, **kwargs)` of `module` like its forward."""
        # Not in `outside_graphs`: the method itself may be compiled.
        args, kwargs = self._before(module, args, kwargs, method=True, call=method)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after(module, args, kwargs, None)
            raise
        changed = self._after(module, args, kwargs, output)
        return output if changed is None else changed

    @contextmanager
    def opened(self, module: nn.Module) -> Iterator[None]:
        """Surrounds reads of weights outside of a forward: one use of the unit, whose outputs nobody sees."""
        if torch.is_grad_enabled():
            if not saved_tensor_hooks_allowed():
                raise RuntimeError(
                    f"unit_open: expected saved-tensor hooks to be allowed, found them disabled: nothing would gather "
                    f"{self._unit.record.name} again in backward; open it outside of disable_saved_tensors_hooks"
                )
            # Reads of saved weights are all that backward shows of this use, for ever.
            self._unit.reads.is_irregular = True
        self._before(module, (), {}, method=True)
        try:
            yield
        except BaseException:
            self._after(module, (), {}, None)
            raise
        self._after(module, (), {}, None)

    @property
    def in_method(self) -> bool:
        """Whether a registered method is running."""
        return any(running.method for running in self._running)

    def running(self, generation: int) -> bool:
        """Whether a forward of the unit is running. Forwards left from another generation ended without their hook
        (KeyboardInterrupt) and are dropped."""
        if generation != self._generation:
            self._generation = generation
            self._running.clear()
        return bool(self._running)

    def _forward_begins(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        method: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> Any:
        unit = self._unit
        root = formed(unit)
        opened = opened_of(unit)
        if opened is not None:
            opened.check_forward()
            if all(below.opened is not None for below in module_units(unit.module)):
                # Plain modules until full_params ends. Perhaps only this rank runs them, so no root may form.
                return args, kwargs
        if root is None or root.provisional:
            root = root_of(unit)
        if unit.opened is not None:
            return args, kwargs  # only this unit is a plain module; the units below communicate as usual
        policy = unit.settings.policy
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        device = unit.device if unit.record.index == 0 and unit.device.type != "cpu" else None
        arguments = None
        if dtype is not None or device is not None:
            accepts = None if dtype is None else chosen(policy.cast_forward_inputs)
            arguments = Arguments(args, kwargs, device, dtype, accepts, call or module.forward)
            args, kwargs = arguments.args, arguments.kwargs
            # Recomputation writes what the original forward wrote.
            if current_backward() != -1 or not arguments.has_copies:
                arguments = None
            elif not method and not runs_last(module, self._after):
                self._carry_after_hooks(module, arguments)
        own_use, nested = root.pre_forward(unit, self.running, in_method=bool(self._running) and self.in_method)
        watched = False
        inputs: Sequence[_InputHook] = ()
        if own_use and torch.is_grad_enabled():
            unit.reads.is_on = False
            # Inputs of a nested forward come from inside the unit or from the outer forward: their gradients do not
            # mark the end of the unit's backward.
            inputs = () if nested else self._hook_inputs(root, args, kwargs)
            watched = unit.reads.left > 0 and root.reads.begin(unit)
        before = None
        if own_use and not nested:
            before = unit.seal.before_forward(sums=self._first or root.options.check)
            self._first = False
        self._running.append(_Running(sys.exception(), own_use, nested, method, watched, inputs, before, arguments))
        return args, kwargs

    def _forward_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        unit = self._unit
        root = formed(unit)
        if root is None or not self._running or unit.opened is not None:
            return None  # the pre-hook raised, or nothing began
        running = self._running.pop()
        if running.watched:
            root.reads.end()
        if sys.exception() is not running.handling:
            if running.arguments is not None:
                with suppress(RuntimeError):  # the forward's own exception says more
                    self._carry_back(module, running, running.arguments)
            note_shards_read(sys.exception(), root.units)
            root.forward_failed(unit, nested=running.nested)
            return None
        if running.arguments is not None:
            try:
                self._carry_back(module, running, running.arguments)
            except BaseException:
                root.forward_failed(unit, nested=running.nested)
                raise
        if running.before is not None:
            try:
                unit.seal.refuse_writes(running.before)
            except RuntimeError:
                root.forward_failed(unit, nested=running.nested)
                raise
        outputs: list[Tensor] = []
        if running.own_use and torch.is_grad_enabled():
            if isinstance(output, Tensor):
                outputs = [output] if output.requires_grad else []
            else:
                outputs = tensors_requiring_grad(output)
        flags = {"nested": running.nested, "inputs": bool(running.inputs), "outputs": bool(outputs)}
        # A unit of one module has no others: `bool()` is False.
        ran = bool if len(unit.modules) == 1 else partial(self._ran, module)
        use = root.post_forward(unit, ran, **flags)
        self._hook_outputs(outputs, use, running.inputs)
        if running.arguments is not None:
            output = running.arguments.returned(output)
        if unit.settings.policy.output_dtype is not None:
            given = (args, kwargs) if running.arguments is None else running.arguments.given
            output = cast_outputs(output, unit.settings.policy.output_dtype, *given)
        return output

    def _carry_back(self, module: nn.Module, running: _Running, arguments: Arguments) -> None:
        callee = None if running.method else module
        if arguments.carry_back(self._unit.record.name, callee, warn=not self._warned_of_edit):
            self._warned_of_edit = True

    def _carry_after_hooks(self, module: nn.Module, arguments: Arguments) -> None:
        """Carry back once more after the hooks that others registered on `module`: they get the copies too."""

        def again(*_: object) -> None:
            handle.remove()
            arguments.carry_back(self._unit.record.name, module, warn=False)

        handle = module.register_forward_hook(outside_graphs(again), with_kwargs=True, always_call=True)

    def _ran(self, module: nn.Module) -> bool:
        """Note that `module` ran; return whether other modules of the unit did not run yet in this pass."""
        if not self._unit.record.pass_open:
            self._left = set(self._unit.modules)
        self._left.discard(module)
        return bool(self._left)

    def _hook_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_InputHook]:
        # A leaf would keep its hooks from step to step, and nothing runs after it in backward: the end of the backward
        # is reported instead.
        if len(args) == 1 and isinstance(args[0], Tensor):
            inputs = [args[0]] if args[0].requires_grad else []
        else:
            inputs = tensors_requiring_grad(args)
        if kwargs:
            inputs += tensors_requiring_grad(kwargs)
        reached = self._inputs
        if reached is None or not self._unit.record.pass_open:
            reached = self._inputs = _InputsReached(root, self._unit)
        hooks = []
        for tensor in inputs:
            if not tensor.is_leaf:
                handle = tensor.register_hook(partial(self._on_input, reached))
                hooks.append(_InputHook(tensor.grad_fn, handle, reached))
        reached.count += len(hooks)
        reached.left += len(hooks)
        if not hooks:
            reached.is_silent = True
        return hooks

    def _hook_outputs(self, outputs: Sequence[Tensor], use: Use | None, inputs: Sequence[_InputHook]) -> None:
        recomputed = current_backward() != -1
        seen = set()
        for tensor in outputs:
            node = tensor.grad_fn
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            returned = []
            for hook in inputs:
                if hook.node is node:
                    hook.handle.remove()
                    returned.append(hook.reached)
            if returned and recomputed:
                continue  # a node of the outer graph, which has the hook of the original forward
            notes: dict[str, Any] = cast("Any", node).metadata  # torch's stub has a method where there is a property
            waiting = notes.get(_WAITING)
            if waiting is None:
                waiting = notes[_WAITING] = []
                node.register_prehook(partial(self._on_outputs, waiting))
            # Not the hooks themselves: they reference the node, a cycle that the garbage collector cannot see.
            waiting.append((self._unit, use, returned))


def _accumulated(
    of: weakref.ref[UnitGradients], which: weakref.ref[ShardedParam], name: str, bit: int, _full: Tensor
) -> None:
    """A backward accumulated the gradient of the full parameter of `which`, whose name and bit they are."""
    gradients, param = of(), which()
    if gradients is None or param is None or gradients.on_arrival is None:
        raise RuntimeError(
            f"{name}: expected the module that computed this to exist during its backward, found that it is gone; "
            f"keep the model until its backwards are over"
        )
    gradients.on_arrival(param, bit)


class _InputHook(NamedTuple):
    """The hook that reports that the gradient of one input is complete."""

    node: Any
    handle: RemovableHandle
    reached: _InputsReached


# Key in a node's metadata: the uses whose output it produced, oldest first: (unit, use, inputs returned unchanged).
_WAITING = "fullshard: uses"


def _outputs_needed(waiting: Sequence[tuple[Unit, Use | None, Sequence[_InputsReached]]], gradients: object) -> None:
    """The node of an output of these uses is about to run in backward.

    A node has several uses if a unit returned its input unchanged, like a skipped layer. Other ranks may have run that
    layer, so backwards are reported as there: youngest first, each one ended before an older one begins.
    """
    for unit, use, returned in reversed(waiting):
        root = formed(unit)
        assert root is not None
        root.pre_backward(unit, use)
        for reached in returned:
            reached.one(gradients)


class _InputsReached:
    """Counts the complete input gradients of one use; reports when all of them are complete.

    A use of a unit of several modules has the inputs of all of them. If one of these ran without inputs that require a
    gradient, the inputs cannot show the end of the backward, and the use never reports.
    """

    __slots__ = ("_root", "_unit", "count", "is_silent", "left")

    def __init__(self, root: Root, unit: Unit) -> None:
        self._root = root
        self._unit = unit
        # Inputs, and those whose gradient is not complete; whether a module ran without any.
        self.count = self.left = 0
        self.is_silent = False

    def one(self, _gradient: object) -> None:
        """The gradient of one input is complete."""
        self.left -= 1
        if self.left == 0:
            self.left = self.count  # a retained graph may run again
            if not self.is_silent:
                self._root.inputs_reached(self._unit)
        elif self._root.stream is not None:
            self._root.stream.follow()  # the last one may come under another stream
