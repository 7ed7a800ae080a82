"""Moves parts of tensors between ranks, as a plan of `layout.routes` has it; and full tensors from their parts.

One message at a time on each rank, through one buffer. All ranks send in one order: in round t those two exchange whose
numbers in the group add up to t (modulo its size), so each rank has one partner, and no rank waits in a circle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Box, Cutting, Link, Route, TransferPlan, spans, whole
from .data_group import Line, Works, can_cut, open_data_group
from .group import backend_name, message_device
from .messages import Messenger, _small, alone, messenger

_TAG = 0x66736868

# ---- ranks -----------------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """The ranks of a transfer. `texts`: their messages on the host; `pairs`: the line over which two of them exchange
    tensors of `device`; `members`: their ranks in the default group, in the order of the process group."""

    texts: Messenger
    pairs: Line | None
    members: tuple[int, ...]
    device: torch.device

    @property
    def rank(self) -> int:
        """This rank in the default group."""
        if self.texts.line is not None:
            return self.members[self.texts.rank]
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of(process_group: dist.ProcessGroup | None, device: torch.device, purpose: str = "transfer") -> Ranks:
    """The ranks of `process_group` (None: the default group, or this process alone). Sends nothing. Those of another
    `purpose` have connections of their own."""
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Ranks(alone(), None, (0,), device)
        process_group = dist.group.WORLD
        assert process_group is not None
    members = tuple(dist.get_process_group_ranks(process_group))
    elsewhere = message_device(str(dist.get_backend_config(process_group)), device)
    device = device if elsewhere is None else torch.device(elsewhere)
    backend = backend_name(process_group, device)
    if backend == "fake":
        return Ranks(alone(), Line(process_group), members, device)
    # Connections of their own: what fails on them fails no step.
    texts = messenger(process_group, purpose)
    pairs = texts.line
    assert pairs is not None
    if pairs.data_group is not None and (device.type != "cpu" or not can_cut(backend)):
        scope = pairs.data_group.scope
        pairs = Line(process_group, open_data_group(scope, process_group, device, backend, f"{purpose} {device.type}"))
    return Ranks(texts, pairs, members, device)


def texts_of(texts: Messenger, mine: str) -> list[tuple[str, list[int]]]:
    """The different texts of all ranks, each with the numbers in the group of those that have it. Collective.

    Each text travels once from one of its ranks: at ten thousand ranks the first one reads their digests alone.
    """
    digest = hashlib.blake2s(mine.encode(), digest_size=16).hexdigest()
    arrived = texts.collect(digest.encode())
    answer = None
    if arrived is not None:
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(arrived):
            found.setdefault(one.decode(), []).append(rank)
        answer = json.dumps(list(found.items())).encode()
    shared: list[tuple[str, list[int]]] = json.loads(texts.share(answer))
    return [
        (texts.share(mine.encode() if digest == one else None, ranks[0]).decode(), ranks)
        if texts.world > 1
        else (mine, ranks)
        for one, ranks in shared
    ]


def problems_of(texts: Messenger, mine: Sequence[str]) -> list[str]:
    """The problems of all ranks, each with its rank. Collective; one small message while there are none."""
    (most,) = texts.largest([len(mine)])
    if not most:
        return []
    arrived = texts.collect(json.dumps(list(mine)).encode())
    answer = None
    if arrived is not None:
        told = [f"rank {rank}: {one}" for rank, text in enumerate(arrived) for one in json.loads(text)[:8]]
        answer = json.dumps(told[:32]).encode()
    found: list[str] = json.loads(texts.share(answer))
    return found


# ---- pieces ----------------------------------------------------------------------------------------------------------

Local = Callable[[str], Tensor]


class OwnParts(NamedTuple):
    """This rank's part of each tensor of one side of a plan, by name."""

    tensors: Mapping[str, Tensor]
    boxes: Callable[[str], Box | None]

    def view(self, name: str, at: tuple[int, ...], box: Box, *, lifted: bool) -> Tensor:
        """The elements of `box`, in coordinates of a link that begins at `at`."""
        held, local = self.boxes(name), self.tensors[name]
        assert held is not None
        if lifted:
            held, local = Box((0, *held.offsets), (1, *held.lengths)), local.unsqueeze(0)
        for dim, (offset, length) in enumerate(zip(*box, strict=True)):
            local = local.narrow(dim, offset + at[dim] - held.offsets[dim], length)
        return local


