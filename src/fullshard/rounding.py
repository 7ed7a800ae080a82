"""How far two correct computations may be apart: derived from dtype and length of sums, never from a run.

`u` is half of a dtype's eps. The error of a sum of n rounded terms is above k standard deviations with probability
below 2 exp(-k^2 / 2), and one standard deviation is sqrt(n / 6) u of the largest (Higham and Mary, A New Approach to
Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019). Two computations have twice the variance:

    sums(dtype, n, elements) = sqrt(2 / 6) u sqrt(n) sqrt(2 log(2 elements / RISK))

The sums of a forward and a backward come one after another, and variances of independent errors add: n is the length
of all sums on the way (`terms_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# How probable it is that rounding alone exceeds a bound, in one tensor.
RISK = 1e-6
# The number of roundings of a module beside those of its product: bias, activation, normalisation, softmax.
_ROUNDINGS = 8


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sums(dtype: torch.dtype, terms: int, elements: int = 1) -> float:
    """How far apart two sums of the same `terms` terms may be, relative to the largest of `elements` results."""
    deviation = math.sqrt(2 / 6) * unit(dtype) * math.sqrt(max(terms, 1))
    return deviation * math.sqrt(2 * math.log(2 * max(elements, 1) / RISK))


def terms_of(parameters: Iterable[Tensor], rows: int) -> int:
    """The length of all sums in a gradient: each weight's inputs on the way forward, its outputs on the way back,
    and the `rows` that its gradient is summed over."""
    shapes = [tuple(p.shape) for p in parameters]
    return rows + sum(_ROUNDINGS + s[0] + math.prod(s[1:]) if len(s) > 1 else _ROUNDINGS for s in shapes)


def rows_of(batch: Any) -> int:
    """The elements of the largest tensor of a batch: as many samples or tokens, at most."""
    if isinstance(batch, Tensor):
        return batch.numel()
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return max(map(rows_of, items), default=1)
