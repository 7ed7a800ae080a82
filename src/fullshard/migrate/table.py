"""The table of units that `prepare_fully_shard` prints, as rows and as lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.names import clean_name
from ..engine.unit import module_units
from ..observe import report
from ..observe.report import human
from .tree import Tree, class_of
from .wrapping import UnitPlan


@dataclass(frozen=True)
class UnitRow:
    """One unit. nbytes: of its whole parameters in their own dtypes. padding: the share of the ranks' buffers that is
    no parameter. reshard_after_forward, compute, reduce: what holds for it, overrides included."""

    name: str
    module_class: str
    why: str
    num_params: int
    numel: int
    nbytes: int
    padding: float
    reshard_after_forward: bool | int | None
    compute: str
    reduce: str


def rows_of(tree: Tree, plans: Iterable[UnitPlan], arguments: Mapping[str, Mapping[str, Any]]) -> tuple[UnitRow, ...]:
    """The units in the order of the model's modules."""
    # Of one stage of several there may be no module where another has a unit.
    plan_of = {tree.modules[name]: plan for plan in plans for name in plan.modules if name in tree.modules}
    parameters = {clean_name(name): p for name, p in tree.model.named_parameters(remove_duplicate=False)}
    rows = []
    for unit, found in zip(module_units(tree.model), report(tree.model).units, strict=True):
        plan = plan_of[unit.module]
        own = [parameters[name] for name in found.param_names]
        room = found.world * found.padded_local_numel
        cut = sum(math.prod(param.layout.shape) for param in unit.params)  # of what this rank's tp part has
        rows.append(
            UnitRow(
                name=plan.name,
                module_class="+".join(class_of(tree.modules[name]) for name in plan.modules),
                why=plan.why,
                num_params=len(own),
                numel=sum(p.numel() for p in own),
                nbytes=sum(p.numel() * p.element_size() for p in own),
                padding=1 - cut / room if room else 0.0,
                reshard_after_forward=arguments[plan.name]["reshard_after_forward"],
                compute="+".join(found.compute_dtypes),
                reduce="+".join(found.reduce_dtypes),
            )
        )
    return tuple(rows)


def table_of(units: Sequence[UnitRow]) -> list[str]:
    """The lines of the table, with a head."""
    head = ("unit", "module", "why", "parameters", "elements", "bytes", "padding", "reshard", "compute", "reduce")
    rows = [head, *map(_cells, units)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines


def _cells(row: UnitRow) -> tuple[str, ...]:
    reshard = {None: "default", True: "yes", False: "no"}
    kept = row.reshard_after_forward
    return (
        row.name,
        row.module_class,
        row.why,
        str(row.num_params),
        f"{row.numel:,}",
        human(row.nbytes),
        f"{row.padding:.1%}",
        reshard[kept] if kept is None or type(kept) is bool else f"1/{kept}",
        row.compute,
        row.reduce,
    )
