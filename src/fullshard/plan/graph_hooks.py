"""Reports what the engine's hooks on the inputs and outputs of units report in backward (`engine.hooks`), for the tape.

reached         the node of an output of a use is about to run
inputs_reached  the gradients of all inputs of a use are complete

A use that returns an input unchanged is reached a second time, when the node runs that made this input: T5's blocks
hand on the positions that the first one computed. The engine then gathers and reduces the unit a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from torch import Tensor

# A key of a node's metadata: the uses whose output it made, oldest first.
_USES = "fullshard: planned uses"
Report = Callable[[int], None]


class GraphHooks:
    """The hooks on one use's inputs. Calls `inputs_reached(use)` when all of their gradients are complete."""

    def __init__(self, use: int, inputs: Iterable[Tensor], reached: Report, inputs_reached: Report) -> None:
        self._use, self._reached, self._inputs_reached = use, reached, inputs_reached
        self._handles = []
        for tensor in inputs:
            if tensor.requires_grad and not tensor.is_leaf:
                self._handles.append((tensor.grad_fn, tensor.register_hook(self._one)))
        self._left = len(self._handles)

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """The forward returned `outputs`."""
        for node in {id(t.grad_fn): t.grad_fn for t in outputs if t.grad_fn is not None}.values():
            returned = 0
            for other, handle in self._handles:
                if other is node:
                    handle.remove()
                    returned += 1
            notes = cast("dict[str, Any]", node.metadata)
            if _USES not in notes:
                notes[_USES] = []
                node.register_prehook(partial(_needed, notes[_USES]))
            notes[_USES].append((self, returned))
        # They hold the graph.
        self._handles.clear()

    def needed(self, returned: int) -> None:
        """The node of an output is about to run, which is that of so many inputs, too."""
        self._reached(self._use)
        for _ in range(returned):
            self._one()

    def _one(self, _: object = None) -> None:
        self._left -= 1
        if not self._left:
            self._inputs_reached(self._use)


def _needed(uses: list[tuple[GraphHooks, int]], _: object) -> None:
    for hooks, returned in reversed(uses):
        hooks.needed(returned)
