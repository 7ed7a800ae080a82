"""Which modules become units, and where tied parameters go: decided before anything is changed, without ranks."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.migrate import ConfigError, read_config
from fullshard.migrate.config import WrapKeys
from fullshard.migrate.ties import refuse_untied, resolve_ties
from fullshard.migrate.tree import Tree, lowest_common, names_above
from fullshard.migrate.wrapping import UnitPlan, WrapFn, choose_units, inner_first
from tests.harness.models import Transformer


def units_of(model: nn.Module, wrap: Any = None, wrap_fn: WrapFn | None = None) -> list[str]:
    keys = read_config({} if wrap is None else {"wrap": wrap}).wrap
    return [plan.name for plan in choose_units(Tree(model), keys, wrap_fn)]


class Named(Transformer):
    _no_split_modules = ["_Attention", "Absent"]


class Marked(nn.Module):
    """As Composer's models: a child that answers for its parts, one that is marked, one that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Answering()
        self.head = nn.Linear(4, 4)
        self.head._fsdp_wrap = True  # type: ignore[assignment]
        self.tail = nn.Linear(4, 4)
        self.tail._fsdp_wrap = False  # type: ignore[assignment]
        self.metric = nn.Identity()


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self) -> None: ...

    def fsdp_wrap_fn(self, module: nn.Module) -> bool | dict[str, Any] | None:
        if module is self:
            return None
        return {"reshard_after_forward": False} if module is self.second else False


BLOCKS = ["layers.0", "layers.1", "layers.2"]
MLP_2 = ["layers.2.mlp"]
ENDS = ["embedding", *BLOCKS, "norm+head"]


@pytest.mark.parametrize(
    ("model", "wrap", "units"),
    [
        (Transformer, None, ENDS),
        (Transformer, {"group_ends": False}, BLOCKS),
        (Transformer, "children", ["embedding", *BLOCKS, "norm", "head"]),
        (Transformer, ["_Block"], ENDS),
        (Transformer, ["_Residual"], ["embedding", *(f"{b}.mlp" for b in BLOCKS), "norm+head"]),
        (Named, None, ["embedding", *(f"{b}.attention" for b in BLOCKS), "norm+head"]),
        (Named, "no_split_modules", ["embedding", *(f"{b}.attention" for b in BLOCKS), "norm+head"]),
        (Transformer, {"min_params": 1000}, BLOCKS),
        (Transformer, {"min_params": 600}, [f"{b}.mlp" for b in BLOCKS]),
        (Transformer, {"plan": ["layers.*", ["embedding", "head"]]}, ["embedding+head", *BLOCKS]),
        (Transformer, {"plan": ["layers.*.mlp", "layers.1"]}, ["layers.0.mlp", "layers.1", "layers.1.mlp"] + MLP_2),
        (Transformer, "none", []),
        (Marked, None, ["body.second", "head"]),
        (Marked, "attributes", ["body.second", "head"]),
        (Marked, "children", ["body", "body.second", "head"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None, ["0", "2"]),
        (lambda: nn.MultiheadAttention(8, 2), {"min_params": 10}, None),
    ],
)  # fmt: skip
def test_units(model: Any, wrap: Any, units: list[str] | None) -> None:
    if units is None:  # the projection's forward never runs, so it is no unit, however large
        with pytest.raises(ValueError, match="at least 10 elements"):
            units_of(model(), wrap)
    else:
        assert units_of(model(), wrap) == units


def test_the_forward_of_a_function_and_its_arguments() -> None:
    def wrap_fn(name: str, module: nn.Module) -> bool | Mapping[str, Any]:
        return (
            {"reshard_after_forward": 2} if name == "layers.0" else name.startswith("layers.") and name.count(".") == 1
        )

    model = Transformer()
    plans = choose_units(Tree(model), WrapKeys(), wrap_fn)
    assert [plan.name for plan in plans] == BLOCKS
    assert plans[0].arguments == {"reshard_after_forward": 2} and not plans[1].arguments
    module = types.ModuleType("wrapping_of_a_test")
    module.units = wrap_fn  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        assert units_of(model, {"function": f"{module.__name__}:units"}) == BLOCKS
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("model", "wrap", "wrap_fn", "error", "told"),
    [
        (nn.ReLU, None, None, ValueError, "found none, so nothing would be sharded apart"),
        (nn.Linear, None, None, ValueError, "a list or sequence of modules"),
        (nn.Linear, "children", None, ValueError, "direct children with parameters in Linear"),
        (Transformer, "attributes", None, ValueError, "_fsdp_wrap = True"),
        (Transformer, "no_split_modules", None, ValueError, "_no_split_modules names"),
        (Transformer, {"by": "size"}, None, ValueError, "at least 100,000,000 elements"),
        (Transformer, None, lambda name, module: False, ValueError, "the function says yes"),
        (Transformer, ["_Blok"], None, ValueError, "found no _Blok; the nearest is _Block"),
        (Transformer, ["_Block", "Absent"], None, ValueError, "found no Absent"),
        (Transformer, {"plan": ["layer.*"]}, None, ValueError, "which matches none; the nearest is layers."),
        (Transformer, {"plan": ["layers"]}, None, ValueError, "write layers.* for its members"),
        (Transformer, {"plan": ["layers.*", "layers.0"]}, None, ValueError, "in 'layers.*' and 'layers.0'"),
        (Transformer, {"function": "no_such_module:f"}, None, ConfigError, "cannot be imported"),
        (Transformer, "children", lambda name, module: True, ConfigError, "beside the argument wrap_fn"),
        (Transformer, None, lambda name, module: name == "layers", ValueError, "expected a module with a forward"),
        (Transformer, None, lambda name, module: 3, TypeError, "embedding: expected True, False or arguments"),
        (Transformer, None, lambda name, module: {"reshard_after": 1}, ValueError, "nearest is reshard_after_forward"),
    ],
)  # fmt: skip
def test_what_matches_nothing_or_the_wrong_thing(
    model: Any, wrap: Any, wrap_fn: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as raised:
        units_of(model(2, 2) if model is nn.Linear else model(), wrap, wrap_fn)
    assert told in str(raised.value)


def test_inner_units_come_first_and_crossing_ones_are_refused() -> None:
    tree = Tree(Transformer())
    plans = [UnitPlan(("layers.0", "head"), ""), UnitPlan(("layers.0.mlp",), ""), UnitPlan(("layers.0.mlp.up",), "")]
    assert [plan.name for plan in inner_first(tree, plans)] == ["layers.0.mlp.up", "layers.0.mlp", "layers.0+head"]
    crossing = [UnitPlan(("layers.0", "layers.1.mlp"), ""), UnitPlan(("layers.1", "layers.0.mlp"), "")]
    with pytest.raises(ValueError, match="layers.0\\+layers.1.mlp and layers.1\\+layers.0.mlp"):
        inner_first(tree, crossing)


def test_names() -> None:
    assert list(names_above("")) == [""]
    assert lowest_common(["a.b", "a.bc"]) == "a" and lowest_common(["a", "b"]) == "" and lowest_common(["", "a"]) == ""


def test_a_module_that_holds_itself_ends() -> None:
    model: Any = Transformer()
    model.layers[0].back = model
    assert units_of(model, ["_Block"]) == ENDS


# ---- ties ------------------------------------------------------------------------------------------------------------


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self) -> None: ...


