"""The placeholder on a sharded parameter's `.grad` while its gradient, or a partial sum, is kept between micro-batches.

FSDP2 leaves `.grad` at None there. So `zero_grad()` cannot clear an abandoned accumulation window, and `step()` with
synchronisation left off silently does nothing. A `PendingGrad` has the shape and dtype of the gradient and no data:

    zero_grad()                    removes or zeroes it: the kept gradient is dropped before the next backward
    step(), clip, any arithmetic   raises a RuntimeError that says what to do

`SteppedGrad` is the placeholder after a step in backward (`step_in_backward`), whose gradient was freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import dtensor_without_data, no_torch_function


class PendingGrad(DTensor):
    """Placeholder for a gradient that exists on each rank but was not reduced yet. It has the parameter's shape and
    placements, the gradient's dtype, and no data.

    A subclass of DTensor: torch asks the first tensor subclass of an operation, unless another one is *its* subclass.
    So this class raises before DTensor complains about mixed types.
    """

    cleared: bool
    parameter_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str, dtype: torch.dtype) -> PendingGrad:
        made = dtensor_without_data(cls, parameter, dtype)
        assert isinstance(made, PendingGrad)
        made.cleared = False
        made.parameter_name = name
        return made

    def __init__(self, parameter: Tensor, name: str, dtype: torch.dtype) -> None:
        pass

    @property
    def is_sparse(self) -> NoReturn:  # type: ignore[override]
        # torch's optimizers read this of every gradient before they change anything (weight decay comes first), so
        # step() raises while all parameters are still unchanged.
        self._refuse([self])

    def full_tensor(self, **_: Any) -> NoReturn:
        self._refuse([self])

    def to_local(self, **_: Any) -> NoReturn:
        self._refuse([self])

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse([self])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingGrad({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pending = _pending(args, kwargs or {})
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in _ZEROING:
            for gradient in pending:
                gradient.cleared = True
            return args[0] if func is torch.ops.aten.zero_.default else None
        cls._refuse(pending)

    @staticmethod
    def _refuse(pending: list[PendingGrad]) -> NoReturn:
        names = ", ".join(dict.fromkeys(gradient.parameter_name for gradient in pending))
        raise RuntimeError(
            f"expected a reduced gradient, found one that was only accumulated on some ranks, of {names}: the last "
            f"backward ran with set_requires_gradient_sync(False) or set_requires_all_reduce(False); run the last "
            f"micro-batch with both True before reading gradients, clipping or optimizer.step()"
        )

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class SteppedGrad(PendingGrad):
    """Placeholder for a gradient that its optimizer consumed in backward: reading it raises."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SteppedGrad({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @staticmethod
    def _refuse(pending: list[PendingGrad]) -> NoReturn:
        names = ", ".join(dict.fromkeys(gradient.parameter_name for gradient in pending))
        raise RuntimeError(
            f"expected a gradient, found that the optimizer took a step with it in backward already and freed it "
            f"(fullshard.step_in_backward), of {names}: clipping by a global norm and torch.amp.GradScaler need all "
            f"gradients at once; leave them out, or leave step_in_backward out"
        )


_ZEROING: tuple[Callable[..., Any], ...] = (
    torch.ops.aten.zero_.default,
    torch.ops.aten._foreach_zero_.default,
)


def _pending(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PendingGrad]:
    found: list[PendingGrad] = []
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        value = stack.pop(0)
        if isinstance(value, PendingGrad):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
    return found
