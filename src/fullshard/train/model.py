"""A Llama-like language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied or untied embeddings.

Plain PyTorch. This file knows nothing of sharding, processes or devices: whoever shards it hands `init_weights` an
`Assign` that knows how to put a full value on a sharded parameter.

Letters in shapes: B sequences, T positions, D model width, H query heads, K key/value heads, E width of one head,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Assign = Callable[[Tensor, Tensor], None]  # (parameter or buffer, its full value): make the former hold the latter


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What decides the shapes of a `Llama`."""

    vocab: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    context: int  # longest sequence, in tokens
    tie_embeddings: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def assign_plain(target: Tensor, value: Tensor) -> None:
    """`Assign` of an ordinary model: copy, casting to the target's dtype and device."""
    with torch.no_grad():
        target.copy_(value)


class Init:
    """Draws initial values, each parameter from a generator of its own.

    The generator's seed is a hash of (seed, parameter name), so a value depends on neither the order in which modules
    are initialised nor on what else the model holds, and every process draws the same full value. One full value
    exists at a time.
    """

    def __init__(self, seed: int = 0, assign: Assign = assign_plain, prefix: str = "") -> None:
        self.seed, self.assign, self.prefix = seed, assign, prefix

    def child(self, name: str) -> Init:
        return Init(self.seed, self.assign, f"{self.prefix}{name}.")

    def normal(self, name: str, parameter: Tensor, std: float) -> None:
        """Normal with deviation `std`, cut at three deviations."""
        digest = hashlib.sha256(f"{self.seed}:{self.prefix}{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        value = torch.empty(parameter.shape, dtype=torch.float32)
        nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=generator)
        self.assign(parameter, value)

    def ones(self, parameter: Tensor) -> None:
        self.assign(parameter, torch.ones(parameter.shape, dtype=torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean is taken in float32 whatever the input's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight

    def init_weights(self, init: Init) -> None:
        init.ones(self.weight)


class Attention(nn.Module):
    """Causal self-attention. H query heads share K key/value heads; positions are rotations of queries and keys."""

    rope_cos: Tensor  # (context, E/2), float32
    rope_sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        kv_dim = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        # Buffers of the block itself, not an argument of its forward: mixed precision casts arguments, and angles in
        # bfloat16 lose the distance between far positions. Not saved: `init_weights` computes them again.
        half = (shape.context, shape.head_dim // 2)
        self.register_buffer("rope_cos", torch.empty(half), persistent=False)
        self.register_buffer("rope_sin", torch.empty(half), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = self._rotate(self.wq(x).view(heads))  # (B, T, H, E)
        k = self._rotate(self.wk(x).view(heads))  # (B, T, K, E)
        v = self.wv(x).view(heads)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.shape.heads != self.shape.kv_heads,
        )  # (B, H, T, E)
        result: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _rotate(self, x: Tensor) -> Tensor:  # (B, T, heads, E), rotated in float32
        length = x.shape[1]
        cos, sin = self.rope_cos[:length, None], self.rope_sin[:length, None]  # (T, 1, E/2)
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).type_as(x)

    def init_weights(self, init: Init, *, out_std: float) -> None:
        std = self.shape.dim**-0.5
        for name, linear in (("wq", self.wq), ("wk", self.wk), ("wv", self.wv)):
            init.normal(f"{name}.weight", linear.weight, std)
        init.normal("wo.weight", self.wo.weight, out_std)
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(self.shape.context, dtype=torch.float64)[:, None] * frequency
        init.assign(self.rope_cos, angle.cos().float())
        init.assign(self.rope_sin, angle.sin().float())


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, F) -> (B, T, D)
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result

    def init_weights(self, init: Init, *, out_std: float) -> None:
        std = self.gate.in_features**-0.5
        init.normal("gate.weight", self.gate.weight, std)
        init.normal("up.weight", self.up.weight, std)
        init.normal("down.weight", self.down.weight, out_std)


class Block(nn.Module):
    """One transformer layer, normalised before each part: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.ffn(self.ffn_norm(x))
        return x

    def init_weights(self, init: Init, *, residual_scale: float) -> None:
        dim, ffn_dim = self.ffn.gate.in_features, self.ffn.gate.out_features
        self.attention_norm.init_weights(init.child("attention_norm"))
        self.attention.init_weights(init.child("attention"), out_std=residual_scale * dim**-0.5)
        self.ffn_norm.init_weights(init.child("ffn_norm"))
        self.ffn.init_weights(init.child("ffn"), out_std=residual_scale * ffn_dim**-0.5)


class Llama(nn.Module):
    """Tokens (B, T), int64 -> logits (B, T, V).

    Construction leaves values undefined, so that it costs nothing on the meta device; `init_weights` defines every
    parameter and buffer, also after `to_empty`.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.output = None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        # Tied: the one weight is used twice by the module that owns it, so no two modules share a parameter.
        return F.linear(x, self.embedding.weight) if self.output is None else self.output(x)

    def init_weights(self, seed: int = 0, *, assign: Assign = assign_plain) -> None:
        """Give every parameter and buffer its initial value, a function of (seed, its name) alone."""
        init = Init(seed, assign)
        # Logits of deviation 1/4, so that the first loss is close to ln V: the model begins with no opinion.
        logits_std = self.shape.dim**-0.5 / 4
        init.normal("embedding.weight", self.embedding.weight, logits_std)
        # Each block adds two terms to the residual stream; this keeps the sum's size independent of depth.
        residual_scale = 1 / math.sqrt(2 * self.shape.layers)
        for index, block in enumerate(self.layers):
            assert isinstance(block, Block)
            block.init_weights(init.child(f"layers.{index}"), residual_scale=residual_scale)
        self.norm.init_weights(init.child("norm"))
        if self.output is not None:
            init.normal("output.weight", self.output.weight, logits_std)
