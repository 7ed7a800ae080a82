"""What torch.compile must not look into.

Dynamo follows calls. Left alone it would trace our hooks into the graph of a block, and with them messages and resized
memory, or compile each function below them by itself. So every function of ours that torch calls while compiled code
may be running is given to torch through `outside_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: for `outside_graphs`, where what is to be called differs from call to call."""
    return function(*args)


def outside_graphs(function: F) -> F:
    """`function`, run as plain Python, with all it calls, also where a compiled function is what calls it.

    Make it once: the call costs a third of a microsecond, making it a hundred times that. The first use in a process
    imports torch's compiler, as making an optimizer does.
    """
    wrapped: F = torch.compiler.disable(function, reason="fullshard: messages and memory are no part of a graph")
    return wrapped
