"""A `Report` as text: a line for each unit, equal neighbours together; what is not sharded; what looks wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .expected import Bytes
    from .report import Report, UnitReport

_HEADER = ("unit", "class", "params", "elements", "this rank", "dtypes", "parameters", "gradients", "optimizer", "full")
_LEFT = {0, 1, 5}
_SHOWN = 12


def render(report: Report) -> str:
    """The table. Byte columns: measured / expected."""
    rows: list[Sequence[str]] = [_HEADER]
    for _, same in groupby(report.units, key=_figures):
        group = list(same)
        name = _name(group[0]) if len(group) == 1 else f"{_name(group[0])} .. {_name(group[-1])}"
        rows.append((name, group[0].module_class + (f" x{len(group)}" if len(group) > 1 else ""), *_cells(group)))
    rows.append(("sum", "", *_cells(report.units)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(_aligned(row[i], widths[i], i) for i in range(len(_HEADER))).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *_below(report)])


def _below(report: Report) -> list[str]:
    placements = dict.fromkeys(placement for unit in report.units for placement in unit.placements)
    lines = [
        f"rank {report.rank}; bytes: measured now / expected between backward and zero_grad; dtypes: storage, compute, "
        f"reduce",
        *(f"sharded as {placement}" for placement in placements),
        f"expected peak: {human(report.peak_nbytes)} in {report.peak_moment}, without activations and optimizer; "
        f"kept for messages: {human(report.message_nbytes)}",
    ]
    kept = sum(unit.kept_nbytes for unit in report.units)
    if kept:
        live = sum(unit.kept_nbytes_live for unit in report.units)
        lines.append(
            f"kept between forward and backward, of an integer reshard_after_forward: {human(kept)}; now {human(live)}"
        )
    resident = [_name(unit) for unit in report.units if unit.resident]
    if resident:
        lines.append(f"kept full within set_resident_bytes: {', '.join(resident)}")
    for unit in report.units:
        lines += [f"tied: {' = '.join(names)}" for names in unit.tied]
    for item in report.unsharded[:_SHOWN]:
        trainable = ", trainable" if item.requires_grad else ""
        lines.append(f"not sharded: {item.kind} {item.name} {item.shape} {item.dtype}, {human(item.nbytes)}{trainable}")
    more = report.unsharded[_SHOWN:]
    if more:
        lines.append(f"not sharded: {len(more)} more, {human(sum(item.nbytes for item in more))}")
    return lines + [f"note: {note}" for note in report.notes]


def _figures(unit: UnitReport) -> tuple[object, ...]:
    """What units on one line have in common."""
    return (unit.module_class, *_cells([unit]), unit.placements)


def _cells(units: Sequence[UnitReport]) -> tuple[str, ...]:
    trainable, params = sum(u.num_trainable for u in units), sum(u.num_params for u in units)
    dtypes = [f"{'/'.join(u.storage_dtypes)} {'/'.join(u.compute_dtypes)} {'/'.join(u.reduce_dtypes)}" for u in units]
    return (
        str(params) if trainable == params else f"{params} ({trainable} trainable)",
        f"{sum(u.numel for u in units):,}",
        f"{sum(u.local_numel for u in units):,}",
        dtypes[0] if len(set(dtypes)) == 1 else "",
        *_bytes([u.measured for u in units], [u.expected for u in units]),
        human(sum(u.full_nbytes_live for u in units)),
    )


def _bytes(measured: Sequence[Bytes], expected: Sequence[Bytes]) -> list[str]:
    cells = []
    for kind in ("parameters", "gradients", "optimizer"):
        sides = []
        for parts in (measured, expected):
            values = [getattr(part, kind) for part in parts]
            sides.append("?" if None in values else human(sum(values)))
        cells.append("-" if sides == ["?", "?"] else " / ".join(sides))
    return cells


def _name(unit: UnitReport) -> str:
    return unit.name or "root"


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column in _LEFT else cell.rjust(width)


def human(nbytes: float) -> str:
    """Bytes in powers of 1024.

    >>> human(812), human(1536)
    ('812 B', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