class Inner(Leaf):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def tree_of(*ties: str) -> Tree:
    """m1{m2{m3, m4}, m5{m6, m7}}, each with a parameter `w` of its own; m1 is the model. A tie "m3=m6" makes m6's that
    of m3."""
    made: dict[str, nn.Module] = {name: Leaf() for name in ("m3", "m4", "m6", "m7")}
    made["m2"] = Inner(m3=made["m3"], m4=made["m4"])
    made["m5"] = Inner(m6=made["m6"], m7=made["m7"])
    made["m1"] = Inner(m2=made["m2"], m5=made["m5"])
    for tie in ties:
        first, second = tie.split("=")
        made[second].w = made[first].w
    return Tree(made["m1"])


PATHS = {"m2": "m2", "m3": "m2.m3", "m4": "m2.m4", "m5": "m5", "m6": "m5.m6", "m7": "m5.m7"}
# (ties, units asked for, units with "lowest_common", units with "one_unit"); root is always there.
TIES: list[tuple[str, str, str, str]] = [
    # no tie, or one within a unit
    ("", "m2 m5", "m2 m5", "m2 m5"),
    ("m3=m4", "m2 m5", "m2 m5", "m2 m5"),
    ("m3=m4", "", "", ""),
    ("m3=m6", "", "", ""),
    ("m2=m3", "m2", "m2", "m2"),
    ("m1=m2", "m5", "m5", "m5"),
    ("m3=m4", "m6", "m6", "m6"),
    # siblings, both or one of them asked for
    ("m3=m4", "m3 m4", "m2", "m3+m4"),
    ("m3=m4", "m3", "m2", "m3+m4"),
    ("m3=m4", "m3 m4 m5", "m2 m5", "m3+m4 m5"),
    ("m3=m4", "m2 m3 m4", "m2", "m2 m3+m4"),
    # parent and child
    ("m2=m3", "m2 m3", "m2", "m2"),
    ("m2=m3", "m3", "m2", "m2"),
    ("m1=m3", "m3", "", ""),
    ("m1=m3", "m2 m3", "", ""),
    # a tie that leaves the branch
    ("m3=m6", "m2", "", "m2+m6"),
    ("m3=m6", "m2 m5", "", "m2+m5"),
    ("m3=m6", "m3 m6", "", "m3+m6"),
    ("m3=m6", "m3 m5", "", "m3+m5"),
    ("m2=m5", "m2 m5", "", "m2+m5"),
    ("m2=m5", "m3 m6", "m3 m6", "m3 m6"),
    # nested: units inside of those that are given up stay
    ("m2=m5", "m2 m3 m5", "m3", "m2+m5 m3"),
    ("m2=m6", "m2 m3 m6", "m3", "m2+m6 m3"),
    # several, chained and crossing
    ("m3=m4 m4=m6", "m3 m4 m6", "", "m3+m4+m6"),
    ("m3=m4 m6=m7", "m3 m4 m6 m7", "m2 m5", "m3+m4 m6+m7"),
    ("m3=m6 m4=m7", "m3 m4 m6 m7", "", "m3+m6 m4+m7"),
    ("m3=m6 m4=m7", "m2 m5", "", "m2+m5"),
    ("m3=m6 m4=m7", "m2 m6 m7", "", "m2+m6+m7"),
    ("m2=m5 m3=m4", "m2 m3 m4 m5", "", "m2+m5 m3+m4"),
    ("m2=m4 m3=m6", "m3 m4 m6", "", "m2 m3+m6"),
]  # fmt: skip


