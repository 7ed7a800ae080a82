"""A model at any size of its micro-batch: described at one and two samples, by a few of its blocks where these stand
for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .description import Model, Stage
from .recomputation import ALL_ON_HOST, NONE
from .repeats import KEPT, as_stage, blocks_of, pipeline_model, stage_model, whole_model, whole_step
from .spans import Step, scaled, steps_of
from .stages import Steps, stage_steps

Ways = str | tuple[str, ...]
# (samples, sequence length or None, compute dtype, whether the model is one unit, ways of recomputation that the tape
# has to know) -> the model as data
Describe = Callable[[int, int | None, str, bool, Ways], Model]


class _Size(NamedTuple):
    samples: int
    sequence: int | None
    compute: str
    alone: bool
    hosted: Ways


class Sizes:
    """`describe`: the model. `short`: the same with `repeats.KEPT` of its blocks, or None. `proof`: of another division
    of the same model, where it was found whether a few blocks stand for all; None: it is found here."""

    def __init__(self, describe: Describe, sequence: int | None, short: Describe | None, proof: Sizes | None) -> None:
        self._describe, self._short, self._sequence = describe, short, sequence
        self.proof = self if proof is None else proof
        self._models: dict[_Size, Model] = {}
        self._few: dict[_Size, Model] = {}
        self._steps: dict[tuple[object, ...], tuple[Model, Step]] = {}
        self._proven: dict[tuple[str, Ways, bool, bool], bool] = {}
        self._staged: dict[tuple[object, ...], tuple[Model, Steps]] = {}
        # Steps that were made of others, by these.
        self._extensions: dict[tuple[int, ...], Step] = {}

    def model(
        self, samples: int, compute: str, *, sequence: int | None = None, alone: bool = False, recompute: Ways = NONE
    ) -> Model:
        """The whole model. `recompute`: of a strategy; the model differs where everything is on the host."""
        size = _Size(samples, sequence or self._sequence, compute, alone, _hosted(recompute))
        if size not in self._models:
            self._models[size] = self._describe(*size)
        return self._models[size]

    def at(self, samples: int, compute: str, ways: Ways, *, compiled_loss: bool = False) -> tuple[Model, Step]:
        """The model at one sample, and its step at `samples`: every figure is taken to be linear in them."""
        key = (samples, compute, ways, compiled_loss)
        if key not in self._steps:
            found = None
            if self._short is not None and self.proof.is_proven(compute, ways, compiled_loss=compiled_loss):
                one, two = (self._cut(n, compute, ways) for n in (1, 2))
                found = self._extended(one, two, samples, ways, compiled_loss)
            if found is None:
                one, two = (self.model(n, compute, recompute=ways) for n in (1, 2))
                first, second = (self._step(each, ways, compiled_loss) for each in (one, two))
                found = one, scaled(first, second, samples)
            self._steps[key] = found
        return self._steps[key]

    def is_proven(self, compute: str, ways: Ways, *, compiled_loss: bool = False, ends: bool = False) -> bool:
        """Whether a few blocks stand for all, by one size at which all are described. `ends`: and whether all but the
        first and the last one are alike."""
        if self._short is None or not isinstance(ways, str):
            return False
        key = (compute, ways, compiled_loss, ends)
        if key not in self._proven:
            there = (s.samples for s in self._models if s[1:] == (self._sequence, compute, False, _hosted(ways)))
            whole = self.model(next(there, 1), compute, recompute=ways)
            cut = self._cut(whole.samples, compute, ways)
            few = self._extended(cut, cut, whole.samples, ways, compiled_loss)
            step = self._step(whole, ways, compiled_loss)
            self._proven[key] = few is not None and _are_equal(few, (whole, step))
            if ends and self._proven[key]:
                self._proven[key] = self._are_alike(cut, ways, compiled_loss)
        return self._proven[key]

    def stages_at(self, samples: int, compute: str, ways: Ways, *, compiled_loss: bool = False) -> tuple[Model, Steps]:
        """The model of a pipeline at one sample, and the steps of its stages at `samples`, as `at`."""
        model, ones = self.stages(1, compute, ways, compiled_loss=compiled_loss)
        _, twos = self.stages(2, compute, ways, compiled_loss=compiled_loss)
        pairs = zip(ones, twos, strict=True)
        return model, tuple(
            (self._scaled(one, two, samples), None if half is None else self._scaled(half, other, samples))
            for (one, half), (two, other) in pairs
        )

    def _scaled(self, one: Step, two: Step | None, samples: int) -> Step:
        """Returns what `scaled` does, made once for stages that are alike."""
        assert two is not None
        key = id(one), id(two), samples  # steps stay
        if key not in self._extensions:
            self._extensions[key] = scaled(one, two, samples)
        return self._extensions[key]

    def stages(self, samples: int, compute: str, ways: Ways, *, compiled_loss: bool = False) -> tuple[Model, Steps]:
        """The model of a pipeline, and the steps of its stages, both at `samples`; of stages that are alike by one of
        them."""
        key = ("stages", samples, compute, ways, compiled_loss)
        if key not in self._staged:
            found = None
            if self._short is not None and self.proof.is_proven(compute, ways, compiled_loss=compiled_loss, ends=True):
                found = self._extended_stages(self._cut(samples, compute, ways), ways, compiled_loss)
            if found is None:
                model = self.model(samples, compute, recompute=ways)
                found = model, stage_steps(model, ways, compiled_loss=compiled_loss)
            self._staged[key] = found
        return self._staged[key]

    def _extended_stages(self, short: Model, ways: Ways, compiled_loss: bool) -> tuple[Model, Steps] | None:
        """The pipeline of `short`, some of whose stages are others that are alike."""
        stages: list[Stage] = []
        steps: list[tuple[Step, Step | None]] = []
        for number, stage in enumerate(short.stages):
            if stage.few is None:
                return None
            compiled = compiled_loss and number == len(short.stages) - 1
            own = self._step(stage.model, ways, compiled)
            found = stage_model(stage, self._step(stage.model, NONE))
            if found is None:
                return None
            model, blocks = found
            key = (id(own), stage.few.number)
            if blocks is None:
                self._extensions[key] = own
            elif key not in self._extensions:
                step = whole_step(own, blocks, model.tape.brought)
                if step is None:
                    return None
                self._extensions[key] = step
            stages.append(stage._replace(model=as_stage(model, number), few=None))
            steps.append((self._extensions[key], None))
        return pipeline_model(tuple(stages), short.tape.batch_nbytes), tuple(steps)

    def _extended(
        self, one: Model, two: Model, samples: int, ways: Ways, compiled_loss: bool
    ) -> tuple[Model, Step] | None:
        """The whole model of `one`, and its step at `samples`, from those of `one` and `two`."""
        blocks = blocks_of(one)
        if blocks is None or blocks_of(two) != blocks:
            return None
        model, step = whole_model(one, blocks, self._step(one, NONE)), self._step(one, ways, compiled_loss)
        if two is not one:
            step = scaled(step, self._step(two, ways, compiled_loss), samples)
        found = whole_step(step, blocks, model.tape.brought)
        return None if found is None else (model, found)

    def _are_alike(self, short: Model, ways: Ways, compiled_loss: bool) -> bool:
        """Whether the blocks of `short` are alike but for the first and the last one: then fewer of them stand for
        fewer, too."""
        assert short.cut is not None
        blocks = blocks_of(short, (short.cut[0], KEPT - 1))
        return blocks is not None and whole_step(self._step(short, ways, compiled_loss), blocks, ()) is not None

    def _cut(self, samples: int, compute: str, ways: Ways) -> Model:
        assert self._short is not None
        size = _Size(samples, self._sequence, compute, False, _hosted(ways))
        if size not in self._few:
            self._few[size] = self._short(*size)
        return self._few[size]

    def _step(self, model: Model, ways: Ways, compiled_loss: bool = False) -> Step:
        key = (id(model), ways, compiled_loss)  # models stay
        if key not in self._steps:
            self._steps[key] = model, steps_of(model, ways, compiled_loss=compiled_loss)
        return self._steps[key][1]


def _hosted(ways: Ways) -> Ways:
    return ways if ALL_ON_HOST in ((ways,) if isinstance(ways, str) else ways) else NONE


def _are_equal(few: tuple[Model, Step], whole: tuple[Model, Step]) -> bool:
    """Whether the model and the step from a few blocks are those of the whole model, at whose samples the step is."""

    def facts(model: Model) -> Model:
        tape = replace(model.tape, lines=(), gradients={}, inputs=(), outputs=(), last_read={}, staying={})
        tape = replace(tape, brought_in=(), batch_nbytes=0)
        return replace(model, tape=tape, samples=1, tokens=model.tokens // model.samples)

    return few[1] == whole[1] and facts(few[0]) == facts(whole[0])
