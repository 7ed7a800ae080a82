"""The configuration of `prepare_fully_shard`: every spelling, strict reading with suggestions, printing, round trip."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fullshard.migrate import LEVELS, ConfigError, ShardingConfig, find_level, read_config, read_table, to_dict, to_toml
from fullshard.migrate.reading import key_names

# The surface that files rely on: a new key is added here on purpose, a removed one is a breaking change.
KEYS = """
wrap.by wrap.classes wrap.min_params wrap.function wrap.plan wrap.group_ends wrap.ties wrap.ignored
sharding.data_parallel_shard_degree sharding.data_parallel_replicate_degree sharding.reshard_after_forward
sharding.cpu_offload sharding.pin_memory
precision.mode precision.dtype precision.param precision.reduce precision.output precision.cast_inputs
initialisation.source initialisation.path initialisation.allow_missing initialisation.allow_unexpected
initialisation.seed
activation_checkpointing.at activation_checkpointing.classes activation_checkpointing.every
activation_checkpointing.recompute activation_checkpointing.save activation_checkpointing.offload
micro_batches.size micro_batches.reduce
state_dict.kind state_dict.rank0_only state_dict.offload_to_cpu
""".split()

EVERYTHING: dict[str, Any] = {
    "wrap": {"by": "plan", "plan": ["embed", "layers.*", ["norm", "head"]], "ties": "refuse", "group_ends": False}
    | {"ignored": ["*.inv_freq"]},
    "sharding": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2, "reshard_after_forward": 2}
    | {"cpu_offload": True, "pin_memory": False},
    "precision": {"mode": "PURE", "dtype": "float16", "reduce": "float32", "output": "float32", "cast_inputs": False},
    "initialisation": {"source": "pretrained", "path": "a \"b\" \\ é", "allow_missing": ["head.weight"], "seed": 3},
    "activation_checkpointing": {"at": "classes", "classes": ["Block"], "every": 2, "save": ["aten.mm"]}
    | {"offload": True},
    "micro_batches": {"size": "auto", "reduce": "each"},
    "state_dict": {"kind": "full", "rank0_only": True, "offload_to_cpu": True},
    "override": [
        {"modules": "layers.0", "reshard_after_forward": False, "param": "float32"},
        {"modules": "Norm", "cpu_offload": False, "cast_inputs": True},
    ],
}  # fmt: skip


def test_the_keys_are_these() -> None:
    assert key_names() == KEYS


def test_every_key_has_a_meaning_and_no_spelling_is_used_twice_in_a_section() -> None:
    for section in fields(ShardingConfig)[:-1]:
        keys = fields(getattr(ShardingConfig(), section.name))
        assert all(key.metadata["doc"] for key in keys)
        names = [name for key in keys for name in (key.name, *key.metadata["spellings"])]
        assert len(names) == len(set(names))


def test_nothing_is_the_default() -> None:
    assert read_config() == read_config({}) == ShardingConfig()
    assert read_config(ShardingConfig()) == ShardingConfig()


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
@pytest.mark.parametrize("table", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_what_is_printed_is_read_back(tmp_path: Path, suffix: str, table: dict[str, Any]) -> None:
    config = read_config(table)
    path = tmp_path / f"c.{suffix}"
    path.write_text(to_toml(config) if suffix == "toml" else json.dumps(to_dict(config)))
    assert read_config(path) == read_config(str(path)) == config
    assert read_config(to_dict(config)) == config


def test_everything_differs_from_the_default_in_every_section() -> None:
    """So that the round trip above tells something of each key."""
    changed = to_toml(read_config(EVERYTHING), only_changes=True)
    unchanged = {"wrap.classes", "wrap.min_params", "wrap.function", "precision.param"}
    unchanged |= {"initialisation.allow_unexpected", "activation_checkpointing.recompute"}
    for name in {*KEYS} - unchanged:
        assert f"\n{name.partition('.')[2]} = " in changed, name


def test_only_changes_are_printed_as_asked() -> None:
    text = to_toml(read_config({"precision": "PURE"}), only_changes=True)
    assert text.startswith('[precision]\nmode = "PURE" ') and text.count("=") < 5
    assert "\n".join(KEYS[:1]) and "[wrap]" in to_toml(ShardingConfig())
    assert to_toml(ShardingConfig(), only_changes=True) == ""


# ---- spellings -------------------------------------------------------------------------------------------------------

HSDP = read_config({"sharding": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}})


@pytest.mark.parametrize(
    "table",
    [
        {"sharding": {"dp_shard_size": 4, "dp_replicate_size": 2}},  # Accelerate
        {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},  # Composer
        {"parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}},  # torchtitan
        {"data_parallel_shard_dim": 4, "data_parallel_replicate_dim": 2},  # torchtune
        {"dp_shard": 4, "dp_replicate": 2},  # names of mesh axes
        {"shard_degree": 4, "replicate_degree": 2},
    ],
)
def test_degrees_have_these_spellings(table: dict[str, Any]) -> None:
    assert read_config(table) == HSDP
    assert HSDP.degrees(8) == (2, 4)


@pytest.mark.parametrize(
    ("table", "kept"),
    [
        ({"reshard_after_forward": True}, True),
        ({"reshard_after_forward": "always"}, True),
        ({"sharding": {"fsdp_reshard_after_forward": "never"}}, False),
        ({"reshard_after_forward": "default"}, "default"),
        ({"reshard_after_forward": 8}, 8),
        ({"sharding": "SHARD_GRAD_OP"}, False),
        ({"sharding": {"strategy": "ZeRO++ hpZ", "reshard_after_forward": 8}}, 8),
    ],
)
def test_resharding_has_these_spellings(table: dict[str, Any], kept: object) -> None:
    found = read_config(table).sharding.reshard_after_forward
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("value", "dtypes"),
    [
        ("FULL", (None, None, None)),
        ("DEFAULT", ("bfloat16", "float32", None)),
        ("PURE", ("bfloat16", "bfloat16", None)),
        ("bf16", ("bfloat16", "float32", None)),
        ("amp_fp16", ("float16", "float32", None)),
        ({"mode": "PURE", "dtype": "fp16"}, ("float16", "float16", None)),
        ({"param_dtype": "torch.bfloat16", "reduce_dtype": "float32"}, ("bfloat16", "float32", None)),
        ({"mixed_precision_param": "bfloat16", "output_dtype": "float32"}, ("bfloat16", None, "float32")),
        ({"mode": "PURE", "reduce": "fp32"}, ("bfloat16", "float32", None)),
    ],
)
def test_precision_has_these_spellings(value: object, dtypes: tuple[str | None, ...]) -> None:
    assert read_config({"precision": value}).precision.dtypes == dtypes
    assert read_config({"mixed_precision": value}).precision.dtypes == dtypes


def test_sections_can_be_short() -> None:
    config = read_config(
        {"wrap": ["Block"], "initialisation": "meta", "activation_checkpointing": True, "micro_batches": 4}
        | {"state_dict": "FULL_STATE_DICT", "override": {"layers.0": {"reshard_after_forward": "never"}}}
    )
    assert (config.wrap.by, config.wrap.classes, config.initialisation.source) == ("classes", ("Block",), "meta")
    assert (config.activation_checkpointing.at, config.micro_batches.size) == ("children", 4)
    assert (config.state_dict.kind, config.override[0].reshard_after_forward) == ("full", False)
    assert read_config({"wrap": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10}}).wrap.by == "size"
    assert read_config({"wrap": {"policy": "TRANSFORMER_BASED_WRAP", "classes": ["B"]}}).wrap.by == "classes"


# ---- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "degrees", "kept"),
    [
        ("FULL_SHARD", 8, (1, 8), True),
        ("ZeRO-3", 8, (1, 8), True),
        ("SHARD_GRAD_OP", 8, (1, 8), False),
        ("ZeRO-2", 8, (1, 8), False),
        ("HYBRID_SHARD", 8, (2, 4), True),
        ("MiCS", 8, (2, 4), True),
        ("_HYBRID_SHARD_ZERO2", 8, (2, 4), False),
        ("NO_SHARD", 8, (8, 1), False),
        ("ZeRO-0", 8, (8, 1), False),
        ("ZeRO++ hpZ", 8, (1, 8), 4),
        ("ZeRO-1", 8, (1, 8), False),
    ],
)
def test_level(name: str, world: int, degrees: tuple[int, int], kept: bool | int) -> None:
    more: dict[str, Any] = {"dp_replicate_size": 2} if degrees == (2, 4) else {}
    more |= {"reshard_after_forward": 4} if kept == 4 else {}
    config = read_config({"sharding": {"strategy": name, **more}})
    assert config.degrees(world) == degrees and config.sharding.reshard_after_forward == kept


def test_all_levels_are_tested() -> None:
    case = next(mark for mark in getattr(test_level, "pytestmark", ()) if mark.name == "parametrize")
    assert {row[0] for row in case.args[1]} == {name for level in LEVELS for name in level.names}


@pytest.mark.parametrize(
    "name", ["full_shard", "ShardingStrategy.FULL_SHARD", "zero3", "ZeRO stage 3", "stage3", "zero_3"]
)
def test_levels_have_these_spellings(name: str) -> None:
    assert find_level("sharding.strategy", name).fsdp1 == "FULL_SHARD"


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"wrapp": {}}, "[wrapp]: there is no such section; nearest valid: wrap"),
        ({"shard_degre": 4}, "there is no such key; nearest valid: sharding.data_parallel_shard_degree"),
        ({"wrap": {"clases": ["B"]}}, "nearest valid: wrap.classes"),
        ({"wrap": {"by": "class"}}, 'nearest valid: "classes"'),
        ({"wrap": {"by": "classes"}}, "expected wrap.classes, found none"),
        ({"wrap": {"by": "size", "classes": ["B"]}}, 'has no effect with wrap.by = "size"'),
        ({"wrap": {"by": "children", "min_params": 5}}, "has no effect"),
        ({"wrap": {"plan": "layers.0"}}, 'nearest valid: ["layers.0"]'),
        ({"wrap": {"plan": [[]]}}, "wrap.plan[0]"),
        ({"wrap": {"function": "units"}}, "module:function"),
        ({"wrap": {"classes": "Block"}}, 'nearest valid: ["Block"]'),
        ({"sharding": {"dp_shard_size": 4, "data_parallel_shard_degree": 4}}, "under two names"),
        ({"sharding": {"cpu_offload": True}, "cpu_offload": True}, "found twice"),
        ({"dp_shard_size": 0}, "expected -1"),
        ({"dp_shard_size": "8"}, "nearest valid: 8"),
        ({"dp_shard_size": -1, "dp_replicate_size": -1}, "found -1 for both"),
        ({"dp_shard_size": -2}, "expected at least -1"),
        ({"reshard_after_forward": "allways"}, 'nearest valid: "always"'),
        ({"reshard_after_forward": 2.0}, "nearest valid: 2"),
        ({"reshard_after_forward": 1}, "expected at least 2"),
        ({"sharding": "FULL_SHARDED"}, 'nearest valid: "FULL_SHARD"'),
        ({"sharding": {"strategy": 3}}, "the number 3 is NO_SHARD in Accelerate"),
        ({"sharding": "HYBRID_SHARD"}, "expected data_parallel_replicate_degree, found none"),
        ({"sharding": "ZeRO++ hpZ"}, "expected reshard_after_forward, found none"),
        ({"sharding": {"strategy": "FULL_SHARD", "reshard_after_forward": False}}, "leave one out"),
        ({"sharding": {"strategy": "NO_SHARD", "dp_shard_size": 4}}, "leave one out"),
        ({"pin_memory": False}, "has no effect without cpu_offload"),
        ({"precision": "pure"}, 'nearest valid: "PURE"'),
        ({"precision": {"param": "bfloat"}}, 'nearest valid: "bfloat16"'),
        ({"precision": {"buffer_dtype": "bfloat16"}}, "buffers keep their dtype"),
        ({"initialisation": {"path": "x", "source": "meta"}}, "has no effect"),
        ({"initialisation": "pretrained"}, "expected initialisation.path"),
        ({"initialisation": "gpu"}, "expected one of"),
        ({"activation_checkpointing": {"every": 2}}, "has no effect with at"),
        ({"activation_checkpointing": {"at": "units", "recompute": False}}, "then has no effect"),
        ({"micro_batches": {"reduce": "each"}}, "has no effect"),
        ({"micro_batches": "atuo"}, 'nearest valid: "auto"'),
        ({"state_dict": "LOCAL_STATE_DICT"}, "shards of flat parameters"),
        ({"state_dict": {"rank0_only": True}}, "has no effect"),
        ({"override": [{"reshard_after_forward": True}]}, "override[0].modules: expected"),
        ({"override": [{"modules": "a"}]}, "found none"),
        ({"override": [{"modules": "a", "reshard": True}]}, "nearest valid: reshard_after_forward"),
        ({"override": "a"}, "written [[override]]"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_key_value_and_the_nearest(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(table)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("table", "world", "told"),
    [
        ({"dp_shard_size": 3}, 8, "sharding.data_parallel_shard_degree = 3: with 1 copy there are 3 of 8 ranks"),
        ({"dp_replicate_size": 3}, 8, "must divide the 8 ranks"),
        ({"dp_shard_size": 3, "dp_replicate_size": -1}, 8, "must divide the 8 ranks"),
        ({"dp_shard_size": 4, "dp_replicate_size": 4}, 8, "there are 16 of 8 ranks; nearest valid: 2 (or -1)"),
        ({"reshard_after_forward": 3}, 8, "expected a factor of the 8 ranks that share a copy; nearest valid: 2"),
        ({"override": {"a": {"reshard_after_forward": 3}}}, 4, "override[0].reshard_after_forward = 3"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks(table: dict[str, Any], world: int, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(table).degrees(world)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.toml", "[wrap\n", "not valid TOML"),
        ("c.json", "{", "not valid JSON"),
        ("c.json", "[1]", "expected keys with values, found a list"),
        ("c.yaml", "a: [1", "c.yaml:1:6: not valid YAML"),
        ("c.yaml", "wrap: !!python/object/apply:os.system ['touch {0}']", "not valid YAML: could not determine"),
        ("c.yaml", "", "found nothing"),
        ("c.yml", "just text", "found a str"),
        ("c.ini", "[wrap]", "expected a file named"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, name: str, text: str, told: str) -> None:
    path, touched = tmp_path / name, tmp_path / "touched"
    path.write_text(text.format(touched) if "touch" in text else text)
    with pytest.raises(ConfigError) as raised:
        read_table(path)
    assert told in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert not touched.exists()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "absent.toml")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_config(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="found a int"):
        read_config(3)  # type: ignore[arg-type]


def test_yaml_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "c.yaml").write_text("precision: PURE")
    with pytest.raises(ConfigError, match=r"fullshard\[yaml\]"):
        read_config(tmp_path / "c.yaml")


def test_reading_needs_no_torch() -> None:
    code = "import sys\nimport fullshard.migrate\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
