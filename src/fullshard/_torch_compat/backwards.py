"""The one function through which torch calls its engine, and what a graph contains.

Where a version of torch does not have the function, nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def watch_backwards(
    begins: Callable[[Sequence[Any], Sequence[Any]], None], raised: Callable[[BaseException], None]
) -> None:
    """From now on each backward that is called from Python, by `backward` or `autograd.grad`, is told of: before it,
    `begins(outputs, inputs)`, where it is asked for the gradients of `inputs`, and may be refused there; and
    `raised(error)` when it ended so, in the thread that called it. `outputs`: tensors or graph edges."""
    # In both modules that have it: torch's tracing puts another one there for a while, and back what the second had.
    modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
    run: Callable[..., Any] | None = getattr(torch.autograd, "_engine_run_backward", None)
    if run is None:
        return

    def ran(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # (outputs, their gradients, retain_graph, create_graph, inputs, allow_unused, accumulate_grad=...)
        inputs = args[3] if len(args) > 3 else ()
        if inputs:
            begins(outputs, inputs)
        try:
            return run(outputs, *args, **kwargs)
        except BaseException as error:
            raised(error)
            raise

    for module in modules:
        module._engine_run_backward = ran


def reaches(outputs: Sequence[Any], tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is in the graph of `outputs`, tensors or graph edges."""
    leaves = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    wanted = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    if any(id(output) in leaves for output in outputs):
        return True
    left = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen = {None, *left}
    while left:
        node = left.pop()
        if node in wanted or id(getattr(node, "variable", None)) in leaves:
            return True
        below = {below for below, _ in node.next_functions} - seen if node is not None else set()
        seen |= below
        left += below
    return False
