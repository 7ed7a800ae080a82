"""Optimizer-in-backward: steps each parameter as soon as its gradient is reduced, then frees the gradient.

    collected     a reduction is complete: its gradients go to `.grad`, the user's hooks run, the optimizer steps
                  these parameters alone, and the gradients are freed
    finish        the backward is over: the same for the remaining parameters
    discard       the backward failed: the optimizer keeps its half-done step on record

Only the last backward of an accumulation window steps: not one that holds its gradients (no_sync), keeps partial sums
(no all-reduce), keeps its graph (`retain_graph`, `create_graph`), or is followed by another
(`set_is_last_backward(False)`). The gradients of these wait on `.grad`, or are held as always, and join the step.

Stepping during the backward is safe because a unit is reduced only after the backward of all of its uses. A program
that reads weights of a unit after that raises before the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from .._torch import local_of, with_tensor_hooks
from ..param import ShardedParam
from ..schedule import Full
from .channels import Stepper
from .optimizer_steps import note_optimizer_step
from .unit import InFlight, Unit

# ---- stepping --------------------------------------------------------------------------------------------------------


class Stepping:
    """The steps in the backward that one executor runs in `thread`, of which optimizer steps are counted. `is_final`:
    whether the running backward is the last of its window; `on_step`: called when a backward that stepped is over."""

    def __init__(self, thread: int, is_final: Callable[[], bool], on_step: Callable[[], object]) -> None:
        self.thread, self.is_final, self.on_step = thread, is_final, on_step
        # The parameters stepped in the running backward; the units whose step waits for its end.
        self._stepped: dict[Unit, set[ShardedParam]] = {}
        self._postponed: set[Unit] = set()

    def sends(self, unit: Unit) -> None:
        """`unit` is about to send gradients. Raises if its parameters were stepped already."""
        stepper = unit.gradients.stepper
        if stepper is None or not self.is_final():
            return
        if unit.gradients.arrived != unit.gradients.expected:
            # Missing gradients may come after the message, if a weight was read outside of its module's forward.
            self._postponed.add(unit)
        if unit in self._stepped:
            self._refuse_late(unit, [param for param in unit.params if param.gradients.fresh is not None])
            return
        if stepper.stepped_any([param.sharded for param in unit.params]):
            raise RuntimeError(
                f"{unit.record.name}: expected optimizer.step() between two backwards that step, found none: its "
                f"parameters took their step in the last backward, with a part of the gradients if you accumulate; "
                f"call set_requires_gradient_sync(False) or set_is_last_backward(False) before all backwards of a step "
                f"but the last, and call optimizer.step() after the last"
            )

    def _refuse_late(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        late = [param.name for param in params if param in self._stepped.get(unit, ())]
        if late:
            raise RuntimeError(
                f"{unit.record.name}: expected all gradients of its parameters before their step in backward, found "
                f"more for {', '.join(late)} after it: weights were read outside of the forward of the module; read "
                f"them inside (fullshard.register_fsdp_forward_method), or exclude this module from the model given "
                f"to step_in_backward"
            )

    def refuse_weights(self, unit: Unit) -> None:
        """The weights of `unit` are about to be read. Raises if they were stepped in this backward."""
        if unit in self._stepped:
            raise RuntimeError(
                f"{unit.record.name}: expected no use of its weights in a backward after their step, found one: a "
                f"weight is read outside of its module's forward; read it inside that forward, or call the optimizer "
                f"after the backward instead of step_in_backward"
            )

    def collected(self, flight: InFlight) -> None:
        """The gradients of a reduction arrived in `param.gradients.reduced`."""
        unit = flight.unit
        if unit.gradients.stepper is None or flight.reduction.keeps or not self.is_final():
            return
        params = [flight.group.params[i] for i in flight.trainable]
        params = [
            param
            for param in params
            if param.gradients.reduced is not None and unit.gradients.stepper.has(param.sharded)
        ]
        self._refuse_late(unit, params)
        # Shards in a running all-gather (a prefetch after the unit's backward) must not change. Gradients that came
        # after the message need another one.
        waits = unit.record.full is Full.PENDING or any(param.gradients.fresh is not None for param in params)
        if waits or unit in self._postponed or not params:
            return
        if unit.host_link is not None:
            unit.host_link.finish()
        for i in with_tensor_hooks([param.sharded for param in params]):
            params[i].gradients.run_tensor_hooks()
        for param in params:
            param.gradients.commit()
        for param in params:
            param.gradients.run_hooks()
        self._step(unit, unit.gradients.stepper, params)

    def finish(self, arrived: Iterable[tuple[Unit, ShardedParam]]) -> None:
        """The backward is over; `arrived`: parameters with gradients on `.grad`, unit by unit."""
        owned: dict[Unit, list[ShardedParam]] = {}
        for unit, param in arrived:
            if unit.gradients.stepper is not None and unit.gradients.stepper.has(param.sharded):
                owned.setdefault(unit, []).append(param)
        if owned and self.is_final():
            for unit, params in owned.items():
                assert unit.gradients.stepper is not None
                self._step(unit, unit.gradients.stepper, params)
        if self._stepped:
            for stepper in self._steppers():
                stepper.end(self)
            self._stepped.clear()
            note_optimizer_step(self.thread)
            self.on_step()
        self._postponed.clear()

    def discard(self) -> None:
        """The backward failed. Stepped parameters stay stepped: the optimizer saw `begin` without `end`."""
        if self._stepped:
            self._stepped.clear()
            note_optimizer_step(self.thread)
            self.on_step()
        self._postponed.clear()

    def _steppers(self) -> dict[Stepper, None]:
        return {unit.gradients.stepper: None for unit in self._stepped if unit.gradients.stepper is not None}

    def _step(self, unit: Unit, stepper: Stepper, params: Sequence[ShardedParam]) -> None:
        # `begin` comes first: a step that fails may have written.
        stepper.begin(self, unit.record.name)
        self._stepped.setdefault(unit, set()).update(params)
        stepper.step(params)
        # Full parameters that are the shards: bump versions, so that autograd raises on a later read.
        shared = [param.full for group in unit.groups if group.shares_memory for param in group.params]
        if shared:
            torch.autograd.graph.increment_version(
                [local_of(full) if isinstance(full, DTensor) else full for full in shared]
            )
