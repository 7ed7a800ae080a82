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

from ..comm import largest_over, sum_over


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
        return same_on_all(mesh, here, F.cross_entropy(input, target, **options), target)
    total = F.cross_entropy(input, target, reduction="sum", **options)
    counted = target != ignore_index
    number = counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()
    whole = total.to_local() if isinstance(total, DTensor) else total
    mean: Tensor = _Mean.apply(mesh, whole, number)  # type: ignore[no-untyped-call]
    return mean


def same_on_all(mesh: DeviceMesh, here: int, loss: Tensor, of: Tensor) -> Tensor:
    """`loss`, a scalar of `of`. If that is nothing of the `here` tokens of this rank, but of the sequence, such as its
    class, it has to be the same on all ranks of `mesh`. Collective then, two numbers; raises `ValueError` otherwise, on
    all of them: each has computed it of its part of the sequence."""
    of_tokens = not here or any(size and size % here == 0 for size in of.shape)
    if loss.ndim or not loss.requires_grad or of_tokens:
        return loss
    own = loss.detach().double()
    most, least = largest_over(mesh, torch.stack([own, -own]), "context_parallel: a loss of sequences").tolist()
    # Not "!=": a loss that is not a number on all ranks is the same.
    if most > -least:
        raise ValueError(
            f"context_parallel: expected a loss of tokens, or one that is the same on all ranks that share a sequence, "
            f"found {-least:.6g} to {most:.6g}: each rank computed it of its part; compute it of the whole sequence, "
            f"such as by an all-reduce of a mean, or leave context_parallel_degree out"
        )
    return loss


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
