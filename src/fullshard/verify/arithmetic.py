"""The mean of gradients in the arithmetic that the reduction is to have, and where that gives equal bits.

    held      a micro-batch after the other, in the reduce dtype
    sum       over the ranks of a shard, in their order, in float32 at least
    divided   by the number of ranks, then summed over the replicas
    stored    in the dtype of the parameter

The order of a sum of two does not matter. Of more, fullshard adds them in the order of the ranks where it exchanges
gradients and sums on arrival, on the CPU; a backend's reduce-scatter or all-reduce may add in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard.rounding import unit

from .setting import Setting

# `Expected.parts` of one parameter: of each rank and micro-batch, undivided, in the dtype in which autograd made it.
Parts = list[list[Tensor | None]]


def order_is_known(setting: Setting) -> bool:
    """Whether the order of every sum over ranks is known, or does not matter."""
    strategy = setting.strategy
    if not setting.is_fsdp2 or strategy.divides or strategy.replicas > 2:
        return False
    if strategy.pure and (setting.library == "torch" or setting.shards == 1):
        return False  # summed in the reduce dtype
    return setting.shards <= 2 or (setting.library == "fullshard" and setting.device == "cpu" and setting.shards > 1)


def mean(parts: Parts, setting: Setting, dtype: torch.dtype, scale: float = 1.0) -> Tensor | None:
    """The gradient in `dtype`, that of the parameter. `scale`: of the loss; the result is divided by it at last.

    >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
    >>> from .strategy import parse_strategy
    >>> setting = Setting("", "fullshard", parse_strategy("zero3+micro=2"), 2, 1, "cpu")
    >>> mean([[one, two], [two, None]], setting, torch.float32)
    tensor(2.5000)
    """
    reduce, shards = setting.strategy.reduce_dtype, setting.shards
    sent = [_held(row, reduce) for row in parts]
    found = next((part for part in sent if part is not None), None)
    if found is None:
        return None
    total: Tensor | None = None
    for first in range(0, len(sent), shards):
        chunk = torch.zeros(found.shape, dtype=torch.float32)
        for k, part in enumerate(sent[first : first + shards]):
            value = torch.zeros_like(chunk) if part is None else part.float()
            chunk = value if k == 0 else chunk + value
        chunk = chunk / len(sent)
        total = chunk if total is None else total + chunk
    assert total is not None
    result = total.to(dtype)
    return result if scale == 1 else result / scale


def _held(row: list[Tensor | None], reduce: torch.dtype) -> Tensor | None:
    """The sum of one rank's micro-batches; that of a single one as autograd made it."""
    total: Tensor | None = None
    for part in row:
        if part is not None:
            total = part if total is None else total.to(reduce) + part.to(reduce)
    return total


def update_allowed(found: Tensor, wanted: Tensor, old: Tensor) -> Tensor:
    """Returns what each element may differ by: either computation rounds a few times at the size of the parameter and
    of its change."""
    if not found.is_floating_point():
        return torch.zeros(found.shape, dtype=torch.float64)
    sizes = torch.stack([t.double().abs() for t in (found, wanted, old)]).amax(0)
    change = (wanted.double() - old.double()).abs()
    # The change itself is a quotient of several rounded values: some 16 roundings in float32.
    return 2 * unit(found.dtype) * sizes + 16 * unit(torch.float32) * (change + change.mean())
