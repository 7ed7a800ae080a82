"""Where torch refuses tensors, or passes over them, without saying which they are.

Everything else is left as it is. Where a version of torch does not have the place, its own words stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# What DTensor's operators say of a plain tensor beside a DTensor.
MIXED = "got mixed torch.Tensor and DTensor"


def explain_unreached(kind: type[Tensor], explain: Callable[[Sequence[Tensor]], RuntimeError]) -> None:
    """From now on a backward that is asked for the gradients of `inputs`, and whose graph has none of those that are of
    `kind`, raises `explain(those)` before it begins: `autograd.grad(loss, inputs)` and `backward(inputs=inputs)`, which
    refused some tensor "at index 1", returned None, or did nothing."""
    module: Any = torch.autograd
    run: Callable[..., Any] | None = getattr(module, "_engine_run_backward", None)
    if run is None:
        return

    def ran(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # (outputs, their gradients, retain_graph, create_graph, inputs, allow_unused, accumulate_grad=...)
        asked = [tensor for tensor in args[3] if isinstance(tensor, kind)] if len(args) > 3 else []
        if asked and not _reaches(outputs, asked):
            raise explain(asked)
        return run(outputs, *args, **kwargs)

    module._engine_run_backward = ran


def _reaches(outputs: Iterable[Any], tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is in the graph of `outputs`, tensors or graph edges."""
    leaves = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    if any(id(output) in leaves for output in outputs):
        return True
    left = [
        node for output in outputs if (node := getattr(output, "grad_fn", getattr(output, "node", None))) is not None
    ]
    seen = set(left)
    while left:
        node = left.pop()
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                left.append(below)
    return False


def is_view_of_its_input(operation: Any) -> bool:
    """Whether what the ATen `operation` returns is its first argument's memory, as a tensor of its own (`t`, `view`,
    `detach`), and is not written."""
    returned = operation._schema.returns
    info = returned[0].alias_info if len(returned) == 1 else None
    return info is not None and not info.is_write
