"""Likely causes: what known faults would give, compared with what was found.

Each function returns the fault that gives exactly that value, or "".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .reference import Expected, Reference
from .setting import Setting
from .subject import Step

# As `Expected.parts`.
Parts = list[list[dict[str, Tensor | None]]]


class Causes:
    """The causes of one setting's difference."""

    def __init__(self, setting: Setting, reference: Reference) -> None:
        self.setting, self.reference = setting, reference
        # The record of the step before, of rank 0, and the parameters from which it began: for values that are stale.
        self.last: tuple[Step, dict[str, Tensor]] | None = None
        # The dim along which each parameter is cut, by its name; missing if it is not known.
        self.cuts: dict[str, int] = {}
        # The running step, and the buffers of each rank before it.
        self.step, self.buffers = 0, list[dict[str, Tensor]]()
        # The number of a step, and the values that it gives where a fault leaves out casts.
        self._uncast: tuple[int, Parts] | None = None

    def of_use(self, name: str, found: Tensor, wanted: Tensor, _: float) -> str:
        """The fault that gives exactly this full parameter, or ""."""
        if not found.count_nonzero():
            return "the full parameter is zero: nothing arrived in it"
        if self.last is not None:
            old = self.last[1][name].to(found.dtype)
            if torch.equal(found, old):
                return "stale weights: the values from before the last step"
            rows = self._rows_kept(name, found, wanted, old)
            if rows and bool(((found == old) | (found == wanted)).all()):
                return f"half-updated weights: {rows} have the values from before the last step"
        return self.misplaced(name, found, wanted, 0.0)

    def of_forward(
        self,
        step: int,
        micro: int,
        rank: int,
        found: Tensor,
        expected: Expected,
        parameters: dict[str, Tensor],
        buffers: list[dict[str, Tensor]],
    ) -> str:
        """The fault that gives exactly this loss, or ""."""
        for other, losses in enumerate(expected.losses):
            for which, loss in enumerate(losses):
                if (other, which) != (rank, micro) and torch.equal(loss, found):
                    taker = other * self.setting.strategy.alike
                    return f"the batch of rank {taker}, micro-batch {which}: batches are split in another way"
        if self.last is not None:
            self.reference.load(self.last[1])
            self.reference.put_buffers(self.reference.buffers_for(rank, buffers))
            loss, _, _ = self.reference.forward(step, micro, rank)
            self.reference.load(parameters)
            if torch.equal(loss, found):
                return "stale weights: the forward used the parameters from before the last step"
        return ""

    def of_gradient(self, name: str, found: Tensor, wanted: Tensor, expected: Expected, exact: float) -> str:
        """The fault that gives exactly this gradient, or ""."""
        world, strategy = self.setting.data_world, self.setting.strategy

        def total(use: Callable[[int, int], float], parts: Parts = expected.parts, name: str = name) -> Tensor:
            result = torch.zeros_like(wanted)
            for rank, row in enumerate(parts):
                for micro, part in enumerate(row):
                    value = part[name]
                    if value is not None and use(rank, micro):
                        result += use(rank, micro) * value
            return result

        predictions: list[tuple[str, Tensor]] = [("it is zero: the result was not written", torch.zeros_like(wanted))]
        for factor in sorted({world, strategy.micro, strategy.replicas, world // strategy.replicas, 2} - {1}):
            predictions.append((f"a wrong divisor: it is {factor} times too large", wanted * factor))
            predictions.append((f"a wrong divisor: it is {factor} times too small", wanted / factor))
        for ranks in self._replicas() if strategy.replicas > 1 else ():
            text = f"no all-reduce over the replicas: only {ranks} are in it"
            predictions += [
                (text, total(lambda r, _: strategy.replicas * (r in ranks))),  # noqa: B023
                (text, total(lambda r, _: r in ranks)),  # noqa: B023
            ]
        # By kind, then by rank: of two ranks, one that is missing leaves the other alone.
        kinds: list[tuple[str, Callable[[bool], float]]] = [
            ("the part of rank {} is missing", lambda own: not own),
            ("the part of rank {} was added twice", lambda own: 1 + own),
            ("no reduction: it is the gradient of rank {} alone", lambda own: world * own),
            ("no reduction: it is the part of rank {} alone", lambda own: own),
        ]
        for text, weight in kinds:
            for k in range(world):
                predictions.append((text.format(k), total(lambda r, _: weight(r == k))))  # noqa: B023
        for k in range(strategy.micro if strategy.micro > 1 else 0):
            predictions += [
                (f"micro-batch {k} is missing", total(lambda _, m: m != k)),  # noqa: B023
                (f"micro-batch {k} was added twice", total(lambda _, m: 1 + (m == k))),  # noqa: B023
            ]
        if self.last is not None and (last := self.last[0].gradients.get(name)) is not None:
            predictions.append(("it is the gradient of the step before", last.double()))
            predictions.append(
                ("the gradient of the step before was added: it was not cleared", last.double() + wanted)
            )
        for text, predicted in predictions:
            if largest(found, predicted) <= exact < largest(predicted, wanted):
                return text
        if misplaced := self.misplaced(name, found, wanted, exact):
            return misplaced
        ties = next((names for names in self.reference.ties if name in names), ())
        for alias in ties:
            with self.reference.without_use(alias):
                parts = self.reference.parts(self.step, self.buffers)
            predicted = total(lambda *_: 1, parts, next(other for other in ties if other != alias))
            if largest(found, predicted) <= exact < largest(predicted, wanted):
                return f"a tie was broken: the gradient of its use as {alias} is missing"
        if strategy.dtype is not None:
            if self._uncast is None or self._uncast[0] != self.step:
                with self.reference.without_casts_again():
                    self._uncast = self.step, self.reference.parts(self.step, self.buffers)
            predicted = total(lambda *_: 1, self._uncast[1])
            if largest(found, predicted) <= exact < largest(predicted, wanted):
                return "a forward that was computed again in backward did not cast its inputs"
        narrow = found.to(torch.bfloat16).double()
        if torch.equal(narrow, found) and not torch.equal(wanted.to(torch.bfloat16).double(), wanted.float().double()):
            return "reduced in a narrower dtype: all of its values are numbers of bfloat16"
        return ""

    def of_update(self, name: str, found: Tensor, wanted: Tensor, old: Tensor) -> str:
        if torch.equal(found, old):
            return "the parameter was not stepped"
        if still := self._rows_kept(name, found, wanted, old):
            return f"{still} were not stepped"
        change, due = (found - old).double(), (wanted - old).double()
        size = due.abs().max().item()
        if size:
            ratio = (change.flatten() @ due.flatten() / (due.flatten() @ due.flatten())).item()
            if abs(ratio - 1) > 0.01 and largest(change, ratio * due) < 0.01 * size:
                return f"the update is {ratio:.3g} times the expected one"
        return self.misplaced(name, found, wanted, 0.0)

    def _rows_kept(self, name: str, found: Tensor, wanted: Tensor, old: Tensor) -> str:
        """The rows, along the dim of the cut, that are `old` and should not be, and whose they are; or ""."""
        if not found.ndim or found.shape != old.shape:
            return ""
        dim = self.cuts.get(name, 0)
        kept, due_to_stay = (found == old).movedim(dim, 0), (wanted == old).movedim(dim, 0)
        rows = kept.flatten(1).all(1) & ~due_to_stay.flatten(1).all(1) if found.ndim > 1 else kept & ~due_to_stay
        still = rows.nonzero().flatten().tolist()
        if not still:
            return ""
        holders = (self._rank_at(name, wanted, row) for row in still)
        ranks = sorted({rank for rank in holders if rank is not None})
        of = f", of rank {', '.join(map(str, ranks))}," if ranks else ""
        return f"rows {still[0]} to {still[-1]}{_along(dim)}{of}"

    def misplaced(self, name: str, found: Tensor, wanted: Tensor, exact: float) -> str:
        """Whether rows, along the dim of the cut, are where others belong."""
        if not found.ndim or found.shape != wanted.shape:
            return ""
        dim = self.cuts.get(name, 0)
        found, wanted = found.movedim(dim, 0), wanted.movedim(dim, 0)
        if found.shape[0] < 2:
            return ""
        parts = [part for part in torch.chunk(torch.arange(found.shape[0]), self.setting.shards) if len(part)]
        for first in range(len(parts)):
            for second in range(first + 1, len(parts)):
                if len(parts[first]) == len(parts[second]):
                    order = torch.arange(found.shape[0])
                    order[parts[first]], order[parts[second]] = parts[second], parts[first]
                    if largest(found, wanted[order]) <= exact < largest(wanted[order], wanted):
                        return f"the shards of rank {first} and rank {second} are in each other's place{_along(dim)}"
        for shift in (1, -1):
            rolled = wanted.roll(shift, 0)
            inner = slice(1, None) if shift > 0 else slice(None, -1)
            if largest(found[inner], rolled[inner]) <= exact < largest(rolled[inner], wanted[inner]):
                return f"rows are off by one{_along(dim)}"
        return ""

    def _replicas(self) -> list[list[int]]:
        """The ranks of each group that holds the whole model."""
        shards = self.setting.shards
        return [list(range(first, first + shards)) for first in range(0, self.setting.data_world, shards)]

    def rank_of(self, name: str, full: Tensor, element: tuple[int, ...]) -> int | None:
        """The first rank that holds this element of a parameter, or of a moment of it; None if that is not known."""
        name = name if name in self.cuts else name.rpartition(".")[0]
        dim = self.cuts.get(name, 0)
        return self._rank_at(name, full, element[dim]) if dim < full.ndim else None

    def _rank_at(self, name: str, full: Tensor, row: int) -> int | None:
        """The same of a row, along the dim of the cut."""
        if name not in self.cuts or self.setting.strategy.divides:
            return None
        return row // -(-full.shape[self.cuts[name]] // self.setting.shards)


def _along(dim: int) -> str:
    return f" along dim {dim}" if dim else ""


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the errors in float64; infinite where something is not finite on one side alone."""
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    return (found - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)


def largest(found: Tensor, expected: Tensor) -> float:
    return errors(found, expected).max().item() if found.numel() else 0.0
