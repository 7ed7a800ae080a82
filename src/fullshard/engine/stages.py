"""Notes which sharded models are stages of a pipeline, the ranks that have the other stages, and what several have.

A schedule says so by what it calls: a stage holds back the reductions of its module and asks for them once
(torch/distributed/pipelining/stage.py). The stage is the caller, and it has the group of its axis.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from .._torch.modules import calling_stage

# Stages seen in this process, with the group of their axis; None: a schedule of another kind, whose axis is not known.
_AXES: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
# Ranks may be threads of one process.
_LOCK = threading.Lock()


def note_stage(module: nn.Module, *, reduces: bool = False) -> None:
    """A call came for `module` that stages of a pipeline make; `reduces`: one that nothing else makes."""
    axis = calling_stage(module)
    if axis is not None or reduces:
        with _LOCK:
            _AXES[module] = axis or _AXES.get(module)


class Stages:
    """The stages of this rank that `parameters` are of. `axes`: groups of their axes, each once; `unknown`: a stage
    whose axis is not known; `lacking`: stages of the same axes of which no parameter was given."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.axes: list[dist.ProcessGroup] = []
        self.unknown: nn.Module | None = None
        self.count = 0
        self.lacking: list[nn.Module] = []
        if not _AXES:
            return
        with _LOCK:
            known = tuple(_AXES.items())
        given = {id(parameter) for parameter in parameters}
        own = {
            module: axis for module, axis in known if any(id(parameter) in given for parameter in module.parameters())
        }
        self.count = len(own)
        self.axes = list(dict.fromkeys(axis for axis in own.values() if axis is not None))
        self.unknown = next((module for module, axis in own.items() if axis is None), None)
        for module, axis in known:
            if module not in own and axis in self.axes:
                if any(parameter.grad is not None for parameter in module.parameters()):
                    self.lacking.append(module)


class _StageCopy:
    """The mark of a copy. A saved or copied parameter does not carry it along."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


_COPY = "_fullshard_stage_copy"


def note_copy(parameter: Tensor) -> None:
    """`parameter` is one of a stage before, which counts it in norms."""
    setattr(parameter, _COPY, _StageCopy())


def is_copy(parameter: Tensor) -> bool:
    """Whether a stage before has the same parameter, with the same gradient."""
    return isinstance(parameter.__dict__.get(_COPY), _StageCopy)
