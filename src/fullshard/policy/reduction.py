"""How the gradients of a unit are reduced: what the user set with the methods of `FSDPModule`, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class CustomComm(Protocol):
    """A caller's own all-gather or reduce-scatter: torch's `AllGather` and `ReduceScatter` objects have this shape.

    `__call__(output_tensor=, input_tensor=, group=, async_op=)`, for a reduce-scatter also `op=`, returns a work or
    None when it is finished. `allocate(size, dtype=, device=)` makes the buffers of both.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Controls:
    """The settings of one unit; each default is what holds when the user says nothing."""

    # One of `options.COMMUNICATION`, or None: what the root's options say.
    communication: str | None = None
    # What sums of gradients are divided by; None: the number of ranks that contribute.
    divide_factor: float | None = None
    # Ask backends for sums alone, never for averages.
    sum_only: bool = False
    # Called with the reduced flat gradient shards, before the last division; in `hook_stream` where there is one.
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    gather: CustomComm | None = None
    reduce_scatter: CustomComm | None = None
    # Parameters that got no gradient count as having a zero one.
    zero_unused: bool = False
    # How many send buffers may exist when this unit's has been made; None: what the root's options say.
    send_buffers: int | None = None

    @property
    def text(self) -> str:
        """What ranks have to have the same of."""
        set_ = ["none" if each is None else type(each).__name__ for each in (self.gather, self.reduce_scatter)]
        return (
            f"communication={self.communication}, divide factor={self.divide_factor}, sums alone={self.sum_only}, "
            f"all-reduce hook={'none' if self.hook is None else 'set'}, custom all-gather={set_[0]}, "
            f"custom reduce-scatter={set_[1]}, unused parameters reduced={self.zero_unused}"
        )

    def strategy(self, default: str) -> str:
        """The communication strategy; a custom reduce-scatter needs the one that makes a reduce-scatter."""
        return "torch" if self.reduce_scatter is not None else self.communication or default


class Scale(NamedTuple):
    """Where a sum of gradients is divided. The product of both numbers is the divide factor."""

    # Before the sum leaves the axis that shards: of every contribution, or of the partial sum.
    before: float
    # When everything is summed, after the hook.
    after: float
    # Backends that can, average over their ranks in the place of `before`.
    averages: bool
    # In a reduction by the backend every contribution is divided, because their sum could overflow.
    overflows: bool


# In these torch leaves the division to the backend; a sum of others is kept small by dividing in two steps.
_WIDE = (torch.float32, torch.bfloat16)


def resolve_scale(reduce_dtype: torch.dtype, ranks: int, factor: float | None, *, sum_only: bool) -> Scale:
    """The scale of a reduction in `reduce_dtype` over `ranks` ranks in all. What a hook sees is what torch's sees.

    >>> resolve_scale(torch.float32, 8, None, sum_only=False)
    Scale(before=8.0, after=1.0, averages=True, overflows=False)
    >>> resolve_scale(torch.float16, 8, None, sum_only=False)
    Scale(before=4.0, after=2.0, averages=False, overflows=True)
    """
    divisor = float(ranks) if factor is None else float(factor)
    if reduce_dtype not in _WIDE:
        # About the root of it before and the rest afterwards: a power of two, which costs no precision.
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Scale(before, divisor / before, averages=False, overflows=True)
    if sum_only:
        return Scale(1.0, divisor, averages=False, overflows=False)
    return Scale(divisor, 1.0, averages=factor is None, overflows=False)
