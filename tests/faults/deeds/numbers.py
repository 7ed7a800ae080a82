"""What the cases of numbers do to batches, losses, gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from tests.faults.actions import Action, local, parameter, poison
from tests.faults.program import Run

NAN, INF = float("nan"), float("inf")


def options(**given: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    return lambda impl: {name: make(impl) for name, make in given.items()}


def hsdp(impl: Any) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicated(impl: Any) -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def bf16(impl: Any) -> Any:
    return impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offload(impl: Any) -> Any:
    return impl.namespace.CPUOffloadPolicy(pin_memory=False)


def bad_loss(value: float) -> Action:
    """The loss of this rank's next batch is multiplied by `value`."""

    def action(run: Run) -> None:
        run.kept["factor"] = value

    return action


def factor(run: Run, tokens: Tensor) -> Tensor:
    found: Tensor = run.model(tokens).pow(2).mean() * run.kept.pop("factor", 1.0)
    return found


def nan_hidden(run: Run, tokens: Tensor) -> Tensor:
    """The loss is finite, its gradient is not: sqrt at 0."""
    out = run.model(tokens)
    bad = run.kept.pop("factor", None) is not None
    found: Tensor = out.pow(2).mean() + ((out * 0.0).abs().sum().sqrt() * 0.0 if bad else 0.0)
    return found


def empty(run: Run) -> None:
    run.kept["empty"] = True


def mean_of_empty(run: Run, tokens: Tensor) -> Tensor:
    out = run.model(tokens[:0] if run.kept.pop("empty", False) else tokens)
    found: Tensor = out.pow(2).mean()
    return found


def sum_of_empty(run: Run, tokens: Tensor) -> Tensor:
    """Rank 1 has an empty batch in every step; the loss is a sum."""
    second = run.plain and run.kept.setdefault("turn", 0) % 2 == 1
    if run.plain:
        run.kept["turn"] += 1
    found: Tensor = run.model(tokens[:0] if second or run.rank == 1 else tokens).pow(2).sum() / 100.0
    return found


def bad_parameter(run: Run) -> None:
    """A row of this rank's shard becomes NaN, as broken memory would make it."""
    with torch.no_grad():
        local(parameter(run, "layers.1.up.weight"))[0] = NAN


def skipped_step(run: Run) -> None:
    """A whole step between two others whose gradients are bad on rank 1: no rank may update anything."""
    for tokens in run.batches(step=70):
        run.loss(tokens).backward()
    if run.rank == 1:
        poison("layers.1.up.weight", NAN, 3)(run)
    if run.ours:
        found = fullshard.check_gradients(run.model, on_nonfinite="skip")
        assert not found.ok and found.rank == 1 and found.name == "layers.1.up.weight", found
    elif not torch.isfinite(torch.nn.utils.clip_grad_norm_(run.model.parameters(), INF)):
        run.optimizer.zero_grad()
    run.optimizer.step()
    run.optimizer.zero_grad()


def counted(run: Run) -> None:
    """Counting finds the bad element and changes nothing."""
    # On both ranks: that one of them wrote to a gradient is an error of its own.
    gradient = local(parameter(run, "head.weight").grad)
    kept = float(gradient.view(-1)[0])
    gradient.view(-1)[0] = INF if run.rank == 1 else kept
    if run.ours:
        found = fullshard.check_gradients(run.model, on_nonfinite="count")
        assert not found.ok and found.bad_steps == 1 and found.name == "head.weight", found
    gradient.view(-1)[0] = kept


def overflow_with_scaler(run: Run) -> None:
    """A whole step whose scaled gradients are inf in one rank's rows: all ranks skip it."""
    for tokens in run.batches(step=70):
        run.scaler.scale(run.loss(tokens)).backward()
    if run.rank == 1:
        poison("layers.1.up.weight", INF, 3)(run)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()


def ten(run: Run, tokens: Tensor) -> Tensor:
    found: Tensor = run.model(tokens).pow(2).mean() * (1e38 if run.step == 1 and run.rank == 1 else 1.0)
    return found * (1e3 if run.step == 1 and run.rank == 1 else 1.0)


def gather_when_needed(run: Run) -> None:
    """Nothing ahead; torch's FSDP2 gathers so in forward."""
    if run.ours:
        run.model.set_memory_budget(prefetch=0)


def even_columns(p: Any) -> Any:
    return Shard(1) if p.ndim > 1 and p.shape[1] % 2 == 0 else None
