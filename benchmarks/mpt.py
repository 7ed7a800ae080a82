"""MosaicML's MPT by its published shapes: what LLM Foundry's tables of speeds trained."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.program import Program

VOCABULARY = 50_368


class MptShape(NamedTuple):
    width: int
    heads: int
    layers: int


SHAPES = {
    "mpt-760m": MptShape(1536, 12, 24),
    "mpt-1b": MptShape(2048, 16, 24),
    "mpt-3b": MptShape(2560, 20, 32),
    "mpt-7b": MptShape(4096, 32, 32),
    "mpt-13b": MptShape(5120, 40, 40),
    "mpt-30b": MptShape(7168, 56, 48),
    "mpt-70b": MptShape(8192, 64, 80),
}


class Block(nn.Module):
    def __init__(self, shape: MptShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class Mpt(nn.Module):
    """Learned positions, no biases, the head tied to the embedding."""

    def __init__(self, shape: MptShape, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class _FusedLoss(torch.autograd.Function):
    """Cross entropy as the FlashAttention package has it, which LLM Foundry takes by default: it saves the logits as
    they are, and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return logits[:, 0].float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        logits, _ = ctx.saved_tensors
        return logits.detach().mul_(1.0), None


def program(name: str, sequence: int) -> Program:
    """The program of that shape, on one sequence."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = _FusedLoss.apply(model(batch).flatten(0, 1), batch.flatten())  # type: ignore[no-untyped-call]
        return out

    return Program(
        lambda: Mpt(SHAPES[name], sequence),
        loss,
        lambda index: torch.zeros(1, sequence, dtype=torch.long, device="cpu"),
    )
