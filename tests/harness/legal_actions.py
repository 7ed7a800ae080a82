"""What users do that is legal: the actions of legal_programs.py, by where they come in a step.

All ranks take them alike; where ranks differ in one it says so.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness.failing_places import PLACES, Fault

if TYPE_CHECKING:
    from .legal_programs import Run

Action = Callable[["Run"], Any]


def _units(run: Run) -> list[Any]:
    return [module for module in run.model.modules() if isinstance(module, fullshard.FSDPModule)]


def _square(run: Run, micro: int) -> Tensor:
    return run.out(micro).pow(2).mean()


# ---- before a window ---------------------------------------------------------------------------------------


def _evaluate(run: Run) -> None:
    run.model.eval()
    context = run.chance.choice([torch.no_grad, torch.inference_mode])
    with context():
        for micro in range(run.chance.choice([1, 2])):
            run.out(micro)
    run.model.train()


def _eval_mode_only(run: Run) -> None:
    """The mode is changed, gradients are not."""
    run.model.eval()
    run.out()
    run.model.train()


def _freeze(run: Run) -> None:
    """Something else is frozen from now on; the head is always trained."""
    for block in run.model.blocks:
        block.requires_grad_(run.chance.random() < 0.6)
    run.model.head.requires_grad_(True)


def _state_dict(run: Run) -> None:
    state = run.model.state_dict()
    run.model.load_state_dict(state)


def _full_params(run: Run) -> None:
    with fullshard.full_params(run.model):
        assert not any(isinstance(p, DTensor) for p in run.model.parameters())


def _by_hand(run: Run) -> None:
    run.model.unshard()
    run.model.reshard()


def _edit(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.99)


def _look_on_one_rank(run: Run) -> None:
    """Without messages: what a rank has may be looked at by that rank alone."""
    if run.rank == 0:
        repr(run.model)
        sum(p.to_local().abs().sum().item() for p in run.model.parameters() if isinstance(p, DTensor))
        fullshard.report(run.model)
        len(list(run.model.named_buffers()))


def _late_rank(run: Run) -> None:
    if run.rank == run.step % run.program.world:
        time.sleep(0.01)


def _step_of_nothing(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.step()


def _clear_twice(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()


def _new_optimizer(run: Run) -> None:
    run.make_optimizers()


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
    "evaluation": _evaluate,
    "forward in eval mode": _eval_mode_only,
    "freezing": _freeze,
    "state dict": _state_dict,
    "full_params": _full_params,
    "unshard, reshard": _by_hand,
    "parameters edited": _edit,
    "one rank looks": _look_on_one_rank,
    "one rank is late": _late_rank,
    "step without gradients": _step_of_nothing,
    "gradients cleared twice": _clear_twice,
    "new optimizer": _new_optimizer,
    "reset_iter_state": lambda run: run.model.reset_iter_state(),
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


# ---- windows -----------------------------------------------------------------------------------------------


def _plain_window(run: Run) -> None:
    run.window(lambda micro: run.out(micro).pow(2).mean())


def _dropped_layers(run: Run) -> None:
    """Which are dropped is drawn from a seed that all ranks have."""

    def loss(micro: int) -> Tensor:
        depth = len(run.spec.blocks)
        return run.out(micro, tuple(i for i in range(depth) if run.chance.random() < 0.6)).pow(2).mean()

    run.window(loss)


def _other_order(run: Run) -> None:
    """Another one for each micro-batch; the same block may come twice."""

    def loss(micro: int) -> Tensor:
        depth = len(run.spec.blocks)
        return run.out(micro, tuple(run.chance.choices(range(depth), k=depth))).pow(2).mean()

    run.window(loss)


def _early_exit(run: Run) -> None:
    run.window(lambda micro: run.out(micro, tuple(range(1 + run.step % len(run.spec.blocks)))).pow(2).mean())


def _own_loss(run: Run) -> None:
    """Each rank has its own function and weight."""

    def loss(micro: int) -> Tensor:
        out = run.out(micro)
        return (1.0 + run.rank) * (out.abs().mean() if run.rank % 2 else F.softplus(out).sum())

    run.window(loss)


def _two_forwards(run: Run) -> None:
    run.window(lambda micro: (run.out(micro) - run.out(micro + 50)).pow(2).mean())


def _graph_kept(run: Run) -> None:
    run.model.set_requires_gradient_sync(True)
    loss = run.out().pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _abandoned_forward(run: Run) -> None:
    run.out(70)
    _plain_window(run)


def _own_target(run: Run) -> None:
    with torch.no_grad():
        target = run.out(60)
    run.window(lambda micro: F.mse_loss(run.out(micro), target))


def _scaled(run: Run) -> None:
    """As a scaler does it: a large factor, taken back from the gradients."""
    run.window(lambda micro: 64.0 * run.out(micro).pow(2).mean())
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.div_(64.0)


def _nothing_for_some(run: Run) -> None:
    """The loss of a rank without valid targets has gradients that are zero."""
    run.window(lambda micro: run.out(micro).pow(2).mean() * (0.0 if run.rank == run.step % run.program.world else 1.0))


def _caught(run: Run) -> None:
    """All ranks raise at one place, catch it, and continue with the step."""
    # What is inside of a block may be used by some ranks only.
    names = ["head", *(f"blocks.{i}" for i in range(len(run.spec.blocks)))]
    # That of a backward may not be come to: what does not raise is a good micro-batch, and no fault either.
    place = run.chance.choice(["before", "body", "after", "gradient of the output"])
    disarm = PLACES[place].arm(run.model.get_submodule(run.chance.choice(names)), lambda: Fault(place))
    run.model.set_requires_gradient_sync(True)
    try:
        run.out(40).pow(2).mean().backward()
    except Fault:
        pass
    finally:
        disarm()
    _plain_window(run)


class _Caught(Exception):
    """What a catcher raises."""


def _catcher(run: Run) -> None:
    """As calibration does: the inputs of a block are caught, and the rest of the forward is left out."""
    caught = []

    def catch(_module: nn.Module, args: Any) -> None:
        caught.append(args)
        raise _Caught

    handle = run.model.blocks[-1].register_forward_pre_hook(catch)
    with torch.no_grad():
        for micro in range(2):
            with contextlib.suppress(_Caught):
                run.out(micro)
    handle.remove()
    assert len(caught) == 2
    _plain_window(run)


def _given_up(run: Run) -> None:
    """A window of accumulation that is cleared in the middle."""
    run.model.set_requires_gradient_sync(False)
    run.out(30).pow(2).mean().backward()
    run.model.zero_grad()
    _plain_window(run)


def _guarded(run: Run) -> None:
    with fullshard.guard(run.model):
        run.window(lambda micro: _square(run, micro))


def _guarded_and_retried(run: Run) -> None:
    """One rank fails at the end of a guarded block; all take the step again."""
    failing = run.rank == run.step % run.program.world
    raised = False
    try:
        with fullshard.guard(run.model):
            run.window(lambda micro: _square(run, micro))
            if failing:
                raise Fault
    except (Fault, fullshard.PeerFailed) as error:
        raised = True
        assert isinstance(error, Fault) == failing
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
    "plain": _plain_window,
    "dropped layers": _dropped_layers,
    "another order": _other_order,
    "early exit": _early_exit,
    "own loss": _own_loss,
    "two forwards": _two_forwards,
    "graph kept": _graph_kept,
    "abandoned forward": _abandoned_forward,
    "own target": _own_target,
    "scaled loss": _scaled,
    "zero loss on a rank": _nothing_for_some,
    "exception caught": _caught,
    "catcher": _catcher,
    "window given up": _given_up,
    "guarded": _guarded,
    "guarded and retried": _guarded_and_retried,
    "micro batches": _micro_batches,
    "evaluation within a window": _evaluation_within,
    "replayed step": _replayed,
    "scaler": _scaler,
}


# ---- after a window ----------------------------------------------------------------------------------------


def _clip(run: Run) -> None:
    fullshard.clip_grad_norm_(run.model.parameters(), 1.0)


def _norm_only(run: Run) -> None:
    norm: Any = fullshard.clip_grad_norm_(run.model.parameters(), math.inf)
    assert float(norm.full_tensor() if isinstance(norm, DTensor) else norm) >= 0.0


def _evaluate_on_gradients(run: Run) -> None:
    """Between backward and step."""
    with torch.no_grad():
        run.out(20)


def _step_twice(run: Run) -> None:
    run.take_step()


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
    """A file of its own, while the others wait in a barrier of their own or continue: nothing of the model is sent."""
    if run.rank == 0:
        nn.utils.get_total_norm([p.to_local() for p in run.model.parameters() if isinstance(p, DTensor)])
    if run.program.setting == "one model":
        dist.barrier()


AFTER: dict[str, Action] = {
    "clipping": _clip,
    "norm": _norm_only,
    "evaluation before the step": _evaluate_on_gradients,
    "two steps with one gradient": _step_twice,
    "gradients checked": _checked,
    "gradients read in full": _gradients_read,
    "gradients replaced": _gradients_replaced,
    "one rank writes": _one_rank_writes,
}
