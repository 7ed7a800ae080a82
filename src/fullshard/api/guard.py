"""`guard`: a part of a step that all ranks come through, or that raises on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.guarded_steps import GuardedSteps
from ..engine.optimizer_facts import tensors_restored, units_restored
from ..engine.peers import peers_below
from ..engine.root import formed, module_units


@contextmanager
def guard(*guarded: nn.Module | Optimizer) -> Iterator[None]:
    """Inside, an exception on one rank is an exception on all ranks of the models, before anything after it is done.

        with fullshard.guard(model, optimizer):
            loss = model(tokens).loss
            loss.backward()
            optimizer.step()  # only where every rank came so far

    The rank that raises keeps its own exception, of whatever type; the others raise `PeerFailed`, which names it and
    says what it said, at the latest when they come to the end of the block, and within seconds where they wait for
    it. Also for a rank that was killed or stopped. Afterwards all ranks may try again: call `zero_grad` and run the
    block once more; gradients of earlier, good micro-batches that are not reduced yet stay.

    Optimizers that are given: before the first step of each, all ranks come together once more, so that one which
    failed until then prevents it everywhere. A rank that raises *in* a step is named on all. Where nothing was written
    on any rank, all may try again. Else nobody can put that back: the error says so, and every forward of the model
    raises `RanksDisagree` on all ranks until all have loaded a checkpoint (`mark_restored`). Steps that a scaler
    leaves out on all ranks are none; those of `step_in_backward` are taken before anybody can prevent them.

    What a forward or a backward raises is told to the peers without a guard, too; but a rank that does not wait for a
    message of the one that failed goes on to its optimizer's step.

    guarded: models sharded by `fully_shard`, the ranks of whose meshes take part, and optimizers of theirs. All ranks
    enter the same blocks, and take the same steps in them. Costs two messages of 16 bytes over each axis of the
    meshes, and two for each optimizer. In a world of one it does nothing. Raises `TypeError` for something else and
    `ValueError` for a model without sharded modules, or none.
    """
    models = [one for one in guarded if isinstance(one, nn.Module)]
    optimizers = [one for one in guarded if isinstance(one, Optimizer)]
    if len(models) + len(optimizers) < len(guarded):
        strange = next(one for one in guarded if not isinstance(one, nn.Module | Optimizer))
        raise TypeError(f"guard: expected models and optimizers, found {type(strange).__name__}")
    if not models:
        raise ValueError("guard: expected a model that fully_shard was applied to, found none; pass it first")
    peers = peers_below(*models)
    roots = dict.fromkeys(
        root for model in models for unit in module_units(model) if (root := formed(unit)) is not None
    )
    steps = GuardedSteps(peers, list(roots), optimizers)
    try:
        with steps:
            yield
        steps.come_together("the end of a guarded block")
    except BaseException as error:
        told = steps.failed(error)
        peers.attempt_failed(error, steps.where)
        if told is error:
            raise
        raise told from error


def mark_restored(model: nn.Module | Iterable[Tensor], *, source: str = "") -> None:
    """Say that the state of `model` is that of one training again: after a rank raised in an optimizer's step which
    others took, every forward refuses to continue until this, or a load, on all ranks.

    `fullshard.checkpoint.load` and `load_state_dict` of the model do it themselves. Call it on all ranks where you
    brought back parameters and optimizer state in another way: from copies, or by a load that writes into tensors.
    model: with sharded modules; or sharded parameters, as a model has them or as they are in its state dict.
    source: what was loaded, in words. The ranks compare it in their next step: of another checkpoint on each rank there
        would be pieces of several. `fullshard.checkpoint.load` says which save it was.

    Raises `ValueError` where nothing of it is sharded.
    """
    units = module_units(model) if isinstance(model, nn.Module) else []
    units_restored(units, source)
    if not units and (isinstance(model, nn.Module) or not tensors_restored(model, source)):
        raise ValueError(
            "mark_restored: expected a model that fully_shard was applied to, or its parameters, found nothing sharded"
        )
