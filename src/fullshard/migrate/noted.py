"""A model on the meta device as one rank has it along `cp` and `ep`, for `fullshard plan`: the code that trains, with
lines that send nothing and note what they would have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..comm import ExpertLine, SequenceLine, TokenRoute
from ..extras import ContextParallel
from ..layout import SequenceSplit
from .experts import cut_by_etp, find_experts, send_by
from .parallelism import Parallelism
from .tree import Tree

# Called with an axis, an operation, and the bytes of it that leave this rank; `once`: whatever is computed again.
Note = Callable[..., None]
_NUMBERS_NBYTES = 16


class _UnderWay:
    """A message of the ring; `count`: how many were sent, this one included."""

    def __init__(self, line: _Sequence, count: int) -> None:
        self._line, self._count = line, count

    def wait(self) -> None:
        self._line.waited(self._count)


class _Sequence(SequenceLine):
    """The first of `degree` ranks that share sequences."""

    def __init__(self, degree: int, note: Note) -> None:
        self.split, self.axis, self.rank, self.world = SequenceSplit(degree, balanced=True), "cp", 0, degree
        self._note, self._count = note, 0

    def waited(self, count: int) -> None:
        self._note("cp", "wait", self._count - count)

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def at(self, place: str) -> None:
        pass

    def compare(self, what: str, facts: str) -> None:
        self._note("cp", "all_reduce of facts", _NUMBERS_NBYTES, once=True)

    def shift(self, out: Tensor, piece: Tensor) -> Any:
        self._note("cp", "ring", piece.nbytes)
        self._count += 1
        return _UnderWay(self, self._count)

    def _exchanged(self, like: Tensor, shapes: Sequence[Any], fill: Callable[[Tensor], None]) -> Tensor:
        numel = sum(batch * heads * length * width for batch, heads, length, width in shapes)
        leaving = like.new_empty(numel)
        fill(leaving)
        arriving = like.new_empty(numel)
        self._note("cp", "all_to_all", leaving.nbytes // self.world * (self.world - 1))
        return arriving


class _Context(ContextParallel):
    def __init__(self, degree: int, variant: str, note: Note) -> None:
        split = SequenceSplit(degree, balanced=True)
        super().__init__(None, split, variant, token_means=True, line=_Sequence(degree, note))
        self._note = note

    def _loss(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._note("cp", "all_reduce of losses", _NUMBERS_NBYTES)
        return func(*args, **kwargs)


class _Experts(ExpertLine):
    """The first of `degree` ranks that divide experts, of `parts` along `tp`; each expert gets as many tokens."""

    def __init__(self, degree: int, parts: int, note: Note, *, cut: bool, divided: bool, name: str) -> None:
        self.everyone, self.cut, self.name = (), cut, name
        self.rank, self.world, self.part, self.parts, self.divided = 0, degree, 0, parts, divided
        self._note = note

    def route(self, counts: Tensor, facts: str, rows: int = 0) -> TokenRoute:
        experts, here = len(counts), len(counts) // self.world
        each = [rows // experts + (number < rows % experts) for number in range(experts)]
        if self.world > 1:
            leaving = counts.new_empty((self.world, here + 1))
            self._note("ep", "all_to_all of counts", leaving.nbytes // self.world * (self.world - 1))
        blocks = [each[at : at + here] for at in range(0, experts, here)]
        return TokenRoute([sum(block) for block in blocks], [sum(blocks[0])] * self.world, [blocks[0]] * self.world)

    def exchange(self, rows: Tensor, route: TokenRoute) -> Tensor:
        out = rows.new_empty((sum(route.arriving), *rows.shape[1:]))
        if self.world > 1:
            leaving = sum(route.leaving) - route.leaving[self.rank]
            self._note("ep", "all_to_all of tokens", leaving * rows[:1].nbytes)
        return out

    def whole(self, part: Tensor, total: int) -> Tensor:
        if self.parts == 1:
            return part
        padded = part.new_zeros((-(-total // self.parts), *part.shape[1:]))
        self._note("tp", "all_gather of tokens", padded.nbytes)
        return padded.new_empty((self.parts * len(padded), *part.shape[1:]))[:total]

    def gates_and_ups(self, rows: Tensor, *, back: bool = False) -> Tensor:
        if self.parts > 1:
            # The first rank keeps its part of the gates, and has no part of the ups.
            self._note("tp", "all_to_all of gates", rows.nbytes // 2)
        return rows.clone()

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.contiguous().clone()
        if self.parts > 1:
            self._note("tp", "all_reduce of tokens", total.nbytes)
        return total


def sequences_noted(plan: Parallelism, note: Note) -> AbstractContextManager[Any]:
    """Attention over `cp` as the first rank computes it, inside; without the axis nothing."""
    degree = plan.context_parallel_degree
    return nullcontext() if degree == 1 else _Context(degree, plan.context_parallel_variant, note)


def experts_noted(model: nn.Module, plan: Parallelism, ranks: int, note: Note, *, divided: bool) -> None:
    """Keep of the experts of `model` those of the first rank. Of each parameter `cut_over` says over how many of the
    ranks, and along which dim, it is cut by sharding. ranks: of `dp_shard`, `cp` and `tp` together. divided: whether
    each rank along `tp` has its part of the tokens."""
    tree = Tree(model)
    degree, own, parts = (
        plan.expert_parallel_degree,
        plan.expert_tensor_parallel_degree,
        plan.tensor_parallel_degree,
    )
    shards = ranks // (degree * own)
    for name in find_experts(tree, plan):
        module: Any = tree.modules[name]
        send_by(module)
        module.line = _Experts(degree, parts, note, cut=own > 1, divided=divided, name=name)
        here = module.num_experts // degree
        for attribute, old in dict(module.named_parameters(recurse=False)).items():
            shape = [here, *old.shape[1:]]
            dim = cut_by_etp(module, attribute) if own > 1 else None
            if dim is not None:
                shape[dim] //= own
            new: Any = nn.Parameter(old.detach().new_empty(shape), requires_grad=old.requires_grad)
            new.cut_over = shards, 0 if here % shards == 0 else 1
            module.register_parameter(attribute, new)
