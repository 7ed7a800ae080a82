"""docs/prepare.md has the tables that the configuration and the levels make."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from fullshard.keys import show
from fullshard.migrate import LEVELS, ShardingConfig

PAGE = Path(__file__).parents[2] / "docs" / "prepare.md"


def keys_table() -> str:
    lines = ["| key | default | other spellings | meaning |", "|---|---|---|---|"]
    for section in fields(ShardingConfig):
        if section.name == "override":
            continue
        for key in fields(getattr(ShardingConfig(), section.name)):
            spellings = ", ".join(f"`{name}`" for name in key.metadata["spellings"])
            doc = key.metadata["doc"].replace("|", "\\|")
            lines.append(f"| `{section.name}.{key.name}` | `{show(key.default)}` | {spellings} | {doc} |")
    return "\n".join(lines)


def levels_table() -> str:
    lines = ["| FSDP1 | DeepSpeed | shard degree | replicate degree | reshard | note |", "|---|---|---|---|---|---|"]
    degrees = {-1: "all that are left", 0: "to be given"}
    reshard = {True: "yes", False: "no", None: "a number, to be given"}
    for level in LEVELS:
        shard, copies = (degrees.get(degree, str(degree)) for degree in (level.shard, level.replicate))
        names = f"| {level.fsdp1 or '-'} | {level.deepspeed or '-'} "
        lines.append(f"{names}| {shard} | {copies} | {reshard[level.reshard_after_forward]} | {level.note} |")
    return "\n".join(lines)


def test_the_page_has_these_keys_and_levels() -> None:
    page = PAGE.read_text()
    assert keys_table() in page
    assert levels_table() in page
