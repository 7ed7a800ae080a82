"""Compares a recorded training with the reference, phase by phase, and names the first difference.

A value is compared in this order:

    within the rounding of the reduction alone     equal
    what a known fault would give, as exactly      different, with that cause
    within the rounding of forward and backward    equal: kernels may sum in another order
    anything else                                  different

Expected and found are the same bits before a step, and the kernels are the same, so most values fall under the first;
the third is wide in bfloat16, and the second finds there what it would hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fullshard.program import Program
from fullshard.rounding import rows_of, sums, terms_of, unit

from .reference import Expected, Reference, read_before, read_step
from .setting import Setting
from .subject import Step

PHASES = ("initial values", "generators", "forward", "buffers", "backward", "optimizer step", "optimizer state")


@dataclass(frozen=True)
class Difference:
    """`name`: of the parameter, buffer or loss. `element`: the index of the largest error, of `rank`'s shard if it is
    sharded. `others`: how many more names differ in this phase and step."""

    step: int
    phase: str
    name: str
    rank: int | None
    element: tuple[int, ...]
    found: float
    expected: float
    allowed: float
    cause: str
    others: int = 0

    def __str__(self) -> str:
        where = f"{self.name}[{', '.join(map(str, self.element))}]" if self.element else self.name
        on = "" if self.rank is None else f" (rank {self.rank})"
        more = f", and {self.others} more" if self.others else ""
        return (
            f"step {self.step}, {self.phase}, {where}{on}: expected {self.expected:.9g}, found {self.found:.9g}, where "
            f"rounding explains {self.allowed:.2g}{more}; likely cause: {self.cause}"
        )


@dataclass
class Result:
    """What came of one setting. `errors`: the largest error of each parameter's gradients, relative to the largest
    element, and what was allowed; `notes`: what could not be checked, and why."""

    setting: Setting
    difference: Difference | None = None
    failure: str = ""
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    compared: int = 0
    same_bits: int = 0
    noise: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "failed" if self.failure else "different" if self.difference else "equal"


@dataclass(frozen=True)
class Tolerance:
    """Stated before a run. Relative: `computing` of forward and backward, `reducing` of the sum over ranks."""

    computing: float
    reducing: float

    @staticmethod
    def of(reference: Reference, setting: Setting) -> Tolerance:
        computing = setting.strategy.dtype or _coarsest(reference)
        largest = max(p.numel() for p in reference.stepped.parameters())
        rows = rows_of(reference.program.batch(0)) * setting.strategy.micro * setting.data_world
        terms = terms_of(reference.stepped.parameters(), rows)
        parts = setting.data_world * setting.strategy.micro
        return Tolerance(sums(computing, terms, largest), sums(setting.strategy.reduce_dtype, parts + 2, largest))


def _coarsest(reference: Reference) -> torch.dtype:
    return max((p.dtype for p in reference.stepped.parameters() if p.is_floating_point()), key=unit)


class Comparison:
    """One setting: `run()` reads its records from `folder` and compares them."""

    def __init__(self, program: Program, setting: Setting, folder: Path, device: torch.device) -> None:
        self.setting, self.folder = setting, folder
        self.reference = Reference(program, setting, device)
        self.tolerance = Tolerance.of(self.reference, setting)
        self.result = Result(setting)
        # Rank 0's record of the step before, and the parameters from which that step began: for values that are stale.
        self._last: tuple[Step, dict[str, Tensor]] | None = None
        # The dim along which each parameter is cut, by its name; missing if it is not known.
        self._cuts: dict[str, int] = {}

    def run(self) -> Result:
        for phase in self._differences():
            found = [difference for difference in phase if difference is not None]
            if found:
                self.result.difference = replace(found[0], others=len(found) - 1)
                break
        return self.result

    def _differences(self) -> Iterator[Sequence[Difference | None]]:
        """The differences of each phase, in order, None for what is equal. The first that has some ends the
        comparison."""
        setting, reference = self.setting, self.reference
        before = [read_before(self.folder, rank) for rank in range(setting.world)]
        self._cuts = before[0].cuts
        yield self._initial(before[0].parameters)
        yield self._ties([rank.ties for rank in before])
        yield [
            self._value(-1, PHASES[0], name, value, reference.initial_buffers[name], 0.0, rank)
            for rank, record in enumerate(before)
            for name, value in record.buffers.items()
        ]
        parameters, buffers = before[0].parameters, [record.buffers for record in before]
        for step in range(setting.steps):
            found = [read_step(self.folder, step, rank) for rank in range(setting.world)]
            reference.load(parameters)
            if step == 0:
                self._measure_noise(buffers)
            expected = reference.replay(step, buffers, found[0])
            self._note_losses(found, expected)
            yield self._generators(step, found, expected)
            yield self._forward(step, found, expected, parameters, buffers)
            yield self._buffers(step, found, expected, buffers)
            yield self._backward(step, found[0], expected)
            yield self._updates(step, found[0], expected, parameters)
            yield self._state(step, found[0], expected)
            reference.resume(found[0])
            self._last = found[0], parameters
            parameters, buffers = found[0].parameters, [record.buffers for record in found]

    # ---- phases ----------------------------------------------------------------------------------------------

    def _initial(self, parameters: dict[str, Tensor]) -> Sequence[Difference | None]:
        expected = self.reference.initial
        if parameters.keys() != expected.keys():
            name = sorted(parameters.keys() ^ expected.keys())[0]
            has = "is not in the plain model" if name in parameters else "is missing"
            return [self._named(-1, PHASES[0], name, f"a parameter that {has}: names differ, or a tie was broken")]
        return [
            self._value(-1, PHASES[0], name, value, expected[name], 0.0, None, partial(self._misplaced, name))
            for name, value in parameters.items()
        ]

    def _ties(self, ties: list[list[tuple[str, ...]]]) -> Sequence[Difference | None]:
        for rank, found in enumerate(ties):
            if found != self.reference.ties:
                odd = sorted(set(found) ^ set(self.reference.ties))[0]
                text = f"{' and '.join(odd)} are one parameter, and are several in the plain model"
                if odd not in found:
                    text = f"a tie was broken: {' and '.join(odd)} are one parameter in the plain model"
                return [self._named(-1, PHASES[0], odd[0], text, rank)]
        return []

    def _generators(self, step: int, found: list[Step], expected: Expected) -> Sequence[Difference | None]:
        differences = []
        for rank, record in enumerate(found):
            for micro, states in enumerate(record.generators):
                wanted = expected.generators[self.setting.data_rank(rank)][micro]
                odd = [library for library in states if states[library] != wanted.get(library, states[library])]
                if odd:
                    text = f"forward or backward drew other random numbers, of {' and '.join(odd)}"
                    differences.append(self._named(step, "generators", f"micro-batch {micro}", text, rank))
        return differences

    def _forward(
        self,
        step: int,
        found: list[Step],
        expected: Expected,
        parameters: dict[str, Tensor],
        buffers: list[dict[str, Tensor]],
    ) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for rank, record in enumerate(found):
            for micro, loss in enumerate(record.losses):
                wanted = expected.losses[self.setting.data_rank(rank)][micro]
                name = f"loss of micro-batch {micro}" if len(record.losses) > 1 else "loss"

                def causes(value: Tensor, rank: int = self.setting.data_rank(rank), micro: int = micro) -> str:
                    return self._other_forward(step, micro, rank, value, expected, parameters, buffers)

                size = wanted.double().abs().max().item()
                allowed = self.tolerance.computing * size, 0.0
                differences.append(self._tested(step, "forward", name, loss, wanted, allowed, causes, rank))
        return differences

    def _other_forward(
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
                    taker = other * self.setting.strategy.tensor
                    return f"the batch of rank {taker}, micro-batch {which}: batches are split in another way"
        if self._last is not None:
            self.reference.load(self._last[1])
            self.reference.put_buffers(buffers[rank * self.setting.strategy.tensor])
            loss, _, _ = self.reference.forward(step, micro, rank)
            self.reference.load(parameters)
            if torch.equal(loss, found):
                return "stale weights: the forward used the parameters from before the last step"
        return ""

    def _buffers(
        self, step: int, found: list[Step], expected: Expected, before: list[dict[str, Tensor]]
    ) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for rank, record in enumerate(found):
            for name, value in record.buffers.items():
                wanted, stale = expected.buffers[self.setting.data_rank(rank)][name], before[rank][name]
                size = wanted.double().abs().max().item() if wanted.numel() else 0.0

                def causes(value: Tensor, stale: Tensor = stale) -> str:
                    return "a stale buffer: the forward did not update it" if torch.equal(value, stale) else ""

                allowed = self.tolerance.computing * size if wanted.is_floating_point() else 0.0
                differences.append(self._tested(step, "buffers", name, value, wanted, (allowed, 0.0), causes, rank))
        return differences

    def _backward(self, step: int, found: Step, expected: Expected) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for name, value in found.gradients.items():
            wanted = expected.gradient(name)
            if value is None or wanted is None:
                if value is not None and value.count_nonzero():
                    differences.append(self._named(step, "backward", name, "a gradient where no rank produced one"))
                elif wanted is not None and wanted.count_nonzero():
                    differences.append(self._named(step, "backward", name, "no gradient: it was dropped"))
                continue
            sizes = expected.sizes(name)
            size = max(sizes[sizes.isfinite()].tolist(), default=0.0)
            stored = unit(value.dtype) * size
            allowed = self.tolerance.computing * size, self.tolerance.reducing * size + 2 * stored

            def causes(value: Tensor, name: str = name, wanted: Tensor = wanted, exact: float = allowed[1]) -> str:
                return self._other_gradient(name, value.double(), wanted, expected, exact)

            differences.append(self._tested(step, "backward", name, value, wanted, allowed, causes))
            error = _largest(value, wanted) / size if size else 0.0
            worst = self.result.errors.get(name, (0.0, 0.0))[0]
            self.result.errors[name] = max(error, worst), allowed[0] / size if size else 0.0
        return differences

    def _other_gradient(self, name: str, found: Tensor, wanted: Tensor, expected: Expected, exact: float) -> str:
        """The fault that gives exactly this gradient, or ""."""
        world, strategy = self.setting.data_world, self.setting.strategy

        def total(use: Callable[[int, int], float]) -> Tensor:
            result = torch.zeros_like(wanted)
            for rank, row in enumerate(expected.parts):
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
        if self._last is not None and (last := self._last[0].gradients.get(name)) is not None:
            predictions.append(("it is the gradient of the step before", last.double()))
            predictions.append(
                ("the gradient of the step before was added: it was not cleared", last.double() + wanted)
            )
        for text, predicted in predictions:
            if _largest(found, predicted) <= exact < _largest(predicted, wanted):
                return text
        if misplaced := self._misplaced(name, found, wanted, exact):
            return misplaced
        narrow = found.to(torch.bfloat16).double()
        if torch.equal(narrow, found) and not torch.equal(wanted.to(torch.bfloat16).double(), wanted.float().double()):
            return "reduced in a narrower dtype: all of its values are numbers of bfloat16"
        return ""

    def _updates(
        self, step: int, found: Step, expected: Expected, before: dict[str, Tensor]
    ) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for name, value in found.parameters.items():
            wanted, old = expected.parameters[name], before[name]

            def causes(value: Tensor, name: str = name, wanted: Tensor = wanted, old: Tensor = old) -> str:
                return self._other_update(name, value, wanted, old)

            allowed = _update_allowed(value, wanted, old)
            differences.append(self._tested(step, "optimizer step", name, value, wanted, (allowed, allowed), causes))
        return differences

    def _other_update(self, name: str, found: Tensor, wanted: Tensor, old: Tensor) -> str:
        if torch.equal(found, old):
            return "the parameter was not stepped"
        if found.ndim:
            dim = self._cuts.get(name, 0)
            kept, due_to_stay = (found == old).movedim(dim, 0), (wanted == old).movedim(dim, 0)
            rows = kept.flatten(1).all(1) & ~due_to_stay.flatten(1).all(1) if found.ndim > 1 else kept & ~due_to_stay
            still = rows.nonzero().flatten().tolist()
            if still:
                holders = (self._rank_at(name, wanted, row) for row in still)
                ranks = sorted({rank for rank in holders if rank is not None})
                of = f", of rank {', '.join(map(str, ranks))}," if ranks else ""
                return f"rows {still[0]} to {still[-1]}{_along(dim)}{of} were not stepped"
        change, due = (found - old).double(), (wanted - old).double()
        size = due.abs().max().item()
        if size:
            ratio = (change.flatten() @ due.flatten() / (due.flatten() @ due.flatten())).item()
            if abs(ratio - 1) > 0.01 and _largest(change, ratio * due) < 0.01 * size:
                return f"the update is {ratio:.3g} times the expected one"
        return self._misplaced(name, found, wanted, 0.0)

    def _state(self, step: int, found: Step, expected: Expected) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for name in sorted(found.state.keys() | expected.state.keys()):
            ours, theirs = found.state.get(name, {}), expected.state.get(name, {})
            if ours.keys() != theirs.keys():
                text = f"entries {sorted(ours)} where one process has {sorted(theirs)}"
                differences.append(self._named(step, "optimizer state", name, text))
                continue
            for key, value in ours.items():
                if isinstance(value, Tensor) and value.numel():
                    wanted = theirs[key].cpu()
                    size = max(value.double().abs().max().item(), wanted.double().abs().max().item())
                    allowed = 8 * unit(value.dtype) * size if value.is_floating_point() else 0.0
                    both = (allowed, allowed)
                    found_one = self._tested(
                        step, "optimizer state", f"{name}.{key}", value, wanted, both, lambda _: ""
                    )
                    differences.append(found_one)
        return differences

    # ---- values ----------------------------------------------------------------------------------------------

    def _tested(
        self,
        step: int,
        phase: str,
        name: str,
        found: Tensor,
        expected: Tensor,
        allowed: tuple[float | Tensor, float | Tensor],
        causes: Callable[[Tensor], str],
        rank: int | None = None,
    ) -> Difference | None:
        """`allowed`: by the rounding of the whole computation, and by that of the reduction alone."""
        self.result.compared += 1
        if found.shape != expected.shape:
            return self._named(step, phase, name, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}", rank)
        if torch.equal(found.to(expected.dtype), expected) or torch.equal(found, expected.to(found.dtype)):
            self.result.same_bits += 1
            return None
        error = _errors(found, expected)
        if bool((error <= allowed[1]).all()):
            return None
        cause = causes(found)
        if not cause and bool((error <= _at_least(allowed[0], 2 * self.result.noise)).all()):
            return None
        limit = allowed[0] if not isinstance(allowed[0], Tensor) else allowed[0].max().item()
        return self._value(step, phase, name, found, expected, limit, rank, lambda *_: cause, surely=True)

    def _value(
        self,
        step: int,
        phase: str,
        name: str,
        found: Tensor,
        expected: Tensor,
        allowed: float,
        rank: int | None = None,
        cause: Callable[[Tensor, Tensor, float], str] | None = None,
        *,
        surely: bool = False,
    ) -> Difference | None:
        if not surely:
            self.result.compared += 1
            if found.shape != expected.shape:
                return self._named(
                    step, phase, name, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}", rank
                )
            if torch.equal(found, expected):
                self.result.same_bits += 1
                return None
        error = _errors(found, expected)
        at = int(error.argmax())
        element = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), found.shape)) if found.ndim else ()
        text = cause(found, expected, allowed) if cause else ""
        owner = self._rank_of(name, expected, element) if rank is None and element else rank
        values = found.double().flatten()[at].item(), expected.double().flatten()[at].item()
        return Difference(step, phase, name, owner, element, *values, allowed, text or "unknown")

    def _named(self, step: int, phase: str, name: str, cause: str, rank: int | None = None) -> Difference:
        return Difference(step, phase, name, rank, (), math.nan, math.nan, 0.0, cause)

    def _misplaced(self, name: str, found: Tensor, wanted: Tensor, exact: float) -> str:
        """Whether rows, along the dim of the cut, are where others belong."""
        if not found.ndim or found.shape != wanted.shape:
            return ""
        dim = self._cuts.get(name, 0)
        found, wanted = found.movedim(dim, 0), wanted.movedim(dim, 0)
        if found.shape[0] < 2:
            return ""
        parts = [part for part in torch.chunk(torch.arange(found.shape[0]), self.setting.shards) if len(part)]
        for first in range(len(parts)):
            for second in range(first + 1, len(parts)):
                if len(parts[first]) == len(parts[second]):
                    order = torch.arange(found.shape[0])
                    order[parts[first]], order[parts[second]] = parts[second], parts[first]
                    if _largest(found, wanted[order]) <= exact < _largest(wanted[order], wanted):
                        return f"the shards of rank {first} and rank {second} are in each other's place{_along(dim)}"
        for shift in (1, -1):
            rolled = wanted.roll(shift, 0)
            inner = slice(1, None) if shift > 0 else slice(None, -1)
            if _largest(found[inner], rolled[inner]) <= exact < _largest(rolled[inner], wanted[inner]):
                return f"rows are off by one{_along(dim)}"
        return ""

    def _replicas(self) -> list[list[int]]:
        """The ranks of each group that holds the whole model."""
        shards = self.setting.shards
        return [list(range(first, first + shards)) for first in range(0, self.setting.data_world, shards)]

    def _rank_of(self, name: str, full: Tensor, element: tuple[int, ...]) -> int | None:
        """The first rank that holds this element of a parameter, or of a moment of it; None if that is not known."""
        name = name if name in self._cuts else name.rpartition(".")[0]
        dim = self._cuts.get(name, 0)
        return self._rank_at(name, full, element[dim]) if dim < full.ndim else None

    def _rank_at(self, name: str, full: Tensor, row: int) -> int | None:
        """The same of a row, along the dim of the cut."""
        if name not in self._cuts or self.setting.strategy.tensor > 1:
            return None
        return row // -(-full.shape[self._cuts[name]] // self.setting.shards)

    # ---- noise -----------------------------------------------------------------------------------------------

    def _measure_noise(self, buffers: list[dict[str, Tensor]]) -> None:
        """Take the first forward and backward of the reference twice: what differs is no fault of the sharding."""
        self.reference.put_buffers(buffers[0])
        loss, _, parts = self.reference.forward(0, 0, 0)
        self.reference.put_buffers(buffers[0])
        again, _, others = self.reference.forward(0, 0, 0)
        pairs = [(part, others[name]) for name, part in parts.items()]
        both = [(part, other) for part, other in pairs if part is not None and other is not None]
        self.result.noise = max(_largest(first, second) for first, second in [(loss, again), *both])
        if self.result.noise:
            self.result.notes.append(
                f"the plain model itself is not deterministic: two runs are {self.result.noise:.2g} apart, and faults "
                f"below twice that cannot be seen"
            )

    def _note_losses(self, found: list[Step], expected: Expected) -> None:
        ours = torch.stack([loss.double() for record in found for loss in record.losses])
        plain = torch.stack([loss.double() for rank in expected.losses for loss in rank])
        self.result.losses.append(ours.mean().item())
        self.result.reference_losses.append(plain.mean().item())


def _along(dim: int) -> str:
    return f" along dim {dim}" if dim else ""


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """In float64; infinite where something is not finite on one side alone."""
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    return (found - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)


def _largest(found: Tensor, expected: Tensor) -> float:
    return _errors(found, expected).max().item() if found.numel() else 0.0


def _at_least(allowed: float | Tensor, noise: float) -> float | Tensor:
    return allowed.clamp(min=noise) if isinstance(allowed, Tensor) else max(allowed, noise)


def _update_allowed(found: Tensor, wanted: Tensor, old: Tensor) -> Tensor:
    """By element: either computation rounds a few times at the size of the parameter and of its change."""
    if not found.is_floating_point():
        return torch.zeros(found.shape, dtype=torch.float64)
    sizes = torch.stack([t.double().abs() for t in (found, wanted, old)]).amax(0)
    change = (wanted.double() - old.double()).abs()
    # The change itself is a quotient of several rounded values: some 16 roundings in float32.
    return 2 * unit(found.dtype) * sizes + 16 * unit(torch.float32) * (change + change.mean())
