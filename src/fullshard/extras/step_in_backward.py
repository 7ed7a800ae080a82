"""Optimizer-in-backward: each unit steps as soon as its gradients are reduced, so that not all exist at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..api.optimizer import AROUND, step_on_shards, step_parts
from ..engine.optimizer_steps import asked_on_devices
from ..engine.unit import Unit, module_units
from ..param import ShardedParam, SteppedGrad
from ..policy.arguments import expect_module


class StepInBackward:
    """The result of `step_in_backward`: one optimizer, and the units whose gradients it consumes in backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._units: dict[Unit, None] = {}
        # The position of each parameter's group, and the lengths of the groups at that time.
        self._groups: dict[nn.Parameter, int] = {}
        self._group_lengths: list[int] = []
        # The stepped parameters and modules, and backwards that did not end.
        self._stepped: dict[nn.Parameter, None] = {}
        self._unit_names: dict[str, None] = {}
        self._unfinished: dict[object, None] = {}

    @property
    def stepped(self) -> tuple[str, ...]:
        """Names of the modules whose parameters were stepped since the last `optimizer.step()`, in that order."""
        return tuple(self._unit_names)

    def accept(self) -> None:
        """Continue after a backward that failed half way, with only some parameters stepped, or after loading a
        checkpoint over them."""
        self._unfinished.clear()
        self._close()

    def remove(self) -> None:
        """Let `optimizer.step()` take the steps again, from the next backward on."""
        self.refuse_half_a_step()
        for unit in self._units:
            unit.gradients.stepper = None
        self._units.clear()
        self._close()
        self._optimizer.__dict__.pop(AROUND, None)

    # ---- called by the optimizer's step() (optimizer.Around) ------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        """Does its part of `optimizer.Around`."""
        self.refuse_half_a_step()
        if closure:
            self._close()  # the closure runs a backward

    def after_step(self) -> None:
        """Does its part of `optimizer.Around`."""
        self.refuse_half_a_step()
        self._close()

    def _close(self) -> None:
        self._stepped.clear()
        self._unit_names.clear()

    # ---- called by a backward (engine.stepping.Stepper) -----------------------------------------------------

    def has(self, parameter: nn.Parameter) -> bool:
        """Does its part of `engine.stepping.Stepper`."""
        lengths = [len(group["params"]) for group in self._optimizer.param_groups]
        if lengths != self._group_lengths:  # add_param_group
            self._group_lengths = lengths
            groups = enumerate(self._optimizer.param_groups)
            self._groups = {parameter: position for position, group in groups for parameter in group["params"]}
        return parameter in self._groups

    def stepped_any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Does its part of `engine.stepping.Stepper`."""
        return any(parameter in self._stepped for parameter in parameters)

    def begin(self, backward: object, unit_name: str) -> None:
        """Does its part of `engine.stepping.Stepper`."""
        for ask in asked_on_devices:
            ask(self._optimizer)
        self._unfinished[backward] = None
        self._unit_names[unit_name] = None

    def step(self, params: Sequence[ShardedParam]) -> None:
        """Does its part of `engine.stepping.Stepper`."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for param in params:
            by_group.setdefault(self._groups[param.sharded], []).append(param.sharded)
            self._stepped[param.sharded] = None
        groups = self._optimizer.param_groups
        step_parts(self._optimizer, [(groups[position], list(part)) for position, part in sorted(by_group.items())])
        for param in params:
            param.sharded.grad = SteppedGrad(param.sharded, param.name, param.precision.gradient)

    def end(self, backward: object) -> None:
        """Does its part of `engine.stepping.Stepper`."""
        self._unfinished.pop(backward, None)

    def refuse_half_a_step(self) -> None:
        """Does its part of `engine.stepping.Stepper`."""
        if self._unfinished:
            raise RuntimeError(
                f"step_in_backward: expected a backward that ended, found that the last one failed after the step of "
                f"{len(self._unit_names)} of {len(self._units)} modules ({', '.join(self._unit_names)}); the others "
                f"did not step; load a checkpoint, or keep the mixed state, and call accept() of the object that "
                f"step_in_backward returned"
            )


def step_in_backward(model: nn.Module, optimizer: Optimizer, *, elementwise: bool = False) -> StepInBackward:
    """Let `optimizer` step each parameter in backward, once its gradient is reduced, and free the gradient.

    The gradients of the whole model then never exist together: only those of the reductions in flight
    (`set_reduce_scatter_max_input_buffers`) and of one unit. Parameters, states and state dicts are bitwise equal to
    those of steps after the backward. The loop does not change:

        fullshard.step_in_backward(model, optimizer)     # once
        ...
        loss.backward()                                  # the steps
        optimizer.step()                                 # those of parameters that no unit has, if any
        optimizer.zero_grad()

    Accumulation: all backwards of a step but the last have to announce it, with `set_requires_gradient_sync(False)`,
    `set_requires_all_reduce(False)`, `set_is_last_backward(False)` or `retain_graph=True`. A backward that steps a
    parameter for the second time since the last `optimizer.step()` raises `RuntimeError`. The learning rate is the one
    at the time of the backward. Step hooks of the optimizer run in `optimizer.step()`; hooks of
    `register_post_accumulate_grad_hook` run before the parameter's step, and may change its gradient.

    A module with a gradient missing at its reduction steps when the backward ends: the gradient may still come.

    Operations that need all gradients at once cannot be used: a placeholder stays on `.grad`, and clipping by a global
    norm, a GradScaler, and others that read it raise `RuntimeError`.

    A failing backward may have stepped some modules. The next forward, and `optimizer.step()`, then raise
    `RuntimeError` with their names, until `accept()` of the returned object is called: each parameter and its state
    either took the step or did not. Load a checkpoint to restore a consistent state.

    model: a module with units. All of them take part, with those of their parameters that the optimizer has. Call it
        for each model if an optimizer has parameters of several (stages of a pipeline).
    optimizer, elementwise: passed on to `step_on_shards`.
    Raises `TypeError` for something that is not an optimizer; `ValueError` for a class that is not elementwise, a
    `differentiable` one, a model without sharded parameters of the optimizer, or with units of another optimizer.
    """
    expect_module("model", model)
    step_on_shards(optimizer, elementwise=elementwise)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "optimizer: expected differentiable=False, found True; a step in backward has no graph: build it without"
        )
    stepper: StepInBackward = optimizer.__dict__.get(AROUND) or StepInBackward(optimizer)
    units = module_units(model)
    if not any(stepper.has(param.sharded) for unit in units for param in unit.params):
        raise ValueError(
            f"model: expected a sharded module with parameters of the optimizer, found {type(model).__name__} with "
            f"{len(units)} units and none of them; apply fully_shard, then build the optimizer from "
            f"model.parameters() or call rebind_optimizer(optimizer, model)"
        )
    others = [unit.record.name for unit in units if unit.gradients.stepper not in (None, stepper)]
    if others:
        raise ValueError(
            f"model: expected modules that no other optimizer steps in backward, found {', '.join(others)}; call "
            f"remove() of the object that step_in_backward returned for them"
        )
    optimizer.__dict__[AROUND] = stepper
    for unit in units:
        unit.gradients.stepper = stepper
        stepper._units[unit] = None
    return stepper
