"""Describes the steps of an optimizer to the parameters of one root, as one call on each mesh (ledger.py).

Only changes since the previous step are turned into text. Values on a device are not read, to avoid a synchronisation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import gradient_versions, versions_of_gradient
from .ledger import STEP, Fact, Statement, called, digest_of

# ---- optimizer facts -------------------------------------------------------------------------------------------------

# Options that affect how a step is computed, not its result.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_SHOWN = 4
_UNKNOWN = object()
_PLAIN = (int, float, bool, str, complex, type(None))

# id of a parameter -> key of its mesh, dotted name.
Places = Mapping[int, tuple[Any, str]]


class _MeshPart:
    """The parameters of one optimizer on one mesh."""

    def __init__(self, params: Sequence[Tensor], groups: Sequence[int], names: Sequence[str]) -> None:
        """`groups` and `names`: for each of `params`, the position of its group and its name."""
        by_name = sorted(zip(names, groups, strict=True))
        # Ranks may order groups, and parameters in them, differently: number groups by their first name.
        ordered = list(dict.fromkeys(position for _, position in by_name))
        self.groups = {position: place for place, position in enumerate(ordered)}
        self.params = list(params)
        self._dotted = list(names)
        self.names = names = tuple(f"{self.groups[position]}.{name}" for name, position in by_name)
        self.listed = f"{len(names)}, {digest_of(chr(10).join(names)):016x}"
        self.options: dict[tuple[int, str], Fact] = {}
        self.states = 0
        self.counter: float | None = None
        self.call: Statement | None = None
        self.made_of: tuple[str, str] | None = None
        # Total version of the gradients, and its text.
        self._written = -1, -1
        self._written_text = ""

    @property
    def written(self) -> str:
        """How often gradients were written before the step, as text; rebuilt only when the versions changed."""
        versions = gradient_versions(self.params)
        if versions != self._written:
            self._written = versions
            names: dict[tuple[int, ...], list[str]] = {}
            for param, name in zip(self.params, self._dotted, strict=True):
                names.setdefault(versions_of_gradient(param), []).append(name)
            *rare, common = sorted(names.items(), key=lambda item: (len(item[1]), item))
            said = [f"{listed(found)} {_writes(count)}" for count, found in rare]
            self._written_text = ", ".join([*said, f"{len(common[1])} {_writes(common[0])}"])
        return self._written_text


class OptimizerFacts:
    """One optimizer, as of its last step. Holds its parameters strongly, like the optimizer."""

    def __init__(self, optimizer: Optimizer, places: Places) -> None:
        self._name = type(optimizer).__name__
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        # Options of all groups at the last step, and (position of the group, key) of each.
        self._raw: list[Any] | None = None
        self._names: list[tuple[int, str]] = []
        self._states = -1
        self._state = optimizer.state
        found: dict[Any, tuple[list[Tensor], list[int], list[str]]] = {}
        # Parameters outside of the root, by the name that the optimizer was given, or by a number.
        self.strangers: dict[str, Tensor] = {}
        for position, params in enumerate(self._lists):
            given = optimizer.param_groups[position].get("param_names", ())
            for number, param in enumerate(params):
                place = places.get(id(param))
                if place is not None:
                    own, groups, names = found.setdefault(place[0], ([], [], []))
                    own.append(param)
                    groups.append(position)
                    names.append(place[1])
                elif not isinstance(param, DTensor):
                    name = given[number] if number < len(given) else f"parameter {len(self.strangers)}"
                    self.strangers[f"{name} beside the model's in the optimizer"] = param
        self.parts = {key: _MeshPart(*part) for key, part in found.items()}

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` still has the same parameters."""
        groups = optimizer.param_groups
        return len(groups) == len(self._lists) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self._lists, strict=True)
        )

    def stepped(self, optimizer: Optimizer, do: Callable[[Any, Statement], None]) -> None:
        """The optimizer took a step: call `do(key of a mesh, statement)` for each mesh."""
        groups = optimizer.param_groups
        raw = [
            value if isinstance(value, _PLAIN) else _number_of(value)
            for group in groups
            for key, value in group.items()
            if key not in _HOW
        ]
        if raw != self._raw:
            self._note_options(groups, raw)
        if not changes_parameters(groups):
            return
        replaced = self._state is not optimizer.state
        if replaced or len(optimizer.state) != self._states:
            self._state, self._states = optimizer.state, len(optimizer.state)
            for part in self.parts.values():
                part.states = sum(param in self._state for param in part.params)
        for key, part in self.parts.items():
            made_of = self._state_text(part, replaced), part.written
            if part.made_of != made_of or part.call is None:
                part.made_of, part.call = made_of, self._call(part, *made_of)
            do(key, part.call)

    def _note_options(self, groups: Sequence[Mapping[str, Any]], raw: list[Any]) -> None:
        """Some option changed. A learning-rate schedule changes one of many in each step, so only changes are noted."""
        before, self._raw = self._raw, raw
        names = [(position, key) for position, group in enumerate(groups) for key in group if key not in _HOW]
        if before is None or names != self._names:
            before, self._names = [_UNKNOWN] * len(raw), names
            for part in self.parts.values():
                part.options = {}
        for (position, key), value, old in zip(names, raw, before, strict=True):
            if value is old or value == old:
                continue
            for part in self.parts.values():
                place = part.groups.get(position)
                if place is not None:
                    of = f"group {place} of the optimizer" if len(part.groups) > 1 else "the optimizer"
                    part.options[position, key] = Fact("optimizer", f"{key} of {of}", text_of(value))
                    part.made_of = None

    def _call(self, part: _MeshPart, state: str, gradients: str) -> Statement:
        facts = (
            Fact("optimizer", "class of the optimizer", self._name),
            Fact("parameters", "parameters of the optimizer", part.listed),
            *sorted(part.options.values()),
            Fact("state", "state of the optimizer", state),
            Fact("gradients", "gradients that the optimizer took", gradients),
        )
        return called(STEP, facts)

    def _state_text(self, part: _MeshPart, replaced: bool) -> str:
        """The size of the optimizer state and the change of its step counter; constant during normal training."""
        counter = None
        if part.states:
            first = next((param for param in part.params if param in self._state), None)
            counter = None if first is None else _counter(self._state[first])
        before, part.counter = part.counter, counter
        if counter is None:
            went = ""
        elif before is not None and counter == before + 1 and not replaced:
            went = ", one step further"
        else:
            went = f", at step {counter:g}"
        return f"of {part.states} parameters{went}{', replaced since the last step' if replaced else ''}"


