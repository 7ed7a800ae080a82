"""The context in which the sequences of a plan are cut over `cp`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from ..extras import ContextParallel as ContextParallel
from ..extras.pipeline import Parts
from .axes import Axes


def sequences_of(
    axes: Axes, whole: DeviceMesh, data: DeviceMesh, variant: str, model: nn.Module | None = None
) -> ContextParallel:
    """The context for a `model` of `axes`: `whole` has all of them, and parameters are on `data`. Without `cp` batches
    stay whole. Sends nothing."""
    cp = whole["cp"] if axes.cp > 1 else None
    return ContextParallel.of_plan(cp, data, variant, shifts_labels=model is None or _shifts_labels(model))


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the loss that `model` computes of `labels` is that of the next token. Hugging Face's losses that shift
    labels take them shifted, too, as `shift_labels`; that of masked tokens does not. True for other models."""
    for each in model.modules():  # adapters are around the model that has the loss
        loss = getattr(each, "loss_function", None) if hasattr(each, "loss_type") else None
        if callable(loss):
            return "shift_labels" in inspect.signature(loss).parameters
    return True


def parts_of_step(model: nn.Module, sequences: ContextParallel) -> Parts | None:
    """Returns what cuts the batch of a step over `cp`; None without that axis. `model`: the whole one, for its
    arguments.

    Positions are those of the whole sequence, made for a model that takes `position_ids` or `positions` and gets none.
    Raises `ValueError` for a length that does not divide, and for documents in several micro-batches.
    """
    if sequences.degree == 1:
        return None
    names = list(inspect.signature(model.forward).parameters)

    def parts(args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, number: int) -> Any:
        given = dict(zip(names, args, strict=False))
        if len(given) < len(args):
            given = {str(at): value for at, value in enumerate(args)}
        order = list(given)
        if not given.keys().isdisjoint(kwargs):
            raise TypeError(f"step: expected each argument once, found {sorted(given.keys() & kwargs.keys())} twice")
        given |= kwargs | {"": target}
        if {"position_ids", "attention_mask"} <= {*names}:
            # Of transformers: with positions of its own, a model looks for packed sequences unless it has a mask.
            found = sequences.split(given)
        else:
            found = dict(zip(given, sequences.split(list(given.values())), strict=True))
            name = next((each for each in ("position_ids", "positions") if each in names), None)
            if name is not None and given.get(name) is None:
                rows, device = len(target), target.device
                found[name] = sequences.positions(sequences.length, device).expand(rows, -1)
        if number > 1 and sequences.has_documents:
            raise ValueError(
                f"cp: expected sequences of one document without padding in {number} micro-batches, found several, or "
                f"a mask that leaves tokens out, which attention knows for whole batches alone; take one micro-batch, "
                f"or nearest valid: context_parallel_degree = 1"
            )
        target = found.pop("")
        return tuple(found.pop(name) for name in order), found, target

    return parts


def running(sequences: ContextParallel | None, *, head: bool) -> Callable[[], Any]:
    """The context of forwards, losses and backwards of a step: that of `sequences`, if they are cut, and torch's
    `loss_parallel` for a `head` whose output is cut."""

    @contextmanager
    def both() -> Iterator[None]:
        cut = nullcontext() if sequences is None or sequences.degree == 1 else sequences
        with loss_parallel() if head else nullcontext(), cut:
            yield

    return both
