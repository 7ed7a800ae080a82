"""Parameters that several stages of a pipeline share, such as an embedding that is the head too.

Each of the stages has the parameter whole, under all its names, as the model has it: so state dicts, optimizer states
and checkpoints are those of one parameter. Its gradient is the sum over the stages, in the order of their numbers, the
same bits on each; so the copies stay equal, with their optimizer states. Norms count the copy of the first stage alone.

```
stage 0: embed.weight -> gradient ---+              +--> embed.weight.grad = g0 + g3
stage 3: head.weight  -> gradient ---+--> exchanged +--> head.weight.grad  = g0 + g3
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch import children_of, dtensor_like, local_of
from ..comm import exchanged_over
from ..engine.stages import note_copy
from .pipeline_stages import Absent
from .tree import Tree, names_above


@dataclass(frozen=True)
class StageTie:
    """places: (module, attribute) where the parameter is registered. stages: the numbers of those that need it, in
    order; ranks: of each, the one of the pipeline that has it. source: the stage whose initialiser counts, that of the
    last place, as in one process."""

    places: tuple[tuple[str, str], ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    source: int

    @property
    def names(self) -> list[str]:
        return [f"{module}.{attribute}" if module else attribute for module, attribute in self.places]

    def __str__(self) -> str:
        return f"{' = '.join(self.names)} in the stages {' and '.join(map(str, self.stages))}"


class SharedParameters:
    """The parameters of this rank's stages that others have too. Made of the whole model, before it is cut."""

    def __init__(self, tree: Tree, ties: Sequence[StageTie], own: Sequence[int]) -> None:
        # All of the pipeline's, because each rank takes part in the messages of all; with this rank's stage, if any.
        self.ties = [(tie, next((number for number in tie.stages if number in own), None)) for tie in ties]
        self.held: dict[StageTie, nn.Parameter] = {
            tie: tree.modules[tie.places[0][0]].get_parameter(tie.places[0][1])
            for tie, number in self.ties
            if number is not None
        }

    def place(self, model: nn.Module, stages: Mapping[int, nn.Module]) -> None:
        """Register each under all its names, on the stage that has it, which is not sharded yet, and so on `model`,
        which has the modules of all stages of this rank."""
        for tie, number in self.ties:
            if number is not None:
                own = [name for name in tie.names if _has(stages[number], name)]
                if own:  # divided over tp, it is another one by now
                    self.held[tie] = stages[number].get_parameter(own[0])
                _register(stages[number], tie, self.held[tie])
                if model is not stages[number]:
                    _show(model, stages[number], tie)

    def begin(self, stages: Mapping[int, nn.Module], group: dist.ProcessGroup) -> None:
        """Follow them to the sharded ones, and give all copies the values of one stage. Collective over the ranks of
        the pipeline."""
        sends_nothing = dist.get_backend(group) == "fake"
        for tie, number in self.ties:
            parameter = None
            if number is not None:
                parameter = self.held[tie] = stages[number].get_parameter(tie.names[0])
                if number != tie.stages[0]:
                    note_copy(parameter)
            if not sends_nothing:
                values = self._exchanged(tie, parameter, parameter, group)
                if parameter is not None:
                    with torch.no_grad():
                        _local(parameter).copy_(values[tie.stages.index(tie.source)])

    @contextmanager
    def summed(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Surrounds forwards and backwards of a step: afterwards their gradients are sums over the stages, added to
        those of earlier steps. Collective over the ranks of the pipeline."""
        earlier: dict[StageTie, Tensor | None] = {}
        for tie, parameter in self.held.items():
            earlier[tie], parameter.grad = parameter.grad, None
        yield
        for tie, _ in self.ties:
            own = self.held.get(tie)
            if own is not None and not own.requires_grad:
                own = None
            parts = self._exchanged(tie, own, None if own is None else own.grad, group)
            if own is None:
                continue
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            before = earlier[tie]
            if before is not None:
                total = total + _local(before)
            own.grad = dtensor_like(own, total) if isinstance(own, DTensor) else total

    def _exchanged(
        self, tie: StageTie, parameter: Tensor | None, value: Tensor | None, group: dist.ProcessGroup
    ) -> list[Tensor]:
        """Returns what each stage has, in their order; `value` None: zeros, such as of a part that no gradient
        reached."""
        what = f"the parameter of {tie}"
        if parameter is None:
            return exchanged_over(None, group, tie.ranks, what)
        local = _local(parameter).detach()
        mine = torch.zeros_like(local) if value is None else _local(value).detach()
        return exchanged_over(mine, group, tie.ranks, what)


def _local(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, DTensor) else value


def _has(stage: nn.Module, name: str) -> bool:
    """Whether a module of this stage itself has the parameter `name`."""
    module, _, attribute = name.rpartition(".")
    try:
        found = stage.get_submodule(module)
    except AttributeError:
        return False
    return not isinstance(found, Absent) and attribute in dict(found.named_parameters(recurse=False))


def _show(model: nn.Module, stage: nn.Module, tie: StageTie) -> None:
    """Let `model` have the absent modules of `stage` that were given the parameter."""
    for name, _ in tie.places:
        above = reversed([each for each in names_above(name) if each])
        place = next((each for each in above if isinstance(stage.get_submodule(each), Absent)), None)
        if place is not None:
            outer, _, last = place.rpartition(".")
            children_of(model.get_submodule(outer))[last] = stage.get_submodule(place)


def _register(stage: nn.Module, tie: StageTie, parameter: nn.Parameter) -> None:
    """Give the absent modules of `stage` that have `parameter` in the whole model the parameter."""
    for name, attribute in tie.places:
        module = stage
        for part in name.split(".") if name else ():
            if children_of(module).get(part) is None:
                children_of(module)[part] = nn.Module()
            module = module.get_submodule(part)
        if dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(attribute) is not parameter:
            module.register_parameter(attribute, parameter)
