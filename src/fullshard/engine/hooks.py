"""Module and autograd hooks that report events. No decision about sharding is made here.

    module pre-hook    (first)  -> pre_forward; inputs are cast, hooks put on those that require a gradient
    module hook        (last)   -> post_forward; hooks put on the nodes of outputs that require a gradient
    output's node, before it runs in backward -> pre_backward
    input tensor, when its gradient is complete -> inputs_reached
    full parameter, when its gradient is accumulated (unit.py) -> grads_ready

Output hooks are on the autograd *node*, which stays in the graph after an in-place edit of the output. Input hooks are
on the *tensor*: they run before the hooks of its node, so the end of this unit's backward is reported before the
backward of the unit that produced the input begins.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import current_backward
from .._torch.modules import call, outside_graphs
from ..schedule import Use
from .backward import State, refuse_writes, state_before
from .full_params import opened_of
from .root import Root, formed, module_units, root_of
from .unit import Unit

# ---- tree ------------------------------------------------------------------------------------------------------------
# Tensors in arguments and outputs: nested tuples, lists, dicts, named tuples and dataclasses, as in FSDP2.
#
# Sets and other objects are not searched. A container without changed tensors is returned as is, which keeps its
# identity and subclass.

_MAX_DEPTH = 64


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, depth: int = 0) -> Any:
    """`value` with `function` applied to its tensors; the same object if nothing changed."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None or isinstance(value, (str, bytes, int, float)):
        return value
    if depth > _MAX_DEPTH:
        raise RuntimeError(
            f"arguments and outputs: expected at most {_MAX_DEPTH} levels of nesting, found more; flatten the structure"
        )
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item, depth + 1) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item, depth + 1) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        made = _like_dict(value)
        for key, new in changed.items():
            if new is not value[key]:
                made[key] = new  # item by item: transformers' ModelOutput refuses `update`
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changes = {
            name: new for name, old in fields.items() if (new := map_tensors(function, old, depth + 1)) is not old
        }
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _like_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    try:
        made = value.copy()  # keeps a subclass (OrderedDict, ModelOutput) and its defaults
    except Exception:
        made = dict(value)
    return made


def tensors_requiring_grad(value: Any) -> list[Tensor]:
    """The tensors in `value` that require a gradient, in order."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    for item in value if isinstance(value, (tuple, list)) else (value,):
        if not isinstance(item, Tensor):
            map_tensors(look, item)
        elif item.requires_grad:
            found.append(item)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), value)


# ---- hooks -----------------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """A running forward of the unit."""

    # The exception being handled when the forward began; a different one at its end was raised by the forward.
    handling: BaseException | None
    # False for recomputation in backward.
    own_use: bool
    # Inside another forward of the unit.
    nested: bool
    # A registered method: its end is always noticed. A forward's end is missed after a KeyboardInterrupt.
    method: bool
    watched: bool
    inputs: Sequence[_InputHook]
    # State of the full parameters when the forward began.
    before: State | None


def hooks_of(unit: Unit) -> UnitHooks:
    """The hooks on the modules of `unit`."""
    return cast("UnitHooks", unit.hooks)


class UnitHooks:
    """The hooks on one unit's modules, and the running forwards, innermost last."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._running: list[_Running] = []
        self._generation = 0
        # No forward ran yet.
        self._first = True
        # The open pass over several modules: modules that did not run yet, and its inputs.
        self._left: set[nn.Module] = set()
        self._inputs: _InputsReached | None = None
        # The callbacks for torch, created once.
        self.outside = outside_graphs(call)
        self._before = before = outside_graphs(self._forward_begins)
        self._after = after = outside_graphs(self._forward_ends)
        self._on_outputs = outside_graphs(_outputs_needed)
        self._on_input = outside_graphs(_InputsReached.one)
        for module in unit.modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # always_call: a forward that raises must pop the saved-tensor hooks it pushed.
            module.register_forward_hook(after, prepend=False, with_kwargs=True, always_call=True)
        unit.hooks = self

    def call(self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `method(*args, **kwargs)` of `module` like its forward."""
        # Not in `outside_graphs`: the method itself may be compiled.
        args, kwargs = self._before(module, args, kwargs, method=True)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after(module, args, kwargs, None)
            raise
        changed = self._after(module, args, kwargs, output)
        return output if changed is None else changed

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
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: bool = False
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
        if unit.record.index == 0 and unit.device.type != "cpu":
            args, kwargs = to_device(args, unit.device), to_device(kwargs, unit.device)
        policy = unit.settings.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
        own_use, nested = root.pre_forward(unit, self.running, in_method=bool(self._running) and self.in_method)
        watched = False
        inputs: Sequence[_InputHook] = ()
        if own_use and torch.is_grad_enabled():
            # Inputs of a nested forward come from inside the unit or from the outer forward: their gradients do not
            # mark the end of the unit's backward.
            inputs = () if nested else self._hook_inputs(root, args, kwargs)
            watched = root.watch.begin(unit)
        before = None
        if own_use and not nested:
            before = state_before(unit, sums=self._first or root.options.check)
            self._first = False
        self._running.append(_Running(sys.exception(), own_use, nested, method, watched, inputs, before))
        return args, kwargs

    def _forward_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        unit = self._unit
        root = formed(unit)
        if root is None or not self._running or unit.opened is not None:
            return None  # the pre-hook raised, or nothing began
        running = self._running.pop()
        if running.watched:
            root.watch.end()
        if sys.exception() is not running.handling:
            root.forward_failed(unit, nested=running.nested)
            return None
        if running.before is not None:
            try:
                refuse_writes(unit, running.before)
            except RuntimeError:
                root.forward_failed(unit, nested=running.nested)
                raise
        outputs: list[Tensor] = []
        if running.own_use and torch.is_grad_enabled():
            outputs = tensors_requiring_grad(output)
        flags = {"nested": running.nested, "inputs": bool(running.inputs), "outputs": bool(outputs)}
        # A unit of one module has no others: `bool()` is False.
        ran = bool if len(unit.modules) == 1 else partial(self._ran, module)
        use = root.post_forward(unit, ran, **flags)
        self._hook_outputs(outputs, use, running.inputs)
        if unit.settings.policy.output_dtype is not None:
            output = cast_floating(output, unit.settings.policy.output_dtype)
        return output

    def _ran(self, module: nn.Module) -> bool:
        """Note that `module` ran; return whether other modules of the unit did not run yet in this pass."""
        if not self._unit.record.pass_open:
            self._left = set(self._unit.modules)
        self._left.discard(module)
        return bool(self._left)

    def _hook_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_InputHook]:
        # A leaf would keep its hooks from step to step, and nothing runs after it in backward: the end of the backward
        # is reported instead.
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
        reached.expect(len(hooks))
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

    __slots__ = ("_count", "_left", "_root", "_silent", "_unit")

    def __init__(self, root: Root, unit: Unit) -> None:
        self._root = root
        self._unit = unit
        self._count = self._left = 0
        self._silent = False

    def expect(self, count: int) -> None:
        """Add `count` inputs; 0: a module ran without any."""
        self._count += count
        self._left += count
        self._silent = self._silent or not count

    def one(self, _gradient: object) -> None:
        """The gradient of one input is complete."""
        self._left -= 1
        if self._left == 0:
            self._left = self._count  # a retained graph may run again
            if not self._silent:
                self._root.inputs_reached(self._unit)
