"""`guard`: a block that either completes on all ranks or raises on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.mixed_operations import note_mixed
from ..engine.root import formed, module_units
from ..policy.arguments import expect, expect_flag, expect_tensors, expect_text
from .guarded_steps import GuardedSteps
from .recovery import declare_sound, peers_below, tensors_restored, units_restored


@contextmanager
def guard(*guarded: nn.Module | Optimizer, wait: bool = True) -> Iterator[None]:
    """If one rank raises inside the block, every rank of the models raises before it leaves the block.

        with fullshard.guard(model, optimizer):
            loss = model(tokens).loss
            loss.backward()
            optimizer.step()  # runs only if every rank got here

    The rank that raises keeps its own exception. The others raise `PeerFailed`, which names that rank and quotes its
    error: at the end of the block at the latest, and within seconds if they are waiting for it. This also covers ranks
    that were killed or stopped. Afterwards all ranks may retry: call `zero_grad` and run the block again; unreduced
    gradients of earlier, successful micro-batches stay.

    Optimizers: before the first step of each, all ranks synchronise once more, so that a rank that failed earlier
    prevents the step everywhere. If a rank raises *inside* a step, all ranks name it. If no rank wrote anything, all
    may retry. Otherwise the step cannot be undone: the error says so, and every forward of the model raises
    `RanksDisagree` on all ranks until all have loaded a checkpoint (`mark_restored`). Steps that a scaler skips on all
    ranks do not count. An optimizer-in-backward step (`step_in_backward`) runs before any rank can prevent it.

    On a device the host runs ahead: after `backward()` the bytes of its messages may still be on the way, and a message
    that never comes shows later. So with `wait=True` the host waits, each time before all ranks synchronise, for all
    that was queued on the current stream. An abort or a message that failed then raises before the first step. What
    this costs on a device is unmeasured: the host cannot queue the step while the backward runs. With `wait=False` it
    does not wait: a step may run on gradients that never arrived, and the model is lost. On a CPU `wait` changes
    nothing.

    Without a guard, peers are also notified of an exception in forward or backward; but a rank that does not wait for
    a message of the failed rank continues to its optimizer step.

    guarded: models sharded by `fully_shard`, the ranks of whose meshes take part, and their optimizers. All ranks must
    enter the same blocks and take the same steps in them. Costs two messages of 16 bytes per mesh axis, and two per
    optimizer. With one rank it does nothing. Raises `TypeError` for any other object and `ValueError` for a model
    without sharded modules, or for no model.
    """
    expect_flag("wait", wait)
    models = [one for one in guarded if isinstance(one, nn.Module)]
    optimizers = [one for one in guarded if isinstance(one, Optimizer)]
    if len(models) + len(optimizers) < len(guarded):
        strange = next(one for one in guarded if not isinstance(one, nn.Module | Optimizer))
        raise TypeError(
            f"guarded: expected models and optimizers, found {type(strange).__name__}; pass models and their optimizers"
        )
    for model in models:
        found = bool(module_units(model))
        expect("guarded", found, "models with sharded modules", model, "call fully_shard first", ValueError)
    if not models:
        raise ValueError("guarded: expected a model that fully_shard was applied to, found none; pass it first")
    peers = peers_below(*models)
    roots = dict.fromkeys(
        root for model in models for unit in module_units(model) if (root := formed(unit)) is not None
    )
    devices = dict.fromkeys(unit.device for model in models for unit in module_units(model)) if wait else ()
    steps = GuardedSteps(peers, list(roots), optimizers, devices)
    try:
        with steps:
            yield
        steps.come_together("the end of a guarded block")
    except BaseException as error:
        note_mixed(error)
        told = steps.failed(error)
        peers.attempt_failed(error, steps.where)
        if told is error:
            raise
        raise told from error


def mark_restored(model: nn.Module | Iterable[Tensor], *, source: str = "") -> None:
    """Declare the state of `model` consistent again after one rank raised in an optimizer step that others took, or
    after an abort on a device while messages were under way.

    Until all ranks call this or load a checkpoint, every forward raises. `fullshard.checkpoint.load` and the model's
    `load_state_dict` call it themselves. Call it on all ranks if you restored parameters and optimizer state in another
    way: from copies, or by a load that writes into tensors. After an abort on a device a model must be given as a
    whole: tensors count for themselves alone, and the state of optimizers does not count as restored with them.
    model: a model with sharded modules, or sharded parameters as in the model or its state dict.
    source: a description of what was loaded. The ranks compare it in their next step, to detect that they loaded
        different checkpoints. `fullshard.checkpoint.load` passes the save it loaded.

    Raises `ValueError` if nothing is sharded.
    """
    expect_text("source", source)
    model = model if isinstance(model, nn.Module) else expect_tensors("model", model)
    units = module_units(model) if isinstance(model, nn.Module) else []
    units_restored(units, source)
    if isinstance(model, nn.Module):
        declare_sound(model)
    if not units and (isinstance(model, nn.Module) or not tensors_restored(model, source)):
        raise ValueError(
            "model: expected one that fully_shard was applied to, or its parameters, found nothing sharded"
        )
