"""The stages of a program's model as programs of their own, for plans; and the calls of `fully_shard` of each of them.

The stages are described in their order: each begins with what the one before it gave.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._torch import stage_backward_input, stage_backward_weight
from ..extras.experts import StageBalance
from ..keys import ConfigError
from ..program import Program, parts_of
from .axes import Axes
from .parallelism import Parallelism
from .pipeline import Split, check_units, split_model
from .pipeline_stages import Boundary, keep_stages
from .tree import Tree


class Calls:
    """The calls of `fully_shard` that a program makes for a whole model: names of modules, and options."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

        def note(module: Any, **options: Any) -> None:
            modules = [module] if isinstance(module, nn.Module) else list(module)
            self.calls.append(([names[each] for each in modules], options))

        program.shard(model, note)

    @property
    def names(self) -> list[str]:
        return [name for names, _ in self.calls for name in names]

    def apply(self, split: Split, stages: Mapping[int, nn.Module], fully_shard: Callable[..., Any]) -> None:
        """Apply the calls to what is in `stages`; a unit of several stages is one in each."""
        for names, options in self.calls:
            by_stage: dict[int, list[nn.Module]] = {}
            for name in names:
                for number, stage in stages.items():
                    if not name:
                        by_stage.setdefault(number, []).append(stage)
                    elif split.stage_of(name) == number:
                        by_stage.setdefault(number, []).append(stage.get_submodule(name))
            for modules in by_stage.values():
                fully_shard(modules[0] if len(modules) == 1 else modules, **options)


class StagePrograms:
    """The programs of the stages of `program`. `count`: how many; `splits`: whether the schedule computes gradients of
    weights apart; `model`: the whole one. `output`: the dtype of what a stage gives, None for the one that it has.

    A program's `loss` returns its backward (`plan.tape.record`): it begins with a gradient that another stage sent, or
    with the loss. Shape and dtype of what it gave are in `made`, by its number: the next stage begins with that.
    """

    def __init__(self, program: Program, plan: Parallelism, axes: Axes, *, output: torch.dtype | None = None) -> None:
        if program.loss_fn is None:
            raise ConfigError(
                "parallelism.pipeline_parallel_degree: expected Program(loss_fn=...), a function of (output, target) "
                "that the last stage calls, found none; give it, with batches (inputs, target)"
            )
        self.program, self.plan, self.axes, self.output = program, plan, axes, output
        with torch.device("meta"):
            model = program.model()
        self.split = split_model(Tree(model), plan, axes, 0)
        check_units(self.split, Calls(program, model).names, "shard")
        problem = "nearest valid: pipeline_parallel_degree = 1"
        if axes.cp > 1:
            raise ConfigError(
                f"context_parallel_degree = {axes.cp}: a plan has no parts of sequences beside stages; {problem}"
            )
        if self.split.ties:
            names = self.split.ties[0].names
            raise ConfigError(
                f"{names[0]}: a plan does not count a parameter that stages share ({names[-1]}); {problem}"
            )
        if self.split.is_balanced:
            raise ConfigError(f"balance_loss: a plan does not count the balance losses of stages; {problem}")
        self.count, self.splits = len(self.split.parts), self.split.schedule.splits
        self.model: nn.Module = model
        self.made: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each stage."""
        return self.split.parts

    def with_stage(self, part: tuple[str, ...]) -> tuple[StagePrograms, int]:
        """The programs of a pipeline of the same model in which these modules are a stage, what is before and after
        them another one; and the number of the stage."""
        chain = self.split.chain
        begin = chain.index(part[0])
        parts = chain[:begin], part, chain[begin + len(part) :]
        found = copy.copy(self)
        found.split = replace(self.split, parts=tuple(each for each in parts if each))
        found.count, found.made = len(found.split.parts), {}
        return found, int(begin > 0)

    def made_nbytes(self, number: int) -> int:
        """Bytes of what the program of stage `number` gave when it ran."""
        shape, dtype = self.made[number]
        return math.prod(shape) * dtype.itemsize

    def of(self, number: int, *, halves: bool = False) -> Program:
        """The program of stage `number`. `halves`: with gradients of inputs and of weights apart."""
        stage = _Stage(self, number, halves)
        divides = self.program.parallelize is not None
        return replace(
            self.program,
            model=stage.build,
            loss=stage.loss,
            batch=stage.batch,
            shard=stage.shard,
            parallelize=stage.parallelize if divides else None,
        )


class _Stage:
    """One stage. `given`: like what the stage before it made."""

    def __init__(self, programs: StagePrograms, number: int, halves: bool) -> None:
        self.programs, self.number, self.halves = programs, number, halves
        self.given: Tensor | None = None
        if number:
            shape, dtype = programs.made[number - 1]
            self.given = torch.empty(shape, dtype=dtype, device="meta")
        self.is_last = number == programs.count - 1
        self.calls: Calls | None = None

    def build(self) -> nn.Module:
        """The whole model, cut unless `parallelize` divides it first."""
        model = self.programs.program.model().to("meta")
        self.calls = Calls(self.programs.program, model)
        return model if self.programs.program.parallelize is not None else self._cut(model)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> object:
        assert self.programs.program.parallelize is not None
        found = self.programs.program.parallelize(model, mesh)
        self._cut(model)
        return found

    def _cut(self, model: nn.Module) -> nn.Module:
        split, number = self.programs.split, self.number
        keep_stages(model, split.chain, {number: split.parts[number]})
        balance = StageBalance(model, is_last=self.is_last)
        Boundary(model, number, len(split.parts), split.parts[number], balance).install(model)
        return model

    def shard(self, model: nn.Module, fully_shard: Callable[..., Any]) -> None:
        assert self.calls is not None
        self.calls.apply(self.programs.split, {self.number: model}, fully_shard)

    def batch(self, index: int) -> Any:
        return {"batch": self.programs.program.batch(index), "given": self.given}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """The forward, and the loss where it is; returns their backward."""
        args, kwargs, target = parts_of(batch["batch"])
        given = None if batch["given"] is None else batch["given"].detach().requires_grad_()
        output: Any = model(*(args if given is None else (given,)), **kwargs)
        if self.programs.output is not None:
            output = output.to(self.programs.output)
        self.programs.made[self.number] = tuple(output.shape), output.dtype
        assert self.programs.program.loss_fn is not None
        ends = self.programs.program.loss_fn(output, target) if self.is_last else output
        # torch has the output as long as the backward runs; without gradients of weights, where these are apart.
        kept = [output]
        del output

        def backward(received: Callable[[Tensor], Tensor], weights: Callable[[], None]) -> None:
            gradients = None if self.is_last else [received(ends)]
            if self.halves and given is not None:
                inputs = [given, *(value for value in kwargs.values() if isinstance(value, Tensor))]
                groups = stage_backward_input([ends], gradients, inputs, model.parameters())
                kept.clear()
                weights()
                stage_backward_weight(model.parameters(), groups)
            else:
                if self.halves:
                    weights()
                torch.autograd.backward([ends], gradients)

        return backward
