"""Optimizer steps in backward: of each unit as soon as its gradients are reduced, so that not all exist together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..api.optimizer import AROUND, step_on_shards, step_parts
from ..engine.root import module_units
from ..engine.stepping import Stepping
from ..engine.unit import Unit
from ..param import ShardedParam, SteppedGrad


class StepInBackward:
    """What `step_in_backward` returns: one optimizer, and the units whose gradients it takes in backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._units: dict[Unit, None] = {}
        # Of each parameter: the position of its group; and what that was made of.
        self._groups: dict[nn.Parameter, int] = {}
        self._group_lengths: list[int] = []
        # Since the last `optimizer.step()`: what was stepped, and by which backwards that did not end.
        self._stepped: dict[nn.Parameter, None] = {}
        self._unit_names: dict[str, None] = {}
        self._unfinished: dict[Stepping, None] = {}

    @property
    def stepped(self) -> tuple[str, ...]:
        """Names of the modules whose parameters were stepped since the last `optimizer.step()`, in that order."""
        return tuple(self._unit_names)

    def accept(self) -> None:
        """Go on after a backward that failed half way, with parameters of which some took the step and some did not;
        or after a checkpoint was loaded over them."""
        self._unfinished.clear()
        self._close()

    def remove(self) -> None:
        """Steps are taken by `optimizer.step()` again, from the next backward on."""
        self.refuse_half_a_step()
        for unit in self._units:
            unit.stepper = None
        self._units.clear()
        self._close()
        self._optimizer.__dict__.pop(AROUND, None)

    # ---- what the optimizer's step() tells (optimizer.Around) ------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        """See `optimizer.Around`."""
        self.refuse_half_a_step()
        if closure:
            self._close()  # a backward is to come in it

    def after_step(self) -> None:
        """See `optimizer.Around`."""
        self.refuse_half_a_step()
        self._close()

    def _close(self) -> None:
        self._stepped.clear()
        self._unit_names.clear()

    # ---- what a backward asks (engine.stepping.Stepper) -----------------------------------------------------

    def has(self, parameter: nn.Parameter) -> bool:
        """See `engine.stepping.Stepper`."""
        lengths = [len(group["params"]) for group in self._optimizer.param_groups]
        if lengths != self._group_lengths:  # add_param_group
            self._group_lengths = lengths
            groups = enumerate(self._optimizer.param_groups)
            self._groups = {parameter: position for position, group in groups for parameter in group["params"]}
        return parameter in self._groups

    def stepped_any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """See `engine.stepping.Stepper`."""
        return any(parameter in self._stepped for parameter in parameters)

    def begin(self, backward: Stepping, unit_name: str) -> None:
        """See `engine.stepping.Stepper`."""
        self._unfinished[backward] = None
        self._unit_names[unit_name] = None

    def step(self, params: Sequence[ShardedParam]) -> None:
        """See `engine.stepping.Stepper`."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for param in params:
            by_group.setdefault(self._groups[param.sharded], []).append(param.sharded)
            self._stepped[param.sharded] = None
        groups = self._optimizer.param_groups
        step_parts(self._optimizer, [(groups[position], list(part)) for position, part in sorted(by_group.items())])
        for param in params:
            param.sharded.grad = SteppedGrad(param.sharded, param.name)

    def end(self, backward: Stepping) -> None:
        """See `engine.stepping.Stepper`."""
        self._unfinished.pop(backward, None)

    def refuse_half_a_step(self) -> None:
        """See `engine.stepping.Stepper`."""
        if self._unfinished:
            raise RuntimeError(
                f"step_in_backward: expected a backward that ended, found that the last one failed after the step of "
                f"{len(self._unit_names)} of {len(self._units)} modules ({', '.join(self._unit_names)}): their "
                f"parameters and states are those of after the step, the others' those of before; load a checkpoint, "
                f"or leave it so, and then call accept() of what step_in_backward returned"
            )


def step_in_backward(model: nn.Module, optimizer: Optimizer, *, elementwise: bool = False) -> StepInBackward:
    """Let `optimizer` take each parameter's step in backward, once its gradient is reduced, and free the gradient.

    Gradients of the whole model then never exist together: there are those of the reductions in flight
    (`FULLSHARD_REDUCTIONS`) and of one unit. Same parameters, bit by bit, as with steps behind the backward; same
    states and state dicts. The loop stays as it is:

        fullshard.step_in_backward(model, optimizer)     # once
        ...
        loss.backward()                                  # the steps
        optimizer.step()                                 # those of parameters that no unit has, if any
        optimizer.zero_grad()

    Accumulation: all backwards of a step but the last have to say so, by `set_requires_gradient_sync(False)`,
    `set_requires_all_reduce(False)`, `set_is_last_backward(False)` or `retain_graph=True`. A backward that steps what
    was stepped since the last `optimizer.step()` is a `RuntimeError`. The learning rate is that of the time of the
    backward. Step hooks of the optimizer run in `optimizer.step()`; hooks of `register_post_accumulate_grad_hook` run
    before the parameter's step, and may change its gradient.

    A module of which a gradient is missing when it sends is stepped when the backward ends: it may come late.

    What decides over all gradients together cannot be used: afterwards a marker stands on `.grad`, and clipping by a
    global norm, a GradScaler, and whatever else reads it, raises `RuntimeError`.

    A backward that fails may have stepped some modules. The next forward, and `optimizer.step()`, then raise
    `RuntimeError` with their names, until `accept()` of the returned object is called: each parameter and its state
    fit together, but not all of them took the step. Load a checkpoint to have the whole as it was.

    model: a module with units; all of them take part, with those of their parameters that the optimizer has. Call it
        for each model when an optimizer has those of several (stages of a pipeline).
    optimizer, elementwise: as for `step_on_shards`, which it is given to.
    Raises `TypeError` for something that is no optimizer; `ValueError` for a class that is not elementwise, a
    `differentiable` one, a model without sharded parameters of the optimizer, or with units of another optimizer.
    """
    step_on_shards(optimizer, elementwise=elementwise)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "optimizer: expected differentiable=False, found True; a step in backward is in no graph: build it without"
        )
    stepper: StepInBackward = optimizer.__dict__.get(AROUND) or StepInBackward(optimizer)
    units = module_units(model)
    if not any(stepper.has(param.sharded) for unit in units for param in unit.params):
        raise ValueError(
            f"model: expected a sharded module with parameters of the optimizer, found {type(model).__name__} with "
            f"{len(units)} units and none of them; apply fully_shard, then build the optimizer from model.parameters()"
        )
    others = [unit.record.name for unit in units if unit.stepper not in (None, stepper)]
    if others:
        raise ValueError(
            f"model: expected modules that no other optimizer steps in backward, found {', '.join(others)}; call "
            f"remove() of what step_in_backward returned for them"
        )
    optimizer.__dict__[AROUND] = stepper
    for unit in units:
        unit.stepper = stepper
        stepper._units[unit] = None
    return stepper
