"""Messages of attention over a sequence that is cut over ranks (context parallelism): an all-to-all, and a ring.

They go over connections of their own, with failures of their own: whoever waits for a rank that raises learns of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..layout import SequenceSplit
from ..peers import RanksDisagree, shown_ranks
from .data_group import Line, Work, open_data_group
from .exchange import Ranks, ranks_of, texts_of
from .messages import alone

_PURPOSE = "context parallel"


class SequenceLine:
    """The ranks of `mesh`, of one axis, over which sequences are cut as `split` says; None: this rank has them whole.
    Sends nothing yet."""

    def __init__(self, mesh: DeviceMesh | None, split: SequenceSplit) -> None:
        self.split = split
        self.axis = "cp" if mesh is None or mesh.mesh_dim_names is None else mesh.mesh_dim_names[0]
        if mesh is None:
            self.rank, self.world = 0, 1
            self._ranks = Ranks(alone(), None, (0,), torch.device("cpu"))
            return
        process_group = mesh.get_group(0)
        self.rank, self.world = process_group.rank(), process_group.size()
        ranks = ranks_of(process_group, _device_of(mesh), _PURPOSE)
        texts, pairs = ranks.texts, ranks.pairs
        if pairs is not None and pairs is texts.line and pairs.data_group is not None:
            # Comparisons have connections of their own. So a rank that compares and one that exchanges parts wait for
            # two messages, each of which the other has not sent: that is seen. On one line it would be one message.
            facts = open_data_group(pairs.data_group.scope, process_group, ranks.device, "gloo", f"{_PURPOSE} facts")
            texts = texts._replace(line=Line(process_group, facts))
        self._ranks = ranks._replace(texts=texts)

    def together(self, what: str) -> AbstractContextManager[None]:
        """All ranks do `what` inside. If one raises, all raise, those too that only begin; then they meet first."""
        return self._ranks.texts.together(what)

    def at(self, place: str) -> None:
        """Note where this rank is, for the error of ranks that wait for each other."""
        line = self._ranks.texts.line
        if line is not None and line.data_group is not None:
            line.data_group.scope.doing = place

    def compare(self, what: str, facts: str) -> None:
        """Raise `RanksDisagree` on all ranks unless all have the same `facts`: one message of 16 bytes. Collective."""
        texts = self._ranks.texts
        if texts.is_same(facts):
            return
        found = texts_of(texts, facts)
        by_rank = {texts.members[number]: text for text, numbers in found for number in numbers}
        told = "; ".join(f"{shown_ranks([texts.members[one] for one in numbers])}: {text}" for text, numbers in found)
        raise RanksDisagree(
            f"{what} over {self.axis}: expected the same sequences on all ranks that share them, found {told}; give "
            f"these ranks the same batch, and split it with this context",
            what=what,
            by_rank=by_rank,
        )

    def shift(self, out: Tensor, piece: Tensor) -> Work:
        """`piece` (n,) goes to the next rank, and into `out` (n,) comes that of the rank before, in a ring."""
        line = self._ranks.pairs
        assert line is not None
        arriving, leaving = [0] * self.world, [0] * self.world
        arriving[self.rank - 1] = leaving[(self.rank + 1) % self.world] = piece.numel()
        return line.exchange(out, piece, arriving, leaving)

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange all heads of this rank's tokens for some heads of all tokens, in their order, by one message.

        parts: (B, H, tokens here, E) each, of one dtype. Returns (B, H / world, tokens, E) each. The opposite, and so
        the backward, of `to_sequence`."""
        world, each = self.world, self.split.each
        shapes = [_shape(part) for part in parts]

        def fill(leaving: Tensor) -> None:
            for part, block in zip(parts, self._blocks(leaving, shapes), strict=True):
                batch, heads, length, width = part.shape
                dealt = part.reshape(batch, world, heads // world, each, length // each, width)
                block.copy_(dealt.transpose(0, 1))

        arriving, whole = self._exchanged(parts[0], shapes, fill), []
        for part, block in zip(parts, self._blocks(arriving, shapes), strict=True):
            batch, heads, length, width = part.shape
            out = part.new_empty((batch, heads // world, self.split.chunks, length // each, width))
            for place, chunk in enumerate(self.split.order):
                # (rank, B, heads, chunks of a rank, ...) -> (B, heads, chunks in their order, ...)
                out[:, :, chunk] = block[place // each, :, :, place % each]
            whole.append(out.flatten(2, 3))
        return whole

    def to_sequence(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange some heads of all tokens for all heads of this rank's tokens, by one message: see `to_heads`."""
        world, each = self.world, self.split.each
        shapes = [(batch, heads * world, length // world, width) for batch, heads, length, width in map(_shape, parts)]

        def fill(leaving: Tensor) -> None:
            for part, block in zip(parts, self._blocks(leaving, shapes), strict=True):
                batch, heads, length, width = part.shape
                chunks = part.reshape(batch, heads, self.split.chunks, length // self.split.chunks, width)
                for place, chunk in enumerate(self.split.order):
                    block[place // each, :, :, place % each] = chunks[:, :, chunk]

        arriving, here = self._exchanged(parts[0], shapes, fill), []
        for part, shape, block in zip(parts, shapes, self._blocks(arriving, shapes), strict=True):
            batch, heads, length, width = shape
            out = part.new_empty(shape)
            out.view(batch, world, heads // world, each, length // each, width).copy_(block.transpose(0, 1))
            here.append(out)
        return here

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """The whole of what is cut along `dim`, in the order of the sequence. Collective; without a graph."""
        line, piece = self._ranks.pairs, part.detach().movedim(dim, 0).contiguous()
        out = piece.new_empty((self.world, *piece.shape))
        if self.world > 1:
            assert line is not None
            line.gather_into(out.view(-1), piece.view(-1)).wait()
        else:
            out.copy_(piece)
        each = self.split.each
        chunks = out.view(self.world * each, piece.shape[0] // each, *piece.shape[1:])
        whole = torch.empty_like(chunks)
        whole[torch.tensor(self.split.order, device=out.device)] = chunks
        return whole.flatten(0, 1).movedim(0, dim)

    def _exchanged(self, like: Tensor, shapes: Sequence[_Shape], fill: Callable[[Tensor], None]) -> Tensor:
        """Returns what arrives for a message of `shapes` that `fill` writes. What left is free before more is made."""
        numel = sum(math.prod(shape) for shape in shapes)
        leaving = like.new_empty(numel)
        fill(leaving)
        if self.world == 1:
            return leaving
        arriving, line = like.new_empty(numel), self._ranks.pairs
        assert line is not None
        line.exchange(arriving, leaving).wait()
        return arriving

    def _blocks(self, buffer: Tensor, shapes: Sequence[_Shape]) -> list[Tensor]:
        """The places of tensors in a message: (world, B, H / world, chunks of a rank, tokens of a chunk, E) each."""
        rows, at, found = buffer.view(self.world, -1), 0, []
        each = self.split.each
        for batch, heads, length, width in shapes:
            numel = batch * heads * length * width // self.world
            shape = self.world, batch, heads // self.world, each, length // each, width
            found.append(rows[:, at : at + numel].view(shape))
            at += numel
        return found


_Shape = tuple[int, int, int, int]


def _shape(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, heads, length, width = tensor.shape
    return batch, heads, length, width


def _device_of(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    if kind in ("cpu", "meta") or not dist.is_initialized():
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
