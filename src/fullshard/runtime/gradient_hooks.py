"""A gradient of a full parameter came: who is told, and who is not kept for it.

Python's collector does not see that a tensor keeps its hooks. One that kept what keeps the tensor would keep both for
ever, and the model with them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..param import ShardedParam
from .outside import outside_graphs

if TYPE_CHECKING:
    from .unit import Unit


def hook_gradient(unit: Unit, param: ShardedParam, bit: int) -> RemovableHandle:
    """Call `unit.on_gradient` each time a backward brought the gradient of `param`, the one of `bit`, to its full
    parameter. Keeps neither of them."""
    its_unit, itself, name = weakref.ref(unit), weakref.ref(param), param.name

    def arrived(_full: Tensor) -> None:
        here, reached = its_unit(), itself()
        if here is None or reached is None or here.on_gradient is None:
            raise RuntimeError(
                f"{name}: expected the module that computed this to exist when a backward goes through it, found that "
                f"it is gone; keep the model until its backwards are over"
            )
        here.on_gradient(here, reached, bit)

    handle: RemovableHandle = param.full.register_post_accumulate_grad_hook(outside_graphs(arrived))
    return handle
