"""`finalize_backward`: steps that end where the user says. `module.py` makes each function a method of `FSDPModule`."""

from __future__ import annotations

from typing import cast

from torch import nn

from .._torch import TorchGradientReductionHandle
from ..engine import Unit, unit_of
from ..engine.finalization import GradientReduction, finalize, set_manual
from ..engine.hooks import hooks_of
from ..engine.root import Root, formed
from ..policy.arguments import expect_flag


class GradientReductionHandle(TorchGradientReductionHandle):
    """The result of `finalize_backward(async_op=True)`: gradients are on `.grad` after `wait()`."""

    def __init__(self, unit: Unit, reduction: GradientReduction | None) -> None:
        self._unit, self._reduction = unit, reduction

    def wait(self) -> None:
        """Wait for the reductions, and write the gradients to `.grad`. Later calls do nothing.

        Raises `RuntimeError` if `reset_iter_state` or a failure discarded the step.
        """
        if self._reduction is not None:
            hooks_of(self._unit).outside(GradientReduction.wait, self._reduction)
            self._reduction = None


def set_manual_backward_finalization(self: object, enabled: bool) -> None:
    """True: the end of a backward hands no gradients over; `finalize_backward` does, after all backwards of a step.

    Root only. Takes precedence over `set_is_last_backward`. Until `finalize_backward`, `.grad` is what it was before
    the step, and a step of the optimizer raises. Backwards follow `set_requires_gradient_sync`: those with False keep
    their gradients, one with True sends them while it runs, and must be the last one. The same on all ranks.
    Raises `RuntimeError` below the root, and for a change in or after the first backward of a step.
    """
    enabled = expect_flag("enabled", enabled)
    unit = _unit(self)
    set_manual(unit, _root(unit), enabled)


def finalize_backward(self: object, *, async_op: bool = False) -> GradientReductionHandle | None:
    """End the step after all of its backwards: reduce what they kept, write `.grad`, and free full parameters.

    Root only; collective. What is reduced and freed follows `set_requires_gradient_sync`, `set_requires_all_reduce` and
    `set_reshard_after_backward` at this moment. Does nothing before the first forward.

    async_op: do not wait, and return a handle. `handle.wait()` must come before gradients are used, and before the next
        forward of this model and of models that share its buffers (`share_comm_ctx`).
    Raises `RuntimeError` without `set_manual_backward_finalization(True)`, below the root, during a backward, after one
    that failed, and while an earlier handle waits.
    """
    async_op = expect_flag("async_op", async_op)
    unit = _unit(self)
    reduction = hooks_of(unit).outside(_finalize, unit, async_op)
    return GradientReductionHandle(unit, reduction) if async_op else None


def _finalize(unit: Unit, asynchronous: bool) -> GradientReduction | None:
    return finalize(unit, _root(unit), asynchronous=asynchronous)


def _root(unit: Unit) -> Root | None:
    root = formed(unit)
    return None if root is None or root.provisional else root


def _unit(module: object) -> Unit:
    unit = unit_of(cast(nn.Module, module))
    assert unit is not None
    return unit
