"""More of what users do that is legal: what fullshard itself offers for it, in the place where it is used.

Actions of `legal_programs.py`, by where they come in a step. All ranks take them alike; where ranks differ in one it
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import fullshard

if TYPE_CHECKING:
    from .legal_programs import Run

Action = Callable[["Run"], Any]


def _units(run: Run) -> list[Any]:
    return [module for module in run.model.modules() if isinstance(module, fullshard.FSDPModule)]


def _square(run: Run, micro: int) -> Tensor:
    return run.out(micro).pow(2).mean()


# ---- before a window -----------------------------------------------------------------------------------------


def _joined_evaluation(run: Run) -> None:
    """Each rank has another number of batches, some have none."""
    run.model.eval()
    own = 0
    with torch.no_grad():
        for turn in fullshard.joined(run.model, range((run.rank + run.step) % 3), filler=0):
            run.out(turn.batch)
            own += turn.own
    run.model.train()
    assert own == (run.rank + run.step) % 3


def _generation(run: Run) -> None:
    """Texts of other lengths, that end on each rank at another time."""
    length = 1 + run.rank
    with torch.inference_mode():
        for turn in fullshard.joined(run.model, range(2 + (run.rank + run.step) % 2)):
            shape = (1, length + turn.batch) if run.spec.tokens else (length + turn.batch, run.spec.width)
            x = torch.zeros(shape, dtype=torch.long if run.spec.tokens else torch.float32)
            run.model(x, (run.step, run.rank))


def _evaluated_in_full_params(run: Run) -> None:
    """By one rank alone, which sends nothing."""
    with fullshard.full_params(run.model), torch.no_grad():
        run.model.eval()
        if run.rank == 0:
            run.out(10)
        run.model.train()


def _optimizer_state(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def _full_state_dict(run: Run) -> None:
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(run.model, options=options)
    assert not any(isinstance(value, DTensor) for value in state.values())
    set_model_state_dict(run.model, state, options=options)


def _buffers_synced(run: Run) -> None:
    run.model.reshard()  # where nothing is freed after backward
    fullshard.sync_module_states(run.model, run.model.head.weight.device_mesh, buffers_only=True)


def _drift(run: Run) -> None:
    assert fullshard.find_drift(run.model) == ()


def _freeing(run: Run) -> None:
    """From now on, until it is drawn again."""
    run.model.set_reshard_after_forward(run.chance.random() < 0.5)
    run.model.set_reshard_after_backward(run.chance.random() < 0.5)


def _prefetch_lists(run: Run) -> None:
    """As they are registered, or the other way round; of modules that may not run next."""
    units = _units(run)
    if run.chance.random() < 0.5:
        units.reverse()
    for unit, behind in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([behind])
        behind.set_modules_to_backward_prefetch([unit])


def _no_prefetch_lists(run: Run) -> None:
    for unit in _units(run):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


def _byte_limits(run: Run) -> None:
    run.model.set_memory_budget(prefetch=run.chance.choice([None, 0, 100, 10_000]))
    run.model.set_memory_budget(gradients=run.chance.choice([None, 0, 100, 10_000]))


def _resident(run: Run) -> None:
    run.model.set_memory_budget(resident=run.chance.choice([0, 200, 10_000]))


BEFORE: dict[str, Action] = {
    "joined evaluation": _joined_evaluation,
    "generation of other lengths": _generation,
    "full_params, one rank evaluates": _evaluated_in_full_params,
    "optimizer state loaded": _optimizer_state,
    "full state dict": _full_state_dict,
    "buffers synced": _buffers_synced,
    "drift looked for": _drift,
    "freed or not": _freeing,
    "prefetch lists": _prefetch_lists,
    "no prefetch lists": _no_prefetch_lists,
    "byte limits": _byte_limits,
    "resident bytes": _resident,
}


# ---- windows -------------------------------------------------------------------------------------------------


def _guarded(run: Run) -> None:
    with fullshard.guard(run.model):
        run.window(lambda micro: _square(run, micro))


class _Fault(Exception):
    """What one rank raises."""


def _guarded_and_retried(run: Run) -> None:
    """One rank fails at the end of a guarded block; all take the step again."""
    failing = run.rank == run.step % run.program.world
    raised = False
    try:
        with fullshard.guard(run.model):
            run.window(lambda micro: _square(run, micro))
            if failing:
                raise _Fault
    except (_Fault, fullshard.PeerFailed) as error:
        raised = True
        assert isinstance(error, _Fault) == failing
    assert raised
    run.zero_grad()
    _guarded(run)


def _micro_batches(run: Run) -> None:
    run.model.set_requires_gradient_sync(True)
    inputs = run.inputs(0)

    def loss_of(piece: slice) -> Tensor:
        out: Tensor = run.model(inputs[piece], (run.step, run.rank))
        return out.float().pow(2).sum() / len(inputs)

    size, reduce = run.chance.choice([None, 1]), run.chance.choice(["last", "each"])
    fullshard.MicroBatches(run.model, size=size, reduce=reduce).backward(loss_of, len(inputs))


def _evaluation_within(run: Run) -> None:
    """Between the micro-batches of a window, whose gradients are held."""

    def loss(micro: int) -> Tensor:
        with torch.no_grad():
            run.out(micro + 80)
        return _square(run, micro)

    run.window(loss)


def _replayed(run: Run) -> None:
    """A whole step, taken twice from one state."""
    if not run.optimizers:
        run.make_optimizers()

    def step() -> None:
        run.window(lambda micro: _square(run, micro))
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert fullshard.replay(step, run.model, run.optimizers).ok


def _scaler(run: Run) -> None:
    """Its step, and later that of the program with the same gradients."""
    if not run.optimizers:
        run.make_optimizers()
    scaler = fullshard.GradScaler("cpu", init_scale=4.0)
    run.window(lambda micro: scaler.scale(_square(run, micro)))
    for optimizer in run.optimizers:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


WINDOWS: dict[str, Action] = {
    "guarded": _guarded,
    "guarded and retried": _guarded_and_retried,
    "micro batches": _micro_batches,
    "evaluation within a window": _evaluation_within,
    "replayed step": _replayed,
    "scaler": _scaler,
}


# ---- behind a window -----------------------------------------------------------------------------------------


def _checked(run: Run) -> None:
    assert fullshard.check_gradients(run.model, 1.0).ok


def _gradients_read(run: Run) -> None:
    for p in run.model.parameters():
        if isinstance(p.grad, DTensor):
            assert p.grad.full_tensor().shape == p.shape


def _gradients_replaced(run: Run) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def _one_rank_writes(run: Run) -> None:
    """A file of its own, while the others wait in a barrier of theirs or go on: nothing of the model is sent."""
    if run.rank == 0:
        nn.utils.get_total_norm([p.to_local() for p in run.model.parameters() if isinstance(p, DTensor)])
    if run.program.setting == "one model":
        dist.barrier()


AFTER: dict[str, Action] = {
    "gradients checked": _checked,
    "gradients read in full": _gradients_read,
    "gradients replaced": _gradients_replaced,
    "one rank writes": _one_rank_writes,
}
