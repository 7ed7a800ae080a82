"""The configuration of `prepare_fully_shard` as data: every form, every spelling, every rule between keys."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fullshard.migrate import ConfigError, Override, ShardingConfig, find_level, read_config, to_dict, to_toml
from fullshard.migrate.reading import key_names, read_table

# One value that is not the default for each key, with what has to be beside it.
CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "wrap.by": ("children", {}),
    "wrap.classes": (["Block"], {"by": "classes"}),
    "wrap.min_params": (7, {"by": "size"}),
    "wrap.function": ("a:b", {"by": "function"}),
    "wrap.plan": (["layers.*", ["norm", "head"]], {"by": "plan"}),
    "wrap.group_ends": (False, {}),
    "wrap.ties": ("refuse", {}),
    "wrap.compile": (True, {}),
    "wrap.ignored": (["head.*"], {}),
    "sharding.data_parallel_shard_degree": (4, {}),
    "sharding.data_parallel_replicate_degree": (2, {}),
    "sharding.reshard_after_forward": (8, {}),
    "sharding.cpu_offload": (True, {}),
    "sharding.pin_memory": (False, {"cpu_offload": True}),
    "parallelism.tensor_parallel_degree": (2, {}),
    "parallelism.enable_sequence_parallel": (True, {"tensor_parallel_degree": 2}),
    "parallelism.context_parallel_degree": (2, {}),
    "parallelism.context_parallel_variant": ("ring", {"context_parallel_degree": 2}),
    "parallelism.pipeline_parallel_degree": (2, {}),
    "parallelism.expert_parallel_degree": (2, {}),
    "parallelism.expert_tensor_parallel_degree": (2, {"tensor_parallel_degree": 2}),
    "parallelism.enable_loss_parallel": (True, {"tensor_parallel_degree": 2}),
    "parallelism.styles": ([["layers.*.up", "column"]], {"tensor_parallel_degree": 2}),
    "parallelism.pipeline_parallel_schedule": ("GPipe", {"pipeline_parallel_degree": 2}),
    "parallelism.pipeline_parallel_microbatch_size": (2, {"pipeline_parallel_degree": 2}),
    "parallelism.pipeline_parallel_num_microbatches": (4, {"pipeline_parallel_degree": 2}),
    "parallelism.pipeline_parallel_stages_per_rank": (
        3,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS"},
    ),
    "parallelism.module_fqns_per_model_part": ([["a", "b"], ["c"]], {"pipeline_parallel_degree": 2}),
    "precision.mode": ("PURE", {}),
    "precision.dtype": ("float16", {}),
    "precision.param": ("bfloat16", {}),
    "precision.reduce": ("float64", {}),
    "precision.output": ("float32", {}),
    "precision.cast_inputs": (False, {}),
    "precision.master": ("float32", {}),
    "precision.keep_float32": (["LayerNorm"], {"mode": "DEFAULT"}),
    "initialisation.source": ("mixed", {}),
    "initialisation.path": ("weights", {"source": "pretrained"}),
    "initialisation.allow_missing": (["head"], {"source": "pretrained", "path": "x"}),
    "initialisation.allow_unexpected": (["old.*"], {"source": "pretrained", "path": "x"}),
    "initialisation.seed": (3, {}),
    "activation_checkpointing.at": ("units", {}),
    "activation_checkpointing.classes": (["Block"], {"at": "classes"}),
    "activation_checkpointing.every": (2, {"at": "units"}),
    "activation_checkpointing.recompute": (False, {"at": "units", "offload": True}),
    "activation_checkpointing.save": (["aten.mm"], {"at": "units"}),
    "activation_checkpointing.offload": (True, {"at": "units"}),
    "micro_batches.size": ("auto", {}),
    "micro_batches.reduce": ("each", {"size": 2}),
    "state_dict.kind": ("full", {}),
    "state_dict.rank0_only": (True, {"kind": "full"}),
    "state_dict.offload_to_cpu": (True, {}),
}


def given(key: str, name: str = "") -> dict[str, Any]:
    """A table with the changed key under `name`."""
    section, _, own = key.partition(".")
    value, beside = CHANGED[key]
    return {section: {**beside, name or own: value}}


def kept(config: ShardingConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def spelled() -> list[Any]:
    sections = [section for section in fields(ShardingConfig) if section.name != "override"]
    return [
        (f"{section.name}.{key.name}", spelling)
        for section in sections
        for key in fields(getattr(ShardingConfig(), section.name))
        for spelling in key.metadata["spellings"]
    ]


def test_every_key_is_here() -> None:
    assert list(CHANGED) == key_names()


@pytest.mark.parametrize("key", CHANGED)
def test_a_key_is_the_same_in_every_form(key: str, tmp_path: Path) -> None:
    """As a dict, in TOML, JSON and YAML, and printed: whole, and what differs from the defaults alone."""
    import yaml

    table = given(key)
    config = read_config(table)
    assert json.loads(json.dumps(kept(config, key))) == CHANGED[key][0] and config != ShardingConfig()
    (tmp_path / "a.json").write_text(json.dumps(table))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(table))
    (tmp_path / "whole.toml").write_text(to_toml(config))
    (tmp_path / "short.toml").write_text(to_toml(config, only_changes=True))
    for name in ("a.json", "a.yaml", "whole.toml", "short.toml"):
        assert read_config(tmp_path / name) == config, name
    assert read_config(to_dict(config)) == config and read_config(config) is config
    printed = to_toml(config)
    assert all(f"{name.partition('.')[2]} = " in printed for name in key_names())
    assert len(read_table(tmp_path / "short.toml")) == 1


@pytest.mark.parametrize(("key", "spelling"), spelled())
def test_another_spelling_is_the_same_key(key: str, spelling: str) -> None:
    """In its section, and outside of it where one section alone has it."""
    value, beside = CHANGED[key]
    value = tuple(value) if isinstance(value, list) else value
    assert kept(read_config(given(key, spelling)), key) == value
    section = key.partition(".")[0]
    outside = {section: beside, spelling: value} if beside else {spelling: value}
    if spelling not in ("type", "mixed_precision", "policy"):
        assert kept(read_config(outside), key) == value


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"precision": "bf16"}, "precision.mode", "DEFAULT"),
        ({"precision": "amp_fp16"}, "precision.dtype", "float16"),
        ({"mixed_precision": "PURE"}, "precision.mode", "PURE"),
        ({"sharding": "ShardingStrategy.SHARD_GRAD_OP"}, "sharding.reshard_after_forward", False),
        ({"strategy": "ZeRO-3"}, "sharding.data_parallel_shard_degree", -1),
        ({"parallelism": {"dp_replicate": 2}}, "sharding.data_parallel_replicate_degree", 2),
        ({"wrap": ["Block"]}, "wrap.classes", ("Block",)),
        ({"wrap": {"min_params": 5}}, "wrap.by", "size"),
        ({"auto_wrap_policy": "NO_WRAP"}, "wrap.by", "none"),
        ({"reshard_after_forward": "never"}, "sharding.reshard_after_forward", False),
        ({"activation_checkpointing": True}, "activation_checkpointing.at", "children"),
        ({"micro_batches": "auto"}, "micro_batches.size", "auto"),
        ({"state_dict_type": "FULL_STATE_DICT"}, "state_dict.kind", "full"),
        ({"initialization": "meta"}, "initialisation.source", "meta"),
    ],
)
def test_short_forms(config: dict[str, Any], key: str, value: Any) -> None:
    assert kept(read_config(config), key) == value


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"warp": {"by": "size"}}, "[warp]: there is no such section; nearest valid: wrap"),
        ({"wrap": {"clases": ["A"]}}, 'wrap.clases = ["A"]: there is no such key; nearest valid: wrap.classes'),
        ({"cpu_ofload": True}, "nearest valid: sharding.cpu_offload"),
        ({"seed": "x"}, 'initialisation.seed = "x": expected a whole number'),
        ({"cpu_offload": "yes"}, 'sharding.cpu_offload = "yes": expected true or false; nearest valid: true'),
        ({"precision": "HALF"}, 'nearest valid: "'),
        ({"precision": {"buffer_dtype": "bf16"}}, "buffers keep their dtype"),
        ({"keep_in_fp32": ["LayerNorm"]}, "no effect where all compute in the dtype of the parameters; nearest valid"),
        ({"wrap": {"by": "classes"}}, "expected wrap.classes, found none; give it"),
        ({"wrap": {"by": "children", "classes": ["A"]}}, 'has no effect with wrap.by = "children"'),
        ({"wrap": {"function": "here"}}, 'expected "module:function"'),
        ({"wrap": {"plan": "layers"}}, "expected a list of names"),
        ({"dp_shard_size": 0}, "at least 1"),
        (
            {"dp_shard": 2, "sharding": {"data_parallel_shard_degree": 2}},
            "expected data_parallel_shard_degree once, found it under two names",
        ),
        ({"dp_shard": -1, "dp_replicate": -1}, "expected one of the two degrees"),
        ({"pin_memory": False}, "has no effect without cpu_offload"),
        ({"sharding": {"strategy": "HYBRID_SHARD"}}, "expected data_parallel_replicate_degree, found none"),
        ({"sharding": {"strategy": "NO_SHARD", "dp_shard": 4}}, "means data_parallel_shard_degree = 1, found 4"),
        ({"sharding": {"strategy": "ZeRO-4"}}, "there is no such level; nearest valid"),
        ({"sharding": {"strategy": 3}}, "the number 3 is NO_SHARD in Accelerate"),
        ({"state_dict": "LOCAL_STATE_DICT"}, "shards of flat parameters"),
        ({"state_dict": {"rank0_only": True}}, 'has no effect with kind = "sharded"'),
        ({"initialisation": {"source": "cpu", "path": "x"}}, 'has no effect with initialisation.source = "cpu"'),
        ({"activation_checkpointing": {"every": 2}}, 'has no effect with at = "none"'),
        ({"activation_checkpointing": {"at": "units", "recompute": False}}, "then has no effect"),
        ({"micro_batches": {"reduce": "each"}}, "has no effect without micro_batches.size"),
        ({"override": [{"cpu_offload": True}]}, "override[0].modules: expected the units meant"),
        ({"override": {"layers.0": {}}}, "expected a setting for layers.0, found none"),
        ({"override": 3}, "expected tables, written [[override]]"),
        (3, "expected a dict, the path of a file or a ShardingConfig, found a int"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_choice(config: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(config)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_an_override_is_read_and_printed(tmp_path: Path) -> None:
    table = {"override": {"layers.0": {"reshard_after_forward": "never", "param_dtype": "bf16"}}}
    config = read_config(table)
    assert config.override == (Override("layers.0", reshard_after_forward=False, param="bfloat16"),)
    (tmp_path / "a.toml").write_text(to_toml(config, only_changes=True))
    assert "[[override]]" in (tmp_path / "a.toml").read_text() and read_config(tmp_path / "a.toml") == config


@pytest.mark.parametrize(
    ("config", "world", "degrees"),
    [
        ({}, 4, (1, 4)),
        ({"dp_replicate": 2}, 8, (2, 4)),
        ({"dp_shard": 2, "dp_replicate": -1}, 8, (4, 2)),
        ({"sharding": "NO_SHARD"}, 3, (3, 1)),
        ({"dp_shard": 2, "dp_replicate": 2}, 4, (2, 2)),
    ],
)
def test_degrees(config: dict[str, Any], world: int, degrees: tuple[int, int]) -> None:
    assert read_config(config).degrees(world) == degrees


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"dp_shard": 3}, "there are 3 of 4 ranks; nearest valid: 4 (or -1)"),
        ({"dp_replicate": 3}, "must divide the 4 ranks"),
        ({"dp_shard": 3, "dp_replicate": -1}, "must divide the 4 ranks"),
        ({"reshard_after_forward": 3}, "expected a factor of the 4 ranks that share a copy; nearest valid: 2"),
        ({"override": {"a": {"reshard_after_forward": 3}}}, "override[0].reshard_after_forward = 3"),
    ],
)
def test_degrees_that_do_not_fit_four_ranks(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(config).degrees(4)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("zero3", "FULL_SHARD"),
        ("stage 2", "SHARD_GRAD_OP"),
        ("ZeRO stage 3", "FULL_SHARD"),
        ("shardingstrategy.no_shard", ""),
        ("ShardingStrategy.NO_SHARD", "NO_SHARD"),
        ("ddp", "NO_SHARD"),
        ("hsdp", "HYBRID_SHARD"),
        ("full shard", "FULL_SHARD"),
    ],
)
def test_spellings_of_levels(name: str, level: str) -> None:
    if level:
        assert find_level("sharding.strategy", name).fsdp1 == level
    else:
        with pytest.raises(ConfigError, match="there is no such level"):
            find_level("sharding.strategy", name)


def test_yaml_without_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("wrap: children\n")
    with pytest.raises(ConfigError, match=r'YAML needs PyYAML: pip install "fullshard\[yaml\]"'):
        read_config(tmp_path / "a.yaml")
