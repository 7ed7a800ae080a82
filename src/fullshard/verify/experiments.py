"""The cause of a difference, by experiment: the training runs again, each time with one thing changed.

    watched          nothing changed; records what each rank's backward made, and with which weights
    without ...      prefetch, recomputation, mixed precision, accumulation, offload; with one replica

The watched training says where in the step the first wrong value is made:

    weights          a unit computed with other values than the shards hold, in forward or in backward
    own gradients    those of a rank are wrong though its weights are right
    the sum          own gradients are right, and summed in float64 they give what is expected
    the scaler       the sum is right before it divides
    ties             a tied parameter is several tensors on its modules
    the shards       changed before the optimizer stepped

The others say what it depends on: a change without which every value is right. Together they name the place. Where the
difference does not come again, nothing is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.program import Program

from .arithmetic import mean, order_is_known
from .causes import largest
from .comparison import COPIES, PHASES, Difference
from .exercised import FullComparison
from .kernels import same
from .reference import Expected
from .setting import Setting
from .subject import Step, Watched

# Trains each setting, with its records in the folder; by setting, why it failed.
Train = Callable[[dict[Setting, Path]], dict[Setting, str]]

# How the place of a fault is named.
GATHER = "the all-gather of weights"
PRECISION = "mixed precision"
RECOMPUTATION = "recomputation"
ACCUMULATION = "accumulation"
REDUCTION = "the reduction"
REPLICAS = "replicas"
OFFLOAD = "offload"
PREFETCH = "prefetch"
SCALER = "the scaler"
SHARDS = "the shards"
TIES = "ties"
# What a wrong value of one rank's forward or backward may depend on, in the order in which it is named.
_ON = PREFETCH, RECOMPUTATION, PRECISION
# By exercise; the phase of a difference begins with its name.
EXERCISES = {
    "clipping": "clipping",
    "evaluation": "evaluation",
    "state dicts": "loading",
    "checkpoint": "loading",
    "another world": "loading",
    "full_params": "full_params",
    "output_dtype": "output_dtype",
}


class Place(NamedTuple):
    """Where the fault is, and what shows it."""

    name: str
    shown: str
    # Whether a cause that was found by its pattern may be the cause there.
    fits: bool = True


def changed(setting: Setting) -> dict[str, Setting]:
    """Returns `setting` with one thing changed, by the place that it leaves out."""
    strategy = setting.strategy
    found: dict[str, Setting] = {}
    if setting.library == "fullshard":
        found[PREFETCH] = setting._replace(prefetch=False)
    if strategy.recompute:
        found[RECOMPUTATION] = setting._replace(strategy=replace(strategy, recompute=False))
    if strategy.precision:
        without = replace(strategy, precision="", pure=False, norms=False)
        found[PRECISION] = setting._replace(strategy=without)
    if strategy.micro > 1:
        found[ACCUMULATION] = setting._replace(strategy=replace(strategy, micro=1))
    if strategy.offload:
        found[OFFLOAD] = setting._replace(strategy=replace(strategy, offload=False))
    if strategy.replicas > 1:
        one = replace(strategy, replicas=1)
        found[REPLICAS] = setting._replace(strategy=one, world=setting.world // strategy.replicas)
    return found


class Experiments:
    """The experiments for the first difference of one setting."""

    def __init__(self, program: Program, setting: Setting, device: torch.device, train: Train) -> None:
        self.program, self.setting, self.device, self.train = program, setting, device, train

    def explained(self, difference: Difference) -> Difference:
        """`difference` with the cause that the experiments found, before the one that its pattern suggested."""
        if difference.step < 0:
            return difference  # before anything ran
        with tempfile.TemporaryDirectory(prefix="fullshard-verify-") as folder:
            place = self._place(difference, Path(folder))
        if place is None:
            return difference
        pattern = difference.cause if place.fits and difference.cause not in ("unknown", COPIES) else ""
        text = f"{place.name}: " + "; ".join(filter(None, (place.shown, pattern)))
        return replace(difference, cause=text)

    def _place(self, difference: Difference, folder: Path) -> Place | None:
        exercise = next((name for name in EXERCISES if difference.phase.startswith(name)), "")
        repeated = self.setting._replace(steps=min(difference.step + 1, self.setting.steps), exercises=())
        if exercise == "another world":
            return Place(EXERCISES[exercise], "loading by the same number of ranks is right")
        if exercise:
            exercises = tuple(name for name in self.setting.exercises if name != "another world")
            repeated = self.setting._replace(exercises=exercises)
        watched = repeated._replace(watched=not exercise)
        settings = {"": watched, **changed(repeated)}
        jobs = {setting: folder / str(i) for i, setting in enumerate(settings.values())}
        failures = self.train(jobs)
        found = {
            change: FullComparison(self.program, setting, jobs[setting], self.device)
            for change, setting in settings.items()
            if setting not in failures
        }
        differences = {change: comparison.run().difference for change, comparison in found.items()}
        if "" not in differences:
            return None
        again = differences.pop("")
        gone = [change for change, difference in differences.items() if difference is None]
        if again is None:
            return Place("unknown", "the difference did not come again, so it depends on time or memory", fits=False)
        if exercise:
            more = _without(gone)
            return Place(EXERCISES[exercise], f"the steps before are right{', and ' + more if more else ''}")
        place = _Watch(found[""], again, gone).place()
        if place is None:
            return None
        return place._replace(shown="; ".join(filter(None, (place.shown, _without(gone)))))


class _Watch:
    """The watched training: its first difference `again`; `gone`: the changes without which there is none."""

    def __init__(self, comparison: FullComparison, again: Difference, gone: list[str]) -> None:
        self.comparison, self.again, self.gone = comparison, again, gone
        self.setting = comparison.setting

    def place(self) -> Place | None:
        """Where the first wrong value is made; None if nothing is known beside the phase."""
        again, latest = self.again, self.comparison.latest
        if again.cause == COPIES:
            return Place(REPLICAS, f"rank {self._first()}, which holds the same shard, has the expected values")
        if latest is None or again.step != latest[0]:
            return None
        _, records, expected, scale = latest
        moved = {name for record in records if record.watched is not None for name in record.watched.moved}
        if moved:
            return Place(SHARDS, f"{min(moved)} changed before the optimizer stepped", fits=False)
        if (weights := self._weights(records)) is not None:
            return weights
        if again.phase == "forward":
            return self._depending("the forward", "every unit had the weights of the shards, and a loss is wrong")
        if again.phase == "backward":
            return self._backward(records, expected, scale)
        if again.phase in PHASES[-2:]:
            return self._depending("the optimizer's step", "gradients and shards were right before it")
        found = self._depending(again.phase, "")
        return None if found.name == again.phase else found

    def _first(self) -> int:
        """The first rank with a copy of what the difference's rank holds."""
        strategy = self.setting.strategy
        rank = self.again.rank or 0
        if strategy.replicas > 1:
            return rank % (self.setting.world // strategy.replicas)
        return rank - rank % strategy.tensor

    def _weights(self, records: list[Step]) -> Place | None:
        for phase in ("forward", "backward"):
            if phase == "backward" and self.again.phase == "forward":
                return None
            for rank, record in enumerate(records):
                for used in record.uses.others:
                    if used.phase == phase:
                        text = f"{used.name} had other values in {phase} on rank {rank} than the shards hold"
                        return self._depending(GATHER, text, (PREFETCH, PRECISION, OFFLOAD))
        return None

    def _depending(self, place: str, shown: str, on: tuple[str, ...] = _ON) -> Place:
        """`place`, or what of `on` the difference depends on."""
        return Place(next((change for change in on if change in self.gone), place), shown)

    def _backward(self, records: list[Step], expected: Expected, scale: float) -> Place | None:
        name, setting = self.again.name, self.setting
        watched = [record.watched for record in records if record.watched is not None]
        if setting.strategy.divides or len(watched) < len(records):
            place = self._depending("the backward", "", (*_ON, ACCUMULATION, REPLICAS))
            return None if place.name == "the backward" else place
        torn = {each for one in watched for each in one.torn}
        if name in torn:
            return Place(TIES, f"{name} is several tensors on its modules, and each gets a part of the gradient")
        dtype, stored = self.comparison.reference.dtypes(name)
        for rank, (row, found) in enumerate(zip(expected.raw(name, dtype, scale * len(records)), watched, strict=True)):
            for micro, wanted in enumerate(row):
                own = found.gradients[micro].get(name)
                if not _equal(own, wanted, exactly=self.comparison.same_kernels):
                    text = f"the gradient of {name} is wrong on rank {rank} before any reduction, its weights are right"
                    return self._depending("the backward", text)._replace(fits=_is_of_backward(self.again.cause))
        text = f"each rank's own gradient of {name} is right"
        total, wanted = _summed(watched, name, len(records)), expected.gradient(name)
        if total is not None and wanted is not None:
            size = self.comparison.tolerance.reducing * wanted.abs().max().item()
            if largest(total / scale, wanted) <= size:
                text += ", and their sum in float64 is what is expected"
        reduced = watched[0].scaled.get(name)
        if setting.strategy.precision == "fp16" and reduced is not None and total is not None:
            parts = expected.raw(name, dtype, scale * len(records))
            exact = mean(parts, setting, stored) if order_is_known(setting) else None
            size = self.comparison.tolerance.reducing * total.abs().max().item()
            if same(reduced, exact) if exact is not None else largest(reduced, total) <= size:
                return Place(SCALER, f"the gradient of {name} is right before it is divided", fits=False)
        return self._depending(REDUCTION, text, (ACCUMULATION, REPLICAS, OFFLOAD))


def _summed(watched: list[Watched], name: str, ranks: int) -> Tensor | None:
    """The mean over ranks of the sums over micro-batches, in float64."""
    parts = [own.double() for one in watched for micro in one.gradients if (own := micro.get(name)) is not None]
    return torch.stack(parts).sum(0) / ranks if parts else None


def _equal(own: Tensor | None, wanted: Tensor | None, *, exactly: bool) -> bool:
    if own is None or wanted is None:
        rest = own if wanted is None else wanted
        return rest is None or not rest.count_nonzero()
    if exactly or own.shape != wanted.shape:
        return own.shape == wanted.shape and same(own, wanted.to(own.dtype))
    return largest(own, wanted) <= 64 * torch.finfo(own.dtype).eps * wanted.double().abs().max().item()


def _is_of_backward(cause: str) -> bool:
    """Whether a cause that was found by its pattern is one of a rank's backward."""
    return "tie" in cause or "computed again" in cause


def _without(changes: list[str]) -> str:
    """Says in words what makes the difference go away."""
    words = [("with one replica" if change == REPLICAS else f"without {change}") for change in changes]
    return f"all is right {' or '.join(words)}" if words else ""
