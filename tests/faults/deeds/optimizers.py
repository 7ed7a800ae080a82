"""What the cases of optimizers do to an optimizer, its schedule, clipping, a scaler or hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from tests.faults.actions import Action, local, parameter
from tests.faults.program import Run
from tests.faults.ranks import Caught

SECOND = "layers.1."


# ---- optimizers of all ranks ---------------------------------------------------------------------------------


def adamw(**options: Any) -> Callable[[Run], Optimizer]:
    return lambda run: AdamW(run.model.parameters(), **{"lr": 1e-2, **options})


def momentum(run: Run) -> Optimizer:
    return SGD(run.model.parameters(), lr=1e-2, momentum=0.9)


def two_groups(run: Run) -> Optimizer:
    """Matrices decay, the rest does not and has another learning rate."""
    return AdamW(groups(run), lr=1e-2)


def groups(run: Run) -> list[dict[str, Any]]:
    parameters = list(run.model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]


def without_second(run: Run) -> Optimizer:
    return AdamW([p for name, p in run.model.named_parameters() if not name.startswith(SECOND)], lr=1e-2)


class Both:
    """Two optimizers of parts of the model, as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.order = [first, second]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: state for optimizer in self.order for p, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.order:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.order:
            optimizer.zero_grad()


def both(run: Run) -> Any:
    named = dict(run.model.named_parameters())
    return Both(
        AdamW([p for name, p in named.items() if not name.startswith(SECOND)], lr=1e-2),
        SGD([p for name, p in named.items() if name.startswith(SECOND)], lr=1e-2),
    )


def decays(gamma: float) -> Callable[[Optimizer], Any]:
    return lambda optimizer: ExponentialLR(optimizer, gamma)


# ---- what one rank has otherwise -----------------------------------------------------------------------------


def put(group: int | None = None, **values: Any) -> Action:
    """Other values in the optimizer's groups, or in one of them."""

    def action(run: Run) -> None:
        for found in run.optimizer.param_groups[slice(None) if group is None else slice(group, group + 1)]:
            found.update(values)

    return action


def exchange_rates(run: Run) -> None:
    first, second = run.optimizer.param_groups
    first["lr"], second["lr"] = second["lr"], first["lr"]


def make(optimizer: Callable[[Run], Any]) -> Action:
    def action(run: Run) -> None:
        run.optimizer = optimizer(run)

    return action


def adam(run: Run) -> Optimizer:
    """What AdamW does without decay, and another class."""
    return Adam(run.model.parameters(), lr=1e-2)


def lr_as_tensor(run: Run) -> Optimizer:
    return AdamW(run.model.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), foreach=False)


def groups_turned(run: Run) -> Optimizer:
    return AdamW(groups(run)[::-1], lr=1e-2)


def parameters_turned(run: Run) -> Optimizer:
    return AdamW(list(run.model.parameters())[::-1], lr=1e-2)


def add_second(run: Run) -> None:
    run.optimizer.add_param_group({"params": list(run.model.layers[1].parameters())})


def other_schedule(run: Run) -> None:
    run.schedule = ExponentialLR(run.optimizer, 0.9)


def schedule_more(run: Run) -> None:
    run.schedule.step()


def schedule_less(run: Run) -> None:
    run.schedule.step = lambda: None


