"""All that forward and backward change, as it is when a window of micro-batches begins; an attempt that failed goes
back to it.

Parameters and optimizer state are not in it: no forward or backward writes them (a step in backward does, and is
refused).
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .._torch_compat import buffers_of
from ..param import KeptGradients, KeptTensor
from ..runtime.forming import module_units


class Start:
    """Gradients, buffers, random numbers and the engine's own marks, of this rank.

    Takes memory: a copy of the buffers, and of gradients that are there already (of those that are held unreduced, the
    bytes of the unsharded model); none of gradients behind `zero_grad()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._units = module_units(model)
        self._gradients = [KeptGradients(param) for unit in self._units for param in unit.params]
        self._windows = [(unit.window_open, unit.partial_open) for unit in self._units]
        ours = {id(param.sharded) for unit in self._units for param in unit.params}
        ours |= {id(param.full) for unit in self._units for param in unit.params if hasattr(param, "full")}
        plain = (parameter for parameter in model.parameters() if id(parameter) not in ours)
        self._plain = [(parameter, KeptTensor(parameter.grad)) for parameter in plain]
        self._buffers = _buffers(model)
        self._random = _random_states(unit.device for unit in self._units)

    def restore(self) -> None:
        """Every rank, outside of a backward. Discards what the step left that failed, on this rank or on another."""
        for root in dict.fromkeys(unit.root for unit in self._units if unit.root is not None):
            root.abandon()
        for gradients in self._gradients:
            gradients.restore()
        for unit, (window, partial) in zip(self._units, self._windows, strict=True):
            unit.window_open, unit.partial_open = window, partial
        for parameter, kept in self._plain:
            parameter.grad = kept.restore()
        for module, buffers in self._buffers:
            standing = buffers_of(module)
            standing.clear()
            standing.update({name: kept.restore() for name, kept in buffers.items()})
        for put_back in self._random:
            put_back()
        # Frames of the failed attempt, and the activations that they hold, may be in cycles.
        gc.collect()
        for kind in {unit.device.type for unit in self._units}:
            # What fits is decided by whole blocks of memory: give back those that the failed sizes left.
            getattr(torch.get_device_module(kind), "empty_cache", _nothing)()


def _nothing() -> None:
    pass


def _buffers(model: nn.Module) -> list[tuple[nn.Module, dict[str, KeptTensor]]]:
    """Of each module, its buffers; those of several modules are copied once."""
    once: dict[int, KeptTensor] = {}

    def kept(buffer: torch.Tensor | None) -> KeptTensor:
        if id(buffer) not in once:
            once[id(buffer)] = KeptTensor(buffer)
        return once[id(buffer)]

    found = []
    for module in model.modules():
        # Also of modules without any: a forward may register its first one.
        found.append((module, {name: kept(buffer) for name, buffer in buffers_of(module).items()}))
    return found


def _random_states(devices: Iterable[torch.device]) -> list[Callable[[], None]]:
    """How to put back the generators of this process as they are now: torch's of the host and of `devices`, Python's,
    and numpy's where it is in use."""
    host, python = torch.get_rng_state(), random.getstate()
    states: list[Callable[[], None]] = [lambda: torch.set_rng_state(host), lambda: random.setstate(python)]
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        states.append(_device_state(device))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states.append(lambda: numpy.random.set_state(state))
    return states


def _device_state(device: torch.device) -> Callable[[], None]:
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)
