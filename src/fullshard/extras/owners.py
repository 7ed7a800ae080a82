"""`step_on_owners`: optimizers of whole matrices (Muon, Shampoo, SOAP) on sharded parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import local_of
from ..agree.ledger import program_of
from ..api import PeerFailed, RanksDisagree, step_on_shards
from ..api.optimizer import ELEMENTWISE, MAKING, expect_own_step, step_parts, with_step
from ..comm import OwnerLine, owner_ranks
from ..engine.foreign import ON_OWNERS, ON_SHARDS
from ..engine.names import clean_name, first_few
from ..layout import Box, FleetPlan, Matrix, OwnersPlan, local_box, newton_schulz_flops
from ..param import Owner, place_of
from ..policy.arguments import expect, expect_each, expect_module, expect_whole
from .owner_steps import Fleet, FleetStep, OwnerRaised, Settings, Whole, is_shaped

# Names in which * stands for anything, or a function of (name, parameter).
Rule = Sequence[str] | Callable[[str, nn.Parameter], bool] | None
Cost = Callable[[tuple[int, ...]], float]
CHUNK_NBYTES = 256 << 20
# From how many rows or columns on `matrices` leaves a weight to another optimizer: those of vocabularies.
LARGEST_DIM = 32_768

_COST = "operations of five Newton-Schulz iterations, 5 * (4 * m * m * n + 2 * m**3) for m <= n"
_MUON: tuple[type[Optimizer], ...] = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))
_MADE: dict[type[Optimizer], type[Optimizer]] = {}


def step_on_owners(
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model: nn.Module | None = None,
    on_shards: Rule = None,
    stacks: Rule = None,
    cost: Cost | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> StepOnOwners:
    """Let each sharded matrix be whole on one rank, its owner, for `optimizer.step()`, which sees plain tensors there.

        muon = torch.optim.Muon(fullshard.extras.matrices(model), lr=0.02)
        adamw = torch.optim.AdamW(fullshard.extras.matrices(model, rest=True), lr=3e-4)
        print(fullshard.step_on_owners([muon, adamw], model=model).plan())

    For optimizers whose update of an element depends on others of the same matrix: torch's Muon, and those that know no
    DTensors, such as Shampoo and SOAP. Given the same gradients, parameters and state are bitwise those of a step in
    one process, on any number of ranks, with HSDP and with tensor parallelism. Storage, state dicts and checkpoints
    stay sharded as they are. The loop, schedulers, hooks and scalers stay as they are.

    A step sends gradient, parameter, and state of the parameter's shape to the owner in one all-to-all of bytes, and
    parameter and state back in another one, for each chunk; the next chunk travels while one is stepped. State of
    another shape (Shampoo's factors) stays on the owner, whole, under the parameter's name; under HSDP on one rank of
    each replica. Owners are a rule of shapes, the same on all ranks: the costliest matrix first, each to the rank with
    the least work. The first step, and one after the parameters or the state of the optimizer changed, compares the
    plan.

    optimizers: one, or several; those that treat each element by itself (AdamW) get `step_on_shards`. They become
        instances of a subclass of theirs. Updates of one parameter must not depend on another one.
    model: of the parameters, for their names. None: those that the optimizer was given, or that the forward of a
        sharded model learned: until then a name is that in its unit, also for rules.
    on_shards: parameters whose update treats each element by itself, although the optimizer does not treat all so: they
        are stepped on their shards. Groups with `use_muon=False`, as several Muons have them, are too.
    stacks: parameters of three dims and more whose update treats each index of dim 0 by itself (experts): each index
        gets its owner, a rank that holds it whole if work is balanced so, and the optimizer sees it without dim 0. All
        of torch's Muon, which takes two dims.
    cost: of a matrix of a shape, by which work is balanced; None: operations of Newton-Schulz iterations.
    chunk_nbytes: of the whole tensors that an owner gets together; at least one matrix.

    A step raises on all ranks, by name: what an owner's step raised (`PeerFailed` on the others), a gradient that is
    None on some ranks, a rank that does not come. Nothing of that chunk is written then. If earlier ones were, further
    steps raise until `accept()` is called, and forwards until a checkpoint is loaded.

    Raises `TypeError` for something that is not an optimizer; `ValueError` for one that needs all parameters together
    (LBFGS), whose step was replaced on the object, or that steps on shards already.
    """
    given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    found = expect_each(
        "optimizers", given, lambda one: isinstance(one, Optimizer), "an optimizer of torch, or a list of them"
    )
    for argument, rule in (("on_shards", on_shards), ("stacks", stacks)):
        if rule is not None and not callable(rule):
            wanted = 'names such as ["*.experts.*"], a function of (name, parameter), or None'
            expect_each(argument, rule, lambda name: isinstance(name, str), wanted)
    expect("cost", cost is None or callable(cost), "a function of a shape, or None", cost, "see its meaning")
    expect_whole("chunk_nbytes", chunk_nbytes, 1)
    owned = [
        one for one in found if type(one) not in ELEMENTWISE and (ON_SHARDS not in vars(one) or ON_OWNERS in vars(one))
    ]
    if not owned:
        raise ValueError(
            f"optimizers: expected one whose update of an element depends on others, found "
            f"{', '.join(type(one).__name__ for one in found) or 'none'}, for which step_on_shards is enough"
        )
    for one in owned:
        if isinstance(one, torch.optim.LBFGS):
            raise ValueError(
                "optimizers: expected one that steps each matrix by itself, found LBFGS, which needs all parameters "
                "together; use it on sharded parameters as it is"
            )
        if ON_OWNERS not in vars(one):
            expect_own_step(one, "step_on_owners")
    for one in found:
        if one not in owned:
            step_on_shards(one, elementwise=True)
    names: dict[int, str] = {}
    if model is not None:
        expect_module("model", model)
        names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    rules = Rules(names, on_shards, stacks, cost, chunk_nbytes)
    return StepOnOwners(found, [_attached(one, rules) for one in owned], names)


class StepOnOwners:
    """The result of `step_on_owners`: its optimizers, to call or to leave to the loop."""

    def __init__(self, optimizers: Sequence[Optimizer], steps: Sequence[OwnerSteps], names: Mapping[int, str]) -> None:
        self.optimizers, self._names = tuple(optimizers), names
        self._steps = tuple(steps)

    def plan(self) -> OwnersPlan:
        """The plan: who owns which matrix, its cost, and the bytes and messages of a step, with the state that there is
        now. `print` it. No message."""
        plans = [steps.plan() for steps in self._steps]
        kept = {name: why for plan in plans for name, why in plan.kept.items()}
        for optimizer in self.optimizers:
            if ON_OWNERS not in vars(optimizer):
                why = f"{type(optimizer).__name__}: each element by itself"
                kept |= dict.fromkeys(_named(optimizer, self._names).values(), why)
        return OwnersPlan([fleet for plan in plans for fleet in plan.fleets], kept, plans[0].cost)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all of them, one after the other; the first one calls `closure` and its result is returned."""
        results = [one.step(closure if number == 0 else None) for number, one in enumerate(self.optimizers)]
        return results[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`zero_grad` of all of them."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    @property
    def written(self) -> tuple[str, ...]:
        """The matrices that took the last step, if it raised after some did; else empty."""
        return tuple(name for steps in self._steps for name in steps.written)

    def accept(self) -> None:
        """Continue after a step that raised when some matrices had taken it, or after loading a checkpoint."""
        for steps in self._steps:
            steps.accept()


def matrices(model: nn.Module, *, rest: bool = False) -> list[nn.Parameter]:
    """The parameters of `model` that Muon is for, or with `rest` the others, each once; the same for a sharded model.

    Matrices have two dims, or are stacks of three; they are no weights of `nn.Embedding` or `nn.EmbeddingBag`, also
    where a head is tied to one, and no dim but that of a stack reaches 32,768, as those of vocabularies do. Frozen
    parameters are in neither list.
    """
    expect_module("model", model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    found = []
    for parameter in model.parameters():
        is_matrix = parameter.ndim in (2, 3) and max(parameter.shape[-2:]) < LARGEST_DIM and id(parameter) not in tables
        if parameter.requires_grad and is_matrix is not rest:
            found.append(parameter)
    return found


class Rules(NamedTuple):
    """The arguments of `step_on_owners`. `names`: of parameters, by id."""

    names: Mapping[int, str]
    on_shards: Rule
    stacks: Rule
    cost: Cost | None
    chunk_nbytes: int


def _attached(optimizer: Optimizer, rules: Rules) -> OwnerSteps:
    steps: OwnerSteps | None = vars(optimizer).get(ON_OWNERS)
    if steps is None:
        steps = vars(optimizer)[ON_OWNERS] = OwnerSteps(optimizer, rules)
        # Mirrors of what it steps on shards.
        vars(optimizer)[ON_SHARDS] = {}
        original = type(optimizer)
        with MAKING:
            if original not in _MADE:
                _MADE[original] = _stepping(original)
            optimizer.__class__ = _MADE[original]
    steps.rules = rules
    steps.forget()
    return steps


def _stepping(original: type[Optimizer]) -> Any:
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        vars(self)[ON_OWNERS].step()
        return loss

    return with_step(original, step)


class OwnerSteps:
    """The steps of one optimizer: its plan, and who executes it."""

    def __init__(self, optimizer: Optimizer, rules: Rules) -> None:
        self._optimizer, self.rules = optimizer, rules
        # The owner of each matrix, by id of the parameter and number: its place in its fleet, which keeps its state.
        self._owners: dict[tuple[int, int | None], int] = {}
        self._signature: object = None
        self._fleets: list[Fleet] = []
        self._on_shards: list[list[Tensor]] = []
        self._lines: dict[object, OwnerLine] = {}
        self.written: tuple[str, ...] = ()

    def forget(self) -> None:
        """The rules changed."""
        self._signature = None

    def accept(self) -> None:
        """Does its part of `StepOnOwners.accept`."""
        if self.written:
            for line in self._lines.values():
                if line.scope is not None:
                    program_of(line.scope).half = ""
        self.written = ()

    def owned(self) -> dict[int, list[int | None]]:
        """The parameters that have owners, by id: which of their matrices this rank owns; None: a whole parameter. No
        message."""
        found: dict[int, list[int | None]] = {}
        for plan, wholes, *_ in self._found().fleets:
            me = plan.ranks.index(dist.get_rank())
            for whole, owner in zip(wholes, plan.owners, strict=True):
                found.setdefault(id(whole.parameter), []).extend([whole.number] if owner == me else [])
        return found

    # ---- the plan ------------------------------------------------------------------------------------------

    def plan(self) -> OwnersPlan:
        """Does its part of `StepOnOwners.plan`."""
        found = self._found()
        cost = _COST if self.rules.cost is None else "that of the argument `cost`"
        return OwnersPlan([plan for plan, *_ in found.fleets], found.kept, cost)

    def _found(self) -> _Found:
        """The matrices and their owners, as parameters, gradients and state are now."""
        found = _Found([], {}, [])
        groups = self._optimizer.param_groups
        names = _named(self._optimizer, self.rules.names)
        fleets: dict[tuple[int, ...], list[tuple[Matrix, Whole, int]]] = {}
        places: dict[tuple[int, ...], tuple[Any, tuple[int, ...]]] = {}
        for number, group in enumerate(groups):
            own: list[Tensor] = []
            for parameter in group["params"]:
                name = names[id(parameter)]
                why = self._why_not(name, parameter, group)
                if why:
                    own.append(parameter)
                    found.kept[name] = why
                elif parameter.requires_grad:
                    mesh, axes = parameter.device_mesh, _axes_of(parameter)
                    key = tuple(int(mesh.mesh[place]) for place in owner_ranks(mesh, axes))
                    places[key] = (mesh, axes)
                    fleets.setdefault(key, []).extend(self._matrices_of(name, parameter, number, axes))
                else:
                    found.kept[name] = "frozen"
            found.on_shards.append(own)
        for key, members in fleets.items():
            fixed = {
                position: self._owners[owner]
                for position, (_, whole, _) in enumerate(members)
                if (owner := (id(whole.parameter), whole.number)) in self._owners
            }
            cost = self.rules.cost or newton_schulz_flops
            plan = FleetPlan([one for one, *_ in members], key, self.rules.chunk_nbytes, cost, fixed)
            found.fleets.append(
                (plan, [whole for _, whole, _ in members], [first for *_, first in members], *places[key])
            )
        return found

    def _why_not(self, name: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> str:
        """Why the parameter has no owner; "" if it has."""
        if not isinstance(parameter, DTensor):
            return "not sharded"
        if not _axes_of(parameter) and not self._is_stack(name, parameter):
            return "whole on each rank"
        if group.get("use_muon") is False:
            return "use_muon=False: stepped on its shards"
        return "on_shards: stepped on its shards" if _matches(self.rules.on_shards, name, parameter) else ""

    def _is_stack(self, name: str, parameter: DTensor) -> bool:
        """Whether each index of dim 0 is a matrix of its own, also where no rank shares it."""
        return parameter.ndim > 2 and (
            isinstance(self._optimizer, _MUON) or _matches(self.rules.stacks, name, parameter)
        )

    def _matrices_of(
        self, name: str, parameter: DTensor, group: int, axes: tuple[int, ...]
    ) -> list[tuple[Matrix, Whole, int]]:
        place = place_of(parameter)
        if isinstance(place, str):
            raise ValueError(f"step_on_owners: {name}: {place}")
        boxes = [
            local_box(place.shape, place.mesh or (), coordinate, place.cuts)
            for coordinate in owner_ranks(parameter.device_mesh, axes)
        ]
        here = local_box(place.shape, place.mesh or (), parameter.device_mesh.get_coordinate() or (), place.cuts)
        gradient = parameter.grad.dtype if parameter.grad is not None else parameter.grad_dtype or parameter.dtype
        state = tuple(
            (key, value.dtype)
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if is_shaped(value, parameter)
        )
        is_stack = self._is_stack(name, parameter)
        sizes = (parameter.dtype.itemsize, *(dtype.itemsize for _, dtype in state))
        made = []
        for index in range(place.shape[0]) if is_stack else (None,):
            shape, own = (place.shape, boxes) if index is None else (place.shape[1:], [_at(index, b) for b in boxes])
            parts = tuple(box.numel for box in own)
            matrix = Matrix(name, index, shape, parts, (gradient.itemsize, *sizes), sizes)
            whole = Whole(parameter, index, matrix.title, shape, tuple(own), group, gradient, state)
            made.append((matrix, whole, here.offsets[0]))
        return made

    def _prepare(self) -> None:
        """Make the plan of this step, if it is not that of the last one. Collective then."""
        optimizer, seen = self._optimizer, list[object]()
        for group in optimizer.param_groups:
            seen.append(group.get("use_muon"))
            for parameter in group["params"]:
                seen += (id(parameter), parameter.requires_grad)
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, DTensor):
                        seen += (key, value.dtype)
        if seen == self._signature:
            return
        found, self._fleets = self._found(), []
        for plan, wholes, first_rows, mesh, axes in found.fleets:
            device = local_of(wholes[0].parameter).device
            key = plan.ranks, device
            if key not in self._lines:
                self._lines[key] = OwnerLine(mesh, axes, device)
            line = self._lines[key]
            with line.together(f"the plan of {type(optimizer).__name__}'s owners"):
                text = f"{plan.matrices}"
                if not line.same(text):
                    told = _apart(line.told("\n".join(map(_described, plan.matrices))))
                    raise RanksDisagree(
                        f"{type(optimizer).__name__}.step: expected the same matrices, with the same state, in the "
                        f"optimizer on all ranks, found {told}; build and load it in the same way on all ranks",
                        what="owners",
                        by_rank=told,
                    )
            self._fleets.append(Fleet(plan, line, tuple(wholes), tuple(first_rows)))
            for whole, owner in zip(wholes, plan.owners, strict=True):
                self._owners[id(whole.parameter), whole.number] = owner
        self._on_shards, self._signature = found.on_shards, seen

    def _leave_to_owners(self) -> None:
        """Drop state that another rank keeps whole: after a load all ranks have it. No message."""
        for fleet in self._fleets:
            for whole, owner in zip(fleet.wholes, fleet.plan.owners, strict=True):
                entries = self._optimizer.state.get(whole.parameter)
                if owner != fleet.line.rank and entries:
                    for name in whole.kept(entries):
                        del entries[whole.kept_key(name)]

    # ---- a step --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step everything. Collective."""
        optimizer = self._optimizer
        title = f"{type(optimizer).__name__}.step"
        if self.written:
            raise RuntimeError(
                f"{title}: expected a state between two steps, found that the last one raised when "
                f"{first_few(self.written)} had taken it and the others had not; load a checkpoint, or keep the mixed "
                f"state, and call accept() of what step_on_owners returned"
            )
        self._prepare()
        self._leave_to_owners()
        settings, written = Settings(optimizer), list[str]()
        with torch.no_grad():
            for fleet in self._fleets:
                self._step_fleet(fleet, settings, title, written)
        if not self._fleets or any(self._on_shards):
            settings.begin()
            # A load makes new groups.
            step_parts(optimizer, list(zip(optimizer.param_groups, self._on_shards, strict=True)))

    def _step_fleet(self, fleet: Fleet, settings: Settings, title: str, written: list[str]) -> None:
        running = FleetStep(fleet, self._optimizer, settings)
        failed: OwnerRaised | None = None
        try:
            with fleet.line.together(title):
                try:
                    running.run()
                except OwnerRaised as error:
                    failed = error
                    if written or error.written:
                        self._mark((*written, *error.written))
                        raise
        except OwnerRaised:
            pass
        except BaseException:
            settings.restore()
            if written or running.may_have_written:
                # Ranks may differ in what they wrote.
                self._mark((*written, *running.written) or tuple(one.title for one in fleet.wholes))
            raise
        if failed is not None:
            raise self._explained(failed, title, (*written, *failed.written))
        written += running.written

    def _mark(self, written: tuple[str, ...]) -> None:
        self.written = written
        for line in self._lines.values():
            if line.scope is not None:
                program_of(line.scope).half = type(self._optimizer).__name__

    def _explained(self, failed: OwnerRaised, title: str, written: tuple[str, ...]) -> BaseException:
        told = "; ".join(f"rank {rank} raised {text}" for rank, text in failed.by_rank.items())
        left = (
            f"{first_few(written)} had taken the step, and the others have not: load a checkpoint"
            if written
            else "no rank wrote anything: parameters and state are those of before"
        )
        if failed.error is not None:
            failed.error.add_note(f"{title}: in the step of what this rank owns; {left}")
            return failed.error
        rank = min(failed.by_rank)
        text = f"{title}: expected all owners to step their matrices, found that {told}; {left}"
        return PeerFailed(text, rank=rank, unit=title, text=failed.by_rank[rank])


class _Found(NamedTuple):
    """The parts of a plan: of each fleet its plan, matrices, first rows, mesh and axes; names that no owner has,
    with the reason; and what is stepped on shards, by group."""

    fleets: list[tuple[FleetPlan, list[Whole], list[int], Any, tuple[int, ...]]]
    kept: dict[str, str]
    on_shards: list[list[Tensor]]


def _axes_of(parameter: DTensor) -> tuple[int, ...]:
    """The axes of its mesh that cut it."""
    mesh = parameter.device_mesh
    return tuple(
        axis
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _at(index: int, box: Box) -> Box:
    """The part of matrix `index` in a part of a stack; empty if it is not there."""
    is_here = box.offsets[0] <= index < box.offsets[0] + box.lengths[0]
    return Box(box.offsets[1:], box.lengths[1:] if is_here else (0,) * (len(box.lengths) - 1))


def _matches(rule: Rule, name: str, parameter: Any) -> bool:
    if rule is None:
        return False
    return bool(rule(name, parameter)) if callable(rule) else any(fnmatch.fnmatchcase(name, one) for one in rule)


def _named(optimizer: Optimizer, known: Mapping[int, str]) -> dict[int, str]:
    """The names of an optimizer's parameters, each another one, by id."""
    names: dict[int, str] = {}
    seen: dict[str, int] = {}
    for group in optimizer.param_groups:
        given = group.get("param_names", ())
        for number, parameter in enumerate(group["params"]):
            owner = Owner.of(parameter)
            own = given[number] if number < len(given) else owner.name if owner is not None else ""
            name = known.get(id(parameter)) or own or f"parameter {len(names)}"
            seen[name] = seen.get(name, 0) + 1
            names[id(parameter)] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return names


def _described(matrix: Matrix) -> str:
    sizes = ", ".join(map(str, matrix.there))
    return f"{matrix.title} {matrix.shape} with {sizes} bytes per element of gradient, parameter and state"


def _apart(told: Mapping[int, str]) -> dict[int, str]:
    """The lines of each rank that others have not, and how many matrices it has."""
    lines = {rank: text.splitlines() for rank, text in told.items()}
    common = set.intersection(*map(set, lines.values()))
    # Where only the order differs, all of them.
    apart = {rank: [line for line in own if line not in common] for rank, own in lines.items()}
    apart = apart if any(apart.values()) else lines
    return {rank: f"{len(lines[rank])} matrices, {first_few(apart[rank]) or 'none of its own'}" for rank in told}
