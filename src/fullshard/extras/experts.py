"""Experts: a router that sends each token to some of them, their products, and the same where ranks divide them.

    MixtureOfExperts     a feed-forward layer of experts: router, balance loss, `Experts`
    Experts              their weights, each of three dims; also on one rank alone
    routed               tokens to experts and back: sorted, sent by an all-to-all with unequal splits, put together

Letters in shapes: N tokens, K experts of each token, E experts, D width, F width of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .._torch import current_node
from ..comm import ExpertLine, TokenRoute
from ..policy.arguments import expect, expect_module, expect_number, expect_whole

# ---- tokens to experts -----------------------------------------------------------------------------------------------

Compute = Callable[[Tensor, "list[int]"], Tensor]


def routed(
    tokens: Tensor, index: Tensor, weights: Tensor, experts: int, compute: Compute, line: ExpertLine | None = None
) -> Tensor:
    """The sum over the experts of each token of weight times output, (N, D) in the dtype of `tokens`.

    tokens: (N, D). index: (N, K), int64, numbers of experts, or `experts` for none. weights: (N, K). compute: (rows,
    how many are for each expert that is here) -> rows; it runs also without rows, so that all ranks send the same
    messages. line: the ranks that divide the experts; None: all are here.
    """
    total, slices = len(tokens), line is not None and line.parts > 1 and not line.cut and not line.divided
    if line is not None and line.cut:
        # Each rank along tp adds its part of the gradient.
        tokens, weights = of_all(line, tokens), of_all(line, weights)
    if slices:
        # Ranks along tp have the same tokens: each sends its part of them.
        tokens, weights = _part(line, tokens, total), _part(line, weights, total)
        index = line.of_part(index)  # type: ignore[union-attr]
    each = index.shape[1]
    # Of the meta device a plan knows shapes alone.
    counts = index.new_empty(experts) if index.is_meta else torch.bincount(index.reshape(-1), minlength=experts)
    if len(counts) > experts:
        index, weights, counts = _without_none(index, weights, experts)
    order = index.reshape(-1).argsort(stable=True)
    back = _inverse(order)
    rows = _taken(tokens, order, back, each)
    if tokens.is_meta and line is None:  # shapes alone: as many for each
        rows = compute(rows, [len(rows) // experts + (e < len(rows) % experts) for e in range(experts)])
    elif line is None:
        rows = compute(rows, counts.tolist())
    else:
        dtype = str(tokens.dtype).removeprefix("torch.")
        facts = f"{experts} experts, {each} for each token, width {tokens.shape[1]}, {dtype}"
        route = line.route(counts, facts, len(rows))
        rows = _exchanged(line, rows, route)
        # From the order of ranks to that of experts.
        here = torch.tensor(route.counts, device=rows.device)
        number = torch.arange(here.shape[1], device=rows.device).repeat(len(here))
        number = number.repeat_interleave(here.flatten(), output_size=sum(route.arriving))
        sort = number.argsort(stable=True)
        undo = _inverse(sort)
        rows = compute(_taken(rows, sort, undo, 1), [sum(each) for each in zip(*route.counts, strict=True)])
        rows = _exchanged(line, _taken(rows, undo, sort, 1), route.back)
    rows = _taken(rows, back, order, 1).view(-1, each, tokens.shape[1])
    out = (rows * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)
    if slices:
        return _together(line, out, total)
    return _summed(line, out) if line is not None and line.cut else out


def _without_none(index: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A token that chose no expert goes to the last one, with a weight of 0: routers have `experts` for it."""
    if int(index.max()) > experts:
        raise ValueError(
            f"experts: expected numbers of experts of at most {experts}, which stands for none, found "
            f"{int(index.max())}; give the router as many outputs as there are experts"
        )
    none = index == experts
    index = index.masked_fill(none, experts - 1)
    return index, weights.masked_fill(none, 0.0), torch.bincount(index.reshape(-1), minlength=experts)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Taken(torch.autograd.Function):
    """Rows in another order, each of them `each` times; the gradient is summed in one order on all devices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.each = each
        return rows.index_select(0, order if each == 1 else order // each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        grad = grad.index_select(0, back)
        return (grad if ctx.each == 1 else grad.unflatten(0, (-1, ctx.each)).sum(1)), None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, rows: Tensor, route: TokenRoute) -> Tensor:
        ctx.line, ctx.route = line, route
        return line.exchange(rows, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.line.exchange(grad, ctx.route.back), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, whole: Tensor, total: int) -> Tensor:
        ctx.line, ctx.total = line, total
        return line.of_part(whole).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.line.whole(grad, ctx.total), None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, part: Tensor, total: int) -> Tensor:
        ctx.line = line
        return line.whole(part, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.line.of_part(grad).contiguous(), None


class _GatesAndUps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, rows: Tensor) -> Tensor:
        ctx.line = line
        return line.gates_and_ups(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.line.gates_and_ups(grad, back=True)


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, tensor: Tensor) -> Tensor:
        ctx.line = line
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.line.sum(grad)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: ExpertLine, tensor: Tensor) -> Tensor:
        return line.sum(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _apply(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


_taken = functools.partial(_apply, _Taken)
_exchanged = functools.partial(_apply, _Exchanged)
# This rank's part of rows that are equal along tp; the gradient is put together.
_part = functools.partial(_apply, _Part)
# The opposite: its gradient, which is equal along tp, is cut.
_together = functools.partial(_apply, _Together)
# From this rank's part of the features (gates, ups) to its parts of both.
gates_and_ups = functools.partial(_apply, _GatesAndUps)
# A tensor that is equal along tp, whose gradient is a sum over the ranks.
of_all = functools.partial(_apply, _OfAll)
# The sum of what the ranks along tp have; its gradient is equal on all of them.
_summed = functools.partial(_apply, _Summed)


def products(rows: Tensor, weights: Tensor, counts: list[int], bias: Tensor | None = None) -> Tensor:
    """Each group of rows times the weight of its expert: rows (n, in), weights (experts, out, in), bias (experts, out)
    -> (n, out).

    An expert without rows gets a gradient of zeros."""
    each = [None] * len(counts) if bias is None else bias.unbind()
    if rows.device.type == "cuda" and rows.dtype == torch.bfloat16:
        out = in_one_kernel(rows, weights, counts)
        return out if bias is None else torch.cat([a + b for a, b in zip(out.split(counts), bias, strict=True)])
    parts = zip(rows.split(counts), weights.unbind(), each, strict=True)
    return torch.cat([F.linear(part, weight, one) for part, weight, one in parts])


def in_one_kernel(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """The same by torch's grouped product, which has kernels for bfloat16 on devices."""
    ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
    out: Tensor = F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    return out


