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


def capturing(device: torch.device) -> Callable[[], bool]:
    """A function that says whether this thread's current stream of `device` captures a graph."""
    return cast("Callable[[], bool]", getattr(torch.get_device_module(device), "is_current_stream_capturing", bool))


def is_capturing_elsewhere(device: torch.device) -> bool:
    """Whether any thread captures a graph with `torch.cuda.graph` on its own stream. Asks for nothing that a capture
    forbids. A capture on a stream of the caller's is not seen."""
    module = torch.get_device_module(device)
    stream = getattr(getattr(module, "graph", None), "default_capture_stream", None)
    if stream is None:
        return False
    with module.stream(stream):
        return bool(module.is_current_stream_capturing())
