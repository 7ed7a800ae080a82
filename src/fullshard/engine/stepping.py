"""Optimizer steps inside a backward: a gradient goes to its optimizer as soon as it is reduced, and then it is gone.

    collected     a reduction is complete: its gradients go to `.grad`, the user's hooks run, the optimizer takes its
                  step with these parameters alone, and the gradients are freed
    finish        the backward is over: the same for what could not be done earlier
    discard       it failed: the optimizer learns that a part of its step was done

A step is taken in the last backward of a window alone: not in one that holds its gradients (no synchronisation), keeps
partial sums (no all-reduce), keeps its graph (`retain_graph`, `create_graph`), or was said not to be the last
(`set_is_last_backward(False)`). What those bring waits on `.grad`, or is held, as always, and is part of the step.

Weights that change while a backward runs are safe because a gradient is reduced when the backward of all uses of its
unit is over. Where that was an error (weights read where nothing announced it) it is one here too, before they are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from .._torch import local_of, with_tensor_hooks
from ..param import ShardedParam
from ..schedule import Full
from .gradients import Stepper
from .optimizer_steps import note_optimizer_step
from .unit import InFlight, Unit

# ---- stepping --------------------------------------------------------------------------------------------------------


class Stepping:
    """The steps in the backward that one executor runs."""

    def __init__(self) -> None:
        # Whether the running backward is the last of its window.
        self.is_final: Callable[[], bool] = lambda: True
        # Told when a backward that stepped is over.
        self.on_step: Callable[[], None] = lambda: None
        # Whose forward runs the model: what counts optimizer steps counts them by thread.
        self.thread = 0
        # Of the running backward: what was stepped; units whose step waits for its end.
        self._stepped: dict[Unit, set[ShardedParam]] = {}
        self._postponed: set[Unit] = set()

    def sends(self, unit: Unit) -> None:
        """`unit` is about to send gradients: that is an error when its step was taken already."""
        stepper = unit.gradients.stepper
        if stepper is None or not self.is_final():
            return
        if unit.gradients.arrived != unit.gradients.expected:
            # What is missing may come behind the message: a weight was read outside of the forward of its module.
            self._postponed.add(unit)
        if unit in self._stepped:
            self._refuse_late(unit, [param for param in unit.params if param.fresh is not None])
            return
        if stepper.stepped_any([param.sharded for param in unit.params]):
            raise RuntimeError(
                f"{unit.record.name}: expected optimizer.step() between two backwards that step, found none: its "
                f"parameters took their step in the last backward, with a part of the gradients if you accumulate; "
                f"call set_requires_gradient_sync(False) or set_is_last_backward(False) before all backwards of a step "
                f"but the last, and keep optimizer.step() behind that one"
            )

    def _refuse_late(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        late = [param.name for param in params if param in self._stepped.get(unit, ())]
        if late:
            raise RuntimeError(
                f"{unit.record.name}: expected all gradients of its parameters before their step in backward, found "
                f"those of {', '.join(late)} once more behind it: weights were read outside of the forward of the "
                f"module; read them inside (fullshard.register_fsdp_forward_method), or give step_in_backward another "
                f"model than the one that contains it"
            )

    def refuse_weights(self, unit: Unit) -> None:
        """The weights of `unit` are about to be read: that is an error when they were stepped in this backward."""
        if unit in self._stepped:
            raise RuntimeError(
                f"{unit.record.name}: expected no use of its weights in a backward behind their step, found one: a "
                f"weight is read where its module's outputs do not announce it; read it inside its module's forward, "
                f"or step behind backward"
            )

    def collected(self, flight: InFlight) -> None:
        """The gradients of a reduction are there, in `param.reduced`."""
        unit = flight.unit
        if unit.gradients.stepper is None or flight.reduction.keeps or not self.is_final():
            return
        params = [flight.group.params[i] for i in flight.trainable]
        params = [param for param in params if param.reduced is not None and unit.gradients.stepper.has(param.sharded)]
        self._refuse_late(unit, params)
        # Shards that are being sent (a prefetch behind the backward of the unit) must not change; and gradients that
        # came behind the message bring another one.
        waits = unit.record.full is Full.PENDING or any(param.fresh is not None for param in params)
        if waits or unit in self._postponed or not params:
            return
        if unit.host_link is not None:
            unit.host_link.finish()
        for i in with_tensor_hooks([param.sharded for param in params]):
            params[i].run_tensor_hooks()
        for param in params:
            param.commit(flight.group.precision.reduce)
        for param in params:
            param.run_hooks()
        self._step(unit, unit.gradients.stepper, params)

    def finish(self, arrived: Mapping[Unit, Sequence[ShardedParam]]) -> None:
        """The backward is over; `arrived`: parameters whose gradients are on `.grad` now."""
        if self.is_final():
            for unit, params in arrived.items():
                if unit.gradients.stepper is not None and (
                    owned := [p for p in params if unit.gradients.stepper.has(p.sharded)]
                ):
                    self._step(unit, unit.gradients.stepper, owned)
        if self._stepped:
            for stepper in self._steppers():
                stepper.end(self)
            self._stepped.clear()
            note_optimizer_step(self.thread)
            self.on_step()
        self._postponed.clear()

    def discard(self) -> None:
        """The backward failed. What it stepped stays stepped: the optimizer was told, and was not told of an end."""
        if self._stepped:
            self._stepped.clear()
            note_optimizer_step(self.thread)
            self.on_step()
        self._postponed.clear()

    def _steppers(self) -> dict[Stepper, None]:
        return {unit.gradients.stepper: None for unit in self._stepped if unit.gradients.stepper is not None}

    def _step(self, unit: Unit, stepper: Stepper, params: Sequence[ShardedParam]) -> None:
        # Before it: a step that fails may have changed something.
        stepper.begin(self, unit.record.name)
        self._stepped.setdefault(unit, set()).update(params)
        stepper.step(params)
        # Full parameters that are the shards: let autograd notice when it reads them once more.
        shared = [param.full for group in unit.groups if group.shares_memory for param in group.params]
        if shared:
            torch.autograd.graph.increment_version(
                [local_of(full) if isinstance(full, DTensor) else full for full in shared]
            )


def refuse_half_a_step(units: Sequence[Unit]) -> None:
    """Raise `RuntimeError` when the last backward failed after some of `units` were stepped."""
    for unit in units:
        if unit.gradients.stepper is not None:
            unit.gradients.stepper.refuse_half_a_step()