# ---- modules ---------------------------------------------------------------------------------------------------------


def _here(weight: Tensor) -> Tensor:
    """This rank's part of a weight that ranks divide."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Experts(nn.Module):
    """SwiGLU experts: down(silu(gate(x)) * up(x)), of each the weights of all experts as one parameter.

    gate, up: (E, F, D). down: (E, D, F). Construction leaves values undefined.
    """

    # The ranks that divide the experts; None: all are here. Set by `prepare_fully_shard`.
    line: ExpertLine | None = None

    def __init__(self, dim: int, ffn_dim: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate = nn.Parameter(torch.empty(experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn_dim))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """(N, D), (N, K), (N, K) -> (N, D)."""
        gate, up, down = map(_here, (self.gate, self.up, self.down))

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            rows = rows.to(gate.dtype)
            return products(F.silu(products(rows, gate, counts)) * products(rows, up, counts), down, counts)

        return routed(tokens, index, weights, self.num_experts, compute, self.line)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of `experts` SwiGLU experts, of which a router chooses some for each token.

        layer = fullshard.MixtureOfExperts(1024, 2048, experts=8, experts_per_token=2, balance=0.01)
        y = layer(x)                                              # (..., dim)
        loss = F.cross_entropy(...) + fullshard.balance_loss(model)

    The router is a linear layer; the softmax over all experts is in float32, and the weights of a token's experts are
    divided by their sum. balance: the factor of the auxiliary loss of Switch Transformers, E times the sum over experts
    of the share of tokens times the mean probability, of the tokens that this rank computes; 0: none.

    On one rank it is a plain module. `prepare_fully_shard` with an `expert_parallel_degree` divides the experts.
    Construction leaves values undefined; they are (E, F, D) and (E, D, F), and (E, D) of the router. Raises
    `ValueError` for numbers that are too small. Source: Mixtral, torchtitan's MoE.
    """

    def __init__(
        self, dim: int, ffn_dim: int, *, experts: int, experts_per_token: int = 2, balance: float = 0.0
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("ffn_dim", ffn_dim), ("experts", experts)):
            expect_whole(name, value, 1)
        expect_whole("experts_per_token", experts_per_token, 1)
        told = f"at most the {experts} experts"
        expect("experts_per_token", experts_per_token <= experts, told, experts_per_token, "choose fewer", ValueError)
        expect_number("balance", balance, lambda factor: factor >= 0, "a number of at least 0")
        self.experts_per_token, self.balance = experts_per_token, float(balance)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(dim, ffn_dim, experts)
        # The value of the last forward with gradients, until it is asked for.
        self.last_balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        line = self.experts.line
        if isinstance(x, DTensor):
            x = x.to_local()  # under sequence parallelism, this rank's part
        shape, tokens, parts = x.shape, x.reshape(-1, x.shape[-1]), 0
        if line is not None and line.divided:
            parts = line.parts
            if line.cut:
                tokens, parts = _together(line, tokens, len(tokens) * line.parts), 0
        # Each rank that has a part of the tokens has a part of the router's gradient.
        scores = F.linear(tokens, of_all(line, self.router.weight)) if parts else self.router(tokens)
        chances = scores.float().softmax(-1)
        kept, index = chances.topk(self.experts_per_token)
        if self.balance and torch.is_grad_enabled():
            found = self.balance * self._balance(chances, index, line if parts else None)
            if current_node() is None:  # recomputation needs the same operations, and gives none
                self.last_balance = found
        y: Tensor = self.experts(tokens, index, (kept / kept.sum(-1, keepdim=True)).to(tokens.dtype))
        if line is not None and line.divided and line.cut:
            y = _part(line, y, len(y))
        return y.view(shape)

    def _balance(self, chances: Tensor, index: Tensor, line: ExpertLine | None) -> Tensor:
        """1 where all experts have as many tokens. line: the ranks that have parts of these tokens, of equal size."""
        experts = chances.shape[1]
        shares = F.one_hot(index.reshape(-1), experts).sum(0) / max(index.numel(), 1)
        means = chances.sum(0) / max(len(chances), 1)
        if line is not None:
            shares, means = line.sum(shares) / line.parts, _summed(line, means) / line.parts
        return experts * (shares * means).sum()


