"""What `fullshard migrate` writes from each format trains on two ranks as plain training does, under the precision that
the old configuration names. So a key that is called exact is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.cli.proof import _strategy
from fullshard.migrate import read_config, to_toml
from fullshard.migrate.settings.conversion import convert_file
from fullshard.migrate.verdict import EXACT
from fullshard.verify.setting import Setting
from tests.harness.converted import ENTRY
from tests.harness.elsewhere import FILES
from tests.harness.pool import pool
from tests.harness.verified import _record, compare

# The keys that claim to be exact in the example of each format, and what of them training shows.
CLAIMS: dict[str, tuple[str, list[str]]] = {
    "accelerate": (
        "zero2+bf16+pure",
        """distributed_type fsdp_config.fsdp_offload_params fsdp_config.fsdp_sharding_strategy
        fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_transformer_layer_cls_to_wrap""".split(),
    ),
    "hf": ("zero3", "transformer_layer_cls_to_wrap sync_module_states state_dict_type".split()),
    "composer": (
        "zero3+bf16",
        """fsdp.auto_wrap fsdp.sharding_strategy fsdp.mixed_precision fsdp.activation_checkpointing_reentrant
        fsdp.state_dict_type fsdp.data_parallel_shard_degree precision device_train_microbatch_size""".split(),
    ),
    "foundry": (
        "zero3+bf16+pure",
        """fsdp_config.auto_wrap fsdp_config.state_dict_type model.init_device device_train_microbatch_size precision
        fsdp_config.sharding_strategy fsdp_config.mixed_precision fsdp_config.activation_checkpointing
        fsdp_config.activation_checkpointing_reentrant fsdp_config.activation_cpu_offload""".split(),
    ),
    "torchtitan": (
        "zero3+bf16",
        """training.mixed_precision_param training.mixed_precision_reduce parallelism.data_parallel_replicate_degree
        parallelism.data_parallel_shard_degree parallelism.fsdp_reshard_after_forward
        parallelism.tensor_parallel_degree activation_checkpoint.selective_ac_option""".split(),
    ),
    "deepspeed": (
        "zero2+bf16+pure",
        "gradient_accumulation_steps train_micro_batch_size_per_gpu zero_optimization.stage".split(),
    ),
}
# Other spellings of what is exact, one file each.
MORE = {
    "accelerate, version 2": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: true\nmixed_precision: 'no'\n",
        "zero3+offload",
    ),
    "composer, a copy on each rank": (
        "c.yaml",
        "fsdp:\n  sharding_strategy: NO_SHARD\n  mixed_precision: FULL\n  state_dict_type: full\n",
        "zero3",
    ),
    "torchtitan, full recomputation": (
        "t.toml",
        '[training]\nmixed_precision_param = "float32"\nenable_cpu_offload = true\n[parallelism]\n'
        'fsdp_reshard_after_forward = "never"\n[activation_checkpoint]\nmode = "full"\n',
        "zero2+offload",
    ),
    "deepspeed, stage 3 with offload": (
        "d.json",
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": '
        '{"device": "cpu"}}, "train_micro_batch_size_per_gpu": 4}',
        "zero3+offload",
    ),
    "deepspeed, stage 1": ("d.json", '{"zero_optimization": {"stage": 1}}', "zero2"),
}


def prove(folder: Path, file: str, text: str, expected: str) -> list[str]:
    """Convert, train on two ranks, compare with plain training; the keys that are called exact."""
    (folder / file).write_text(text)
    found = convert_file(folder / file)
    written = folder / "new.fullshard.toml"
    written.write_text(to_toml(found.config, only_changes=True))
    assert read_config(written) == found.config
    strategy = replace(_strategy(found.config, 2)[0], recompute=False)  # the configuration itself does that
    assert str(strategy) == expected
    setting = Setting(f"{ENTRY}:{written}", "fullshard", strategy, 2, 2, "cpu")
    pool(2).run(_record, setting, str(folder), None)
    result = compare(folder, setting)
    assert result.verdict == "equal", result.difference
    assert result.compared > 50
    return [each.key for each in found.findings if each.verdict == EXACT]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
def test_what_is_called_exact_trains_as_plain_training_does(name: str, tmp_path: Path) -> None:
    strategy, keys = CLAIMS[name]
    assert sorted(prove(tmp_path, *FILES[name], strategy)) == sorted(keys)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MORE)
def test_other_spellings_too(name: str, tmp_path: Path) -> None:
    prove(tmp_path, *MORE[name])
