"""Attention over a sequence that is cut over ranks: by an all-to-all over heads (Ulysses), or by a ring.

Both take the part of this rank, (B, H, tokens here, E), and return the part of the result. Which query sees which key
is in `Sight`, so that neither knows where a mask came from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._torch import attend, attend_backward
from ..comm import SequenceLine
from ..layout import SequenceSplit, Visible, repeats

# ---- sight -----------------------------------------------------------------------------------------------------------


class Sight(NamedTuple):
    """The keys that queries see. `documents`: (B, tokens of the whole sequence), numbers: a query sees keys of its
    own document. `mask`: (B or 1, H or 1, tokens here or all of them, all tokens), bool, or summands of the scores.
    `stamp`: another one for other documents."""

    split: SequenceSplit
    causal: bool
    documents: Tensor | None = None
    mask: Tensor | None = None
    stamp: int = 0

    def marker(self, like: Tensor) -> Tensor:
        """An empty tensor to save, by whose shape recomputation notices that it ran outside of the context, or after
        another batch was split."""
        return like.new_empty((3, 0, 5 + self.stamp))

    def positions(self, rank: int, length: int, device: torch.device) -> Tensor:
        """The places in the sequence of what `rank` holds, (tokens of a rank,)."""
        each = length // self.split.chunks
        within = torch.arange(each, device=device)
        return torch.cat([chunk * each + within for chunk in self.split.held(rank)])

    def pair(self, rank: int, source: int) -> Visible | None:
        """The queries of `rank` and keys of `source` that are computed together; None: there are none."""
        return self.split.visible(rank, source) if self.causal else Visible(0, self.split.each, False)

    def mask_of(self, rank: int, source: int, pair: Visible, length: int) -> Tensor | None:
        """The mask of `pair`, (B or 1, H or 1, queries, keys), which has causality in it; None: there is none."""
        if self.documents is None and self.mask is None:
            return None
        device = (self.mask if self.documents is None else self.documents).device  # type: ignore[union-attr]
        each = length // self.split.chunks
        rows = self.positions(rank, length, device)[pair.first_query * each :]
        columns = self.positions(source, length, device)[: pair.end_key * each]
        seen: Tensor | None = (rows[:, None] >= columns)[None, None] if pair.is_causal else None
        if self.documents is not None:
            same = self.documents[:, None, rows, None] == self.documents[:, None, None, columns]
            seen = same if seen is None else seen & same
        if self.mask is None:
            return seen
        if self.mask.shape[-2] == length:
            mask = self.mask[:, :, rows]
        else:
            mask = self.mask[:, :, pair.first_query * each :]
        mask = mask[..., columns]
        if seen is None:
            return mask
        return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)


# ---- ulysses ---------------------------------------------------------------------------------------------------------


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: SequenceLine, sight: Sight, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.line = line
        ctx.save_for_backward(sight.marker(parts[0]))
        return tuple(line.to_heads(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, *ctx.line.to_sequence(grads)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: SequenceLine, whole: Tensor) -> Tensor:
        ctx.line = line
        return line.to_sequence([whole])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.line.to_heads([grad])[0]


def ulysses(line: SequenceLine, query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight) -> Tensor:
    """Each rank attends with some heads over the whole sequence. Query heads divide by the number of ranks; key/value
    heads are repeated as often as that needs."""
    times = repeats(query.shape[1], key.shape[1], line.world)
    assert times is not None
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    query, key, value = _ToHeads.apply(line, sight, query, key, value)  # type: ignore[no-untyped-call]
    if sight.mask is not None and sight.mask.shape[1] > 1:
        heads = query.shape[1]
        sight = sight._replace(mask=sight.mask[:, line.rank * heads : (line.rank + 1) * heads])
    out: Tensor = _ToSequence.apply(line, _whole(query, key, value, scale, sight))  # type: ignore[no-untyped-call]
    return out


def _whole(query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight) -> Tensor:
    """torch's attention over whole sequences."""
    grouped = query.shape[1] != key.shape[1]
    mask, causal, length = sight.mask, sight.causal, query.shape[-2]
    if sight.documents is not None and mask is None:
        runs = _runs(sight.documents)
        if runs is not None:
            # One document after the other, without a mask.
            found = []
            for start, end in runs:
                parts = query[:, :, start:end], key[:, :, start:end], value[:, :, start:end]
                found.append(F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale, enable_gqa=grouped))
            return torch.cat(found, 2)
    if sight.documents is not None or (mask is not None and causal):
        split = SequenceSplit(1, balanced=False)
        mask = sight._replace(split=split).mask_of(0, 0, Visible(0, 1, causal), length)
        causal = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _runs(documents: Tensor) -> list[tuple[int, int]] | None:
    """(start, end) of each document, if they are runs at the same places in all rows; else None."""
    first = documents[0].tolist()
    starts = [at for at, number in enumerate(first) if at == 0 or number != first[at - 1]]
    if len({first[at] for at in starts}) < len(starts) or not bool((documents == documents[:1]).all()):
        return None
    return list(zip(starts, [*starts[1:], len(first)], strict=True))


# ---- ring ------------------------------------------------------------------------------------------------------------


