"""Hooks around each optimizer step of the process: they may refuse it, and count it.

    before    checks that may refuse the step, each with its registry: an empty registry costs nothing
    after     the step is counted for its thread, and reported (`tell_each_step`)

    full parameters    the optimizer holds temporary full parameters instead of shards
    open windows       the step would ignore gradients held by an open accumulation window
    no backward        no backward brought gradients after a forward
    replaced           the optimizer holds parameters that were replaced on their modules (state_dict.py)

torch has a public, global hook for each; the first `fully_shard` registers both.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .._torch.modules import outside_graphs
from ..comm import settle_uploads, uploading
from ..param import ShardedParam
from .names import NamedUnit, dotted_name, first_few

# ---- steps -----------------------------------------------------------------------------------------------------------
# Step counts and version counters of sharded parameters show that shards were written. Versions alone are not enough:
# `foreach=True` and `fused=True` steps write DTensors without bumping versions. A write that shows in neither (a direct
# `torch._foreach_copy_` on the parameters) leaves kept full parameters stale; see ADR 0007. Counts are per thread: the
# ranks of a test may be threads, and the thread that runs a model's forward also steps it.

Check = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], object]
C = TypeVar("C", bound=Check)

# With the registry of what each looks for, and whether its answer lasts.
_checks: list[tuple[Sized, Check, bool]] = []
# Optimizers that passed all checks whose answer lasts, with what they were then.
_passed: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
# As `_checks`, once there is a model on a device.
asked_on_devices: list[Callable[[Optimizer], None]] = []
# The two hooks, once there is a model.
_hooks: list[RemovableHandle] = []
# Held by a thread that registers something, because another one may register the same at that moment.
_REGISTERING = threading.Lock()


def follow_steps() -> int:
    """Register the hooks, once per process. Returns the identifier of this thread."""
    with _REGISTERING:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(outside_graphs(_before)))
            _hooks.append(register_optimizer_step_post_hook(outside_graphs(_after)))
    return threading.get_ident()


def refuses_steps(registry: Sized, *, lasts: bool = False) -> Callable[[C], C]:
    """Decorator: call the check with `(optimizer, args, kwargs)` before each optimizer step while something is in
    `registry`; it may raise. `lasts`: once it returned True, not again while the groups of the optimizer have as many
    parameters and are stepped in the same way (`foreach`, `fused`)."""

    def registered(check: C) -> C:
        _checks.append((registry, check, lasts))
        return check

    return registered


def asks_on_devices(check: Callable[[Optimizer], None]) -> None:
    """Call `check(optimizer)` before each optimizer step from now on, before the other checks; it may raise."""
    with _REGISTERING:
        if check not in asked_on_devices:
            asked_on_devices.append(check)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for ask in asked_on_devices:
        ask(optimizer)
    seen: list[Any] = []
    for group in optimizer.param_groups:
        seen += (len(group["params"]), group.get("foreach"), group.get("fused"))
    passed = passes = _passed.get(optimizer) == seen
    if not passed:
        passes = True
    for registry, check, lasts in _checks:
        if registry and not (lasts and passed):
            answer = check(optimizer, args, kwargs)
            passes = passes and (answer is True or not lasts)
    if passes and not passed:
        _passed[optimizer] = seen
    if uploading:
        settle_uploads()


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _steps[threading.get_ident()] += 1
    for function in _told:
        function(optimizer)


# ---- counting --------------------------------------------------------------------------------------------------------

_steps: Counter[int] = Counter()
_told: list[Callable[[Optimizer], None]] = []


# Optimizer steps of the thread with this identifier since the first model was run.
optimizer_steps: Callable[[int], int] = _steps.__getitem__


def tell_each_step(function: Callable[[Optimizer], None]) -> None:
    """Call `function` with each optimizer that took a step, in any thread. Registers each function once."""
    with _REGISTERING:
        if function not in _told:
            _told.append(function)


def note_optimizer_step(thread: int) -> None:
    """Count a step that ran no hooks: optimizer-in-backward."""
    _steps[thread] += 1


# ---- full in optimizers ----------------------------------------------------------------------------------------------
# Optimizers that hold full parameters instead of shards.
#
# An optimizer built from `model.parameters()` after `unshard()`, between forward and backward, or inside `full_params`
# holds temporary tensors. Gradients go to the sharded parameters, so its steps would silently train nothing: the first
# step raises.
#
# Full parameters with gradients of their own are allowed: a user may train the parameters of `full_params` on purpose.


class _FullOf(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[NamedUnit]
    # Relative to the unit, as in `ShardedParam`.
    name: str
    # When the parameter is on the modules.
    when: str


_full: dict[int, _FullOf] = {}  # by id; removed when the parameter dies


def note_full(unit: NamedUnit) -> None:
    """Remember the full parameters of `unit`, on its modules in compute and between forward and backward."""
    for param in unit.params:
        for full in (param.full, param.kept):
            if full is not None:
                _note(unit, full, param, "they compute (after unshard(), or between forward and backward)")


def note_lent(unit: NamedUnit, params: Iterable[ShardedParam], lent: Iterable[nn.Parameter]) -> None:
    """Remember `lent`, one for each of `params`: the full parameters of a `full_params` that ended."""
    for param, full in zip(params, lent, strict=True):
        _note(unit, full, param, "full_params is open")


def _note(unit: NamedUnit, full: Tensor, param: ShardedParam, when: str) -> None:
    key = id(full)
    if key in _full:
        return

    def forget(_: weakref.ref[Tensor]) -> None:
        _full.pop(key, None)

    _full[key] = _FullOf(weakref.ref(full, forget), weakref.ref(unit), param.name, when)


def _shows_held(entry: _FullOf, full: Tensor) -> bool:
    """Whether the gradient on `full` is the local one of micro-batches that no backward has reduced."""
    unit = entry.unit()
    return unit is not None and any(param.full is full and param.gradients.shown is not None for param in unit.params)


@refuses_steps(_full, lasts=True)
def _refuse_full(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    entries = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _full.get(id(parameter))
            if entry is None or not parameter.requires_grad:
                continue
            if parameter.grad is not None and not _shows_held(entry, parameter):
                return False  # full parameters are trained on purpose
            entries.append(entry)
    units = [(entry.unit(), entry) for entry in entries]
    names = [dotted_name(unit, entry.name) for unit, entry in units if unit is not None]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected the sharded parameters of the model, found full ones, which "
            f"are on its modules while {entries[0].when}: {first_few(names)}; no gradient reaches them, so the step "
            f"would train nothing. Build the optimizer from model.parameters() before the first forward, or after "
            f"model.reshard(), outside of full_params"
        )
    return not entries


# ---- open windows ----------------------------------------------------------------------------------------------------
# Steps during an open accumulation window, whose held gradients are not in `.grad`.
#
# After a backward without gradient sync, or without all-reduce, `.grad` is a `PendingGrad`, which raises when used, or
# the reduced part of an earlier backward, which a step would take for the whole gradient. Without this check, an
# optimizer could also step half of its parameters before it meets a `PendingGrad`. So the step raises before it begins.
# A step with a closure is allowed: its backward may close the window.

_open: dict[int, weakref.ref[NamedUnit]] = {}  # by id


def note_window(unit: NamedUnit, is_open: bool) -> None:
    """A backward ended. `is_open`: `unit` holds gradients or partial sums."""
    key = id(unit)
    if is_open:
        _open[key] = weakref.ref(unit, partial(_forget, key))
    elif _open:
        _open.pop(key, None)


def _forget(key: int, _: object) -> None:
    _open.pop(key, None)


@refuses_steps(_open)
def _refuse_a_part(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(closure) for closure in (*args[1:2], kwargs.get("closure"))):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    waiting = []
    for reference in list(_open.values()):
        unit = reference()
        if unit is None:
            continue
        for param in unit.params:
            if id(param.sharded) in own and (
                param.gradients.live_held() is not None or param.gradients.live_partial() is not None
            ):
                waiting.append(dotted_name(unit, param.name))
    if waiting:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected gradients that are reduced, found some that were only "
            f"accumulated on each rank, of {first_few(waiting)}: the last backward ran with "
            f"set_requires_gradient_sync(False) or set_requires_all_reduce(False), and the step would ignore its "
            f"gradients. Run the last micro-batch of the step with both True, or discard the gradients (zero_grad)"
        )


# ---- no backward -----------------------------------------------------------------------------------------------------
# `backward(inputs=parameters)` asks for gradients of shards, but the graph contains the full parameters, so autograd
# silently computes nothing and no hook runs. The step raises instead if a forward recorded a graph, no backward of any
# model brought a gradient since, and no parameter of the optimizer has one.


class _Trained(Protocol):
    """A root: its units, and the thread that runs it."""

    thread: int

    @property
    def units(self) -> Sequence[NamedUnit]: ...


# By the thread that runs the model.
_untrained: dict[int, weakref.WeakSet[_Trained]] = {}


def expect_backward(root: _Trained) -> None:
    """A forward of `root` that records a graph begins."""
    _untrained.setdefault(root.thread, weakref.WeakSet()).add(root)


def note_backward(root: _Trained) -> None:
    """A backward brought gradients of `root`. Other roots of the thread may be left out of it on purpose."""
    _untrained.pop(root.thread, None)


@refuses_steps(_untrained)
def _refuse_untrained(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    roots = _untrained.get(threading.get_ident())
    if not roots or any(callable(closure) for closure in (*args[1:2], kwargs.get("closure"))):
        return
    own = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in own):
        return
    ids = {id(parameter) for parameter in own}
    for root in tuple(roots):
        names = [dotted_name(unit, p.name) for unit in root.units for p in unit.params if id(p.sharded) in ids]
        if names:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected gradients, found none after a forward, of "
                f"{first_few(names)}: no backward brought any. backward(inputs=parameters) brings none, because the "
                f"graph contains the full parameters, and neither does a loss that is not made of the model's output. "
                f"Call loss.backward() without inputs, and requires_grad_(False) before the forward on parameters that "
                f"are to get no gradient. A rank whose batch has no loss takes (output * 0).sum(), so that no peer "
                f"waits for it; skip a step on all ranks or on none. For ranks with fewer batches: fullshard.joined"
            )
