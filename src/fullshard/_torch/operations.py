"""Private names about operations and nodes, for those who watch all of them (plan/facts.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The node that runs in the backward of this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# The number that the next node of a forward in this thread gets.
next_node_number: Callable[[], int] = cast(Any, torch.autograd)._get_sequence_nr


def node_number(node: Any) -> int:
    """The place of `node` in the order in which forwards made nodes; -1 for the accumulation of a gradient."""
    number = int(node._sequence_nr())
    return -1 if number >= 1 << 62 else number


def operation_name(operation: Any) -> str:
    """Namespace and name of an operation that torch dispatches: "aten.mm"."""
    return str(operation._schema.name).replace("::", ".")


def is_write(operation: Any) -> bool:
    """Whether the operation writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


def overloads(operation: Any) -> Any:
    """The operation without the choice of an overload: `torch.ops.aten.mm`."""
    return operation._overloadpacket


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all tensors of a storage, while it is there."""
    return int(storage._cdata)


def without_torch_functions() -> Any:
    """A context in which `__torch_function__` is not asked."""
    return torch._C.DisableTorchFunction()


def attention_for_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Any, scale: Any) -> Tensor:
    """Fused attention: what torch takes on a CPU, and with shapes alone."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )[0]
    return out