class Exchange:
    """The transfer of one plan on one rank. `source`, `target`: its parts of the tensors of both sides."""

    def __init__(self, plan: TransferPlan, ranks: Ranks, source: OwnParts, target: OwnParts) -> None:
        self._plan, self._ranks, self._source, self._target = plan, ranks, source, target
        self._peers = {rank: number for number, rank in enumerate(ranks.members)}

    @property
    def most_messages(self) -> int:
        """The largest number of messages between this rank and one other."""
        rank = self._ranks.rank
        routes = [*self._plan.sends(rank).values(), *self._plan.receives(rank).values()]
        return max((route.messages for route in routes), default=0)

    def buffer(self) -> Tensor:
        """The memory of this rank's messages: (n,) bytes, n at most the plan's limit."""
        rank = self._ranks.rank
        routes = [*self._plan.sends(rank).values(), *self._plan.receives(rank).values()]
        nbytes = max((min(route.nbytes, self._plan.limit_nbytes) for route in routes), default=0)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._ranks.device)

    def run(self, buffer: Tensor, most_messages: int) -> None:
        """Move everything. `most_messages`: of any pair of ranks, the same on all. Collective; complete on return."""
        rank = self._ranks.rank
        with torch.inference_mode(False), torch.no_grad():
            for piece in self._plan.copies(rank):
                everything = whole(piece.box.lengths)
                there = self._from_target(piece.link, piece.box, everything)
                # Rounded as if it had travelled.
                here = self._from_source(piece.link, piece.box, everything).to(getattr(torch, piece.dtype))
                there.copy_(here)
            self._exchange(rank, buffer, most_messages)
            if self._ranks.device.type not in ("cpu", "meta"):
                # Until then a message may fail, and nobody would know.
                torch.accelerator.current_stream(self._ranks.device).synchronize()

    def _exchange(self, rank: int, buffer: Tensor, most_messages: int) -> None:
        line, world = self._ranks.pairs, len(self._ranks.members)
        data = None if line is None else line.data_group
        if data is not None:
            # Waits for all ranks. Those with nothing to move have to come too, or the others would wait for ever.
            data.connect()
        # A message has the same number on both ranks, as one of a collective would, so that a rank that fails can say
        # how far it came.
        first = 0 if data is None else data.issued
        for number, peer, nbytes, cuttings, sends in self._order(rank, most_messages):
            assert line is not None
            message = buffer[:nbytes]
            if sends:
                self._pack(message, cuttings)
            if data is not None:
                data.issued = first + number
            line.send(_send if sends else _receive, line.process_group, message, self._peers[peer]).wait()
            if not sends:
                self._unpack(message, cuttings)
        if data is not None:
            data.issued = first + world * 2 * most_messages

    def _order(self, rank: int, most_messages: int) -> list[tuple[int, int, int, list[Cutting], bool]]:
        """(number, peer, bytes, contents, whether this rank sends it), in the order of all ranks."""
        world, me = len(self._ranks.members), self._peers[rank]

        def numbered(route: Route, peer: int) -> list[tuple[int, int, int, list[Cutting], bool]]:
            other = self._peers[peer]
            turn, sends = (me + other) % world, route.source == rank
            second = (me < other) is not sends  # the lower rank of two sends first
            return [
                (2 * (turn * most_messages + index) + second, peer, nbytes, cuttings, sends)
                for index, (nbytes, cuttings) in enumerate(route.cut())
            ]

        found = [one for peer, route in self._plan.sends(rank).items() for one in numbered(route, peer)]
        found += [one for peer, route in self._plan.receives(rank).items() for one in numbered(route, peer)]
        return sorted(found, key=lambda one: one[0])

    def _pack(self, message: Tensor, cuttings: Sequence[Cutting]) -> None:
        for place, box, piece in _places(message, cuttings):
            place.copy_(self._from_source(piece.link, piece.box, box))

    def _unpack(self, message: Tensor, cuttings: Sequence[Cutting]) -> None:
        for place, box, piece in _places(message, cuttings):
            self._from_target(piece.link, piece.box, box).copy_(place)

    def _from_source(self, link: Link, outer: Box, box: Box) -> Tensor:
        return self._source.view(link.source, link.at_source, _inside(outer, box), lifted=link.lifted == "source")

    def _from_target(self, link: Link, outer: Box, box: Box) -> Tensor:
        return self._target.view(link.target, link.at_target, _inside(outer, box), lifted=link.lifted == "target")


def _inside(outer: Box, box: Box) -> Box:
    return Box(tuple(a + b for a, b in zip(outer.offsets, box.offsets, strict=True)), box.lengths)


def _places(message: Tensor, cuttings: Sequence[Cutting]) -> Any:
    """Each box of a message: its bytes as a tensor, the box in its piece, the piece."""
    for piece, start, stop, at in cuttings:
        dtype: torch.dtype = getattr(torch, piece.dtype)
        for box in spans(piece.box.lengths, start, stop):
            nbytes = box.numel * dtype.itemsize
            yield message[at : at + nbytes].view(dtype).view(box.lengths), box, piece
            at += nbytes


def _send(group: dist.ProcessGroup, message: Tensor, peer: int) -> Works:
    return Works([group.send([message], peer, _TAG)])


def _receive(group: dist.ProcessGroup, message: Tensor, peer: int) -> Works:
    return Works([group.recv([message], peer, _TAG)])


# ---- full tensors ----------------------------------------------------------------------------------------------------


def gathered(piece: Tensor, groups: Sequence[dist.ProcessGroup], what: str) -> Tensor:
    """The bytes `piece` (n,) of all ranks: (world of groups[0], ..., world of groups[-1], n). Collective over one group
    after the other, the last one first; complete on return."""
    shape: tuple[int, ...] = tuple(piece.shape)
    for process_group in reversed(groups):
        world = process_group.size()
        out = piece.new_empty(world * piece.numel())
        with _small(process_group, piece.device, what) as line:
            line.gather_into(out, piece).wait()
        piece, shape = out, (world, *shape)
    return piece.view(shape)
