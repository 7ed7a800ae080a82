"""Attention between some queries and some keys, with the logarithm of its sums, so that parts can be added.

torch's fused kernels have the sums under private names: on CPUs, and on CUDA devices in half precision without a mask.
Everywhere else the scores are computed for some queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Bytes of scores that exist at a time, where no fused kernel computes them.
_SCORES_NBYTES = 64 << 20
_FUSED_ON_CUDA = (torch.float16, torch.bfloat16)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result (B, H, Q, V) in the dtype of `query`, and the logarithm (B, H, Q) of the sums, at least float32.

    query (B, H, Q, E), key (B, H or a divisor, K, E), value (B, the same, K, V). `causal`: Q = K. `mask`: (B or 1, H or
    1, Q, K), bool, or summands of the scores. A query that sees no key has 0, and -inf.
    """
    kind = _kernel(query, value, mask)
    if kind != "cpu":
        key, value = _of_groups(query, key, value)
    if kind == "cpu":
        added = _summands(mask, query.dtype)
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=added, scale=scale
        )
        if added is not None:
            # The kernel has 0 there.
            sums = sums.masked_fill((added == -torch.inf).all(-1), -torch.inf)
        return out, sums
    if kind == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return found[0], found[1]
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    sums = query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))
    for rows in _rows(query, key):
        scores = _scores(query, key, scale, rows, causal=causal, mask=mask)
        sums[:, :, rows] = torch.logsumexp(scores, -1)
        out[:, :, rows] = (_weights(scores, sums[:, :, rows]) @ value.to(scores.dtype)).to(out.dtype)
    return out, sums


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. `out` and `sums` are over all keys, of which `key` may be a part."""
    sums = sums.masked_fill(sums == -torch.inf, 0.0)  # no key is seen: every weight is exp(-inf)
    kind = _kernel(query, value, mask)
    if kind != "cpu" and key.shape[1] != query.shape[1]:
        both = _of_groups(query, key, value)
        d_query, *found = attend_backward(grad, query, *both, out, sums, scale, causal=causal, mask=mask)
        d_key, d_value = (_summed(one, key.shape[1]) for one in found)
        return d_query, d_key, d_value
    if kind == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, causal, attn_mask=_summands(mask, query.dtype), scale=scale
        )
        return found[0], found[1], found[2]
    if kind == "cuda":
        seed = torch.empty((), dtype=torch.int64)  # of dropout, which there is none of
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            sums.contiguous(),
            None,
            None,
            query.shape[-2],
            key.shape[-2],
            0.0,
            causal,
            seed,
            seed,
            scale=scale,
        )
        return found[0], found[1], found[2]
    wide = _wide(query.dtype)
    d_query = torch.empty_like(query)
    d_key, d_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    for rows in _rows(query, key):
        scores = _scores(query, key, scale, rows, causal=causal, mask=mask)
        weights, arrived = _weights(scores, sums[:, :, rows]), grad[:, :, rows].to(wide)
        d_value += weights.transpose(-1, -2) @ arrived
        share = (arrived * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        d_scores = weights * (arrived @ value.to(wide).transpose(-1, -2) - share) * scale
        d_query[:, :, rows] = (d_scores @ key.to(wide)).to(d_query.dtype)
        d_key += d_scores.transpose(-1, -2) @ query[:, :, rows].to(wide)
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """The kernel: "cpu", "cuda", or "" for none."""
    if query.shape[-1] != value.shape[-1] or not query.is_floating_point():
        return ""
    if query.device.type == "cpu":
        return "cpu"
    fits = query.dtype in _FUSED_ON_CUDA and mask is None and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return "cuda" if query.is_cuda and fits else ""


def _of_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for each head of `query`. The kernel for CPUs has groups of heads itself."""
    times = query.shape[1] // key.shape[1]
    return (key, value) if times == 1 else (key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of one head of each group, at least float32."""
    found: Tensor = grad.unflatten(1, (heads, -1)).sum(2, dtype=_wide(grad.dtype))
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 4 else torch.float32


def _summands(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _rows(query: Tensor, key: Tensor) -> list[slice]:
    """Queries whose scores fit."""
    row_nbytes = query.shape[0] * query.shape[1] * key.shape[-2] * max(4, query.element_size())
    each = max(1, _SCORES_NBYTES // max(1, row_nbytes))
    return [slice(at, at + each) for at in range(0, query.shape[-2], each)]


def _scores(query: Tensor, key: Tensor, scale: float, rows: slice, *, causal: bool, mask: Tensor | None) -> Tensor:
    wide = _wide(query.dtype)
    scores = (query[:, :, rows].to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    if causal:
        at = torch.arange(query.shape[-2], device=query.device)
        scores = scores.masked_fill(at[rows, None] < at, -torch.inf)
    if mask is not None:
        part: Any = mask[:, :, rows]
        scores = scores.masked_fill(~part, -torch.inf) if mask.dtype is torch.bool else scores + part.to(wide)
    return scores


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    return torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1))
