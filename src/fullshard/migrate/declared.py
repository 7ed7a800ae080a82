"""A declaration of axes beside a model, without ranks: what it makes of the model, and each rule that it breaks.

`fullshard plan`, `doctor` and `verify` look at a declaration with these before, or without, `prepare_fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from ..keys import ConfigError
from .axes import Axes
from .experts import find_experts, shape_with_experts
from .noted import Note, experts_noted, sequences_noted
from .parallelism import ModelShape, Parallelism
from .tensor_parallel import Division, Replaced, apply_styles, divide, shape_for, shape_of
from .tree import Tree


@dataclass(frozen=True)
class Declared:
    """A declaration on a number of ranks, for one model. shape: the numbers of the model that degrees have to divide,
    and the length of its sequences, as far as they are known."""

    plan: Parallelism
    axes: Axes
    division: Division
    shape: ModelShape

    def lines(self) -> Iterator[str]:
        """Mesh, who shares what, who gets which data, how layers are divided, and which degrees are legal."""
        yield from self.axes.lines()
        if self.division.styles:
            yield "layers:"
            yield from (f"  {line}" for line in self.division.lines())
        yield "legal, with what is left to dp_shard:"
        yield from (f"  {line}" for line in self.legal())

    def stages(self, model: nn.Module) -> Iterator[str]:
        """Lines: the stages of a pipeline, with their modules. Raises `ConfigError` for a model that has no such
        stages."""
        if self.axes.pp == 1:
            return
        # torch's pipelines are imported where there are any.
        from .pipeline import split_model

        split = split_model(Tree(model), self.plan, self.axes, 0)
        yield f"stages of the pipeline: {split.schedule.name}"
        yield from (f"  {line}" for line in split.lines())

    def legal(self) -> Iterator[str]:
        """Lines, for each degree the numbers that it may have beside the other ones."""
        world = self.axes.world
        for name in ("data_parallel_replicate_degree", "context_parallel_degree", "tensor_parallel_degree"):
            found = []
            for degree in (k for k in range(1, world + 1) if world % k == 0):
                changed: dict[str, Any] = {name: degree, "data_parallel_shard_degree": -1}
                if name == "tensor_parallel_degree" and degree == 1:
                    changed |= {"enable_sequence_parallel": "auto", "enable_loss_parallel": False, "styles": ()}
                try:
                    replace(self.plan, **changed).on(world, self.shape)
                except ConfigError:
                    continue
                found.append(degree)
            yield f"{name}: {', '.join(map(str, found))}"


def declare(model: nn.Module, plan: Parallelism, world: int, *, sequence: int = 0) -> Declared:
    """`plan` for `model`, which stays as it is, on `world` ranks. sequence: tokens of a sequence, 0 if not known.
    Raises `ConfigError` with the nearest legal plan."""
    tree = Tree(model)
    division = divide(tree, plan)
    shape = replace(shape_for(tree, division, shape_of(model)), sequence=sequence)
    if plan.expert_parallel_degree > 1:
        shape = shape_with_experts(tree, find_experts(tree, plan), shape, sequence=division.sequence)
    if division.sequence:
        plan = replace(plan, enable_sequence_parallel=True)
    return Declared(plan, plan.on(world, shape), division, shape)


def broken_rules(model: nn.Module, plan: Parallelism, world: int, *, sequence: int = 0) -> tuple[list[str], str]:
    """Each rule that `plan` breaks for `model` on `world` ranks, and the nearest legal plan in words, "" if the rule
    says it."""
    tree = Tree(model)
    try:
        division = divide(tree, plan)
    except ConfigError as error:
        return [str(error)], ""
    shape = replace(shape_for(tree, division, shape_of(model)), sequence=sequence)
    plan = replace(plan, enable_sequence_parallel=True) if division.sequence else plan
    if plan.expert_parallel_degree > 1:
        try:
            shape = shape_with_experts(tree, find_experts(tree, plan), shape, sequence=division.sequence)
        except ConfigError as error:
            return [str(error)], ""
    broken = plan.broken(world, shape)
    if broken:
        return broken, plan.nearest(world, shape)
    return [*_broken_by_stages(tree, plan, world)], ""


def _broken_by_stages(tree: Tree, plan: Parallelism, world: int) -> Iterator[str]:
    """The rule that a pipeline breaks: a model that is no chain of as many parts, or ties across them."""
    if plan.pipeline_parallel_degree == 1:
        return
    # torch's pipelines are imported where there are any.
    from .pipeline import split_model

    try:
        split_model(tree, plan, plan.on(world), 0)
    except ConfigError as error:
        yield str(error)


def noted_by(
    plan: Parallelism, ranks: int, note: Note
) -> Callable[[nn.Module, DeviceMesh], Callable[[], AbstractContextManager[Any]]]:
    """`parallelize_by` for a model on the meta device, as the first rank has it along `cp` and `ep` too, of `ranks`
    along `dp_shard`, `cp` and `tp`; `note` gets what is sent along these."""
    divide_layers = parallelize_by(plan)

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> Callable[[], AbstractContextManager[Any]]:
        sequence = plan.tensor_parallel_degree > 1 and divide(Tree(model), plan).sequence
        experts_noted(model, plan, ranks, note, divided=sequence)
        context = divide_layers(model, mesh) if plan.tensor_parallel_degree > 1 else nullcontext

        @contextmanager
        def both() -> Iterator[None]:
            with sequences_noted(plan, note), context():
                yield

        return both

    return parallelize


def parallelize_by(plan: Parallelism) -> Callable[[nn.Module, DeviceMesh], Callable[[], AbstractContextManager[Any]]]:
    """The `parallelize` of a `Program`, by a declaration: the model is divided by its own styles and those of
    `plan`. The result of that makes the context in which loss and backward run."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> Callable[[], AbstractContextManager[Any]]:
        tree = Tree(model)
        division = divide(tree, replace(plan, tensor_parallel_degree=mesh.size()))
        apply_styles(tree, division, division.styles, mesh, Replaced())
        return loss_parallel if division.head else nullcontext

    return parallelize