def ring(line: SequenceLine, query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight) -> Tensor:
    """Keys and values pass all ranks, each of which adds what its queries see of them. Any number of heads."""
    out: Tensor = _Ring.apply(line, sight, scale, query, key, value)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, line: SequenceLine, sight: Sight, scale: float, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        ctx.line, ctx.sight, ctx.scale = line, sight, scale
        wide = query.dtype if query.dtype.itemsize > 4 else torch.float32
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        sums = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        for source, keys, values in _passing(line, key, value):
            part = _part(line, sight, source, query)
            if part is None:
                continue
            pair, first, end, mask = part
            keys, values = _grouped(query, keys[:, :, :end], values[:, :, :end])
            causal = pair.is_causal and mask is None
            _add(
                out[:, :, first:],
                sums[:, :, first:],
                *attend(query[:, :, first:], keys, values, scale, causal=causal, mask=mask),
            )
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums, sight.marker(query))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        line, sight, scale = ctx.line, ctx.sight, ctx.scale
        query, key, value, out, sums, _ = ctx.saved_tensors
        wide = sums.dtype
        d_query = torch.zeros_like(query, dtype=wide)
        # The gradients of the keys and values that are here, which travel with them.
        here: tuple[Tensor, ...] = ()
        travelling = None
        for source, keys, values in _passing(line, key, value):
            part = _part(line, sight, source, query)
            added = None
            if part is not None:
                pair, first, end, mask = part
                causal = pair.is_causal and mask is None
                found = attend_backward(
                    grad[:, :, first:],
                    query[:, :, first:],
                    *_grouped(query, keys[:, :, :end], values[:, :, :end]),
                    out[:, :, first:],
                    sums[:, :, first:],
                    scale,
                    causal=causal,
                    mask=mask,
                )
                d_query[:, :, first:] += found[0]
                added = [_ungrouped(one, key.shape[1]) for one in found[1:]], end
            # What the ranks before added to the same keys arrives while this rank computes.
            here = _arrived(travelling, key, value, wide)
            if added is not None:
                for one, more in zip(here, added[0], strict=True):
                    one[:, :, : added[1]] += more
            travelling = _sent_on(line, here)
        d_key, d_value = _arrived(travelling, key, value, wide)
        return None, None, None, d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


def _passing(line: SequenceLine, key: Tensor, value: Tensor) -> Any:
    """(rank, its keys, its values), this rank's first: the next ones travel while these are used."""
    if line.world == 1:
        yield line.rank, key, value
        return
    here = torch.cat([key.reshape(-1), value.reshape(-1)])
    spare = torch.empty_like(here)
    for step in range(line.world):
        work = line.shift(spare, here) if step + 1 < line.world else None
        yield (line.rank - step) % line.world, *_pair(here, key, value)
        if work is not None:
            work.wait()
            here, spare = spare, here


def _pair(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one buffer, in the shapes of `key` and `value`."""
    return flat[: key.numel()].view(key.shape), flat[key.numel() :].view(value.shape)


def _sent_on(line: SequenceLine, here: tuple[Tensor, ...]) -> tuple[Any, Tensor, Tensor]:
    leaving = torch.cat([one.reshape(-1) for one in here])
    arriving = torch.empty_like(leaving)
    if line.world == 1:
        return None, leaving, leaving
    return line.shift(arriving, leaving), arriving, leaving


def _arrived(travelling: tuple[Any, Tensor, Tensor] | None, key: Tensor, value: Tensor, wide: torch.dtype) -> Any:
    if travelling is None:
        return torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    work, arriving, _ = travelling  # what was sent is kept until here
    if work is not None:
        work.wait()
    return _pair(arriving, key, value)


def _part(
    line: SequenceLine, sight: Sight, source: int, query: Tensor
) -> tuple[Visible, int, int, Tensor | None] | None:
    """(pair, its first query, the end of its keys, mask) of this rank's queries and the keys of `source`; None: they do
    not see any."""
    pair = sight.pair(line.rank, source)
    if pair is None:
        return None
    length = query.shape[-2]
    each = length // sight.split.each
    mask = sight.mask_of(line.rank, source, pair, length * line.world)
    if mask is not None and mask.dtype is torch.bool and mask.device.type == "cpu" and not bool(mask.any()):
        return None
    return pair, pair.first_query * each, pair.end_key * each, mask


def _add(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Add what some more keys give to `out` and to the logarithm `sums`, in place, in float32."""
    more_sums = more_sums.to(sums.dtype)
    total = torch.logaddexp(sums, more_sums)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # nothing is seen yet
    out.mul_(torch.exp(sums - finite).unsqueeze(-1)).add_(
        more.to(out.dtype) * torch.exp(more_sums - finite).unsqueeze(-1)
    )
    sums.copy_(total)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    times = query.shape[1] // key.shape[1]
    return (key, value) if times == 1 else (key.repeat_interleave(times, 1), value.repeat_interleave(times, 1))


def _ungrouped(grad: Tensor, heads: int) -> Tensor:
    return (
        grad
        if grad.shape[1] == heads
        else grad.unflatten(1, (heads, -1)).sum(2, dtype=torch.promote_types(grad.dtype, torch.float32))
    )
