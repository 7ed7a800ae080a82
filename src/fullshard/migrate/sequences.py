"""The context in which the sequences of a plan are cut over `cp`."""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..extras import ContextParallel as ContextParallel
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
