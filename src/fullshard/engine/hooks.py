"""What modules and autograd report, and nothing else: no decision about sharding is taken here.

    module pre-hook    (first)  -> pre_forward; inputs are cast, hooks put on those that require a gradient
    module hook        (last)   -> post_forward; hooks put on the nodes of outputs that require a gradient
    output's node, before it runs in backward -> pre_backward
    input tensor, when its gradient is complete -> inputs_reached
    full parameter, when its gradient is accumulated (unit.py) -> grads_ready

The hook of an output is put on its autograd *node*, which an in-place edit of the output leaves in the graph. The hook
of an input is a hook of the *tensor*: those run before the hooks of its node, so the end of this unit's backward is
reported before the beginning of that of the unit which made the input.
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
from .._torch.modules import outside_graphs
from ..schedule import Use
from .full_params import opened_of
from .root import Root, formed, module_units, root_of
from .saved_tensors import State, refuse_writes, state_before
from .unit import Unit

# ---- tree ------------------------------------------------------------------------------------------------------------
# Tensors inside arguments and outputs: tuples, lists, dicts, named tuples and dataclasses, nested; as FSDP2.
#
# Sets and other objects are not looked into. What holds no tensor that changes is returned as it is, so that identity
# and subclasses survive.

_MAX_DEPTH = 64


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, depth: int = 0) -> Any:
    """`value` with `function` applied to its tensors; the same object where nothing changed."""
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
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, value)


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    return map_tensors(lambda t: t if t.device == device else t.to(device, non_blocking=True), value)


# ---- hooks -----------------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    """One forward of the unit that has begun."""

    # The exception that was being handled when it began; another one at its end is its own.
    handling: BaseException | None
    # Not a repetition in backward.
    own_use: bool
    # Inside another forward of the unit.
    nested: bool
    # A registered method, whose end is noticed whatever ends it; that of a forward is not, after a KeyboardInterrupt.
    method: bool
    watched: bool
    # The hooks of its inputs.
    inputs: Sequence[_InputHook]
    # How the full parameters were.
    before: State | None


def hooks_of(unit: Unit) -> UnitHooks:
    """The hooks on the modules of `unit`."""
    return cast("UnitHooks", unit.hooks)


class UnitHooks:
    """The hooks of one unit's modules. Holds the forwards that are running, innermost last."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._running: list[_Running] = []
        self._generation = 0
        # No forward ran yet.
        self._first = True
        # Of the open pass over several modules: those that did not run, and its inputs.
        self._left: set[nn.Module] = set()
        self._inputs: _InputsReached | None = None
        # Everything that torch calls, made once.
        self._before = before = outside_graphs(self._forward_begins)
        self._after = after = outside_graphs(self._forward_ends)
        self._on_outputs = outside_graphs(_outputs_needed)
        self._on_input = outside_graphs(_InputsReached.one)
        for module in unit.modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # always_call: a forward that raises must give back the saved-tensor hooks it pushed.
            module.register_forward_hook(after, prepend=False, with_kwargs=True, always_call=True)
        unit.hooks = self

    def call(self, module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`method(*args, **kwargs)` of `module` as if it were its forward."""
        # The method itself may be compiled.
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
        """Whether a forward of the unit is running. What a step of another generation left running ended without its
        hook (KeyboardInterrupt)."""
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
                # Plain modules, until full_params ends: of one rank alone, perhaps, so no root forms.
                return args, kwargs
        if root is None or root.provisional:
            root = root_of(unit)
        if unit.opened is not None:
            return args, kwargs  # that alone is a plain module; what is below sends as ever
        if unit.record.index == 0 and unit.device.type != "cpu":
            args, kwargs = to_device(args, unit.device), to_device(kwargs, unit.device)
        policy = unit.settings.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)
        own_use, nested = root.pre_forward(unit, self.running, in_method=self.in_method)
        watched = False
        inputs: Sequence[_InputHook] = ()
        if own_use and torch.is_grad_enabled():
            # What a nested forward gets was made inside, or belongs to the forward around it: the gradients of its
            # inputs say nothing about the end of the unit's backward.
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
            return None  # the pre-hook itself raised, or nothing was begun
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
        use = root.post_forward(unit, partial(self._ran, module), **flags)
        self._hook_outputs(outputs, use, running.inputs)
        if unit.settings.policy.output_dtype is not None:
            output = cast_floating(output, unit.settings.policy.output_dtype)
        return output

    def _ran(self, module: nn.Module) -> bool:
        """Note that `module` ran; whether others of the unit did not, in this pass over all of them."""
        if len(self._unit.modules) == 1:
            return False
        if not self._unit.record.pass_open:
            self._left = set(self._unit.modules)
        self._left.discard(module)
        return bool(self._left)

    def _hook_inputs(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_InputHook]:
        # A leaf keeps its hooks from step to step, and nothing runs in backward behind it: the end of the backward
        # serves for it.
        inputs = [t for t in tensors_requiring_grad(args) if not t.is_leaf]
        if kwargs:
            inputs += [t for t in tensors_requiring_grad(kwargs) if not t.is_leaf]
        reached = self._inputs
        if reached is None or not self._unit.record.pass_open:
            reached = self._inputs = _InputsReached(root, self._unit)
        reached.expect(len(inputs))
        return [_InputHook(t.grad_fn, t.register_hook(partial(self._on_input, reached)), reached) for t in inputs]

    def _hook_outputs(self, outputs: Sequence[Tensor], use: Use | None, inputs: Sequence[_InputHook]) -> None:
        recomputed = current_backward() != -1
        for node in {id(node): node for t in outputs if (node := t.grad_fn) is not None}.values():
            returned = [hook for hook in inputs if hook.node is node]
            for hook in returned:
                hook.handle.remove()
            if returned and recomputed:
                continue  # a node of the graph outside, which knows of the forward that is repeated
            notes: dict[str, Any] = cast("Any", node).metadata  # torch's stub has a method where there is a property
            waiting = notes.get(_WAITING)
            if waiting is None:
                waiting = notes[_WAITING] = []
                node.register_prehook(partial(self._on_outputs, waiting))
            # Not the hooks: they name the node, and Python's collector does not see that the node holds this list.
            waiting.append((self._unit, use, [hook.reached for hook in returned]))


class _InputHook(NamedTuple):
    """What tells that the gradient of one input is complete."""

    node: Any
    handle: RemovableHandle
    reached: _InputsReached


# Of an autograd node: the uses whose output it made, oldest first: (unit, use, inputs that it returned as they are).
_WAITING = "fullshard: uses"


def _outputs_needed(waiting: Sequence[tuple[Unit, Use | None, Sequence[_InputsReached]]], gradients: object) -> None:
    """The node of an output of these uses is about to run in backward.

    There is more than one where a unit returned what it was given, as a layer does that is skipped. On other ranks it
    may have computed something: the backwards come youngest first, and end before an older one begins, as there.
    """
    for unit, use, returned in reversed(waiting):
        root = formed(unit)
        assert root is not None
        root.pre_backward(unit, use)
        for reached in returned:
            reached.one(gradients)


class _InputsReached:
    """Told when the gradient of an input of one use is complete; reports when that holds for all of them.

    The use of a unit of several modules has the inputs of all these. One that ran without inputs that require a
    gradient has an end of its backward that no input tells, and so has the use: it never reports.
    """

    __slots__ = ("_count", "_left", "_root", "_silent", "_unit")

    def __init__(self, root: Root, unit: Unit) -> None:
        self._root = root
        self._unit = unit
        self._count = self._left = 0
        self._silent = False

    def expect(self, count: int) -> None:
        """So many more inputs; 0: a module ran without any."""
        self._count += count
        self._left += count
        self._silent = self._silent or not count

    def one(self, _gradient: object) -> None:
        """The gradient of one of them is complete."""
        self._left -= 1
        if self._left == 0:
            self._left = self._count  # a retained graph may be run through again
            if not self._silent:
                self._root.inputs_reached(self._unit)
