"""docs/reference/every-key.md says what the tables say, and the rows of Composer's guide (seed 004) are settings."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as fsdp

from fullshard.migrate.code import arguments
from fullshard.migrate.settings.conversion import convert
from fullshard.migrate.settings.table import INSIDE, ROWS
from fullshard.migrate.verdict import UNSUPPORTED
from tests.harness import migration_page


def test_the_page_has_the_tables_of_the_code() -> None:
    text = migration_page.PAGE.read_text()
    assert migration_page.renewed(text) == text, "python -m tests.harness.migration_page --write"


def test_each_table_is_on_the_page_once() -> None:
    assert sorted(migration_page.names(migration_page.PAGE.read_text())) == sorted(migration_page.tables())


def test_every_key_of_every_dialect_is_on_the_page() -> None:
    """Each vocabulary of the conversion is in a column; a new one needs a place."""
    shown = {name for parts in migration_page.DIALECTS.values() for _, name in parts}
    inside = {name for outer in shown for _, name in INSIDE.get(outer, ())}
    assert shown | inside >= {name for name in ROWS if name}


# torch has these from 2.15 on, fullshard on every torch.
OF_2_15 = {"set_manual_backward_finalization", "finalize_backward", "set_keep_unsharded_storage"}
OF_2_15_EXPORTED = {"GradientReductionHandle"}


def test_the_tables_of_fsdp2_have_all_of_its_names() -> None:
    assert list(migration_page.FSDP2) == list(inspect.signature(fsdp.fully_shard).parameters)
    methods = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
    assert set(migration_page.FSDP2_MODULE) == methods | OF_2_15
    exported = {name for name in arguments.FSDP2_NAMES if hasattr(fsdp, name)}
    assert set(migration_page.FSDP2_OTHERS) == exported | OF_2_15_EXPORTED == set(arguments.FSDP2_NAMES)


# A feature of seed 004 as Composer's configuration spells it, and the new settings.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mixed Precision": ({"mixed_precision": "PURE"}, {"precision.mode": "PURE"}),
    "CPU offload": ({"cpu_offload": True}, {"sharding.cpu_offload": True}),
    "Auto submodule level wrapping": ({"verbose": False}, {"wrap.by": "auto"}),
    "State Checkpointing": ({"state_dict_type": "sharded"}, {"state_dict.kind": "sharded"}),
    "Weight Tying": ({"verbose": False}, {}),
    "Microbatching": ({"device_train_microbatch_size": "auto"}, {"micro_batches.size": "auto"}),
    "HSDP": ({"data_parallel_replicate_degree": 2}, {"sharding.data_parallel_replicate_degree": 2}),
    "Optimizers": ({"verbose": False}, {}),
    "Activation checkpointing": ({"activation_checkpointing": True}, {"activation_checkpointing.at": "children"}),
    "HSDP with flexible reshard degree": ({"reshard_after_forward": 8}, {"sharding.reshard_after_forward": 8}),
    "2D Composability with TP/SP/EP": (
        {"tp": {"tensor_parallel_degree": 2}},
        {"parallelism.tensor_parallel_degree": 2},
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_seed_004_s_row(feature: str) -> None:
    keys, settings = FEATURES[feature]
    outer = ("device_train_microbatch_size", "tp")
    table = {"fsdp": {k: v for k, v in keys.items() if k not in outer}} | {k: v for k, v in keys.items() if k in outer}
    found = convert({"parallelism_config": table}, "x.yaml", ".yaml")
    assert {name: found.settings.get(name) for name in settings} == settings
    if feature == "Weight Tying":
        assert found.config.wrap.ties == "lowest_common"
    assert not [each.reason for each in found.findings if each.verdict == UNSUPPORTED]


def test_seed_004_has_no_other_rows() -> None:
    assert [row[0] for row in migration_page.SEED_004] == list(FEATURES)