def keep_state(run: Run) -> None:
    """As a checkpoint in memory has it."""
    run.kept["optimizer"] = {
        "state": {
            n: {k: v.clone() for k, v in state.items()} for n, state in run.optimizer.state_dict()["state"].items()
        },
        "param_groups": [dict(group) for group in run.optimizer.state_dict()["param_groups"]],
    }
    run.kept["model"] = {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def load_optimizer(**values: Any) -> Action:
    """The optimizer's own state again, with other values in its groups."""

    def action(run: Run) -> None:
        state = run.optimizer.state_dict()
        state["param_groups"] = [{**group, **values} for group in state["param_groups"]]
        run.optimizer.load_state_dict(state)

    return action


def load_optimizer_kept(run: Run) -> None:
    run.optimizer.load_state_dict(run.kept["optimizer"])


def load_model_kept(run: Run) -> None:
    run.model.load_state_dict(run.kept["model"])


def load_all_kept(run: Run) -> None:
    """On all ranks: everything again as it was."""
    if run.step == 2 and not run.kept.get("again"):
        run.kept["again"] = True
        load_model_kept(run)
        load_optimizer_kept(run)


def lose_state(run: Run) -> None:
    run.optimizer.state.clear()


def made_anew(run: Run) -> None:
    run.optimizer = AdamW(run.model.parameters(), lr=1e-2)


def steps_at_zero(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["step"].fill_(0)


def second_left_out(run: Run) -> None:
    run.optimizer.order.pop()


def turned(run: Run) -> None:
    run.optimizer.order.reverse()


def zeros(run: Run) -> None:
    """zero_grad(set_to_none=False) from now on."""
    clear = run.optimizer.zero_grad
    run.optimizer.zero_grad = lambda: clear(set_to_none=False)


# ---- writes --------------------------------------------------------------------------------------------------


def scaled_shards(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.layers[1].parameters():
            local(p).mul_(0.5)


def begin_average(run: Run) -> None:
    run.kept["average"] = [local(p).detach().clone() for p in run.model.parameters()]


def update_average(run: Run) -> None:
    if "average" in run.kept:
        torch._foreach_lerp_(run.kept["average"], [local(p).detach() for p in run.model.parameters()], 0.1)


def average_into_model(run: Run) -> None:
    """The running average takes the place of the parameters, for good."""
    with torch.no_grad():
        for p, value in zip(run.model.parameters(), run.kept["average"], strict=True):
            local(p).copy_(value)


def average_for_an_evaluation(run: Run) -> None:
    """All ranks evaluate with the running average, and put the parameters back."""
    own = [local(p).detach().clone() for p in run.model.parameters()]
    average_into_model(run)
    run.evaluate()
    with torch.no_grad():
        for p, value in zip(run.model.parameters(), own, strict=True):
            local(p).copy_(value)


def gradient_scaled(run: Run) -> None:
    """By hand, after the backward."""
    for p in run.model.layers[1].parameters():
        local(p.grad).mul_(2.0)


def gradient_gone(run: Run) -> None:
    parameter(run, "layers.1.up.weight").grad = None


# ---- hooks and settings --------------------------------------------------------------------------------------


def doubles(run: Run) -> None:
    """A hook of a sharded parameter's gradient, on this rank."""
    parameter(run, "layers.1.up.weight").register_hook(lambda gradient: gradient * 2)


def doubles_after(run: Run) -> None:
    def hook(p: Any) -> None:
        local(p.grad).mul_(2.0)

    parameter(run, "layers.1.up.weight").register_post_accumulate_grad_hook(hook)


def looks(run: Run) -> None:
    """A hook of every rank, which only looks."""
    parameter(run, "layers.1.up.weight").register_hook(lambda gradient: None)


def step_hook(run: Run) -> None:
    """Before each update this rank makes its gradients smaller."""

    def hook(*_: Any) -> None:
        for p in run.model.parameters():
            local(p.grad).mul_(0.5)

    run.optimizer.register_step_pre_hook(hook)


def setting(call: str, *values: Any) -> Action:
    """A `set_*` call of the model's."""

    def action(run: Run) -> None:
        if not run.plain:
            getattr(run.model, call)(*values)

    return action


def all_reduce_hook(run: Run) -> None:
    for layer in run.model.layers:
        layer.set_all_reduce_hook(lambda gradient: gradient.mul_(2.0))


def hsdp(impl: Any) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


# ---- clipping ------------------------------------------------------------------------------------------------


def clip_with(**values: Any) -> Action:
    def action(run: Run) -> None:
        run.clip_arguments.update(values)

    return action


def _clip(run: Run, parameters: Any) -> None:
    assert run.impl is not None
    run.impl.clip(parameters, **run.clip_arguments)


def clip_second(run: Run) -> None:
    run.clip = lambda: _clip(run, run.model.layers[1].parameters())  # type: ignore[method-assign]


def clip_never(run: Run) -> None:
    run.clip = lambda: None  # type: ignore[method-assign]


def clip_twice(run: Run) -> None:
    clip = run.clip

    def twice() -> None:
        clip()
        clip()

    run.clip = twice  # type: ignore[method-assign]


def clip_after(run: Run) -> None:
    """The gradients are clipped when the update has used them."""

    def update() -> None:
        run.optimizer.step()
        run.clip()

    run.update = update  # type: ignore[method-assign]


def clip_parts(*order: str) -> Action:
    """Two calls, of two parts of the model."""

    def action(run: Run) -> None:
        def clip() -> None:
            for name in order:
                _clip(run, run.model.get_submodule(name).parameters())

        if not run.plain:
            run.clip = clip  # type: ignore[method-assign]

    return action


def clip_of_torch(run: Run) -> None:
    run.clip = lambda: torch.nn.utils.clip_grad_norm_(  # type: ignore[method-assign,assignment]
        run.model.parameters(), **run.clip_arguments
    )


# ---- scalers -------------------------------------------------------------------------------------------------


def scaler(**options: Any) -> Action:
    def action(run: Run) -> None:
        run.scaler = run.new_scaler(**options)

    return action


def scaler_set(run: Run) -> None:
    run.scaler.update(new_scale=32.0)


def scaler_loaded(run: Run) -> None:
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 32.0})


def scaler_never_updated(run: Run) -> None:
    run.scaler.update = lambda: None


def unscale(run: Run) -> None:
    run.scaler.unscale_(run.optimizer)


def unscale_twice(run: Run) -> None:
    unscale(run)
    unscale(run)


def scale_logged(run: Run) -> None:
    run.kept["scale"] = run.scaler.get_scale()


def infs_everywhere(run: Run) -> None:
    with torch.no_grad():
        local(parameter(run, "layers.1.up.weight").grad).fill_(float("inf"))


# ---- the update inside of a guard ----------------------------------------------------------------------------


def raise_before_update(run: Run) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        raise ValueError("injected, before the update")

    handle = run.optimizer.register_step_pre_hook(hook)


def raise_after_update(run: Run) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        raise ValueError("injected, after the update")

    handle = run.optimizer.register_step_post_hook(hook)


def at_update(then: Action) -> Action:
    """Do it when the optimizer is called, before anything is written."""

    def action(run: Run) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            then(run)

        handle = run.optimizer.register_step_pre_hook(hook)

    return action


class Halfway(SGD):
    """Writes one parameter after the other, and may raise between two of them."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, p in enumerate(self.param_groups[0]["params"]):
            if self.fails and number == 5:
                self.fails = False
                raise ValueError("injected, in the middle of the update")
            if p.grad is not None:
                local(p).add_(local(p.grad), alpha=-1e-2)


def halfway(run: Run) -> Optimizer:
    return Halfway(run.model.parameters(), lr=1e-2)


def fails_halfway(run: Run) -> None:
    run.optimizer.fails = True


def loads_and_goes_on(run: Run) -> None:
    """A program that keeps its state before each step; what raised is tried again from there."""
    run.build()
    run.step = 0
    while run.step < run.setup.steps:
        keep_state(run)
        try:
            run.one_step()
        except Exception as error:
            assert run.told is not None
            run.told.caught.append(Caught.of(error))
            if len(run.told.caught) > 3:
                raise
            run.optimizer.zero_grad()
            load_model_kept(run)
            load_optimizer_kept(run)
            continue
        run.step += 1
