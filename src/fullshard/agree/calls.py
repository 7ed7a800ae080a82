"""States what optimizers and other callers do to the parameters of a root, on each mesh (ledger.py).

`OptimizerFacts` describes the steps of an optimizer: only changes since the previous step are turned into text, and
values on a device are not read, to avoid a synchronisation. `Calls` records these steps, gradient clipping, scaling and
loads for one root. The owner of a parameter reports steps to the order of messages (ledger.py).
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of, version_of
from ..engine.foreign import ON_OWNERS
from ..engine.names import parameter_names
from ..engine.optimizer_steps import optimizer_steps, tell_each_step
from ..engine.unit import AnyRoot, Unit
from ..param import Owner, claim
from ..peers import Scope
from .ledger import STEP, Fact, Statement, called, digest_of, program_of
from .mesh_ledger import MeshLedger
from .structure import digests_of

# ---- an optimizer ----------------------------------------------------------------------------------------------------

# Options that affect how a step is computed, not its result.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_SHOWN = 4
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
        self.options: dict[int, list[Fact]] = {}
        self.states = 0
        self.counter: float | None = None
        self.call: Statement | None = None
        self.made_of: tuple[str, str] | None = None
        # The total version of the gradients, and its text.
        self._written = -1, -1
        self._written_text = ""

    def note_options(self, position: int, options: Mapping[str, Any]) -> None:
        """The options of the group at `position` are others than at the last step."""
        place = self.groups.get(position)
        if place is not None:
            of = f"group {place} of the optimizer" if len(self.groups) > 1 else "the optimizer"
            self.options[position] = [Fact("optimizer", f"{key} of {of}", text_of(options[key])) for key in options]
            self.made_of = None

    def written(self) -> str:
        """How often gradients were written before the step, as text; rebuilt only when the versions changed."""
        versions = _gradient_versions(self.params)
        if versions != self._written:
            self._written = versions
            names: dict[tuple[int, ...], list[str]] = {}
            for param, name in zip(self.params, self._dotted, strict=True):
                names.setdefault(_versions_of_gradient(param), []).append(name)
            *rare, common = sorted(names.items(), key=lambda item: (len(item[1]), item))
            texts = [f"{listed(found)} {_writes(count)}" for count, found in rare]
            self._written_text = ", ".join([*texts, f"{len(common[1])} {_writes(common[0])}"])
        return self._written_text


_gradient: Callable[[Tensor], Tensor] = operator.attrgetter("grad")


def _gradient_versions(parameters: Sequence[Tensor]) -> tuple[int, int]:
    """The number of `parameters` without a gradient, and the summed versions of all other gradients and their local
    tensors (a write to a DTensor and a write to its local tensor bump different versions). No Python per item if all
    gradients exist and are DTensors."""
    gradients = list(map(_gradient, parameters))
    try:
        return 0, sum(map(version_of, gradients)) + sum(map(version_of, map(local_of, gradients)))
    except AttributeError:
        found = list(map(_versions_of_gradient, parameters))
        return found.count(()), sum(map(sum, found))


def _versions_of_gradient(parameter: Tensor) -> tuple[int, ...]:
    """The versions that `_gradient_versions` sums, for one parameter; empty without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return ()
    own = version_of(gradient)
    return (own, version_of(local_of(gradient))) if isinstance(gradient, DTensor) else (own,)


