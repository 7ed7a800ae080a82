"""Compares what a sharded training did beside its steps with the reference: see exercises.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.rounding import sums, unit

from .causes import Causes, errors
from .comparison import Comparison, Difference, Tolerance
from .exercises import Clipped, Evaluated, Exercised, Loaded, Other
from .merged import merged_step, of_pipelines
from .reference import Reference
from .setting import written

Differences = Iterator[Sequence[Difference | None]]


class FullComparison(Comparison):
    """The steps, and then what was exercised."""

    def _differences(self) -> Differences:
        yield from super()._differences()
        if self.setting.exercises:
            # How far gradients are from what rounding allows is said of the steps.
            step_errors = dict(self.result.errors)
            yield from self._exercises()
            self.result.errors = step_errors

    def _exercises(self) -> Differences:
        reference, last = self.reference, self.setting.steps - 1
        found = of_pipelines(
            [read_exercised(self.folder, rank) for rank in range(self.setting.world)], self.setting, _merged
        )
        parameters = self.parameters
        optimizer, scale = copy.deepcopy(reference.optimizer.state_dict()), reference.scale
        evaluated = _by_moment([record.evaluated for record in found])
        yield from self._evaluated(evaluated, "after the last step", parameters)
        if (moments := evaluated.get("after the last step")) is not None:
            self.buffers = [record.buffers for record in moments[-1]]  # of a model that updates them there, too
        buffers = self.buffers
        yield from self._evaluated(evaluated, "between backward and the optimizer's step", parameters)
        first = found[0]
        if first.step is not None:
            clipped = first.clipped
            stepped_with = first.step.gradients if clipped is None else clipped.gradients
            # Gradients first, then what was made of them.
            phases = [*self._step(self.setting.steps, last, _all([r.step for r in found]), stepped_with)]
            yield from phases[:-2]
            if clipped is not None:
                yield self._clipped(_all([record.clipped for record in found]), first.step.gradients)
            yield from phases[-2:]
            yield from self._evaluated(evaluated, "after a step that follows an evaluation", self.parameters)
        stepped = self.parameters
        if first.names is not None:
            yield self._names("state dicts", [record.names or [] for record in found])
            taken = [record.taken or (0, []) for record in found]
            yield self._others("state dicts", taken, "the state dict has another value than the model")
            in_place = _all([record.in_place for record in found])
            yield self._loaded("state dicts", in_place, buffers, stepped)
            if first.step is not None:
                self.causes.last = first.step, stepped
            yield from self._evaluated(evaluated, "after a state dict was loaded", parameters)
        if first.again is not None:
            again, continued = _all([r.again for r in found]), _all([r.continued for r in found])
            yield self._loaded("checkpoint", again, buffers[:1] * len(again), None)
            reference.restart(optimizer, scale)
            self.parameters, self.buffers, self.causes.last = parameters, [record.buffers for record in again], None
            steps = self._step(self.setting.steps, last, continued, continued[0].gradients)
            yield from _labelled("checkpoint", steps)
        if "another world" in self.setting.exercises:
            elsewhere = [Loaded(*record) for record in _records(self.folder / "elsewhere")]
            yield self._loaded("another world", elsewhere, buffers[:1] * len(elsewhere), None)
        if first.cast is not None:
            yield from self._cast(found, parameters)
        if first.opened is not None:
            yield from self._opened(found, parameters)
            values = {name: written(value) for name, value in parameters.items()}
            yield from self._evaluated(evaluated, "after full_params wrote to the parameters", values)

    # ---- evaluation and clipping ---------------------------------------------------------------------------------

    def _evaluated(
        self, evaluated: dict[str, list[list[Evaluated]]], when: str, parameters: dict[str, Tensor]
    ) -> Differences:
        for records in evaluated.get(when, ()):
            self.reference.load(parameters)
            mode, losses, buffers = records[0].mode, list[Difference | None](), list[Difference | None]()
            uses = self._uses(self.setting.steps, "forward", [r.uses for r in records], parameters, "evaluation")
            for rank, record in enumerate(records):
                self.reference.put_buffers(record.before)
                data_rank = self.setting.data_rank(rank)
                loss, states, after = self.reference.evaluate(self.reference.computing, mode, data_rank)
                losses.append(self._loss("evaluation", f"loss {when} ({mode})", record.loss, loss, rank))
                odd = [library for library, state in record.generators.items() if state != states.get(library, state)]
                if odd:
                    text = f"the evaluation {when} ({mode}) drew other random numbers, of {' and '.join(odd)}"
                    losses.append(self._named(self.setting.steps, "evaluation", "generators", text, rank))
                for name, value in record.buffers.items():
                    size = after[name].double().abs().max().item() if after[name].numel() else 0.0
                    allowed = self.tolerance.computing * size if value.is_floating_point() else 0.0
                    where, limits = (self.setting.steps, "evaluation", name), (allowed, 0.0)
                    exact = after[name] if self.same_kernels else None
                    odd_one = self._tested(*where, value, after[name], limits, lambda _: "", rank, exact=exact)
                    if odd_one is not None:
                        buffers.append(replace(odd_one, cause=f"the evaluation {when} ({mode}) left it so"))
            yield [*uses, *losses, *buffers]

    def _loss(self, phase: str, name: str, found: Tensor, wanted: Tensor, rank: int) -> Difference | None:
        allowed = self.tolerance.computing * wanted.double().abs().max().item(), 0.0
        exact = wanted if self.same_kernels else None
        return self._tested(self.setting.steps, phase, name, found, wanted, allowed, lambda _: "", rank, exact=exact)

    def _clipped(self, found: list[Clipped], gradients: dict[str, Tensor | None]) -> Sequence[Difference | None]:
        there = {name: g for name, g in gradients.items() if g is not None}
        norm = _norm(there.values())
        coarsest = max((g.dtype for g in there.values()), key=unit, default=torch.float32)
        allowed = norm * (sums(coarsest, sum(g.numel() for g in there.values())) + 4 * unit(coarsest))
        differences: list[Difference | None] = []
        for rank, record in enumerate(found):
            for name, size in (("norm", record.unlimited), ("norm again", record.norm)):
                both = [torch.tensor(number, dtype=torch.float64) for number in (size, norm)]
                differences.append(
                    self._tested(
                        self.setting.steps,
                        "clipping",
                        name,
                        both[0],
                        both[1],
                        (allowed, allowed),
                        lambda v: self._cause_of_norm(v.item(), norm, there, allowed),
                        rank,
                    )
                )
        factor = min(1.0, found[0].limit / (norm + 1e-6))
        for name, gradient in there.items():
            value, wanted = found[0].gradients[name], gradient.double() * factor
            if value is None:
                differences.append(self._named(self.setting.steps, "clipping", name, "the gradient is gone"))
                continue

            def cause(value: Tensor, gradient: Tensor = gradient) -> str:
                if torch.equal(value, gradient):
                    return "the gradient was not scaled"
                ratio = value.double().norm().item() / (gradient.double().norm().item() or math.nan)
                return f"the gradient was scaled by {ratio:.4g} instead of {factor:.4g}"

            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            rounding = 4 * unit(value.dtype) * largest + (allowed / norm * largest if norm else 0.0)
            differences.append(
                self._tested(self.setting.steps, "clipping", name, value, wanted, (rounding, rounding), cause)
            )
        return differences

    def _cause_of_norm(self, found: float, norm: float, gradients: dict[str, Tensor], allowed: float) -> str:
        shards = self.setting.shards
        for shard in range(shards if shards > 1 else 0):
            local = []
            for name, gradient in gradients.items():
                dim = self.causes.cuts.get(name)
                parts = (
                    torch.chunk(gradient, shards, dim) if dim is not None and gradient.ndim else (gradient,) * shards
                )
                local.append(parts[shard] if shard < len(parts) else gradient.new_zeros(0))
            if abs(_norm(local) - found) <= allowed:
                return f"the norm of the shards of rank {shard} alone"
        return f"{found / norm:.4g} times the norm of the gradients" if norm else ""

    # ---- state ---------------------------------------------------------------------------------------------------

    def _names(self, phase: str, found: list[list[str]]) -> Sequence[Difference | None]:
        """Compares the names of state dicts: those of the plain model, in its order."""
        wanted = list(self.reference.stepped.state_dict())
        differences: list[Difference | None] = []
        for rank, names in enumerate(found):
            odd = sorted(set(names) ^ set(wanted))
            if odd:
                text = "is missing in the state dict" if odd[0] in wanted else "is not in the plain model's state dict"
                differences.append(self._named(self.setting.steps, phase, odd[0], text, rank))
        return differences

    def _others(
        self, phase: str, found: list[tuple[int, list[Other]]], cause: str, stale: dict[str, Tensor] | None = None
    ) -> Sequence[Difference | None]:
        """Values that have to be the same bits: `found` by rank, how many were looked at and those that differ. `cause`
        is said where no other is known; `stale`: values from before."""
        differences: list[Difference | None] = []
        for rank, (looked, others) in enumerate(found):
            self.result.compared += looked
            self.result.same_bits += looked - len(others)
            differences += [self._other(phase, other, rank, cause, stale) for other in others]
        return differences

    def _other(
        self, phase: str, other: Other, rank: int, cause: str, stale: dict[str, Tensor] | None
    ) -> Difference | None:
        step, (_, name, value, wanted) = self.setting.steps, other
        if value is None or wanted is None:
            text = f"{other.kind}: it is missing" if value is None else f"{other.kind}: nothing of this name was saved"
            return self._named(step, phase, name, text, rank)
        if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
            return self._named(step, phase, name, f"{value!r}, expected {wanted!r}", rank)
        if value.shape != wanted.shape or value.dtype is not wanted.dtype:
            text = f"{value.dtype} of shape {tuple(value.shape)}, expected {wanted.dtype} of {tuple(wanted.shape)}"
            return self._named(step, phase, name, text, rank)
        text = cause
        if stale is not None and other.kind == "parameters" and torch.equal(value, stale[name]):
            text = "it kept the value from before"
        elif not value.count_nonzero():
            text = "it is zero"
        elif rows := self.causes.misplaced(name, value, wanted, 0.0):
            text = rows
        error = errors(value, wanted)
        at = int(error.argmax())
        element = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)) if value.ndim else ()
        pair = value.double().flatten()[at].item(), wanted.double().flatten()[at].item()
        return Difference(step, phase, name, rank, element, *pair, 0.0, text)

    def _loaded(
        self,
        phase: str,
        found: list[Loaded],
        buffers: list[dict[str, Tensor]],
        stale: dict[str, Tensor] | None,
    ) -> Sequence[Difference | None]:
        """`buffers`: those that each rank has to have of what a state dict has; `stale`: the parameters from before."""
        differences = [
            *self._others(phase, [record[:2] for record in found], "the load gave another value than was saved", stale)
        ]
        saved = self.reference.stepped.state_dict().keys()
        for rank, (record, wanted) in enumerate(zip(found, buffers, strict=True)):
            for name in record.buffers.keys() & saved:
                text = "the load gave another value than was saved"
                differences.append(
                    self._tested(
                        self.setting.steps,
                        phase,
                        name,
                        record.buffers[name],
                        wanted[name],
                        (0.0, 0.0),
                        lambda _, text=text: text,  # type: ignore[misc]
                        rank,
                    )
                )
        return differences

    def _opened(self, found: list[Exercised], parameters: dict[str, Tensor]) -> Differences:
        phase, records = "full_params", _all([record.opened for record in found])
        yield self._names(phase, [record.names for record in records])
        yield self._others(phase, [r.read for r in records], "the full parameter is not what the shards hold")
        self.reference.load(parameters)
        losses: list[Difference | None] = []
        stored = self.setting._replace(strategy=replace(self.setting.strategy, precision=""))
        computing = Tolerance.of(self.reference, stored).computing
        for rank, record in enumerate(records):
            if record.loss is not None:
                self.reference.put_buffers(record.buffers, self.reference.stepped)
                data_rank = self.setting.data_rank(rank)
                loss, _, _ = self.reference.evaluate(self.reference.stepped, "no_grad", data_rank)
                allowed = computing * loss.double().abs().max().item(), 0.0
                name = "loss inside of the context"
                losses.append(
                    self._tested(self.setting.steps, phase, name, record.loss, loss, allowed, lambda _: "", rank)
                )
        yield losses
        yield self._others(phase, [r.dropped for r in records], "an edit without writeback reached the shards")
        yield self._others(phase, [r.on_rank0 for r in records], "the full parameter of rank 0 alone is another one")
        kept = [record.kept for record in records]
        yield self._others(phase, kept, "an edit with writeback gave another value", parameters)

    # ---- outputs -------------------------------------------------------------------------------------------------

    def _cast(self, found: list[Exercised], parameters: dict[str, Tensor]) -> Differences:
        records, phase, dtype = _all([record.cast for record in found]), "output_dtype", self.setting.output_dtype
        text = "loaded from a full tensor, it has another value"
        yield self._others("state dicts", [record.loaded for record in records], text)
        sound = self.reference, self.causes, self.tolerance
        self.reference = Reference(self.reference.program, self.setting, self.reference.device, dtype)
        self.causes = Causes(self.setting, self.reference)
        self.causes.cuts, self.causes.buffers = sound[1].cuts, [record.buffers for record in records]
        wide = sums(dtype, 1, 1) / sums(self.setting.strategy.dtype or torch.float32, 1, 1)
        self.tolerance = Tolerance(self.tolerance.computing * max(wide, 1.0), self.tolerance.reducing)
        try:
            self.reference.load(parameters)
            steps = [record.step for record in records]
            scale = self.reference.scale
            expected = self.reference.replay(0, self.causes.buffers, steps[0].gradients)
            outputs: list[Difference | None] = []
            for rank, record in enumerate(records):
                data_rank = self.setting.data_rank(rank)
                wanted = [call for whose, calls in self.reference.outputs if whose == data_rank for call in calls]
                for ours, plain in zip(record.outputs, wanted, strict=True):
                    is_of, due = dict(ours), dict(plain)
                    for place in [place for place in due | is_of if is_of.get(place) is not due.get(place)]:
                        text = f"an output in {is_of.get(place)}, expected {due.get(place)}"
                        outputs.append(self._named(self.setting.steps, phase, f"output{place}", text, rank))
            yield outputs
            uses = [step.uses for step in steps]
            step = self.setting.steps
            yield from _labelled(
                phase,
                [
                    self._uses(step, "forward", uses, parameters),
                    self._forward(step, steps, expected, parameters, self.causes.buffers),
                    self._buffers(step, steps, expected, self.causes.buffers),
                    self._uses(step, "backward", uses, parameters),
                    self._backward(step, steps[0], expected, scale),
                ],
            )
        finally:
            self.reference, self.causes, self.tolerance = sound


def _labelled(exercise: str, phases: Any) -> Differences:
    for phase in phases:
        yield [d if d is None else replace(d, phase=f"{exercise}: {d.phase}") for d in phase]


def _by_moment(evaluated: list[list[Evaluated]]) -> dict[str, list[list[Evaluated]]]:
    """Returns by `when` the evaluations in order, each as those of all ranks."""
    found: dict[str, list[list[Evaluated]]] = {}
    for records in zip(*evaluated, strict=True):
        found.setdefault(records[0].when, []).append(list(records))
    return found


def _all(records: list[Any]) -> list[Any]:
    assert all(record is not None for record in records), "an exercise that some ranks did"
    return records


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def _records(folder: Path) -> list[Any]:
    paths = sorted(folder.glob("rank-*.pt"), key=lambda path: int(path.stem.removeprefix("rank-")))
    return [torch.load(path, weights_only=False) for path in paths]


def _merged(records: Sequence[Exercised]) -> Exercised:
    """The first of `records`, with the gradients of all of them."""
    first, steps = records[0], [record.step for record in records if record.step is not None]
    clipped = first.clipped
    if clipped is not None:
        gradients: dict[str, Tensor | None] = {}
        for record in records:
            gradients |= {} if record.clipped is None else record.clipped.gradients
        clipped = clipped._replace(gradients=gradients)
    return first._replace(clipped=clipped, step=merged_step(steps) if steps else None)


def read_exercised(folder: Path, rank: int) -> Exercised:
    return Exercised(*torch.load(folder / "exercised" / f"rank-{rank}.pt", weights_only=False))
