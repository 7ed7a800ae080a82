"""All formats, and which of them a file is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..verdict import MigrationError
from .composer import COMPOSER, CONFIG, FOUNDRY
from .deepspeed import DEEPSPEED
from .hugging import ACCELERATE, HUGGING_FACE
from .rules import Format
from .titan import TITAN

FORMATS = (ACCELERATE, HUGGING_FACE, COMPOSER, FOUNDRY, TITAN, DEEPSPEED)


def find_format(path: str, suffix: str, table: Mapping[str, Any], name: str | None) -> Format:
    """The format `name`, or the one whose keys the table has. Raises `MigrationError`."""
    if name is not None:
        return next(each for each in FORMATS if each.name == name)
    if "fsdp_config" in table and ("output_dir" in table or isinstance(table.get("fsdp"), str | list)):
        raise MigrationError(
            f"{path}: expected the Trainer's fsdp_config by itself, found all arguments of a Trainer; write the table "
            f"fsdp_config to a file, with the strategy of fsdp = {table.get('fsdp')!r} as its key sharding_strategy"
        )
    scores = {each.name: _score(each, table) for each in FORMATS if suffix in each.suffixes}
    best = max(scores, key=lambda each: scores[each], default="")
    if not best or scores[best] == 0:
        shown = ", ".join(list(table)[:4]) or "nothing"
        titles = ", ".join(each.title for each in FORMATS)
        raise MigrationError(
            f"{path}: expected a configuration of one of these: {titles}; found keys {shown}; if it is one of them, "
            f"name it by fullshard migrate --format"
        )
    return next(each for each in FORMATS if each.name == best)


def _score(each: Format, table: Mapping[str, Any]) -> int:
    """How surely a table is in this format: its signs count most, then other keys that it has rules for."""
    keys = {str(key) for key in table}
    known = {name.partition(".")[0] for rule in each.rules for name in (rule.key, *rule.names)}
    if each is COMPOSER:  # also the table itself, without a block around it
        known |= {rule.key for rule in CONFIG}
    score = 10 * len(keys & set(each.signs)) + len(keys & known)
    block = table.get("fsdp_config")
    if isinstance(block, Mapping):  # Accelerate's keys have a prefix, LLM Foundry's have none
        prefixed = any(str(key).startswith("fsdp_") for key in block)
        score += 5 if prefixed == (each is ACCELERATE) else -100 if each in (ACCELERATE, FOUNDRY) else 0
    return max(score, 0)
