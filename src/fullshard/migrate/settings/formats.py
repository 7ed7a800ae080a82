"""Finds the library that a configuration file belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verdict import MigrationError
from .table import FORMATS, ROWS, Format, keys_of

# Files of these have tables of these keys, which others have as texts, lists or switches.
_TABLES = {"composer": ("fsdp", "fsdp2")}
_NO_TABLES = {"hf": ("fsdp",), "axolotl": ("fsdp",)}


def find_format(path: str, suffix: str, table: Mapping[str, Any], name: str | None) -> Format:
    """The format `name`, or the one whose keys the table has. Raises `MigrationError`."""
    if name is not None:
        if name == "llamafactory" and "dist_config" in table:
            name = "llamafactory-v1"
        return FORMATS[name]
    scores = {each.name: _score(each, table) for each in FORMATS.values() if suffix in each.suffixes}
    best = max(scores, key=lambda each: scores[each], default="")
    if not best or scores[best] == 0:
        shown = ", ".join(list(table)[:4]) or "nothing"
        titles = ", ".join(each.title for each in FORMATS.values())
        raise MigrationError(
            f"{path}: expected a configuration of one of these: {titles}; found keys {shown}; if it is one of them, "
            f"name it by fullshard migrate --format"
        )
    return FORMATS[best]


def _score(each: Format, table: Mapping[str, Any]) -> int:
    """How surely a table is in this format: its signs count most, then other keys that it has rows for."""
    keys = {str(key) for key in table}
    known = {name.partition(".")[0] for name in keys_of(each)}
    if each.name in ("composer", "hf"):  # also the table itself, without a block around it
        own = ("composer",) if each.name == "composer" else ("plugin", "plugin-v1", "plugin-v2")
        known |= {f"{p}{key}" for name in own for row in ROWS[name] for key in row.names for p in ("", "fsdp_")}
        known -= {"version"}
    signs = set(each.signs)
    if each.name in ("trl", "llamafactory") and len(keys & signs) > 1:  # the Trainer's keys, and own ones
        signs |= set(FORMATS["hf"].signs)
    score = 10 * len(keys & signs) + len(keys & known)
    if any(key in table and not isinstance(table[key], Mapping | None) for key in _TABLES.get(each.name, ())):
        score -= 20 if "parallelism_config" not in table and not set(table) <= {"fsdp", "fsdp2"} else 0
    if any(isinstance(table.get(key), Mapping | list) for key in _NO_TABLES.get(each.name, ())):
        score -= 20 if not _are_words(table["fsdp"]) else 0
    block = table.get("fsdp_config")
    if isinstance(block, Mapping) and block:  # Accelerate's keys have a prefix, LLM Foundry's have none
        prefixed = any(str(key).startswith("fsdp_") for key in block)
        if each.name in ("accelerate", "foundry"):
            score += 5 if prefixed == (each.name == "accelerate") else -100
    return max(score, 0)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
