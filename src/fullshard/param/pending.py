"""What stands on a sharded parameter's `.grad` while its gradient, or a partial sum, is kept between micro-batches.

FSDP2 leaves `.grad` at None there, so `zero_grad()` cannot clear an abandoned accumulation window and `step()` with
synchronisation left off silently does nothing. A `PendingGrad` has the shape and dtype of the gradient and no data:

    zero_grad()                    removes it (or zeroes it): the kept gradient is dropped before the next backward
    step(), clip, any arithmetic   RuntimeError that says what to do

`SteppedGrad` stands there after a step in backward (`step_in_backward`), whose gradient exists no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import dtensor_without_data, no_torch_function


class PendingGrad(DTensor):
    """Stands for a gradient that exists on each rank but was not reduced yet. Shape, dtype and placements are the
    parameter's; there is no data behind them.

    A subclass of DTensor, because the first of two tensor subclasses in an operation is asked, unless the other one is
    *its* subclass: so this refuses before DTensor complains about mixed types.
    """

    cleared: bool
    parameter_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> PendingGrad:
        made = dtensor_without_data(cls, parameter)
        assert isinstance(made, PendingGrad)
        made.cleared = False
        made.parameter_name = name
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        pass

    @property
    def is_sparse(self) -> NoReturn:  # type: ignore[override]
        # torch's optimizers ask this of every gradient before they change anything (weight decay comes first), so
        # step() refuses while all parameters are still what they were.
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
            f"micro-batch of the step with both True before reading gradients, clipping or optimizer.step()"
        )

    __torch_function__ = no_torch_function  # type: ignore[assignment]


class SteppedGrad(PendingGrad):
    """Stands for a gradient that its optimizer took in backward: what wants to read it comes too late, and is told."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SteppedGrad({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @staticmethod
    def _refuse(pending: list[PendingGrad]) -> NoReturn:
        names = ", ".join(dict.fromkeys(gradient.parameter_name for gradient in pending))
        raise RuntimeError(
            f"expected a gradient, found that the optimizer took a step with it in backward already and freed it "
            f"(fullshard.step_in_backward), of {names}: clipping by a global norm and torch.amp.GradScaler decide over "
            f"all gradients and cannot be combined with it; leave them out, or leave step_in_backward out"
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
