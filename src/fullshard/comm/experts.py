"""Messages of experts that are divided over ranks: tokens to their experts and back, and parts of tokens along `tp`.

They go over connections of their own, in the scope of the model's ranks: a rank that raises ends the waits of all.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..peers import RanksDisagree, scope_of, shown_ranks
from .data_group import Line
from .group import backend_name
from .messages import line_over

# Of what a rank says of its tokens, where ranks differ.
_TEXT_NBYTES = 256


class TokenRoute(NamedTuple):
    """How many rows go to each rank, and come from it; and how many of these are for each expert that is here:
    (ranks, experts here)."""

    leaving: list[int]
    arriving: list[int]
    counts: list[list[int]]

    @property
    def back(self) -> TokenRoute:
        """The opposite way."""
        return TokenRoute(self.arriving, self.leaving, [])


class TokenCount(NamedTuple):
    """The messages that this rank has sent since `ExpertLine.sent` was cleared, by kind."""

    messages: int = 0
    nbytes: int = 0


class ExpertLine:
    """The ranks that divide experts. Sends nothing yet.

    experts: the ranks among which experts are divided. tokens: the ranks along `tp`, which have the same tokens, or
    parts of them; None: one rank. everyone: all ranks of the model, for failures. cut: whether each expert is cut over
    `tokens`. name: of the module, for errors.
    """

    def __init__(
        self,
        experts: dist.ProcessGroup,
        tokens: dist.ProcessGroup | None,
        everyone: Sequence[int],
        device: torch.device,
        *,
        cut: bool = False,
        name: str = "",
    ) -> None:
        self.everyone, self.cut, self.name = tuple(everyone), cut, name
        self.rank, self.world = experts.rank(), experts.size()
        self.part, self.parts = (0, 1) if tokens is None else (tokens.rank(), tokens.size())
        # Whether a message takes what each rank along `tp` has as its part of the tokens.
        self.divided = False
        self._experts, self._tokens, self._device = experts, tokens, device
        # Messages and bytes to other ranks, by kind.
        self.sent: dict[str, TokenCount] = {}

    # ---- experts ---------------------------------------------------------------------------------------------

    def route(self, counts: Tensor, facts: str, rows: int = 0) -> TokenRoute:
        """Exchange the numbers of rows: `counts` (experts,), int64, of this rank's for each expert of all; together
        they are `rows`.

        Waits for the device, because the sizes of messages are decided on the host. With the numbers travels a digest
        of `facts`, which are to be equal; raises `RanksDisagree` on all ranks that divide these experts otherwise.
        """
        here = len(counts) // self.world
        if self.world == 1:
            found = counts.tolist()
            return TokenRoute([sum(found)], [sum(found)], [found])
        digest = int.from_bytes(hashlib.blake2s(facts.encode(), digest_size=8).digest(), "big") >> 2
        leaving = counts.new_full((self.world, here + 1), digest)
        leaving[:, :here] = counts.view(self.world, here)
        arriving = torch.empty_like(leaving)
        with self._line(self._experts, "the numbers of their tokens") as line:
            self._exchange(line, arriving, leaving, "counts")
        if self._sends_nothing(self._experts):
            arriving.copy_(leaving)
        found = arriving.tolist()
        if any(row[here] != digest for row in found):
            self._disagree(facts)
        return TokenRoute(
            counts.view(self.world, here).sum(1).tolist(), [sum(row[:-1]) for row in found], [r[:-1] for r in found]
        )

    def exchange(self, rows: Tensor, route: TokenRoute) -> Tensor:
        """`rows` (n, width), those for rank 0 first, for those of all ranks that are for this one."""
        rows = rows.contiguous()
        out = rows.new_empty((sum(route.arriving), *rows.shape[1:]))
        if self.world == 1 or self._sends_nothing(self._experts):
            out.copy_(rows[: len(out)])
            return out
        with self._line(self._experts, "tokens of experts") as line:
            self._exchange(line, out, rows, "tokens", route)
        return out

    # ---- tokens along tp -------------------------------------------------------------------------------------

    def of_part(self, whole: Tensor) -> Tensor:
        """This rank's part of rows (n, ...) that all ranks along `tp` have."""
        rows = -(-len(whole) // self.parts)
        return whole[self.part * rows : (self.part + 1) * rows]

    def whole(self, part: Tensor, total: int) -> Tensor:
        """The `total` rows of all parts, in the ranks' order; the parts are those of `of_part`."""
        if self.parts == 1:
            return part
        assert self._tokens is not None
        rows = -(-total // self.parts)
        padded = part.new_zeros((rows, *part.shape[1:]))
        padded[: len(part)] = part
        out = padded.new_empty((self.parts * rows, *part.shape[1:]))
        if out.numel():
            with self._line(self._tokens, "parts of tokens") as line:
                line.gather_into(out.view(-1), padded.view(-1)).wait()
            self._count("parts", padded.nbytes)
        return out[:total]

    def gates_and_ups(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """(n, 2F / parts) -> the same shape: of all ranks' features, F gates and F ups, each rank along `tp` has a
        neighbouring part, and gets its part of the gates, then its part of the ups. back: the opposite."""
        parts, number = self.parts, len(rows)
        if parts == 1 or not number or (self._tokens is not None and self._sends_nothing(self._tokens)):
            return rows.clone()
        assert self._tokens is not None
        units = rows.view(number, 2, -1).transpose(0, 1)
        numel = units[0].numel()
        # Unit u of 2 * parts is held by the rank u // 2, and wanted by u % parts.
        held, wanted = [2 * self.part, 2 * self.part + 1], [self.part, self.part + parts]
        have, want = (wanted, held) if back else (held, wanted)
        to = [unit // 2 if back else unit % parts for unit in have]
        of = [unit % parts if back else unit // 2 for unit in want]
        send, take = sorted((0, 1), key=lambda k: to[k]), sorted((0, 1), key=lambda k: of[k])
        leaving, arriving = ([ranks.count(rank) * numel for rank in range(parts)] for ranks in (to, of))
        out = rows.new_empty((2, number, rows.shape[1] // 2))
        with self._line(self._tokens, "parts of gates") as line:
            line.exchange(out.view(-1), units[send].contiguous().view(-1), arriving, leaving).wait()
        self._count("gates", (2 * numel - leaving[self.part]) * rows.itemsize)
        return out[take].transpose(0, 1).reshape(number, -1)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks along `tp`, as a new tensor."""
        total = tensor.contiguous().clone()
        if self.parts > 1 and total.numel():
            assert self._tokens is not None
            with self._line(self._tokens, "sums over tp") as line:
                line.all_reduce(total).wait()
            self._count("sums", total.nbytes)
        return total

    # ---- messages --------------------------------------------------------------------------------------------

    def _exchange(self, line: Line, out: Tensor, rows: Tensor, kind: str, route: TokenRoute | None = None) -> None:
        """`rows` and `out` are contiguous; without a route all ranks get as much."""
        width = rows.shape[1:].numel()
        leaving, arriving = ([], []) if route is None else ([n * width for n in side] for side in route[:2])
        line.exchange(out.view(-1), rows.view(-1), arriving, leaving).wait()
        own = leaving[self.rank] if leaving else rows.numel() // self.world
        self._count(kind, rows.nbytes - own * rows.itemsize)

    def _count(self, kind: str, nbytes: int) -> None:
        before = self.sent.get(kind, TokenCount())
        self.sent[kind] = TokenCount(before.messages + 1, before.nbytes + nbytes)

    def _sends_nothing(self, group: dist.ProcessGroup) -> bool:
        # torch's fake group brings nothing: what leaves counts as what arrives.
        return backend_name(group, self._device) == "fake"

    def _line(self, group: dist.ProcessGroup, what: str) -> AbstractContextManager[Line]:
        """The line over `group`, whose waits know failures of any rank of the model."""
        doing = f"{what} of {self.name}" if self.name else what
        return line_over(scope_of(self.everyone), group, self._device, "experts", doing)

    def _disagree(self, facts: str) -> None:
        """Raise `RanksDisagree` that says what each rank has. Collective."""
        text = facts.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES)
        mine = torch.tensor(list(text), dtype=torch.uint8, device=self._device)
        every = mine.new_empty(self.world * _TEXT_NBYTES)
        with self._line(self._experts, "facts") as line:
            line.gather_into(every, mine).wait()
        host = every.cpu()
        members = dist.get_process_group_ranks(self._experts)
        found: dict[str, list[int]] = {}
        for rank, row in zip(members, host.view(self.world, -1), strict=True):
            row = row.contiguous()
            found.setdefault(ctypes.string_at(row.data_ptr(), len(row)).decode(errors="replace").strip(), []).append(
                rank
            )
        shown = "; ".join(f"{shown_ranks(ranks)}: {said}" for said, ranks in found.items())
        raise RanksDisagree(
            f"{self.name or 'experts'}: expected the ranks that divide these experts (ep) to call them alike, found "
            f"{shown}; give all ranks the same model and settings",
            what="experts",
            by_rank={rank: said for said, ranks in found.items() for rank in ranks},
        )
