"""`finalize_backward`: the user ends a step, after all of its backwards, instead of the end of the last one.

    backward         sends what its settings say (R18); a backward that sends nothing keeps its gradients (no_sync)
    its end          waits for nothing that was sent (R38)
    finalize         sends what backwards kept, by the settings of this moment (R39)
    wait_finalize    waits for all messages of the step and writes `.grad`

Until then `.grad` is what it was before the step. A step that fails before is discarded as always: what was sent is
lost, and what earlier micro-batches kept stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer

from .._torch import current_backward
from .names import dotted_name, first_few
from .optimizer_steps import refuses_steps
from .unit import AnyRoot, Shared, Unit

_WAIT = "call wait() of the GradientReductionHandle that finalize_backward(async_op=True) returned"


class FinalizedRoot(AnyRoot, Protocol):
    """Ends a step of a root (root.py)."""

    @property
    def shared(self) -> Shared: ...
    def has_leftovers(self) -> bool: ...
    def finalize(self) -> None: ...
    def wait_finalize(self) -> None: ...


class GradientReduction:
    """The reductions that `finalize_backward(async_op=True)` left under way. `wait` may be called once."""

    def __init__(self, root: FinalizedRoot) -> None:
        self._root = weakref.ref(root)
        self._generation = root.run.generation

    def wait(self) -> None:
        """Hand the gradients over. Raises `RuntimeError` if the step was discarded in the meantime."""
        root = self._root()
        if root is None or root.run.generation != self._generation or not root.run.ending.waits:
            raise RuntimeError(
                "GradientReductionHandle.wait: expected the gradients of its step under way, found that the step was "
                "discarded (reset_iter_state, or a failure), and its gradients with it; run the step again"
            )
        root.wait_finalize()


def set_manual(unit: Unit, root: FinalizedRoot | None, enabled: bool) -> None:
    """Set whether `finalize_backward` ends a step. `root`: that of `unit`, if one formed."""
    if root is None:
        unit.settings.manual_finalization = enabled
        return
    _expect_root(root, unit, "set_manual_backward_finalization")
    ending = root.run.ending
    if enabled != ending.manual and current_backward() != -1:
        raise RuntimeError(
            "set_manual_backward_finalization: expected no backward to be running when the mode changes, found one; "
            "call it before the forward of the step"
        )
    if ending.active is not None and enabled != ending.active:
        raise RuntimeError(
            f"set_manual_backward_finalization: expected the mode of a step to stay {ending.active} from its first "
            f"backward on, found {enabled}; call it after {'finalize_backward' if ending.active else 'the backward'} "
            f"of the last micro-batch, or after reset_iter_state()"
        )
    unit.settings.manual_finalization = ending.manual = enabled


def finalize(unit: Unit, root: FinalizedRoot | None, *, asynchronous: bool) -> GradientReduction | None:
    """End the step of `root`, whose unit is `unit`. Does nothing before the first forward."""
    if root is None:
        return None
    ending = root.run.ending
    if ending.waits:
        raise RuntimeError(
            f"finalize_backward: expected no reduction under way, found that of the last finalize_backward; {_WAIT}"
        )
    _expect_root(root, unit, "finalize_backward")
    _refuse_waiting(root, "finalize_backward")
    if not ending.is_manual:
        raise RuntimeError(
            "finalize_backward: expected manual backward finalization, found that the end of the backward hands "
            "gradients over; call set_manual_backward_finalization(True) before the forward, or leave this call out"
        )
    if current_backward() != -1:
        raise RuntimeError(
            "finalize_backward: expected to be called after the backward completes, found one running; call it after "
            "the last backward() of the step"
        )
    if root.has_leftovers():
        raise RuntimeError(
            "finalize_backward: expected to be called after the backward completes, found a forward or backward that "
            "failed; run that micro-batch again, or call reset_iter_state() to continue without it"
        )
    root.finalize()
    if not asynchronous:
        root.wait_finalize()
        return None
    root.shared.finalizing = reduction = GradientReduction(root)
    return reduction


def refuse_unfinished(root: FinalizedRoot, what: str) -> None:
    """Raise `RuntimeError` if the gradients of the last step were not handed over. `what` is about to begin."""
    ending = root.run.ending
    if ending.waits:
        raise RuntimeError(f"{what}: expected the gradients of the last step on .grad, found them under way; {_WAIT}")
    _refuse_waiting(root, what)
    if ending.sent and ending.is_manual:
        raise RuntimeError(
            f"{what}: expected finalize_backward after a backward that reduced gradients, because "
            f"set_manual_backward_finalization(True) was called, found none; call finalize_backward() on the root "
            f"before, or set_requires_gradient_sync(False) before all backwards of a step and True before "
            f"finalize_backward()"
        )


def lost_gradients(units: Sequence[Unit], without: Collection[Unit]) -> RuntimeError | None:
    """The error for units `without` gradients of weights, although a backward computed those of their inputs.

    Zero-bubble schedules split the backward and assign weight gradients to the full parameters themselves. They look up
    these parameters before the backward: a unit that was resharded after forward shows shards and gets none.
    """
    lost = [unit for unit in units if unit in without]
    if not lost:
        return None
    return RuntimeError(
        f"{lost[0].record.name}: expected gradients of its weights, found backwards that computed those of its "
        f"inputs alone ({len(lost)} of {len(units)} units): a schedule that splits the backward (zero "
        f"bubble) needs full weights between forward and backward; use "
        f"fully_shard(..., reshard_after_forward=False), or a schedule that does not (1F1B, interleaved 1F1B)"
    )


# Roots whose gradients are under way, by id.
_under_way: dict[int, weakref.ref[FinalizedRoot]] = {}


def note_under_way(root: FinalizedRoot) -> None:
    """A backward ended, `finalize_backward` was called, or a step was discarded."""
    ending = root.run.ending
    key = id(root)
    if ending.waits or (ending.sent and ending.is_manual):
        _under_way[key] = weakref.ref(root, partial(_forget, key))
    elif _under_way:
        _under_way.pop(key, None)


def _forget(key: int, _: object) -> None:
    _under_way.pop(key, None)


@refuses_steps(_under_way)
def _refuse_too_early(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # A copy: backwards end in other threads meanwhile.
    for root in [found for reference in list(_under_way.values()) if (found := reference()) is not None]:
        names = [dotted_name(unit, p.name) for unit in root.units for p in unit.params if id(p.sharded) in own]
        if names:
            cure = _WAIT if root.run.ending.waits else "call finalize_backward() on the root"
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected gradients on .grad, found them under way, of "
                f"{first_few(names)}; {cure} before the step"
            )


def refuse_below(root: FinalizedRoot) -> None:
    """Raise `RuntimeError` if the setting was made below the root."""
    for unit in root.units[1:]:
        if unit.settings.manual_finalization:
            _expect_root(root, unit, "set_manual_backward_finalization")


def _refuse_waiting(root: FinalizedRoot, what: str) -> None:
    if root.shared.finalizing is not None:
        raise RuntimeError(
            f"{what}: expected no reduction under way of a model that shares buffers (share_comm_ctx), found one; "
            f"{_WAIT}"
        )


def _expect_root(root: FinalizedRoot, unit: Unit, method: str) -> None:
    if root.units[0] is not unit:
        raise RuntimeError(
            f"{method}: expected the root module, found {unit.record.name} below it; call it on the root"
        )
