"""What the cases of exceptions do, beside raising at a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.actions import Action, parameter, throw
from tests.faults.program import Run


def grow(name: str) -> Action:
    """A hook of the parameter raises once: at the end of the backward that reduces its gradient."""

    def action(run: Run) -> None:
        def hook(gradient: Any) -> None:
            handle.remove()
            throw(ValueError, "a tensor hook")(run)

        handle = parameter(run, name).register_hook(hook)

    return action


def post_hook(run: Run) -> None:
    def hook(p: Any) -> None:
        handle.remove()
        throw(ValueError, "a hook behind accumulation")(run)

    handle = parameter(run, "layers.1.up.weight").register_post_accumulate_grad_hook(hook)


def backward_hook(run: Run) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        throw(ValueError, "a full backward hook")(run)

    handle = run.model.layers[1].register_full_backward_hook(hook)


def optimizer_hook(run: Run) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        throw(ValueError, "a hook before the update")(run)

    handle = run.optimizer.register_step_pre_hook(hook)


def failing_evaluation(place: str) -> Action:
    def action(run: Run) -> None:
        module = run.model.layers[1].up
        register = module.register_forward_pre_hook if place == "before" else module.register_forward_hook
        handle = register(lambda *_: throw(ValueError, "evaluation")(run))
        try:
            run.evaluate()
        except ValueError:
            pass
        finally:
            handle.remove()

    return action


def abandoned(clear: Callable[[Run], None]) -> Action:
    """A micro-batch without synchronisation is given up before the step, and its gradients cleared."""

    def action(run: Run) -> None:
        if hasattr(run.model, "set_requires_gradient_sync"):
            run.model.set_requires_gradient_sync(False)
        for tokens in run.batches(step=70):
            run.loss(tokens).backward()
        if hasattr(run.model, "set_requires_gradient_sync"):
            run.model.set_requires_gradient_sync(True)
        clear(run)

    return action


def in_full_params(run: Run) -> None:
    if not run.ours:
        return
    import fullshard

    try:
        with fullshard.full_params(run.model):
            raise ValueError("inside full_params")
    except ValueError:
        pass


def in_unshard(run: Run) -> None:
    try:
        run.model.unshard()
        raise ValueError("between unshard and reshard")
    except ValueError:
        pass


def bad_load(run: Run) -> None:
    state = {name: value for name, value in run.model.state_dict().items() if "up" not in name}
    try:
        run.model.load_state_dict(state)
    except RuntimeError:
        pass


def reset(run: Run) -> None:
    if hasattr(run.model, "reset_iter_state"):
        run.model.reset_iter_state()


def two_models(run: Run) -> None:
    """Another sharded model fails between forward and backward of the first."""
    from tests.threads.programs import Model, batch, shard

    torch.manual_seed(0)
    other = Model() if run.plain else shard(Model(), run.impl)
    handle = other.layers[1].register_forward_pre_hook(lambda *_: throw(ValueError)(run))
    try:
        other(batch(1, 0))
    except ValueError:
        pass
    handle.remove()


def hsdp() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
