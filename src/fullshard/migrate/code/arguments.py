"""Tells what each argument of FSDP1, DDP and their helpers means here, and what is not rewritten: `arguments.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """`old`: an argument, or argument=VALUE. `new`: what is written instead, "" for nothing."""

    old: str
    verdict: str
    new: str
    reason: str


_READ: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _rows(table: str) -> tuple[Row, ...]:
    return tuple(Row(old, *cells) for old, cells in _READ[table].items())


FSDP1, STRATEGIES, MIXED_PRECISION = _rows("fsdp1"), _rows("strategies"), _rows("precision")
CPU_OFFLOAD, DDP, CALLS = _rows("offload"), _rows("ddp"), _rows("calls")
# In the order of their signatures: the position of an argument is its index here.
FSDP1_ARGUMENTS, DDP_ARGUMENTS = tuple(_READ["signatures"]["fsdp1"]), tuple(_READ["signatures"]["ddp"])
MIXED_PRECISION_ARGUMENTS = tuple(_READ["signatures"]["precision"])
# Names of torch's FSDP2 that fullshard has too; arguments in which seed 000 says that nothing is needed any more.
FSDP2_NAMES, REMOVED = tuple(_READ["signatures"]["fsdp2"]), tuple(_READ["signatures"]["removed"])
# Programs that keep FSDP1's class import it, and the names around it, from here.
ADAPTER = "fullshard.compat.fsdp1"
ADAPTER_NAMES, ADAPTER_REFUSES = tuple(_READ["adapter"]["names"]), dict(_READ["adapter"]["refuses"])
SHAPES: dict[str, list[str]] = _READ["shapes"]
TOLD: dict[str, str] = _READ["told"]

_TABLES = {"fsdp": FSDP1 + STRATEGIES, "ddp": DDP, "precision": MIXED_PRECISION, "offload": CPU_OFFLOAD, "calls": CALLS}


def row(table: str, old: str) -> Row:
    """The row of an argument, or of argument=VALUE."""
    return next(each for each in _TABLES[table] if each.old == old)
