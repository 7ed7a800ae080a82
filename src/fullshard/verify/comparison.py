"""Compares a recorded training with the reference, phase by phase, and names the first difference.

A value is compared in this order:

    the same bits                                  equal
    where the same kernels run (kernels.py)        different
    within the rounding of the reduction alone     equal
    what a known fault would give, as exactly      different, with that cause
    within the rounding of forward and backward    equal: kernels may sum in another order
    anything else                                  different

The last is wide in bfloat16. So it is used where kernels differ alone: beside other axes, on a device whose
results differ from run to run, or where the plain model gives other bits in the processes of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.program import Program
from fullshard.rounding import rows_of, sums, terms_of, unit

from . import arithmetic
from .causes import Causes, errors, largest
from .kernels import can_be_equal, differentiates, elementwise, other_bits, same
from .merged import SHARED, Entry, merged_before, merged_step, of_pipelines, shared_in, tensors_of
from .reference import Expected, Reference, read_before, read_step
from .replicas import Held
from .setting import Setting
from .subject import Step
from .weights import Uses

# What is said of a shard that another rank holds with other bits.
COPIES = "another rank holds this shard with other values"
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
        bound = f"rounding explains {self.allowed:.2g}" if self.allowed else "equal bits are expected"
        return (
            f"step {self.step}, {self.phase}, {where}{on}: expected {self.expected:.9g}, found {self.found:.9g}, where "
            f"{bound}{more}; likely cause: {self.cause}"
        )


@dataclass
class Result:
    """The result of one setting. `errors`: the largest error of each parameter's gradients, relative to the largest
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
    # The exercises done beside steps; and by name why another was not done.
    exercised: tuple[str, ...] = ()
    not_exercised: dict[str, str] = field(default_factory=dict)
    # The number of values of the first step that were compared with torch's FSDP2, and that had the same bits.
    beside: tuple[int, int] | None = None

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
        self.result = Result(setting, exercised=setting.exercises)
        self.causes = Causes(setting, self.reference)
        # Of the sharded training where the comparison is: the parameters, and the buffers of each rank.
        self.parameters, self.buffers = dict[str, Tensor](), list[dict[str, Tensor]]()
        # The stage that has each parameter, of a pipeline.
        self.stages = dict[str, int]()
        # The step where the comparison is: its number, the records, what they must give, and the scale of the loss.
        self.latest: tuple[int, list[Step], Expected, float] | None = None
        # The control of each data-parallel rank: see `kernels.control`.
        self._controls = list[dict[str, int]]()
        # The sizes of which the first step's gradients are sums, by name.
        self._sizes: dict[str, float] = {}
        # Whether the same kernels compute on both sides, so that bits have to be equal; of forward and backward, and of
        # the optimizer.
        self.same_kernels = self.same_updates = can_be_equal(setting)
        # Whether each micro-batch is added to the earlier ones as a whole.
        self._whole_parts = True

    def run(self) -> Result:
        # Another number of threads cuts sums elsewhere.
        threads = torch.get_num_threads()
        torch.set_num_threads(read_before(self.folder, 0).threads or threads)
        try:
            for phase in self._differences():
                found = [difference for difference in phase if difference is not None]
                if found:
                    first = found[0]
                    stage = self.stages.get(first.name, self.stages.get(first.name.rpartition(".")[0]))
                    cause = first.cause if stage is None else f"{first.cause} (stage {stage} of the pipeline)"
                    self.result.difference = replace(first, others=len(found) - 1, cause=cause)
                    break
        finally:
            torch.set_num_threads(threads)
        return self.result

    def take_beside(self, other: Path) -> None:
        """Take the first step of a training by torch's FSDP2, whose records are in `other`, as the reference too. Both
        began with the same parameters; each may be as far from the plain model as rounding explains."""
        counted = self.result.compared, self.result.same_bits
        computing, reducing = 2 * self.tolerance.computing, 2 * self.tolerance.reducing
        differences: list[Difference | None] = []
        for rank in range(self.setting.world):
            ours, theirs = read_step(self.folder, 0, rank), read_step(other, 0, rank)
            for loss, wanted in zip(ours.losses, theirs.losses, strict=True):
                allowed = computing * wanted.double().abs().max().item(), 0.0
                differences.append(self._tested(0, "forward", "loss", loss, wanted, allowed, lambda _: "", rank))
            for name, size in self._sizes.items():
                value, gradient = ours.gradients.get(name), theirs.gradients.get(name)
                if value is not None and gradient is not None:
                    both = computing * size, (reducing + 4 * unit(value.dtype)) * size
                    differences.append(self._tested(0, "backward", name, value, gradient, both, lambda _: ""))
        self.result.beside = self.result.compared - counted[0], self.result.same_bits - counted[1]
        self.result.compared, self.result.same_bits = counted
        found = [difference for difference in differences if difference is not None]
        if found and self.result.difference is None:
            cause = "torch's FSDP2, as the reference, has the expected value"
            self.result.difference = replace(found[0], others=len(found) - 1, cause=cause)

    def _differences(self) -> Iterator[Sequence[Difference | None]]:
        """The differences of each phase, in order, None for what is equal. The first that has some ends the
        comparison."""
        setting, reference = self.setting, self.reference
        before = [read_before(self.folder, rank) for rank in range(setting.world)]
        ties = [rank.ties for rank in before]
        shared = self._shared(-1, [[Entry(PHASES[0], *item) for item in one.parameters.items()] for one in before])
        before = of_pipelines(before, setting, merged_before)
        self.causes.cuts, self.stages = before[0].cuts, before[0].stages
        yield [*self._initial(before[0].parameters), *shared]
        yield self._ties(ties)
        yield [
            self._value(-1, PHASES[0], name, value, reference.initial_buffers[name], 0.0, rank)
            if name in reference.initial_buffers
            else self._named(-1, PHASES[0], name, "a buffer that is not in the plain model under this name", rank)
            for rank, record in enumerate(before)
            for name, value in record.buffers.items()
        ]
        self.parameters, self.buffers = before[0].parameters, [record.buffers for record in before]
        self._controls = [before[setting.ranks_of(rank)[0]].control for rank in range(setting.data_world)]
        for step in range(setting.steps):
            records = [read_step(self.folder, step, rank) for rank in range(setting.world)]
            found = of_pipelines(records, setting, merged_step)
            yield from self._step(step, step, found, found[0].gradients)
            yield self._shared(step, [tensors_of(record) for record in records])

    def _step(
        self, step: int, batches: int, found: list[Step], stepped_with: dict[str, Tensor | None]
    ) -> Iterator[Sequence[Difference | None]]:
        """The differences of one step, from `self.parameters` and `self.buffers`, which it moves on. `batches`: the
        number of the step whose batches it took; `stepped_with`: the gradients that its optimizer took."""
        reference, parameters, buffers = self.reference, self.parameters, self.buffers
        reference.load(parameters)
        self.causes.step, self.causes.buffers = batches, buffers
        if step == 0:
            self._measure_noise(buffers)
        scale = reference.scale
        expected = reference.replay(batches, buffers, stepped_with)
        self.latest = step, found, expected, scale
        if step == 0:
            self._look_at_kernels(expected, stepped_with)
        if step < self.setting.steps:
            self._note_losses(found, expected)
        if step == 0:
            self._note_reads(found[0].reads)
        if step == 0 and reference.updated_again:
            names = sorted(reference.updated_again)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.result.notes.append(
                f"backward computes blocks again and so updates the buffer {names[0]}{more} a second time, in plain "
                f"training with recomputation too; to this the sharded training is compared"
            )
        yield self._generators(step, found, expected)
        forward = self._forward(step, found, expected, parameters, buffers)
        yield [*self._uses(step, "forward", [record.uses for record in found], parameters), *forward]
        yield self._buffers(step, found, expected, buffers)
        yield [
            *self._uses(step, "backward", [record.uses for record in found], parameters),
            *self._backward(step, found[0], expected, scale),
            *self._copies(step, "backward", [record.gradients_apart for record in found], found[0].gradients),
        ]
        apart = [[one for one in record.stepped_apart if not one.key] for record in found]
        yield [
            *self._updates(step, found[0], expected, parameters),
            *self._copies(step, "optimizer step", apart, found[0].parameters),
        ]
        apart = [[one for one in record.stepped_apart if one.key] for record in found]
        yield [*self._state(step, found[0], expected), *self._copies(step, "optimizer state", apart, found[0].state)]
        reference.resume(found[0])
        self.causes.last = found[0], parameters
        self.parameters, self.buffers = found[0].parameters, [record.buffers for record in found]

    # ---- phases ----------------------------------------------------------------------------------------------

    def _initial(self, parameters: dict[str, Tensor]) -> Sequence[Difference | None]:
        expected = self.reference.initial
        if parameters.keys() != expected.keys():
            name = sorted(parameters.keys() ^ expected.keys())[0]
            has = "is not in the plain model" if name in parameters else "is missing"
            return [self._named(-1, PHASES[0], name, f"a parameter that {has}: names differ, or a tie was broken")]
        return [
            self._value(-1, PHASES[0], name, value, expected[name], 0.0, None, partial(self.causes.misplaced, name))
            for name, value in parameters.items()
        ]

    def _ties(self, ties: list[list[tuple[str, ...]]]) -> Sequence[Difference | None]:
        stride = self.setting.world // self.setting.strategy.pipeline
        for rank, own in enumerate(ties):
            # A stage has the ties of its own modules.
            found = (
                own if stride == len(ties) else sorted({n for other in ties[rank % stride :: stride] for n in other})
            )
            if found != self.reference.ties:
                odd = sorted(set(found) ^ set(self.reference.ties))[0]
                text = f"{' and '.join(odd)} are one parameter, and are several in the plain model"
                if odd not in found:
                    text = f"a tie was broken: {' and '.join(odd)} are one parameter in the plain model"
                return [self._named(-1, PHASES[0], odd[0], text, rank)]
        return []

    def _shared(self, step: int, records: Sequence[Sequence[Entry]]) -> Sequence[Difference | None]:
        found = shared_in(records, self.setting)
        return [self._value(step, *one, 0.0, rank, lambda *_: SHARED) for one, rank in found]

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

    def _uses(
        self, step: int, phase: str, found: list[Uses], parameters: dict[str, Tensor], label: str = ""
    ) -> Sequence[Difference | None]:
        """Compares full parameters: each forward must compute with what the shards hold. `label`: of the phase, if it
        has another."""
        differences: list[Difference | None] = []
        for rank, record in enumerate(found):
            for used in record.others:
                if used.phase != phase:
                    continue
                name, value, held = used.name, used.value, parameters[used.name]
                where = label or phase
                differences.append(
                    self._value(
                        step, where, name, value, held.to(value.dtype), 0.0, rank, partial(self.causes.of_use, name)
                    )
                    # Its values are those of the shards.
                    or self._named(step, where, name, f"the forward computed with it in {value.dtype}", rank)
                )
            if phase == "forward":
                self.result.compared += record.looked - len(record.others)
                self.result.same_bits += record.looked - len(record.others)
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
            stages = found[rank % (stride := self.setting.world // self.setting.strategy.pipeline) :: stride]
            for micro, loss in enumerate(record.losses):
                loss = loss + sum(stage.balances[micro] for stage in stages if stage.balances)
                wanted = expected.losses[self.setting.data_rank(rank)][micro]
                name = f"loss of micro-batch {micro}" if len(record.losses) > 1 else "loss"

                def causes(value: Tensor, rank: int = self.setting.data_rank(rank), micro: int = micro) -> str:
                    batches = self.causes.step
                    return self.causes.of_forward(batches, micro, rank, value, expected, parameters, buffers)

                size = wanted.double().abs().max().item()
                allowed = self.tolerance.computing * size, 0.0
                exact = wanted if self.same_kernels else None
                differences.append(
                    self._tested(step, "forward", name, loss, wanted, allowed, causes, rank, exact=exact)
                )
        for rank, record in enumerate(found):
            if record.total is not None:
                whole = torch.stack([loss.double() for loss in expected.losses[self.setting.data_rank(rank)]]).mean()
                size = self.tolerance.computing * whole.abs().item()
                named = (step, "forward", "loss of the step", record.total.double(), whole)
                differences.append(self._tested(*named, (size, 0.0), lambda _: "", rank))
        return differences

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
                exact = wanted if self.same_kernels else None
                differences.append(
                    self._tested(step, "buffers", name, value, wanted, (allowed, 0.0), causes, rank, exact=exact)
                )
        return differences

    def _backward(self, step: int, found: Step, expected: Expected, scale: float) -> Sequence[Difference | None]:
        """The last parameters first: an error in backward spreads to those before. `scale`: of the loss."""
        differences: list[Difference | None] = []
        for name, value in reversed(found.gradients.items()):
            wanted = expected.gradient(name)
            if value is None or wanted is None:
                if value is not None and value.count_nonzero():
                    differences.append(self._named(step, "backward", name, "a gradient where no rank produced one"))
                elif wanted is not None and wanted.count_nonzero():
                    differences.append(self._named(step, "backward", name, "no gradient: it was dropped"))
                continue
            sizes = expected.sizes(name)
            size = max(sizes[sizes.isfinite()].tolist(), default=0.0)
            if step == 0:
                self._sizes[name] = size
            stored = unit(value.dtype) * size
            allowed = self.tolerance.computing * size, self.tolerance.reducing * size + 2 * stored

            def causes(value: Tensor, name: str = name, wanted: Tensor = wanted, exact: float = allowed[1]) -> str:
                return self.causes.of_gradient(name, value.double(), wanted, expected, exact)

            exact = self._in_order(name, expected, scale)
            if self.same_kernels:  # what is left is the order of the reduction's sums
                allowed = allowed[1], allowed[1]
            differences.append(self._tested(step, "backward", name, value, wanted, allowed, causes, exact=exact))
            error = largest(value, wanted) / size if size else 0.0
            worst = self.result.errors.get(name, (0.0, 0.0))[0]
            self.result.errors[name] = max(error, worst), allowed[0] / size if size else 0.0
        return differences

    def _in_order(self, name: str, expected: Expected, scale: float) -> Tensor | None:
        """The gradient in the arithmetic of the reduction; None where the order of its sums is not known."""
        if not self.same_kernels or not self._whole_parts or not arithmetic.order_is_known(self.setting):
            return None
        computed, stored = self.reference.dtypes(name)
        parts = expected.raw(name, computed, scale * self.setting.data_world)
        return arithmetic.mean(parts, self.setting, stored, scale)

    def _copies(
        self, step: int, phase: str, apart: Sequence[Sequence[Held]], whole: Mapping[str, Any]
    ) -> Sequence[Difference | None]:
        """Compares shards that several ranks hold: those that are not what the first of these ranks holds. `whole`:
        what that has, by name, or by name and key."""
        differences: list[Difference | None] = []
        for rank, held in enumerate(apart):
            for one in reversed(held) if phase == "backward" else held:
                name = f"{one.name}.{one.key}" if one.key else one.name
                full = whole.get(one.name)
                full = full.get(one.key) if one.key and full is not None else full
                wanted = one.of(full) if isinstance(full, Tensor) else None
                self.result.compared += 1
                if wanted is None:
                    differences.append(self._named(step, phase, name, COPIES, rank))
                else:
                    text = self._value(step, phase, name, one.value, wanted, 0.0, rank, lambda *_: COPIES, surely=True)
                    differences.append(text)
        return differences

    def _updates(
        self, step: int, found: Step, expected: Expected, before: dict[str, Tensor]
    ) -> Sequence[Difference | None]:
        differences: list[Difference | None] = []
        for name, value in found.parameters.items():
            wanted, old = expected.parameters[name], before[name]

            def causes(value: Tensor, name: str = name, wanted: Tensor = wanted, old: Tensor = old) -> str:
                return self.causes.of_update(name, value, wanted, old)

            allowed = arithmetic.update_allowed(value, wanted, old)
            both = allowed, allowed
            exact = wanted if self.same_updates else None
            differences.append(self._tested(step, "optimizer step", name, value, wanted, both, causes, exact=exact))
        return differences

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
                    exact = wanted if self.same_updates else None
                    where = f"{name}.{key}"
                    differences.append(
                        self._tested(step, "optimizer state", where, value, wanted, both, lambda _: "", exact=exact)
                    )
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
        *,
        exact: Tensor | None = None,
    ) -> Difference | None:
        """`allowed`: by the rounding of the whole computation, and by that of the reduction alone. `exact`: the bits
        that are expected, if any are."""
        self.result.compared += 1
        if found.shape != expected.shape:
            return self._named(step, phase, name, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}", rank)
        if exact is not None:
            if same(found, exact):
                self.result.same_bits += 1
                return None
            cause = causes(found)
            return self._value(step, phase, name, found, exact, 0.0, rank, lambda *_: cause, surely=True)
        if torch.equal(found.to(expected.dtype), expected) or torch.equal(found, expected.to(found.dtype)):
            self.result.same_bits += 1
            return None
        error = errors(found, expected)
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
        error = errors(found, expected)
        at = int(error.argmax())
        element = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), found.shape)) if found.ndim else ()
        text = cause(found, expected, allowed) if cause else ""
        owner = self.causes.rank_of(name, expected, element) if rank is None and element else rank
        values = found.double().flatten()[at].item(), expected.double().flatten()[at].item()
        return Difference(step, phase, name, owner, element, *values, allowed, text or "unknown")

    def _named(self, step: int, phase: str, name: str, cause: str, rank: int | None = None) -> Difference:
        return Difference(step, phase, name, rank, (), math.nan, math.nan, 0.0, cause)

    # ---- kernels ---------------------------------------------------------------------------------------------

    def _look_at_kernels(self, expected: Expected, gradients: dict[str, Tensor | None]) -> None:
        """Whether equal bits are to be expected, by what the first step gives in plain torch (see kernels.py)."""
        if not self.same_kernels:
            return
        if self.result.noise:
            self.same_kernels = False
        elif other := other_bits(self._controls, expected):
            self.same_kernels = False
            self.result.notes.append(
                f"the plain model gives other bits in the processes of the training ({other}), so tolerances are those "
                f"of the rounding of whole sums"
            )
        self._whole_parts = self.setting.strategy.micro == 1 or not differentiates(self.reference)
        self.same_updates = elementwise(
            self.reference.program,
            {name: value for name, value in self.parameters.items() if name in self.reference.trainable},
            gradients,
            expected.parameters,
            self.causes.cuts,
            self.setting.shards,
        )

    # ---- noise -----------------------------------------------------------------------------------------------

    def _measure_noise(self, buffers: list[dict[str, Tensor]]) -> None:
        """Take the first forward and backward of the reference twice: what differs is no fault of the sharding."""
        self.reference.put_buffers(self.reference.buffers_for(0, buffers))
        loss, _, parts = self.reference.forward(0, 0, 0)
        self.reference.put_buffers(self.reference.buffers_for(0, buffers))
        again, _, others = self.reference.forward(0, 0, 0)
        pairs = [(part, others[name]) for name, part in parts.items()]
        both = [(part, other) for part, other in pairs if part is not None and other is not None]
        self.result.noise = max(largest(first, second) for first, second in [(loss, again), *both])
        if self.result.noise:
            self.result.notes.append(
                f"the plain model itself is not deterministic: two runs are {self.result.noise:.2g} apart, and faults "
                f"below twice that cannot be seen"
            )

    def _note_reads(self, reads: Sequence[str]) -> None:
        if reads:
            more = f" and {len(reads) - 1} more" if len(reads) > 1 else ""
            self.result.notes.append(
                f"a number was taken of this rank's part of a sum: {reads[0]}{more}. It differs from rank to rank, and "
                f"from that of plain training; use fullshard.grad_stats(model), or .full_tensor() before it becomes one"
            )

    def _note_losses(self, found: list[Step], expected: Expected) -> None:
        ours = torch.stack([loss.double() for record in found for loss in record.losses])
        plain = torch.stack([loss.double() for rank in expected.losses for loss in rank])
        self.result.losses.append(ours.mean().item())
        self.result.reference_losses.append(plain.mean().item())


def _at_least(allowed: float | Tensor, noise: float) -> float | Tensor:
    return allowed.clamp(min=noise) if isinstance(allowed, Tensor) else max(allowed, noise)
