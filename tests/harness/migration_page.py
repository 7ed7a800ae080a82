"""The tables of docs/migration.md, as the code has them; `python -m tests.harness.migration_page --write` renews it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fullshard.migrate.code import arguments
from fullshard.migrate.code.arguments import Row
from fullshard.migrate.levels import LEVELS
from fullshard.migrate.settings.formats import FORMATS
from fullshard.migrate.settings.rules import ANY, GIVEN, KINDS, Case, Format

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def tables() -> dict[str, str]:
    """Each table by the name in its marker."""
    found = {
        "seed-000": _removed(),
        "seed-001": _seed_001(),
        "levels": _levels(),
        "strategies": _rows(arguments.STRATEGIES),
        "fsdp1": _rows(arguments.FSDP1),
        "precision": _rows(arguments.MIXED_PRECISION),
        "offload": _rows(arguments.CPU_OFFLOAD),
        "ddp": _rows(arguments.DDP),
        "calls": _rows(arguments.CALLS),
        "seed-004": _table(("feature of seed 004", "here", "setting of a config"), SEED_004),
    }
    return found | {each.name: _format(each) for each in FORMATS}


# Seed 004's tables, row by row: what Composer's users find here.
SEED_004 = (
    ("Mixed Precision", "`MixedPrecisionPolicy`, four dtypes; DEFAULT, PURE and FULL", "`precision.mode`"),
    ("CPU offload", "`CPUOffloadPolicy`", "`sharding.cpu_offload`"),
    ("Auto submodule level wrapping", "children, classes, attributes, size, function, plan", "`wrap.by`"),
    (
        "State Checkpointing",
        "DTensors in DCP load; ShardedTensor files are refused by name ([other formats](foreign-checkpoints.md))",
        "`state_dict.kind`",
    ),
    ("Weight Tying", "found before anything changes; to the lowest common unit, one unit, or refused", "`wrap.ties`"),
    ("Microbatching", "with messages for each micro-batch or for the last alone, without deadlock", "`micro_batches`"),
    ("HSDP", "by degrees or by mesh", "`sharding.data_parallel_replicate_degree`"),
    ("Optimizers", "built before (`rebind_optimizer`) or after", ""),
    ("Activation checkpointing", "a function of its own, before or after wrapping", "`activation_checkpointing.at`"),
    ("HSDP with flexible reshard degree", "a number of ranks", "`sharding.reshard_after_forward`"),
    (
        "2D Composability with TP/SP/EP",
        "the other axis first; the wrong order is an error with names ([parallelism](parallelism.md))",
        "",
    ),
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _rows(rows: Sequence[Row]) -> str:
    return _table(
        ("before", "verdict", "here", "why"), [(_code(r.old), r.verdict, _code(r.new), r.reason) for r in rows]
    )


def _removed() -> str:
    rows = [row for name in arguments.REMOVED for row in arguments.FSDP1 if row.old.partition("=")[0] == name]
    return _rows(rows)


def _seed_001() -> str:
    by_old = {
        row.old: row for row in (*arguments.STRATEGIES, *arguments.FSDP1, *arguments.CPU_OFFLOAD, *arguments.CALLS)
    }
    names = (
        "sharding_strategy=FULL_SHARD",
        "sharding_strategy=SHARD_GRAD_OP",
        "offload_params=True",
        "backward_prefetch=BACKWARD_PRE",
        "use_orig_params",
        "ignored_states",
        "no_sync()",
    )
    return _rows([by_old[name] for name in names])


def _levels() -> str:
    rows = []
    for level in LEVELS:
        degrees = {-1: "all that are left", 0: "to be given"}
        reshard = {None: "to be given", True: "default", False: "false"}[level.reshard_after_forward]
        shard, copies = (degrees.get(n, str(n)) for n in (level.shard, level.replicate))
        rows.append((_code(level.fsdp1), level.deepspeed, shard, copies, reshard, level.note))
    return _table(("FSDP1", "DeepSpeed", "shard degree", "replicate degree", "reshard_after_forward", "note"), rows)


def _format(format: Format) -> str:
    """One line a case; keys that are dropped for one reason share a line."""
    rows: list[list[str]] = []
    last: tuple[str, str] | None = None
    for rule in format.rules:
        for case in rule.cases:
            key = _code(rule.key)
            if case.when == ANY and not case.settings:
                if last == (case.verdict, case.reason):
                    rows[-1][0] += f", {key}"
                    continue
                last = case.verdict, case.reason
            else:
                last = None
            rows.append([key, _when(case), case.verdict, _settings(case), case.reason])
    return _table(("key", "value", "verdict", "here", "why"), rows)


def _when(case: Case) -> str:
    if case.when in tuple(KINDS):
        return KINDS[case.when]
    return _code(str(case.when).lower() if isinstance(case.when, bool) or case.when is None else str(case.when) or '""')


def _settings(case: Case) -> str:
    shown = {True: "true", False: "false"}
    parts = [
        f"{key} = {'the value' if v == GIVEN else shown.get(v, v) if isinstance(v, bool) else v}"
        for key, v in case.settings.items()
    ]
    return ", ".join(map(_code, parts))


def renewed(text: str) -> str:
    """The page with its tables as the code has them. Raises `ValueError` for a table without a place."""
    for name, table in tables().items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- /table -->)", re.S)
        text, count = pattern.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)  # noqa: B023
        if count != 1:
            raise ValueError(f"docs/migration.md: expected one place for the table {name}, found {count}")
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(renewed(PAGE.read_text()))
    else:
        sys.exit("usage: python -m tests.harness.migration_page --write")