def _number_of(value: Any) -> Any:
    """The number in a one-element CPU tensor (a learning rate), else a text."""
    is_number = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() == 1
    return value.item() if is_number and value.device.type == "cpu" else text_of(value)


def changes_parameters(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step of an optimizer with these groups changes parameters. torch creates missing optimizer state by a
    step with a zero learning rate when a checkpoint is loaded or saved, only on ranks that lack the state."""
    return not all(_is_zero(group.get("lr")) for group in groups)


def _is_zero(rate: object) -> bool:
    if isinstance(rate, Tensor):
        return rate.device.type == "cpu" and float(rate) == 0
    return isinstance(rate, (int, float)) and rate == 0


def _writes(versions: tuple[int, ...]) -> str:
    return f"written {' and '.join(map(str, versions))} times" if versions else "without one"


def listed(names: Sequence[str]) -> str:
    """`names`, sorted and shortened; a digest covers the rest."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more ({digest_of(chr(10).join(names)):016x})" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _counter(state: Mapping[str, Any]) -> float | None:
    step = state.get("step") if isinstance(state, Mapping) else None
    if isinstance(step, Tensor):
        return float(step) if step.device.type == "cpu" and step.numel() == 1 and type(step) is Tensor else None
    return float(step) if isinstance(step, (int, float)) else None


def text_of(value: Any) -> str:
    """The text of a value that ranks compare; tensors on a device are not read."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() > 16 or isinstance(value, DTensor):
            return f"a tensor on {value.device.type}"
        return repr(value.tolist())
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        return f"({', '.join(map(text_of, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
