"""Records checksums of one step on this rank, to compare with a repetition of the same step.

In command order: shards before the all-gather, full parameters after use, full gradients before the reduce-scatter, and
`.grad` before the optimizer step. A wrong bit therefore shows first on the rank that produced it, and on the others
once a message carried it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..param import ExtensionGroup, PendingGrad, ShardedParam
from ..schedule import Command
from .names import parameter_names
from .root import Root, formed
from .unit import Unit, sum_of_bits

# (description, how often it occurred in this step).
Moment = tuple[str, int]

_SHARDS = frozenset({"unshard"})
_FULL = frozenset({"reshard", "shelve", "reshard_secondary"})
_GRADIENTS = frozenset({"reduce", "accumulate"})


class Recorder:
    """Context manager that fills `found` with an entry for each moment, in order. Ignores roots that form inside."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> None:
        # Position, counted in commands, which are the same on all ranks; sum of bits.
        self.found: dict[Moment, tuple[int, int]] = {}
        self._position = 0
        self._counts: Counter[str] = Counter()
        self._names = parameter_names(model, units)
        self._of_shards = {id(param.sharded): name for param, name in self._names.items()}
        self._optimizers = optimizers
        self._listening = [
            (root, partial(self._before, root)) for root in dict.fromkeys(map(formed, units)) if root is not None
        ]

    def __enter__(self) -> Recorder:
        for root, listener in self._listening:
            root.executor.listeners.append(listener)
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        return self

    def __exit__(self, *_: object) -> None:
        for root, listener in self._listening:
            root.executor.listeners.remove(listener)
        for handle in self._handles:
            handle.remove()

    def _before(self, root: Root, command: Command) -> None:
        unit = root.units[command.unit.index]
        self._position += 1
        groups = [group for group in unit.groups if not isinstance(group, ExtensionGroup)]
        if command.kind in _SHARDS:
            for group in groups:
                for param in group.params:
                    self._note("the shard of", param, param.local)
        elif command.kind in _FULL:
            for group in groups:
                if not group.shares_memory and group.memory.live_nbytes:
                    for param in group.params:
                        self._note("the full parameter", param, param.full)
        elif command.kind in _GRADIENTS:
            for param in unit.params:
                if param.gradients.fresh is not None:
                    self._note("this rank's gradient of", param, param.gradients.fresh)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                self._position += 1
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, PendingGrad):
                    name = self._of_shards.get(id(parameter), f"parameter {position} of the optimizer")
                    self._put(f"the reduced gradient of {name}", gradient)

    def _note(self, what: str, param: ShardedParam, tensor: Tensor) -> None:
        self._put(f"{what} {self._names.get(param, param.name)}", tensor)

    def _put(self, what: str, tensor: Tensor) -> None:
        self._counts[what] += 1
        self.found[what, self._counts[what]] = self._position, sum_of_bits(tensor)


def first_difference(
    first: dict[Moment, tuple[int, int]], second: dict[Moment, tuple[int, int]]
) -> tuple[int, str] | None:
    """(position in the step, description) of the first sum that differs, or None.

    Ignores moments of only one of them: the prefetch order may still be settling.
    """
    for moment, (position, bits) in first.items():
        again = second.get(moment)
        if again is not None and again[1] != bits:
            return position, moment[0]
    return None