@pytest.mark.parametrize(("ties", "asked", "common", "one"), TIES, ids=[f"{t or 'none'}: {a}" for t, a, _, _ in TIES])
def test_tied_parameters_are_in_one_unit(ties: str, asked: str, common: str, one: str) -> None:
    plans = [UnitPlan((PATHS[name],), "") for name in asked.split()]
    for how, expected in (("lowest_common", common), ("one_unit", one)):
        tree = tree_of(*ties.split())
        units, found = resolve_ties(tree, plans, how)
        wanted = {"+".join(PATHS[name] for name in unit.split("+")) for unit in expected.split()}
        assert {plan.name for plan in units} == wanted, how
        inner_first(tree, units)
        for tie in found:
            assert tie.unit in {*wanted, "root"} and bool(tie.instead_of) <= ({plan.name for plan in plans} != wanted)
    divided = {asked} != {common} or {asked} != {one}
    tree = tree_of(*ties.split())
    if divided:
        with pytest.raises(ValueError, match="expected no parameter in two units"):
            resolve_ties(tree, plans, "refuse")
    else:
        assert resolve_ties(tree, plans, "refuse")[0] == plans


def test_every_tied_place_ends_in_one_unit_however_ties_and_units_lie() -> None:
    """All pairs of ties and all sets of units on the tree."""
    names = [*PATHS]
    pairs = [f"{a}={b}" for i, a in enumerate(["m1", *names]) for b in names[i:] if a != b]
    for first in pairs[::2]:
        for second in pairs[1::3]:
            for chosen in range(0, 1 << len(names), 5):
                plans = [UnitPlan((PATHS[name],), "") for bit, name in enumerate(names) if chosen >> bit & 1]
                for how in ("lowest_common", "one_unit"):
                    tree = tree_of(first, second)
                    units, ties = resolve_ties(tree, plans, how)
                    inner_first(tree, units)
                    members = [name for plan in units for name in plan.modules]
                    assert len(members) == len(set(members))
                    for tie in ties:
                        owners = set()
                        for name in tie.names:
                            above = names_above(name.rpartition(".")[0])
                            at = next((a for a in above if a in members), "")
                            owners.add(next((plan.name for plan in units if at in plan.modules), "root"))
                        assert owners == {tie.unit}, (first, second, chosen, how)


def test_a_module_under_two_names_is_one_and_ties_nothing() -> None:
    model = Transformer()
    model.layers[2] = model.layers[0]
    tree = Tree(model)
    plans = choose_units(tree, WrapKeys())
    units, ties = resolve_ties(tree, plans, "refuse")
    assert [plan.name for plan in units] == ["embedding", "layers.0", "layers.1", "norm+head"]
    assert all(tie.unit == "layers.0" for tie in ties) and len(ties) == 8


def test_a_view_of_another_parameter_is_refused_before_anything_is_changed() -> None:
    model = Transformer()
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    with pytest.raises(ValueError, match="embedding.weight and head.weight: expected tied parameters to be one object"):
        resolve_ties(Tree(model), [], "lowest_common")


def test_a_tie_that_something_cut_is_named() -> None:
    model = Transformer(tied=True)
    _, ties = resolve_ties(Tree(model), [], "refuse")
    refuse_untied(ties, model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="embedding.weight = head.weight to stay one parameter"):
        refuse_untied(ties, model)


def test_a_tie_is_told() -> None:
    tree = Tree(Transformer(tied=True))
    units, ties = resolve_ties(tree, choose_units(tree, WrapKeys()), "lowest_common")
    assert [plan.name for plan in units] == BLOCKS
    assert str(ties[0]) == (
        "tied: embedding.weight = head.weight in the unit root, instead of the units embedding, norm+head"
    )
