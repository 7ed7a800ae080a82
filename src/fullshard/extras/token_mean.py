"""Cross entropy as the mean over the tokens of whole sequences, of which each rank has some.

The mean over a rank's own labels is not it: ranks have different numbers of labels that count. So the sums of losses
and the numbers of labels of all ranks travel together, in one message of two numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import sum_over


def token_mean(
    mesh: DeviceMesh,
    here: int,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy`, with its arguments. A mean over labels of the `here` tokens of this rank becomes the mean over
    those of all ranks of `mesh`, the same on each of them; its gradient is this rank's part, times their number, so
    that the average of gradients over the ranks is that of the mean. Collective then. Other losses are torch's."""
    options: Any = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    of_tokens = not target.is_floating_point() and target.numel() > 0 and (not here or target.numel() % here == 0)
    if size_average is not None or reduce is not None or reduction != "mean" or not of_tokens:
        options |= {"size_average": size_average, "reduce": reduce, "reduction": reduction}
        return F.cross_entropy(input, target, **options)
    total = F.cross_entropy(input, target, reduction="sum", **options)
    counted = target != ignore_index
    number = counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()
    whole = total.to_local() if isinstance(total, DTensor) else total
    mean: Tensor = _Mean.apply(mesh, whole, number)  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, total: Tensor, number: Tensor) -> Tensor:
        both = torch.stack([total.detach().double(), number.double()])
        losses, labels = sum_over(mesh, both, "context_parallel: the mean over all tokens").unbind()
        ctx.scale = mesh.size() / labels
        return (losses / labels).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, (grad * ctx.scale).to(grad.dtype), None
