"""Parameters that several modules share, found before anything is changed, and the units that keep them whole.

`fully_shard` cuts a parameter for one unit. So all places of a tied parameter have to be in one: the lowest common unit
around them (seed 004: the parent module is sharded instead of those that share), or one unit of a list of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..param import local_data
from .tree import Tree, lowest_common, names_above
from .wrapping import ROOT, UnitPlan, crossing_units


@dataclass(frozen=True)
class Tie:
    """A parameter under several names. `unit`: where it is sharded; `instead_of`: units that were given up for that."""

    names: tuple[str, ...]
    unit: str
    instead_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        moved = f", instead of the units {', '.join(self.instead_of)}" if self.instead_of else ""
        return f"tied: {' = '.join(self.names)} in the unit {self.unit}{moved}"


def resolve_ties(tree: Tree, plans: Sequence[UnitPlan], how: str) -> tuple[list[UnitPlan], list[Tie]]:
    """The units that keep every tied parameter in one of them, and the ties.

    how: "lowest_common": units with a part of the places are given up for one at the lowest module around all places
        that has a forward; "one_unit": they, or the modules with the places, become one unit of a list; "refuse".
    Raises `ValueError` for ties between units with "refuse", and for parameters that are other objects over the same
    memory, which no unit can keep tied.
    """
    slots = {parameter: places for parameter, places in tree.slots().items() if len(places) > 1}
    _refuse_views(tree)
    units = list(plans)
    given_up: dict[nn.Parameter, dict[str, None]] = {}
    # One tie may move the places of another one, until a unit is around them all.
    while (divided := _divided(tree, units, slots)) is not None:
        modules = [module for module, _ in slots[divided]]
        if how == "refuse":
            owners = sorted({_unit_of(tree, units, module).name for module in modules})
            raise ValueError(
                f'wrap.ties = "refuse": expected no parameter in two units, found {" = ".join(_names(slots[divided]))} '
                f'in {" and ".join(owners)}; put these modules into one unit, or use ties = "lowest_common"'
            )
        before = units
        units = (_at_lowest_common if how == "lowest_common" else _in_one_unit)(tree, units, modules)
        while crossing := crossing_units(tree, units):
            units = [plan for plan in units if plan not in crossing] + [_joined(tree, crossing, [])]
        gone = given_up.setdefault(divided, {})
        gone |= dict.fromkeys(plan.name for plan in before if plan not in units)
    ties = [
        Tie(_names(places), _unit_of(tree, units, places[0][0]).name, tuple(given_up.get(parameter, ())))
        for parameter, places in slots.items()
    ]
    return units, ties


def _divided(
    tree: Tree, units: Sequence[UnitPlan], slots: Mapping[nn.Parameter, Sequence[tuple[str, str]]]
) -> nn.Parameter | None:
    """A parameter whose places are in several of `units`."""
    for parameter, places in slots.items():
        if len({_unit_of(tree, units, module).modules for module, _ in places}) > 1:
            return parameter
    return None


def _names(places: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{module}.{attribute}" if module else attribute for module, attribute in places)


def _unit_of(tree: Tree, units: Sequence[UnitPlan], name: str) -> UnitPlan:
    """The unit that has the parameters of the module `name`: that of the nearest module around it."""
    owners = {tree.modules[member]: plan for plan in units for member in plan.modules}
    return next((owners[tree.modules[above]] for above in names_above(name) if tree.modules[above] in owners), ROOT)


def _at_lowest_common(tree: Tree, units: list[UnitPlan], modules: Sequence[str]) -> list[UnitPlan]:
    common = next(name for name in names_above(lowest_common(modules)) if tree.can_be_unit(name) or not name)
    inside = {
        tree.modules[name]
        for module in modules
        for name in names_above(module)
        if name != common and (not common or name.startswith(f"{common}."))
    }
    kept = [plan for plan in units if not inside & {tree.modules[name] for name in plan.modules}]
    known = {name for plan in kept for name in plan.modules}
    return kept if not common or tree.names[tree.modules[common]] in known else [*kept, UnitPlan((common,), "tied")]


def _in_one_unit(tree: Tree, units: list[UnitPlan], modules: Sequence[str]) -> list[UnitPlan]:
    """The units with the places, and modules with places in none of them, as one; of nested ones the outermost."""
    around = [_unit_of(tree, units, module) for module in modules]
    shared = lowest_common(modules)
    members: list[str] = []
    joined: list[UnitPlan] = []
    for module, plan in zip(modules, around, strict=True):
        # A unit around all places stays what it is: the module itself joins.
        encloses = any(shared == name or shared.startswith(f"{name}.") or not name for name in plan.modules)
        if encloses:
            members.append(module)
        else:
            joined.append(plan)
    unit = _joined(tree, joined, members)
    rest = [plan for plan in units if plan not in joined and not {*plan.modules} <= {*unit.modules}]
    return rest if unit.modules == ("",) else [*rest, unit]


def _joined(tree: Tree, plans: Sequence[UnitPlan], more: Sequence[str]) -> UnitPlan:
    """One unit of the modules of `plans` and `more`; of nested ones the outermost."""
    members = {name for plan in plans for name in plan.modules} | {*more}
    outermost = [name for name in tree.modules if name in members and not members & {*list(names_above(name))[1:]}]
    arguments = {key: value for plan in plans for key, value in plan.arguments.items()}
    return UnitPlan(tuple(outermost), "tied", arguments, any(plan.last for plan in plans))


def _refuse_views(tree: Tree) -> None:
    """Raise for parameters that overlap in memory without being one object."""
    last: tuple[str, int, bool] | None = None
    spans = []
    for parameter, places in tree.slots().items():
        local = local_data(parameter)
        if not local.is_meta and local.numel() and type(local) in (Tensor, nn.Parameter):
            start = local.data_ptr()
            spans.append((start, start + local.numel() * local.itemsize, _names(places)[0], parameter.requires_grad))
    for start, end, name, trains in sorted(spans):
        if last is not None and start < last[1] and (trains or last[2]):
            raise ValueError(
                f"{last[0]} and {name}: expected tied parameters to be one object, found two over the same memory; tie "
                f"them as `a.weight = b.weight` does, or give one a copy"
            )
        if last is None or end > last[1]:
            last = name, end, trains


def refuse_untied(before: Sequence[Tie], model: nn.Module) -> None:
    """Raise `RuntimeError` if names of `before` are no longer one parameter each."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for tie in before:
        if len({id(now[name]) for name in tie.names if name in now}) > 1:
            raise RuntimeError(
                f"expected {' = '.join(tie.names)} to stay one parameter, found several; something replaced it on one "
                f"module alone: tie them again before prepare_fully_shard"
            )
