"""Stages of a model: the model's own forward around the modules of one stage, with what they do not have passed by.

A stage is the model with the modules of other stages replaced by `Absent` ones, which return their input. So parameters
keep their names, and code of the model between its modules runs in each stage. That is right only where modules are a
chain: each reads what the one before it returns, and nothing else does. `Boundary` checks it while a stage runs.

```
stage input -> Absent ... Absent -> first own module -> ... -> last own module -> output of the stage
               each gives the stage input;                     what follows in the forward is left out
               after the last one it is unchanged, or an error
```
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import children_of, copied_around, version_of
from ..extras.experts import StageBalance


class Absent(nn.Module):
    """Stands where a module of another stage would be. Returns what came into the stage, and after its modules what
    they gave; attributes that are plain values are those of the module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and isinstance(value, (bool, int, float, str)) and attribute != "training":
                setattr(self, attribute, value)
        # Not "name": a module may have a child or an attribute of that name.
        self.absent_name = name
        self.boundary: Boundary | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{vars(self).get('absent_name')}.{name}: expected the model to read it in its own stage, found that "
                f"another stage of the pipeline reads it; put that code into the module, or both into one stage"
            ) from None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill what has no value yet (NaN) of a parameter that stages share: that of its own module replaces it
        (`SharedParameters`)."""
        for parameter in self.parameters(recurse=False):
            parameter.nan_to_num_(0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.boundary is None:
            raise RuntimeError(
                f"{self.absent_name}: expected prepared.step or prepared.evaluate, found a call of the model, of which "
                f"this rank has only its stages of a pipeline"
            )
        return self.boundary.passes(self.absent_name)


def keep_stages(model: nn.Module, chain: Sequence[str], own: Mapping[int, Sequence[str]]) -> dict[int, nn.Module]:
    """Replace in `model` the modules of `chain` that are in no stage of `own`; returns each stage by its number. A rank
    with one stage gets the model itself, with several copies of what is around their modules."""
    here = {name for names in own.values() for name in names}
    for name in chain:
        if name not in here:
            leave_out(model, name)
    if len(own) == 1:
        return {number: model for number in own}
    return {number: _around(model, "", {*chain}, {*names}) for number, names in own.items()}


def leave_out(model: nn.Module, name: str) -> None:
    """Replace the module `name`, whose parameters then belong to nobody."""
    above, _, last = name.rpartition(".")
    children = children_of(model.get_submodule(above))
    module = children[last]
    if module is not None and not isinstance(module, Absent):
        children[last] = Absent(name, module)


def _around(module: nn.Module, name: str, chain: set[str], own: set[str]) -> nn.Module:
    children: dict[str, nn.Module | None] = {}
    for attribute, child in children_of(module).items():
        below = f"{name}.{attribute}" if name else attribute
        if child is None or below in own:
            children[attribute] = child
        elif below in chain:
            original = Absent(below, child)
            if isinstance(child, Absent):
                vars(original).update({k: v for k, v in vars(child).items() if not k.startswith("_")})
            children[attribute] = original
        elif any(each.startswith(f"{below}.") for each in chain):
            children[attribute] = _around(child, below, chain, own)
        else:
            # Without parameters, but perhaps with buffers: each stage has its own.
            children[attribute] = copy.deepcopy(child)
    return copied_around(module, children)


class Boundary:
    """Where the values of a stage come in and go out. `number` of `count` stages; `names`: its modules, in order;
    `balance`: the losses of its experts, which go out with them."""

    def __init__(self, stage: nn.Module, number: int, count: int, names: Sequence[str], balance: StageBalance) -> None:
        self.balance = balance
        self.number, self.names = number, tuple(names)
        self.is_first, self.is_last = number == 0, number == count - 1
        # They describe the forward that runs: what came in, the alias of it for the first module, what goes out.
        self.given: Any = None
        self.version = 0
        self.entered: Any = None
        self.result: Any = None
        self.is_checked = False
        names = list(inspect.signature(stage.forward).parameters)
        self.takes_embeds = names[:1] == ["input_ids"] and "inputs_embeds" in names
        for module in stage.modules():
            if isinstance(module, Absent):
                module.boundary = self

    def install(self, stage: nn.Module) -> None:
        """Register its hooks, on a stage that is sharded: it sees what the modules get and give."""
        stage.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name in self.names:
            module = stage.get_submodule(name)
            module.register_forward_pre_hook(_Enter(self, name), with_kwargs=True, prepend=True)
        stage.get_submodule(self.names[-1]).register_forward_hook(self._leave)
        stage.register_forward_hook(self._end, prepend=True)

    def passes(self, name: str) -> Any:
        """The forward came to a module of another stage; returns what that gives here."""
        if self.result is None and (self.entered is not None or self.is_first):
            before = "before its first module" if self.entered is None else "between its modules"
            raise RuntimeError(
                f"stage {self.number} of the pipeline: expected its modules {self._told} to run one after the other, "
                f"found {name} of another stage {before}; list modules in the order of the forward in "
                f"module_fqns_per_model_part"
            )
        if self.is_last and self.result is not None:
            raise RuntimeError(
                f"stage {self.number} of the pipeline: expected {self.names[-1]} to be the last module of the forward, "
                f"found {name} of another stage after it; list modules in the order of the forward in "
                f"module_fqns_per_model_part"
            )
        return self.given if self.result is None else self.result

    @property
    def _told(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def _begin(self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.entered = self.result = None
        self.given = args[0] if args else next(iter(kwargs.values()), None)
        self.version = version_of(self.given) if isinstance(self.given, Tensor) and not self.given.is_inference() else 0
        if not self.is_first and self.takes_embeds and len(args) == 1:
            # Not as input_ids, whose shape some models read.
            return (), kwargs | {"inputs_embeds": args[0]}
        return None

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module of this stage begins; returns its arguments, if they are others."""
        if self.result is not None:
            raise RuntimeError(
                f"stage {self.number} of the pipeline: expected {self.names[-1]} to be its last module, found {name} "
                f"after it; list modules in the order of the forward in module_fqns_per_model_part"
            )
        if self.entered is not None or self.is_first:
            self.entered = self.given if self.entered is None else self.entered
            return None
        if name != self.names[0]:
            raise RuntimeError(
                f"stage {self.number} of the pipeline: expected {self.names[0]} to be its first module, found {name}; "
                f"list modules in the order of the forward in module_fqns_per_model_part"
            )
        key = None if args else next(iter(kwargs), None)
        value: Any = args[0] if args else kwargs.get(key or "")
        if not _same(value, self.given, self.version):
            raise RuntimeError(
                f"stage {self.number} of the pipeline: expected {name} to read what the module before it returns, "
                f"found that the model computes something between them (such as x + layer(x), or a sum of embeddings), "
                f"which would be computed on another value here; put it inside of a module, or divide the model "
                f"elsewhere with module_fqns_per_model_part"
            )
        # An alias, so that a gradient shows whether anything else reads what came in.
        self.entered = value.view_as(value) if torch.is_grad_enabled() else value
        return ((self.entered, *args[1:]), kwargs) if args else (args, kwargs | {key: self.entered})

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.result = output

    def _end(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        result, given, entered = self.result, self.given, self.entered
        self.given = self.entered = self.result = None
        if self.is_last:
            result = getattr(output, "logits", output)
        if not isinstance(result, Tensor):
            what = "the model" if self.is_last else self.names[-1]
            raise TypeError(
                f"stage {self.number} of the pipeline: expected {what} to return a tensor, found a "
                f"{type(result).__name__}; end the stage with another module"
            )
        if not self.is_checked and not self.is_first and isinstance(given, Tensor) and given.requires_grad:
            self.is_checked = True
            if reaches(result, given, past=entered):
                raise RuntimeError(
                    f"stage {self.number} of the pipeline: expected only {self.names[0]} to read what the stage before "
                    f"it returns, found that something else does (a residual of the embedding, say), which would get "
                    f"another value here; put it inside of a module, or divide the model elsewhere"
                )
        return self.balance.join(result)


class _Enter:
    """The hook of one module."""

    def __init__(self, boundary: Boundary, name: str) -> None:
        self.boundary, self.name = boundary, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.boundary.enter(self.name, args, kwargs)


def _same(value: Any, given: Any, version: int) -> bool:
    """Whether `value` has the elements of `given` as they came: it, or a view of all of it."""
    if not isinstance(value, Tensor) or not isinstance(given, Tensor):
        return False
    if value is given:
        return given.is_inference() or version_of(given) == version
    alike = value.shape == given.shape and value.stride() == given.stride() and value.dtype == given.dtype
    if not alike or value.storage_offset() != given.storage_offset() or value.is_inference():
        return False
    return value.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() and version_of(given) == version


def reaches(result: Tensor, given: Tensor, *, past: Tensor) -> bool:
    """Whether a gradient of `result` comes to `given` on another way than over `past`."""
    end = torch.autograd.graph.get_gradient_edge(given).node
    seen: set[Any] = {past.grad_fn}
    left: list[Any] = [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node == end:
            return True
        seen.add(node)
        left += [after for after, _ in node.next_functions]
    return False