def balance_loss(model: nn.Module) -> Tensor | float:
    """The sum of the balance losses of all `MixtureOfExperts` in `model`, of their last forward with gradients.

    Add it to the loss of the same forward, before the backward: each layer gives it once. A 0-dim float32 tensor of
    this rank's tokens; 0.0 where no layer has one, as in a block that is recomputed with `use_reentrant=True`, which
    computes without gradients at first. No message. Raises `TypeError` for anything but a module.
    """
    expect_module("model", model)
    total: Tensor | float = 0.0
    for layer in _layers(model):
        if layer.last_balance is not None:
            total, layer.last_balance = layer.last_balance + total, None
    return total


class StageBalance:
    """The balance losses of a stage of a pipeline, whose forward is not followed by a loss: their gradients begin where
    that of its output arrives. `scale`: the factor of these gradients; `values`: of each forward since it was cleared,
    0-dim, without the factor."""

    def __init__(self, stage: nn.Module, *, is_last: bool) -> None:
        self._layers, self._is_last = tuple(_layers(stage)), is_last
        self.scale, self.values = 1.0, list[Tensor]()

    def join(self, output: Tensor) -> Tensor:
        """`output`, with the losses of the forward that gave it."""
        total: Tensor | None = None
        for layer in self._layers:
            if layer.last_balance is not None:
                total = layer.last_balance if total is None else total + layer.last_balance
                layer.last_balance = None
        if total is None or not torch.is_grad_enabled():
            return output
        self.values.append(total.detach())
        joined = _apply(_Joined, output, total, self.scale)
        # torch detaches in place what a stage sends, which a view cannot be.
        return joined if self._is_last else joined.clone()


class _Joined(torch.autograd.Function):
    """An output, whose gradient brings one of a loss along."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), ctx.scale, dtype=dtype, device=device), None


def _layers(model: nn.Module) -> Iterable[MixtureOfExperts]:
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))
