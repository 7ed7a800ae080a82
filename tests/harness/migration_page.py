"""The tables of docs/reference/every-key.md, as the code has them, wherever a marker is: `<!-- table: NAME -->`.

`python -m tests.harness.migration_page --write` renews them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fullshard.migrate.code import arguments
from fullshard.migrate.code.arguments import Row
from fullshard.migrate.levels import LEVELS
from fullshard.migrate.settings.table import GIVEN, INSIDE, KINDS, ROWS, TRAIN, Case

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "every-key.md"


def tables() -> dict[str, str]:
    """Each table by the name in its marker."""
    return {
        "levels": _levels(),
        "strategies": _rows(arguments.STRATEGIES),
        "fsdp1": _rows(arguments.FSDP1),
        "fsdp2": _fsdp2(FSDP2),
        "fsdp2-module": _fsdp2(FSDP2_MODULE),
        "fsdp2-others": _fsdp2(FSDP2_OTHERS),
        "precision": _rows(arguments.MIXED_PRECISION),
        "offload": _rows(arguments.CPU_OFFLOAD),
        "ddp": _rows(arguments.DDP),
        "calls": _rows(arguments.CALLS),
        "shapes": _table(("before", "here"), [(_code(old), new) for old, new in arguments.SHAPES.values()]),
        "left": _table(
            ("what stays, and why",), [(reason.replace("{}", "..."),) for reason in arguments.TOLD.values()]
        ),
        "seed-004": _table(("feature of Composer's guide", "here", "setting of a config"), SEED_004),
        "keys": _keys(),
    }


# The vocabularies of each dialect, each with the prefix that its keys have in a file.
DIALECTS: dict[str, tuple[tuple[str, str], ...]] = {
    "Accelerate": (
        ("", "accelerate"),
        *(("fsdp_config.fsdp_", name) for name in ("plugin", "plugin-v1", "plugin-v2")),
        ("parallelism_config.parallelism_config_", "parallelism"),
        ("deepspeed_config.", "accelerate-zero"),
        ("dynamo_config.dynamo_", "compile"),
        ("fp8_config.", "float8"),
        ("megatron_lm_config.megatron_lm_", "megatron"),
    ),
    "Trainer": (("", "trainer"), ("fsdp_config.", "plugin-trainer")),
    "axolotl": (("", "axolotl"),),
    "LLaMA-Factory": (("", "llamafactory"), ("", "v1"), ("dist_config.", "v1-dist")),
    "Composer": (("fsdp.", "composer"), ("", "composer-run")),
    "LLM Foundry": (("", "foundry"),),
    "torchtitan": (("", "torchtitan"), ("compile.", "compile"), ("float8.", "float8")),
    "DeepSpeed": (("", "zero"),),
}


# Seed 004's tables, row by row: what Composer's users find here.
SEED_004 = (
    ("Mixed Precision", "`MixedPrecisionPolicy`, four dtypes; DEFAULT, PURE and FULL", "`precision.mode`"),
    ("CPU offload", "`CPUOffloadPolicy`", "`sharding.cpu_offload`"),
    ("Auto submodule level wrapping", "children, classes, attributes, size, function, plan", "`wrap.by`"),
    (
        "State Checkpointing",
        "DTensors in DCP load; ShardedTensor files are refused by name ([other formats](../foreign-checkpoints.md))",
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
        "one declaration of all axes; a wrong order is an error with names ([parallelism](../parallelism.md))",
        "`parallelism.tensor_parallel_degree`",
    ),
)


# FSDP2: what each name of torch 2.13 does here. tests/pure/test_migration_page.py holds them against torch's own names.
SAME = "as in torch"
FSDP2 = {
    "module": f"{SAME}; a list of modules is one unit",
    "mesh": f"{SAME}: one axis shards; of two axes the first replicates (HSDP)",
    "reshard_after_forward": f"{SAME}: True, False, None (all but the root) or a number of ranks",
    "shard_placement_fn": f"{SAME}; dims that do not divide evenly are accepted",
    "mp_policy": f"{SAME}; torch's own object is accepted",
    "offload_policy": f"{SAME}; torch's own object is accepted",
    "ignored_params": SAME,
    "dp_mesh_dims": SAME,
}
FSDP2_MODULE = {
    "reshard": SAME,
    "unshard": SAME,
    "reset_iter_state": f"{SAME}, and not needed: the next forward discards what a failed step left",
    "set_is_last_backward": SAME,
    "set_requires_gradient_sync": f"{SAME}; before the last backward `.grad` raises for any use but `zero_grad()`",
    "set_requires_all_reduce": SAME,
    "set_reshard_after_forward": SAME,
    "set_reshard_after_backward": SAME,
    "set_modules_to_forward_prefetch": f"{SAME}; without it the order of the recorded step is used",
    "set_modules_to_backward_prefetch": f"{SAME}; without it the order of the recorded step is used",
    "set_custom_all_gather": SAME,
    "set_custom_reduce_scatter": SAME,
    "set_all_reduce_hook": f"{SAME}; the hook gets the shards of the unit in one flat tensor",
    "set_post_optim_event": SAME,
    "set_reduce_scatter_divide_factor": "as in torch, where it is deprecated: use `set_gradient_divide_factor`",
    "set_gradient_divide_factor": SAME,
    "set_force_sum_reduction_for_comms": SAME,
    "set_reduce_scatter_unused_params": SAME,
    "set_reduce_scatter_max_input_buffers": SAME,
    "set_separate_reduce_scatter_group": SAME,
    "set_manual_backward_finalization": f"{SAME}, on every torch",
    "finalize_backward": f"{SAME}, on every torch; a step or forward without it raises",
    "set_keep_unsharded_storage": f"{SAME}, on every torch",
    "set_unshard_in_backward": f"{SAME}; a weight that backward does read is gathered then",
    "set_allocate_memory_from_process_group_for_comm": f"{SAME}, on NCCL; not run on a GPU yet",
    "set_symm_mem_for_comm": "`NotImplementedError`; use `set_allocate_memory_from_process_group_for_comm(True)`",
}
FSDP2_OTHERS = {
    "MixedPrecisionPolicy": f"{SAME}, all four fields",
    "OffloadPolicy": SAME,
    "CPUOffloadPolicy": SAME,
    "DataParallelMeshDims": SAME,
    "FSDPModule": "torch's class is its base, so `isinstance` with either holds",
    "UnshardHandle": "torch's class is its base, as above",
    "GradientReductionHandle": "torch's own class is its base from torch 2.15 on",
    "register_fsdp_forward_method": SAME,
    "share_comm_ctx": f"{SAME}; message buffers are shared, for there are no streams of its own",
    "fully_shard": "the tables above",
}


def _fsdp2(names: dict[str, str]) -> str:
    return _table(("name", "here"), [(_code(name), here) for name, here in names.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _rows(rows: Sequence[Row]) -> str:
    return _table(
        ("before", "verdict", "here", "why"), [(_code(r.old), r.verdict, _code(r.new), r.reason) for r in rows]
    )


def _levels() -> str:
    rows = []
    for level in LEVELS:
        degrees = {-1: "all that are left", 0: "to be given"}
        reshard = {None: "to be given", True: "default", False: "false"}[level.reshard_after_forward]
        shard, copies = (degrees.get(n, str(n)) for n in (level.shard, level.replicate))
        rows.append((_code(level.fsdp1), level.deepspeed, shard, copies, reshard, level.note))
    return _table(("FSDP1", "DeepSpeed", "shard degree", "replicate degree", "reshard_after_forward", "note"), rows)


def _keys() -> str:
    """One line a subject: what each of its values becomes, and the keys about it, with a column for each dialect."""
    keys: dict[str, dict[str, list[str]]] = {}
    for dialect, parts in DIALECTS.items():
        for prefix, vocabulary in parts:
            for inner, name in (("", vocabulary), *INSIDE.get(vocabulary, ())):
                for row in ROWS.get(name, ()):
                    versions = f" ({row.versions})" if row.versions else ""
                    spelled = " or ".join(_code(f"{prefix}{inner}{key}") for key in row.names)
                    keys.setdefault(row.subject.name, {}).setdefault(dialect, []).append(spelled + versions)
    subjects = {row.subject.name: row.subject for rows in ROWS.values() for row in rows}
    rows = []
    for name, by_dialect in keys.items():
        cells = [", ".join(by_dialect.get(dialect, ())) for dialect in DIALECTS]
        rows.append(["<br>".join(_case(case) for case in subjects[name].cases), *cells])
    return _table(("what it becomes", *DIALECTS), rows)


def _case(case: Case) -> str:
    becomes = _settings(case)
    return f"{_when(case)}: {case.verdict}{f', {becomes}' if becomes else ''}: {case.reason}"


def _when(case: Case) -> str:
    return " or ".join(_value(when) for when in case.when)


def _value(when: object) -> str:
    if isinstance(when, str) and when in KINDS:
        return KINDS[when]
    return _code(str(when).lower() if isinstance(when, bool) else str(when) or '""')


def _settings(case: Case) -> str:
    shown = {True: "true", False: "false"}
    parts = [
        f"{key} = {'the value' if v == GIVEN else shown.get(v, v) if isinstance(v, bool) else v}"
        for key, v in case.settings.items()
        if not key.startswith(TRAIN)
    ]
    return ", ".join(map(_code, parts))


def names(text: str) -> list[str]:
    """The tables that a page has places for."""
    return re.findall(r"^<!-- table: (\S+) -->$", text, flags=re.M)


def renewed(text: str) -> str:
    """The page with its tables as the code has them. Raises `KeyError` for a table that the code has not."""
    for name in names(text):
        table = tables()[name]
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- /table -->)", re.S)
        text = pattern.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)  # noqa: B023
    return text


if __name__ == "__main__":
    if "--write" not in sys.argv:
        sys.exit("usage: python -m tests.harness.migration_page --write")
    PAGE.write_text(renewed(PAGE.read_text()))
