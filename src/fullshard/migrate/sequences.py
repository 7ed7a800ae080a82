"""The context in which the sequences of a plan are cut over `cp`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..extras import ContextParallel as ContextParallel
from .axes import Axes


def sequences_of(axes: Axes, whole: DeviceMesh, data: DeviceMesh, variant: str) -> ContextParallel:
    """The context for a model of `axes`: `whole` has all of them, and parameters are on `data`. Without `cp` batches
    stay whole. Sends nothing."""
    return ContextParallel.of_plan(whole["cp"] if axes.cp > 1 else None, data, variant)
