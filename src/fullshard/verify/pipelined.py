"""The stages of a program's model in a pipeline: which of them this rank has, their step, and what cannot be one.

A step takes its micro-batches as one batch, in their order. So the plain model takes each of them by itself, as it does
beside every strategy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.migrate import ConfigError
from fullshard.migrate.axes import Axes
from fullshard.migrate.declared import declare
from fullshard.migrate.experts import find_experts
from fullshard.migrate.pipeline import Pipeline, check_units, make_pipeline, refuse_tied_units, split_model
from fullshard.migrate.pipeline_stages import keep_stages
from fullshard.migrate.relations import Relations
from fullshard.migrate.sequences import ContextParallel, parts_of_step
from fullshard.migrate.stage_programs import Calls
from fullshard.migrate.stage_ties import SharedParameters
from fullshard.migrate.tree import Tree
from fullshard.program import Program, ProgramError, parts_of

from .setting import SEED, named, seed_generators, seed_of
from .strategy import Strategy

_FIELD = "loss_fn"


class Stages:
    """The stages of this rank, cut out of `model`. `modules`: each by its number."""

    def __init__(self, program: Program, model: nn.Module, strategy: Strategy, axes: Axes, mesh: DeviceMesh) -> None:
        self.program, self.plan, self.axes, self.mesh = program, strategy.parallelism, axes, mesh
        self._calls = Calls(program, model)
        tree = Tree(model)
        self.split = split_model(tree, self.plan, axes, mesh.get_local_rank("pp"))
        self.shared = SharedParameters(tree, self.split.ties, self.split.own)
        self.modules = keep_stages(model, self.split.chain, {n: self.split.parts[n] for n in self.split.own})
        self.shared.place(model, self.modules)
        # The losses of the micro-batches of the running step, on the last stage.
        self.losses: list[Tensor] = []

    def shard(self, _: nn.Module, fully_shard: Callable[..., Any]) -> None:
        """Apply the calls of the program to what is in a stage of this rank."""
        self._calls.apply(self.split, self.modules, fully_shard)

    def places(self, model: nn.Module) -> dict[str, int]:
        """The stage that has each parameter of `model`, by its name."""
        found = {name: self.split.stage_of(name) for name, _ in named(model)}
        found |= {name: tie.stages[0] for tie in self.split.ties for name in tie.names}
        return {name: number for name, number in found.items() if number is not None}

    def begin(self, context: Callable[[], Any], sequences: ContextParallel | None, *, sequence: bool) -> Pipeline:
        """Make the steps of all stages, after they were sharded. `sequences`: cuts batches over `cp`."""
        relations = Relations(None, self.axes, self.mesh, sequence=sequence, sequences=sequences)
        parts = None if sequences is None else parts_of_step(next(iter(self.modules.values())), sequences)
        self.shared.begin(self.modules, self.mesh.get_group("pp"))
        given = self.plan, self.split, self.modules, self.axes, self.mesh, relations, self._loss, context
        return make_pipeline(*given, parts=parts, shared=self.shared)

    def step(self, pipeline: Pipeline, batches: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Forward and backward of all micro-batches: their losses, on the last stage; their balance losses in the
        stages of this rank, if any; and the loss of the batch."""
        self.losses = []
        args, kwargs, target = parts_of(together(batches))
        loss = pipeline.step(*args, target=target, **kwargs)
        # The first step computes one micro-batch before, for the shapes.
        return self.losses[-len(batches) :], pipeline.balances(len(batches)), loss

    def _loss(self, output: Any, target: Tensor) -> Tensor:
        assert self.program.loss_fn is not None
        loss = self.program.loss_fn(output, target)
        self.losses.append(loss.detach())
        return loss


def together(batches: Sequence[Any]) -> Any:
    """One batch of several: tensors one after the other along dim 0. Raises `ProgramError` where they differ."""
    first = batches[0]
    if isinstance(first, Tensor):
        if any(each.shape != first.shape for each in batches) or not first.ndim:
            shapes = sorted({tuple(each.shape) for each in batches})
            raise ProgramError(f"pp: expected batches of one shape, with samples in dim 0, found {shapes}")
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {key: together([each[key] for each in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(together([each[i] for each in batches]) for i in range(len(first)))
    return first


def check_pipeline(program: Program, strategy: Strategy, world: int) -> None:
    """Raise `ProgramError` if the model cannot be trained as the pipeline of `strategy`."""
    if program.loss_fn is None:
        raise ProgramError(
            f"{strategy}: expected Program({_FIELD}=...), a function of (output, target) that the last stage calls, "
            f"found none; give it, with batches (inputs, target)"
        )
    if program.parallelize is not None and strategy.tensor > 1:
        raise ProgramError(f"{strategy}: expected the styles of the model beside pp, found a division of its own")
    seed_generators(SEED)
    model = program.model()
    calls: list[nn.Module] = []
    program.shard(model, lambda module, **_: calls.extend([module] if isinstance(module, nn.Module) else module))
    if model not in calls:
        raise ProgramError(f"{strategy}: expected shard to call fully_shard with the whole model, found no such call")
    names = {module: name for name, module in model.named_modules()}
    try:
        find_experts(Tree(model), strategy.parallelism)
        axes = declare(model, strategy.parallelism, world).axes
        split = split_model(Tree(model), strategy.parallelism, axes, 0)
        check_units(split, [names[each] for each in calls], "shard")
        refuse_tied_units(split, [names[each] for each in calls], "shard")
    except ConfigError as error:
        raise ProgramError(f"{strategy}: {error}") from error
    batch = program.batch(0)
    args, kwargs, target = parts_of(batch)
    together([program.batch(index) for index in range(strategy.micro)])
    seed_generators(seed_of(0))
    before = torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        output: Any = model(*args, **kwargs)
        alone = program.loss_fn(getattr(output, "logits", output), target)
        drew = not torch.equal(before[0], torch.get_rng_state()) or random.getstate() != before[1]
        seed_generators(seed_of(0))
        whole = program.loss(model, batch)
    if drew:
        raise ProgramError(
            f"{strategy}: expected a forward without random numbers, which stages draw in another order, found one "
            f"that draws some; set dropout to 0"
        )
    if not torch.equal(alone, whole):
        raise ProgramError(
            f"{strategy}: expected {_FIELD}(model(inputs), target) to be loss(model, batch), {whole.item():.9g}, found "
            f"{alone.item():.9g}; let both compute the same"
        )
