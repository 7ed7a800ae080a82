"""Attention over a sequence that is cut over ranks: by an all-to-all over heads (Ulysses), or by a ring.

Both take the part of this rank, (B, H, tokens here, E), and return the part of the result. Which query sees which key
is in `Sight`, so that neither knows where a mask came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
        both = torch.cat([key.reshape(-1), value.reshape(-1)])
        for source, keys, values in _passing(line, both, key.shape, value.shape):
            part = _part(line, sight, source, query)
            if part is None:
                continue
            for some, *three in _some_heads(part, query, keys, values):
                _add(
                    out[:, some, part.first :],
                    sums[:, some, part.first :],
                    *attend(three[0], three[1], three[2], scale, causal=part.causal, mask=_of_heads(part.mask, some)),
                )
        result = out.to(query.dtype)
        # Keys and values in the form in which they travel: those that came as arguments may go.
        ctx.shapes = key.shape, value.shape
        ctx.save_for_backward(query, both, result, sums, sight.marker(query))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        line, sight, scale = ctx.line, ctx.sight, ctx.scale
        query, both, out, sums, _ = ctx.saved_tensors
        d_query = torch.zeros_like(query, dtype=sums.dtype)
        # The gradients of the keys and values that are here, in one buffer, which travels with them.
        gradients = _Travelling(line, both, ctx.shapes, sums.dtype)
        for source, keys, values in _passing(line, both, *ctx.shapes):
            part = _part(line, sight, source, query)
            # What the ranks before added to the same keys arrives while this rank computes the first heads.
            for some, *three in () if part is None else _some_heads(part, query, keys, values):
                assert part is not None
                found = attend_backward(
                    grad[:, some, part.first :],
                    three[0],
                    three[1],
                    three[2],
                    out[:, some, part.first :],
                    sums[:, some, part.first :],
                    scale,
                    causal=part.causal,
                    mask=_of_heads(part.mask, some),
                )
                d_query[:, some, part.first :] += found[0]
                gradients.add(some, part.end, found[1:], query.shape[1])
                del found, three
            gradients.send_on()
        d_key, d_value = gradients.here()
        return None, None, None, d_query.to(query.dtype), d_key.to(both.dtype), d_value.to(both.dtype)


class _Travelling:
    """Gradients of keys and values on their way around, in one message. Two buffers at most: what leaves, and what
    arrives; then they change."""

    def __init__(
        self, line: SequenceLine, like: Tensor, shapes: tuple[torch.Size, torch.Size], wide: torch.dtype
    ) -> None:
        self._line, (self._key, self._value) = line, shapes
        self._flat = torch.zeros_like(like, dtype=wide)
        self._spare: Tensor | None = None
        self._work: Any = None

    def here(self) -> tuple[Tensor, Tensor]:
        """The gradients that are here, as (of keys, of values); waits for them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            assert self._spare is not None
            self._flat, self._spare = self._spare, self._flat
        return _pair(self._flat, self._key, self._value)

    def add(self, some: slice, end: int, found: Sequence[Tensor], heads: int) -> None:
        """Add the gradients of key/value heads for query heads `some`, of `heads`, before key `end`."""
        times = heads // self._key[1]
        for one, more in zip(self.here(), found, strict=True):
            one[:, some.start // times : some.stop // times, :end] += more

    def send_on(self) -> None:
        """Send them to the next rank; those of the rank before arrive."""
        self.here()
        if self._line.world > 1:
            if self._spare is None:
                self._spare = torch.empty_like(self._flat)
            self._work = self._line.shift(self._spare, self._flat)


def _passing(line: SequenceLine, both: Tensor, key: torch.Size, value: torch.Size) -> Iterator[Any]:
    """(rank, its keys, its values), this rank's `both` first: the next ones travel while these are used."""
    here, spare = both, None
    for step in range(line.world):
        work = arriving = None
        if step + 1 < line.world:
            arriving = torch.empty_like(both) if spare is None else spare
            work = line.shift(arriving, here)
        yield (line.rank - step) % line.world, *_pair(here, key, value)
        if work is not None:
            work.wait()
            # `both` stays what it is; the last ones travel no further, and nothing arrives beside them.
            spare = here if 0 < step and step + 2 < line.world else None
            assert arriving is not None
            here = arriving


def _pair(flat: Tensor, key: torch.Size, value: torch.Size) -> tuple[Tensor, Tensor]:
    """Both in one buffer, in their shapes."""
    return flat[: key.numel()].view(key), flat[key.numel() :].view(value)


class _Part(NamedTuple):
    """This rank's queries from `first` on, and another rank's keys before `end`."""

    first: int
    end: int
    causal: bool
    mask: Tensor | None


def _part(line: SequenceLine, sight: Sight, source: int, query: Tensor) -> _Part | None:
    """Returns what this rank's queries see of the keys of `source`; None: nothing."""
    pair = sight.pair(line.rank, source)
    if pair is None:
        return None
    length = query.shape[-2]
    each = length // sight.split.each
    mask = sight.mask_of(line.rank, source, pair, length * line.world)
    if mask is not None and mask.dtype is torch.bool and mask.device.type == "cpu" and not bool(mask.any()):
        return None
    return _Part(pair.first_query * each, pair.end_key * each, pair.is_causal and mask is None, mask)


# Elements of queries below which heads are not computed some at a time, and how often at most.
_SLICE_NUMEL, _MOST_SLICES = 1 << 18, 4


def _some_heads(
    part: _Part, query: Tensor, keys: Tensor, values: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(query heads, their queries, keys and values of `part`), for some heads after the other: so what is computed of
    them is in memory for some heads alone."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    times, pieces = heads // kv_heads, min(kv_heads, _MOST_SLICES, max(query.numel() // _SLICE_NUMEL, 1))
    at = [kv_heads * piece // pieces for piece in range(pieces + 1)]
    for begin, stop in itertools.pairwise(at):
        some = slice(begin * times, stop * times)
        yield some, query[:, some, part.first :], keys[:, begin:stop, : part.end], values[:, begin:stop, : part.end]


def _of_heads(mask: Tensor | None, some: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[1] == 1 else mask[:, some]


def _add(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Add what some more keys give to `out` and to the logarithm `sums`, in place, in float32."""
    more_sums = more_sums.to(sums.dtype)
    total = torch.logaddexp(sums, more_sums)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # nothing is seen yet
    out.mul_(torch.exp(sums - finite).unsqueeze(-1))
    out.addcmul_(more.to(out.dtype), torch.exp(more_sums - finite).unsqueeze(-1))
    sums.copy_(total)