class OptimizerFacts:
    """One optimizer, as of its last step. Holds its parameters strongly, like the optimizer."""

    def __init__(self, optimizer: Optimizer, places: Places) -> None:
        self._name = type(optimizer).__name__
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        # The options of each group at the last step, by key.
        self._options: list[dict[str, Any]] = [{} for _ in self._lists]
        self._states = -1
        self._state = optimizer.state
        # Whether state that has not its parameter's shape is on one rank alone (extras/owners.py).
        self._has_owners = False
        found: dict[Any, tuple[list[Tensor], list[int], list[str]]] = {}
        # The parameters outside of the root, by the name that the optimizer was given, or by a number.
        self.beside: dict[str, Tensor] = {}
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
                    name = given[number] if number < len(given) else f"parameter {len(self.beside)}"
                    self.beside[f"{name} beside the model's in the optimizer"] = param
        self.parts = {key: _MeshPart(*part) for key, part in found.items()}

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` still has the same parameters."""
        groups = optimizer.param_groups
        if len(groups) != len(self._lists):
            return False
        for group, known in zip(groups, self._lists, strict=True):
            params = group["params"]
            if len(params) != len(known) or not all(map(operator.is_, params, known)):
                return False
        return True

    def stepped(self, optimizer: Optimizer, *, changes: bool = True) -> dict[Any, Statement]:
        """The optimizer took a step. Returns its statement for each mesh, by the key of the mesh. `changes`: whether
        the step changed parameters."""
        for position, group in enumerate(optimizer.param_groups):
            options = {}
            for key, value in group.items():
                if key not in _HOW:
                    value = _number_of(value) if isinstance(value, Tensor) else value
                    options[key] = value if isinstance(value, _PLAIN) else text_of(value)
            if options != self._options[position]:
                self._options[position] = options
                for part in self.parts.values():
                    part.note_options(position, options)
        if not changes:
            return {}
        self._has_owners = ON_OWNERS in vars(optimizer)
        replaced = self._state is not optimizer.state
        if replaced or len(optimizer.state) != self._states:
            self._state, self._states = optimizer.state, len(optimizer.state)
            for part in self.parts.values():
                part.states = sum(param in self._state for param in part.params)
        calls: dict[Any, Statement] = {}
        for key, part in self.parts.items():
            made_of = self._state_text(part, replaced), part.written()
            if part.made_of != made_of or part.call is None:
                part.made_of, part.call = made_of, self._call(part, *made_of)
            calls[key] = part.call
        return calls

    def _call(self, part: _MeshPart, state: str, gradients: str) -> Statement:
        facts = (
            Fact("optimizer", "class of the optimizer", self._name),
            Fact("parameters", "parameters of the optimizer", part.listed),
            *sorted(chain.from_iterable(part.options.values())),
            Fact("state", "state of the optimizer", state),
            Fact("gradients", "gradients that the optimizer took", gradients),
        )
        return called(STEP, facts)

    def _state_text(self, part: _MeshPart, replaced: bool) -> str:
        """Returns the size of the state and the change of its step counter; constant during normal training."""
        counter = None
        if part.states and not self._has_owners:
            first = next(filter(self._state.__contains__, part.params), None)
            counter = None if first is None else _counter(self._state[first])
        before, part.counter = part.counter, counter
        if counter is None:
            went = ""
        elif before is not None and counter == before + 1 and not replaced:
            went = ", one step further"
        else:
            went = f", at step {counter:g}"
        return f"of {part.states} parameters{went}{', replaced since the last step' if replaced else ''}"


def _number_of(tensor: Tensor) -> Any:
    """The number in a one-element CPU tensor (a learning rate), else a text."""
    is_number = not isinstance(tensor, DTensor) and tensor.numel() == 1
    return tensor.item() if is_number and tensor.device.type == "cpu" else text_of(tensor)


def changes_parameters(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step of an optimizer with these groups changes parameters. torch creates missing optimizer state by a
    step with a zero learning rate when a checkpoint is loaded or saved, only on ranks that lack the state."""
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            if rate.device.type != "cpu" or float(rate) != 0:
                return True
        elif not isinstance(rate, (int, float)) or rate != 0:
            return True
    return False


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


# ---- the calls of one root -------------------------------------------------------------------------------------------

_by_thread: dict[int, weakref.WeakSet[Calls]] = {}


class Calls:
    """Records what callers do to the parameters of `root`, on each of `meshes`."""

    def __init__(self, root: AnyRoot, meshes: Mapping[tuple[int, ...], MeshLedger]) -> None:
        self._root, self._meshes = root, meshes
        self._known: weakref.WeakKeyDictionary[Optimizer, OptimizerFacts] = weakref.WeakKeyDictionary()
        self._places: dict[int, tuple[tuple[int, ...], str]] = {}
        self._placed: list[Tensor] = []
        # The text of parameters in a fact, by their ids, on each mesh.
        self._listed_places: dict[tuple[int, ...], dict[tuple[int, ...], str]] = {}
        self._channels = -1
        # The default process group in which the root formed; gone when it is destroyed.
        self.process_group: weakref.ref[dist.ProcessGroup] | None = None

    def begin(self) -> None:
        """Record from now on, until the process group is destroyed, if the root has other ranks."""
        if self._meshes and dist.group.WORLD is not None:
            self.process_group = weakref.ref(dist.group.WORLD)
            _by_thread.setdefault(self._root.thread, weakref.WeakSet()).add(self)

    def optimizer_stepped(self, optimizer: Optimizer, *, changes: bool = True) -> None:
        """`optimizer` took a step. `changes`: whether it changed parameters."""
        known = self._known.get(optimizer)
        if known is None or not known.holds(optimizer):
            known = self._known[optimizer] = OptimizerFacts(optimizer, self._placed_now())
            if len(known.parts) == 1:
                (ranks,) = known.parts
                self._meshes[ranks].beside |= known.beside
        if known.parts:
            for ranks, call in known.stepped(optimizer, changes=changes).items():
                self._meshes[ranks].ledger.do(call)

    def done_to(self, parameters: Iterable[Tensor], name: str, facts: Sequence[Fact]) -> None:
        """Record the operation `name` on `parameters`, some of which may belong to the root."""
        places = self._placed_now()
        done_to = tuple(map(id, parameters))
        if done_to not in self._listed_places:
            names: dict[tuple[int, ...], list[str]] = {}
            for place in (places[one] for one in done_to if one in places):
                names.setdefault(place[0], []).append(place[1])
            if len(self._listed_places) > 8:
                self._listed_places.clear()
            self._listed_places[done_to] = {ranks: listed(found) for ranks, found in names.items()}
        for ranks, text in self._listed_places[done_to].items():
            self._meshes[ranks].ledger.do(called(name, [*facts, Fact(facts[0].kind, f"parameters of {name}", text)]))

    def loaded(self, unit: Unit, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Record that parameters of `unit` were loaded; `values`: those loaded from full tensors."""
        for mesh in self._meshes.values():
            if unit in mesh.members:
                mesh.since.values_asked = True
                facts = [Fact("load", "names that load_state_dict loaded", ", ".join(names))]
                facts += [Fact("load", f"loaded values of {n}", text) for n, text in digests_of(values).items()]
                mesh.ledger.do(called("load_state_dict", facts))

    def listed_on(self, ranks: tuple[int, ...]) -> str:
        """The names of the parameters in optimizers on the mesh of `ranks`, one a line."""
        parts = [known.parts[ranks] for known in self._known.values() if ranks in known.parts]
        return "\n".join(sorted(name.partition(".")[2] for part in parts for name in part.names))

    def _placed_now(self) -> dict[int, tuple[tuple[int, ...], str]]:
        """Mesh and name of each parameter, by id; rebuilt when shards were replaced."""
        units = self._root.units
        made = sum([unit.channels.times_made for unit in units])
        if made != self._channels:
            self._channels = made
            names = parameter_names(units[0].module, units)
            self._places, self._placed, self._listed_places = {}, [], {}
            for ranks, mesh in self._meshes.items():
                for name, parameter in mesh.outside().items():
                    self._place(parameter, ranks, name)
                for unit, positions in mesh.members.items():
                    for position in positions:
                        for param in unit.groups[position].params:
                            self._place(param.sharded, ranks, names[param])
        return self._places

    def _place(self, parameter: Tensor, ranks: tuple[int, ...], name: str) -> None:
        self._places[id(parameter)] = ranks, name
        self._placed.append(parameter)  # keep it alive, so that its id stays unique


def note_clip(parameters: Sequence[Tensor], max_norm: object, norm_type: object) -> None:
    """`clip_grad_norm_` was called in this thread."""
    values = {"max_norm": max_norm, "norm_type": norm_type}
    facts = [Fact("clip", f"{name} of clip_grad_norm_", text_of(value)) for name, value in values.items()]
    _note(parameters, "clip_grad_norm_", facts)


def note_unscale(optimizer: Optimizer, settings: Mapping[str, object]) -> None:
    """A `GradScaler` with these settings unscaled the gradients of `optimizer`."""
    facts = [Fact("scaler", f"{name} of GradScaler", text_of(value)) for name, value in settings.items()]
    _note([p for group in optimizer.param_groups for p in group["params"]], "GradScaler", facts)


def _note(parameters: Sequence[Tensor], name: str, facts: Sequence[Fact]) -> None:
    for calls in tuple(_by_thread.get(threading.get_ident(), ())):
        calls.done_to(parameters, name, facts)


# ---- owners ----------------------------------------------------------------------------------------------------------
# The steps of an optimizer are reported to the order of the ranks that share its parameters, as long as it holds them,
# even after their model is gone: garbage collection differs between ranks.


class _Formed(NamedTuple):
    """The thread that runs a root, and its scopes: kept as long as any of its parameters is held. The scopes are weak:
    the watch of their process group keeps them as long as it exists."""

    thread: int
    scopes: tuple[weakref.ref[Scope], ...]


class _Owned(Owner):
    """The owner of one parameter. Knows no unit: holding a parameter must not hold the model."""

    formed: _Formed | None = None


def own_parameters(unit: Unit) -> None:
    """Attach an owner to each sharded parameter of `unit`."""
    for position, group in enumerate(unit.groups):
        for param in group.params:
            param.owner = _Owned(param.name, unit.links[position].everyone)
            claim(param.sharded, param.owner)


def own_by_root(root: AnyRoot, scopes: Iterable[Scope], *, compares: bool) -> None:
    """`root` formed, on the meshes of `scopes`: name its parameters as its model does. `compares`: report the steps of
    their optimizers."""
    names = parameter_names(root.units[0].module, root.units)
    formed = _Formed(root.thread, tuple(map(weakref.ref, scopes)))
    for param, name in names.items():
        if isinstance(param.owner, _Owned):
            param.owner.name, param.owner.formed = name, formed
    if compares:
        tell_each_step(_optimizer_stepped)


def _optimizer_stepped(optimizer: Optimizer) -> None:
    thread, changes = threading.get_ident(), changes_parameters(optimizer.param_groups)
    roots: dict[_Formed, None] = {}
    for group in optimizer.param_groups if changes else ():
        for parameter in group["params"]:
            # `Owner.of`, without a call for each parameter in each step.
            owner = getattr(parameter.untyped_storage(), Owner.ATTRIBUTE, None) if type(parameter) is DTensor else None
            if isinstance(owner, _Owned) and owner.formed is not None:
                roots[owner.formed] = None
    for formed in roots:
        if formed.thread == thread:
            for reference in formed.scopes:
                if (scope := reference()) is not None:
                    note_stepped(scope, thread)
    for calls in tuple(_by_thread.get(thread, ())):
        if calls.process_group is not None and calls.process_group() is dist.group.WORLD:
            calls.optimizer_stepped(optimizer, changes=changes)
        else:
            # Of a destroyed process group: what is noted of an optimizer would keep its parameters alive.
            _by_thread[thread].discard(calls)


def note_stepped(scope: Scope, thread: int) -> None:
    """The last optimizer step of `thread`, which runs the model, changed parameters on the mesh of `scope`."""
    program, step = program_of(scope), optimizer_steps(thread)
    # An optimizer may have parameters of several roots on one mesh.
    if program.last_step != step:
        program.last_step = step
        program.stepped += 1
        program.count += 1
