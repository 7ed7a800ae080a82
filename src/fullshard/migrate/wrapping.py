"""Decides from the configuration which modules become units, before anything is changed.

Sources: FSDP1's `ModuleWrapPolicy`, `size_based_auto_wrap_policy`, `CustomPolicy`; Hugging Face's `_no_split_modules`;
Composer's `_fsdp_wrap` and `fsdp_wrap_fn`. The ends of a model (embeddings apart, final norm and head together) are
divided as torchtitan and Accelerate divide them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torch import nn

from ..api import fully_shard
from ..keys import ConfigError
from ..program import blocks_of
from .config import WrapKeys
from .tree import Tree, names_above, nearest

# Answers whether a module is a unit; a dict says yes, and has arguments of `fully_shard`, or keys of an override.
WrapFn = Callable[[str, nn.Module], "bool | Mapping[str, Any] | None"]


@dataclass(frozen=True)
class UnitPlan:
    """One call of `fully_shard` to come: the names of its modules ("" is the root), and what it gets by itself.

    last: backward begins with it, so resharding it after forward would only gather it again at once.
    """

    modules: tuple[str, ...]
    why: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False

    @property
    def name(self) -> str:
        return "+".join(name or "root" for name in self.modules)


ROOT = UnitPlan(("",), "root")


def choose_units(tree: Tree, keys: WrapKeys, wrap_fn: WrapFn | None = None) -> list[UnitPlan]:
    """The units below the root, in the order of the model's modules.

    Raises `ValueError` if nothing matched, naming what is there; `ConfigError` for a function that cannot be imported.
    """
    by = keys.by
    if wrap_fn is not None:
        if by not in ("auto", "function") or keys.function:
            raise ConfigError(f'wrap.by = "{by}": expected "function" beside the argument wrap_fn; leave one out')
        by = "function"
    nested = by != "auto"
    if by == "auto":
        by = _automatic(tree)
    found = _CHOICES[by](tree, keys) if wrap_fn is None else _by_function(tree, wrap_fn)
    if not nested and by in ("blocks", "no_split_modules"):
        # As `fullshard plan` and `verify` choose: a class inside of another that is named is no unit of its own.
        found = _outermost(found)
    found = list({plan.modules: plan for plan in found}.values())  # a module may be twice in a list
    if by not in ("plan", "none"):
        found = [plan for plan in found if tree.has_parameters(plan.modules[0])]
    if not found and by != "none":
        raise ValueError(f"wrap.by = {by!r}: {_nothing(tree, by, keys)}")
    if keys.group_ends and by in ("blocks", "classes", "no_split_modules"):
        found = _with_ends(tree, found)
    order = _order(tree)
    return sorted(found, key=lambda plan: order[plan.modules[0]])


def _outermost(found: list[UnitPlan]) -> list[UnitPlan]:
    names = {plan.modules[0] for plan in found}
    inside = {name for name in names if any(name.startswith(f"{other}.") for other in names)}
    return [plan for plan in found if plan.modules[0] not in inside]


def _order(tree: Tree) -> dict[str, int]:
    return {name: position for position, name in enumerate(tree.modules)}


def _automatic(tree: Tree) -> str:
    if any(_mark(module) is not None or hasattr(module, "fsdp_wrap_fn") for module in tree.names):
        return "attributes"
    return "no_split_modules" if _no_split(tree) else "blocks"


def _no_split(tree: Tree) -> set[str]:
    named = {name for module in tree.names for name in getattr(module, "_no_split_modules", None) or ()}
    return named & set(tree.classes())


def _nothing(tree: Tree, by: str, keys: WrapKeys) -> str:
    """Says what was not found, and what could be asked for instead."""
    kind = type(tree.model).__name__
    with_parameters = [name for name in tree.names.values() if name and tree.has_parameters(name)]
    looked = {
        "children": "direct children with parameters",
        "no_split_modules": "modules that _no_split_modules names",
        "attributes": "modules with _fsdp_wrap = True, or for which an fsdp_wrap_fn says yes",
        "size": f"modules of at least {keys.min_params:,} elements",
        "function": "modules for which the function says yes",
        "blocks": "a list or sequence of modules with parameters",
    }[by]
    classes = ", ".join(sorted({type(tree.modules[name]).__name__ for name in with_parameters})[:8]) or "none"
    return (
        f"expected {looked} in {kind}, found none, so nothing would be sharded apart; choose among its classes "
        f'({classes}) with wrap.classes, or shard it as one unit with wrap.by = "none"'
    )


# ---- choices ---------------------------------------------------------------------------------------------------------


def _by_blocks(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    return [UnitPlan((tree.names[block],), "block") for block in blocks_of(tree.model) if block in tree.names]


def _by_children(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    """Direct children, and the members of those that are lists; marks on modules go before."""
    answers = {name: True for name in tree.children()}
    return _answered(tree, {**answers, **_marks(tree)}, "child")


def _by_classes(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    plans = []
    for wanted in keys.classes:
        found = tree.of_class(wanted.rpartition(".")[2])
        if not found:
            raise ValueError(
                f"wrap.classes: expected classes of modules in {type(tree.model).__name__}, found no "
                f"{wanted}{nearest(wanted, tree.classes())}"
            )
        plans += [UnitPlan((name,), wanted) for name in found if tree.can_be_unit(name)]
    return plans


def _by_no_split(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    return [UnitPlan((name,), wanted) for wanted in sorted(_no_split(tree)) for name in tree.of_class(wanted)]


def _by_attributes(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    return _answered(tree, _marks(tree), "attribute")


def _marks(tree: Tree) -> dict[str, Any]:
    """Returns what attributes say of modules: `_fsdp_wrap` of the module itself, else the `fsdp_wrap_fn` of the nearest
    module around it that has one."""
    answers: dict[str, Any] = {}
    for module, name in tree.names.items():
        if not name:
            continue
        if (mark := _mark(module)) is not None:
            answers[name] = mark
            continue
        above = (tree.modules[outer] for outer in names_above(name))
        asked = next((outer for outer in above if callable(getattr(outer, "fsdp_wrap_fn", None))), None)
        if asked is not None:
            answer = asked.fsdp_wrap_fn(module)  # type: ignore[operator]
            # A child asked about itself, as by Composer, may leave the answer open.
            answers |= {} if answer is None else {name: answer}
    return answers


def _mark(module: nn.Module) -> Any:
    return getattr(module, "_fsdp_wrap", None)


def _by_size(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    plans: list[UnitPlan] = []

    def left(name: str) -> set[nn.Parameter]:
        """The parameters at and below `name` that are in no unit yet."""
        module = tree.modules[name]
        found = set(module.parameters(recurse=False))
        for child, _ in module.named_children():
            found |= left(f"{name}.{child}" if name else child)
        # Its forward reads parameters of its parts, which do not run.
        inside = any(
            isinstance(tree.modules[outer], nn.MultiheadAttention) for outer in names_above(name) if outer != name
        )
        if name and not inside and tree.can_be_unit(name) and sum(p.numel() for p in found) >= keys.min_params:
            plans.append(UnitPlan((name,), "size"))
            return set()
        return found

    left("")
    return plans


def _by_named_function(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    module_name, _, name = keys.function.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'wrap.function = "{keys.function}": cannot be imported: {error}') from None
    return _by_function(tree, found)


def _by_function(tree: Tree, wrap_fn: WrapFn) -> list[UnitPlan]:
    if not callable(wrap_fn):
        raise TypeError(f"wrap_fn: expected a function of (name, module), found {wrap_fn!r}; pass the function itself")
    return _answered(tree, {name: wrap_fn(name, module) for module, name in tree.names.items() if name}, "function")


def _answered(tree: Tree, answers: Mapping[str, Any], why: str) -> list[UnitPlan]:
    plans = []
    for name, answer in answers.items():
        if not isinstance(answer, (bool, Mapping, type(None))):
            raise TypeError(
                f"{name}: expected True, False or arguments of fully_shard as a dict, found {answer!r} from {why}"
            )
        if isinstance(answer, Mapping):
            _check_arguments(name, answer)
        if isinstance(answer, Mapping) or answer:
            if not tree.can_be_unit(name):
                raise ValueError(
                    f"{name}: expected a module with a forward, found {type(tree.modules[name]).__name__}, whose "
                    f"forward never runs; choose its members"
                )
            plans.append(UnitPlan((name,), why, dict(answer) if isinstance(answer, Mapping) else {}))
    return plans


ARGUMENTS = tuple(name for name in inspect.signature(fully_shard).parameters if name != "module")


def _check_arguments(name: str, given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in ARGUMENTS:
            raise ValueError(
                f"{name}: expected arguments of fully_shard, found {key!r}{nearest(str(key), ARGUMENTS)}; those of all "
                f"units are in the configuration"
            )


def _by_plan(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    plans: list[UnitPlan] = []
    taken: dict[str, object] = {}
    for entry in keys.plan:
        found = []
        for pattern in (entry,) if isinstance(entry, str) else entry:
            names = tree.matching(pattern)
            if not names:
                raise ValueError(
                    f"wrap.plan: expected names of modules of {type(tree.model).__name__}, found {pattern!r}, which "
                    f"matches none{nearest(pattern, (name for name in tree.names.values() if name))}"
                )
            found += names
        for name in found:
            if not tree.can_be_unit(name):
                raise ValueError(
                    f"wrap.plan: expected modules with a forward, found {name} ({type(tree.modules[name]).__name__}); "
                    f"write {name}.* for its members"
                )
            if name in taken:
                raise ValueError(f"wrap.plan: expected each module once, found {name} in {taken[name]!r} and {entry!r}")
            taken[name] = entry
        plans += (
            [UnitPlan((name,), "plan") for name in found]
            if isinstance(entry, str)
            else [UnitPlan(tuple(found), "plan")]
        )
    return plans


def _none(tree: Tree, keys: WrapKeys) -> list[UnitPlan]:
    return []


_CHOICES: dict[str, Callable[[Tree, WrapKeys], list[UnitPlan]]] = {
    "blocks": _by_blocks,
    "children": _by_children,
    "classes": _by_classes,
    "no_split_modules": _by_no_split,
    "attributes": _by_attributes,
    "size": _by_size,
    "function": _by_named_function,
    "plan": _by_plan,
    "none": _none,
}


# ---- ends ------------------------------------------------------------------------------------------------------------


def _with_ends(tree: Tree, plans: list[UnitPlan]) -> list[UnitPlan]:
    """Embeddings before the blocks as units, and what comes after them (final norm, head) as one."""
    order = _order(tree)
    units = {name for plan in plans for name in plan.modules}
    first, last = min(map(order.__getitem__, units)), max(map(order.__getitem__, units))
    rest = [
        name
        for module, name in tree.names.items()
        if name and not units & {*names_above(name)} and next(module.parameters(recurse=False), None) is not None
    ]
    rest = [name for name in rest if tree.can_be_unit(name) and not _beside_units(tree, name, units)]
    ends = [
        UnitPlan((name,), "embedding")
        for name in rest
        if order[name] < first and isinstance(tree.modules[name], nn.Embedding)
    ]
    after = [name for name in rest if order[name] > last]
    outermost = tuple(name for name in after if not {*after} & {*list(names_above(name))[1:]})
    if outermost:
        ends.append(UnitPlan(outermost, "head" if len(outermost) == 1 else "norm and head", last=True))
    return [*plans, *ends]


def _beside_units(tree: Tree, name: str, units: set[str]) -> bool:
    """Whether it is in a member of a list, with units in it: a part of a block, not of the model's ends."""
    for above in list(names_above(name))[:-1]:
        outer = tree.modules[above.rpartition(".")[0]]
        if isinstance(outer, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            if any(unit.startswith(f"{above}.") for unit in units):
                return True
    return False


# ---- order -----------------------------------------------------------------------------------------------------------


def inner_first(tree: Tree, plans: list[UnitPlan]) -> list[UnitPlan]:
    """`plans` in an order in which no module is sharded after one around it. Raises `ValueError` if there is none."""
    crossing = crossing_units(tree, plans)
    if crossing:
        names = " and ".join(plan.name for plan in crossing)
        raise ValueError(f"expected units of which one is inside the other or apart, found {names}; divide them")
    return [plans[number] for number in TopologicalSorter(_inside(tree, plans)).static_order()]


def crossing_units(tree: Tree, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Units of which each is in part inside the next one, and the last in the first; empty if there are none."""
    try:
        TopologicalSorter(_inside(tree, plans)).prepare()
    except CycleError as error:
        return [plans[number] for number in sorted(set(error.args[1]))]
    return []


def _inside(tree: Tree, plans: Sequence[UnitPlan]) -> dict[int, set[int]]:
    """Returns for each of `plans` those with a module inside of it, all by number."""
    of = {tree.modules[name]: number for number, plan in enumerate(plans) for name in plan.modules}
    inside: dict[int, set[int]] = {number: set() for number in range(len(plans))}
    for name, module in tree.modules.items():
        number = of.get(module)
        if number is not None:
            around = {of.get(tree.modules[above]) for above in names_above(name)} - {None, number}
            for outer in around:
                inside[outer or 0].add(number)
    return inside
