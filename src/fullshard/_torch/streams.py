"""Streams of a device: which one is current, and whether a graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch


def current_stream_of(device: torch.device) -> Callable[[], torch.Stream]:
    """A function that returns this thread's current stream of `device`, without Python per call: it is called with each
    report of a step."""
    index = -1 if device.index is None else device.index
    return partial(cast(Any, torch._C)._accelerator_getStream, index)
