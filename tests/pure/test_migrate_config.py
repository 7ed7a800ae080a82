"""`fullshard migrate CONFIG`: every row of every table, what depends on several keys, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.cli.migrate import FORMATS as NAMES_OF_FORMATS
from fullshard.migrate.reading import read_config
from fullshard.migrate.settings.conversion import Conversion, convert
from fullshard.migrate.settings.table import (
    ABSENT,
    ANY,
    FORMATS,
    GIVEN,
    KINDS,
    NAMES,
    NUMBER,
    PARTS,
    PATTERN,
    SUBJECTS,
    TABLE,
    TEXT,
    TRAIN,
    WHOLE,
    Case,
    Format,
    Row,
    given,
    keys_of,
    names_of,
)
from fullshard.migrate.settings.table import ROWS as VOCABULARIES
from fullshard.migrate.verdict import DROPPED, EQUIVALENT, LOSSY, UNSUPPORTED, VERDICTS, MigrationError

# A value of each kind that no literal case takes.
SAMPLES: dict[str, Any] = {ANY: r"layers\.\d+", WHOLE: 2, NUMBER: 0.5, TEXT: "float16", NAMES: ["A", "B"]}
SAMPLES |= {TABLE: {"type": "AdamW"}, PATTERN: r"head|layers\.0\.mlp.*", PARTS: [["a"], ["b"]]}
# Keys without which a row means nothing, by subject; `.` stands for the prefix of the row.
BESIDE: dict[str, dict[str, Any]] = {
    "size": {".auto_wrap_policy": "SIZE_BASED_WRAP"},
    "selection": {".mode": "selective"},
    "pinned": {".device": "cpu", ".offload_params": True},
    "held_activations": {".activation_checkpointing": True},
    **{f"pipeline_{name}": {".pipeline_parallel_degree": 2} for name in ("schedule", "size", "parts")},
    "pipeline_number": {".pp_degree": 2},
    "context_variant": {".cp_size": 2},
}


def _table(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        here = found
        *parts, last = key.split(".")
        for part in parts:
            here = here.setdefault(part, {})
        here[last] = value
    return found


def _convert(name: str, keys: Mapping[str, Any]) -> Conversion:
    suffix = FORMATS[name].suffixes[0]
    return convert(_table(keys), f"x{suffix}", suffix, "", name)


def _beside(format: Format, prefix: str, row: Row, case: Case) -> dict[str, Any]:
    version = row.vocabulary.rpartition("-v")[2]
    found = {f"{prefix}version": int(version)} if version in ("1", "2") and prefix.startswith("fsdp_config") else {}
    known = keys_of(format)
    if case.settings:
        beside = {f"{prefix}{key[1:]}": value for key, value in BESIDE.get(row.subject.name, {}).items()}
        found |= {key: value for key, value in beside.items() if key in known}
    if any("hybrid" in str(when).lower() for when in case.when):
        found |= {"num_machines": 2} if format.name == "accelerate" else {}
        found |= {f"{prefix}data_parallel_replicate_degree": 2} if row.vocabulary == "composer" else {}
    if row.subject.name not in ("fsdp", "settings_in_a_file") and "fsdp" in known:
        found |= {"fsdp": True}
    return found


def _rows() -> dict[str, list[tuple[Format, str, str, Row]]]:
    """The keys of each subject: each key of each vocabulary once, in the first format that has it."""
    found: dict[str, list[tuple[Format, str, str, Row]]] = {name: [] for name in SUBJECTS}
    met: set[int] = set()
    for format in FORMATS.values():
        for key, (prefix, row) in (*keys_of(format, 1).items(), *keys_of(format, 2).items()):
            if id(row) not in met and key == f"{prefix}{row.names[0]}":
                met.add(id(row))
                found[row.subject.name].append((format, key, prefix, row))
    return found


ROWS = _rows()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_row(subject: str) -> None:
    """Under each key of a subject, each value gives its verdict and its settings, which are a valid configuration."""
    assert ROWS[subject] and SUBJECTS[subject].cases
    for case in SUBJECTS[subject].cases:
        for when in case.when:
            assert when in tuple(KINDS) or SUBJECTS[subject].case(when) is case, f"another case hides {when}"
    for format, key, prefix, row in ROWS[subject]:
        for case in row.subject.cases:
            for when in case.when:
                if when != ABSENT:
                    _check_row(format, key, prefix, row, case, SAMPLES[when] if when in tuple(KINDS) else when)


def _check_row(format: Format, key: str, prefix: str, row: Row, case: Case, value: Any) -> None:
    found = _convert(format.name, {**_beside(format, prefix, row, case), key: value})
    assert case.verdict in VERDICTS and case.reason
    if row.subject.loop:
        assert key in found.loop and any(key in each.key for each in found.findings)
    else:
        said = next(each for each in found.findings if each.key == key and not each.default)
        beside = [each for each in found.findings if each.key != key and not each.default]
        decided = said.reason.startswith("has no effect") or any(f"{b.key} decides" in said.reason for b in beside)
        assert decided or said.verdict in (case.verdict, UNSUPPORTED), (key, value)  # a number of copies is missing
    for name, wanted in case.settings.items():
        expected = given(value, name.removeprefix(TRAIN)) if wanted == GIVEN else wanted
        if name.startswith(TRAIN):
            assert found.trains[key][name.removeprefix(TRAIN)] == expected, (key, value)
        elif name in found.settings:
            assert found.settings[name] == expected, (key, value)
    assert found.config == read_config(_table(found.settings))


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda each: each.name)
def test_no_key_hides_another(format: Format) -> None:
    keys = [(p, key) for p, v in format.mounts for row in VOCABULARIES.get(v, []) for key in row.names]
    assert len(keys) == len(set(keys))


def test_the_command_knows_the_formats() -> None:
    assert {*FORMATS} == {*NAMES_OF_FORMATS}


STRANGE: list[Any] = ["", "x", 3, -1, 2.5, True, [], ["a", 1], {}, {"a": 1}, {"type": "AdamW", "params": {"betas": 3}}]
STRANGE += [{"type": "WarmupLR", "params": {"warmup_num_steps": "x"}}, {"type": 3, "params": 4}, {"type": "Lion"}]


@pytest.mark.sample(12)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_strange_values_are_one_line(subject: str) -> None:
    """Of any type under any key: converted, or refused in one line."""
    for format, key, _, _ in ROWS[subject]:
        for value in STRANGE:
            try:
                found = _convert(format.name, {key: value})
            except MigrationError as error:
                assert str(error).count("\n") == 0 and str(error).startswith("x."), (key, value)
            else:
                assert found.config == read_config(_table(found.settings)), (key, value)


# ---- several keys ----------------------------------------------------------------------------------------------------


def test_hybrid_sharding_takes_the_number_of_machines() -> None:
    keys = {"fsdp_config.fsdp_sharding_strategy": 4, "distributed_type": "FSDP"}
    found = _convert("accelerate", {**keys, "num_machines": 3})
    assert found.config.sharding.data_parallel_replicate_degree == 3
    assert not [
        each for each in _convert("accelerate", {**keys, "num_machines": 1}).findings if each.verdict == UNSUPPORTED
    ]


@pytest.mark.parametrize("name", ["hf", "composer", "foundry"])
def test_hybrid_sharding_without_a_degree_is_not_dropped(name: str) -> None:
    key = {"hf": "fsdp", "composer": "fsdp.sharding_strategy", "foundry": "fsdp_config.sharding_strategy"}[name]
    last = [each for each in _convert(name, {key: "HYBRID_SHARD"}).findings if each.key == key][-1]
    assert last.verdict == UNSUPPORTED and "data_parallel_replicate_degree" in last.reason


@pytest.mark.parametrize("name", ["accelerate", "hf", "composer", "foundry"])
def test_no_shard_stays_replicated(name: str) -> None:
    prefix = {"accelerate": "fsdp_config.fsdp_", "composer": "fsdp.", "foundry": "fsdp_config."}
    key = "fsdp" if name == "hf" else f"{prefix[name]}sharding_strategy"
    sharding = _convert(name, {key: "NO_SHARD"}).config.sharding
    assert (sharding.data_parallel_shard_degree, sharding.data_parallel_replicate_degree) == (1, -1)


# Defaults that mean something else, and what is said: the format, the keys that are there, the key that is not.
DEFAULTS = {
    "full state dicts, Accelerate": ("accelerate", {"fsdp_config.fsdp_version": 1}, "fsdp_config.fsdp_state_dict_type"),
    "full state dicts, Trainer": ("hf", {"auto_wrap_policy": "NO_WRAP"}, "state_dict_type"),
    "full state dicts, Composer": ("composer", {"fsdp.verbose": True}, "fsdp.state_dict_type"),
    "nothing is wrapped, Accelerate": (
        "accelerate",
        {"fsdp_config.fsdp_version": 2},
        "fsdp_config.fsdp_auto_wrap_policy",
    ),
    "BACKWARD_POST": ("foundry", {"fsdp_config.verbose": True}, "fsdp_config.backward_prefetch"),
    "reentrant checkpointing": (
        "foundry",
        {"fsdp_config.activation_checkpointing": True},
        "fsdp_config.activation_checkpointing_reentrant",
    ),
    "the model's classes, Trainer": ("hf", {"version": 2}, "auto_wrap_policy"),
    "full state dicts of version 2, Trainer": ("hf", {"version": 2}, "state_dict_type"),
    "version 2, Trainer": ("hf", {"auto_wrap_policy": "NO_WRAP"}, "version"),
    "torchtitan's low precision": (
        "torchtitan",
        {"parallelism.tensor_parallel_degree": 1},
        "training.mixed_precision_param",
    ),
    "DeepSpeed without a stage": ("deepspeed", {"steps_per_print": 1}, "zero_optimization.stage"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_that_changes_meaning_is_said(name: str) -> None:
    format, keys, key = DEFAULTS[name]
    said = [each for each in _convert(format, keys).findings if each.key == key]
    assert len(said) == 1 and said[0].default and said[0].reason


def test_version_2_has_other_defaults() -> None:
    assert _convert("accelerate", {"fsdp_config.fsdp_version": 2}).config.state_dict.kind == "sharded"
    found = convert({"parallelism_config": {"fsdp2": {"verbose": True}}}, "x.yaml", ".yaml")
    assert (found.format.name, found.config.state_dict.kind) == ("composer", "sharded")


@pytest.mark.parametrize(
    ("name", "key"), [("foundry", "fsdp_config.mixed_precision"), ("composer", "fsdp.mixed_precision")]
)
def test_pure_says_that_gradients_are_reduced_in_low_precision(name: str, key: str) -> None:
    found = _convert(name, {key: "PURE", "precision": "amp_bf16"})
    assert found.config.precision.dtypes == ("bfloat16", "bfloat16", None)
    assert "reduced in the low precision" in next(each.reason for each in found.findings if each.key == key)


@pytest.mark.parametrize("written", [{}, {"reduce_dtype": None}])
@pytest.mark.parametrize(
    ("name", "key"),
    [("foundry", "fsdp_config.mixed_precision"), ("composer", "fsdp.mixed_precision"), ("composer", "mixed_precision")],
)
def test_a_reduction_that_is_left_out_is_in_the_dtype_of_compute(name: str, key: str, written: dict[str, Any]) -> None:
    found = _convert(name, {key: {"param_dtype": "bf16", **written}, "precision": "amp_bf16"})
    assert found.config.precision.dtypes == ("bfloat16", "bfloat16", None)
    said = next(each for each in found.findings if "precision.reduce" in each.setting)
    assert said.default and "as there" in said.reason
    other = _convert(name, {key: {"param_dtype": "bf16", "reduce_dtype": "fp32"}})
    assert other.config.precision.dtypes == ("bfloat16", "float32", None)


@pytest.mark.parametrize("each", FORMATS.values(), ids=lambda each: each.name)
def test_what_computes_in_a_lower_dtype_says_in_which_it_reduces(each: Any) -> None:
    """Of every case of every key: where a file leaves the dtype of reductions out, the settings have it."""
    met = 0
    for key, (_, row) in keys_of(each).items():
        for case in row.subject.cases:
            if {"precision.mode", "precision.param"} & case.settings.keys() and case.when != (ABSENT,):
                value = "bfloat16" if case.when[0] == TEXT else case.when[0]
                compute, reduce, _ = _convert(each.name, {key: value}).config.precision.dtypes
                assert (reduce is None) == (compute is None), (key, value)
                met += compute is not None
    assert met


def test_accelerate_says_that_it_reduces_in_the_compute_dtype() -> None:
    found = _convert("accelerate", {"mixed_precision": "bf16", "distributed_type": "FSDP"})
    assert found.config.precision.dtypes == ("bfloat16", "bfloat16", None)
    said = next(each for each in found.findings if each.key == "mixed_precision")
    assert "gradients are reduced in the compute dtype" in said.reason


def test_the_trainer_has_defaults_of_its_own() -> None:
    config = _convert("hf", {"reshard_after_forward": True}).config
    assert (config.wrap.by, config.state_dict.kind, config.state_dict.rank0_only) == ("no_split_modules", "full", True)
    config = _convert("hf", {"version": 2, "transformer_layer_cls_to_wrap": ["Block"]}).config
    assert (config.wrap.by, config.wrap.classes) == ("classes", ("Block",))


@pytest.mark.parametrize(("version", "cast"), [({}, True), ({"fsdp_config.fsdp_version": 2}, False)])
def test_version_1_of_accelerate_casts_buffers(version: dict[str, Any], cast: bool) -> None:
    keys = {"mixed_precision": "bf16", "fsdp_config.fsdp_offload_params": False, **version}
    said = next(each for each in _convert("accelerate", keys).findings if each.key == "mixed_precision")
    assert ("casts buffers too" in said.reason) == cast


def test_accelerate_recomputes_whole_layers() -> None:
    keys = {"fsdp_config.fsdp_activation_checkpointing": True, "fsdp_config.fsdp_version": 2}
    said = next(each for each in _convert("accelerate", keys).findings if each.key.endswith("_checkpointing"))
    assert "children" not in said.reason and "dropout" in said.reason
    with pytest.raises(MigrationError, match="expected fsdp_activation_checkpointing = true beside it"):
        _convert("accelerate", {"fsdp_config.fsdp_activation_checkpointing_offload": True})


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head", ["lm_head"]),
        (r"model\.vision_tower.*|lm_head", ["model.vision_tower*", "lm_head"]),
        ("(a|b.c)", ["a", "b.c"]),
        ("^(?:a)$", ["a"]),
        (r"layers\.\d+", None),
        ("a[bc]", None),
        ("a(b|c)", None),
        ("", None),
        ("a|", None),
    ],
)
def test_regular_expressions_of_names(pattern: str, names: list[str] | None) -> None:
    """What is read as names matches the same modules as the expression."""
    assert names_of(pattern) == names
    found = _convert("accelerate", {"fsdp_config.fsdp_ignored_modules": pattern})
    assert found.config.wrap.ignored == tuple(names or ())
    assert [each.verdict for each in found.findings if each.key.endswith("ignored_modules")] == [
        UNSUPPORTED if names is None else EQUIVALENT
    ]
    for module in ("lm_head", "model.vision_tower", "model.vision_tower.x.y", "a", "b.c", "layers.3", "ab"):
        same = names is None or any(fnmatchcase(module, name) for name in names)
        assert names is None or same == bool(re.fullmatch(pattern, module))


@pytest.mark.parametrize(
    ("keys", "lost"),
    [
        ({"gradient_clipping": 0.5}, ["gradient_clipping"]),
        ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps"]),
        ({"gradient_clipping": 0.0, "gradient_accumulation_steps": 1}, []),
        ({"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}, []),
    ],
)
def test_what_deepspeed_s_engine_does_in_a_step_is_not_dropped(keys: dict[str, Any], lost: list[str]) -> None:
    found = _convert("deepspeed", {"zero_optimization.stage": 2, **keys})
    assert [each.key for each in found.findings if each.verdict == LOSSY] == lost


def test_keys_of_foundry_that_are_not_about_sharding() -> None:
    keys = "eval_gauntlet eval_gauntlet_str icl_tasks_str icl_seq_len icl_subset_num_batches load_ignore_keys".split()
    keys += "save_ignore_keys cuda_load_lazy device_train_batch_size n_gpus device_train_grad_accum".split()
    found = _convert("foundry", {**dict.fromkeys(keys, 1), "fsdp_config.verbose": True})
    said = next(each for each in found.findings if "eval_gauntlet" in each.key)
    assert said.verdict == DROPPED and said.key.split(", ") == keys


def test_composer_shards_over_all_ranks_without_a_degree() -> None:
    found = _convert("composer", {"fsdp.sharding_strategy": "HYBRID_SHARD", "fsdp.data_parallel_replicate_degree": 2})
    said = next(each for each in found.findings if each.key == "fsdp.sharding_strategy")
    assert "without it Composer shards over all ranks, with a warning" in said.reason


@pytest.mark.parametrize("value", [None, {}])
def test_a_table_without_keys(value: Any) -> None:
    table = {"distributed_type": "FSDP", "fsdp_config": value, "parallelism_config": value}
    assert not [each.key for each in convert(table, "a.yaml", ".yaml").findings if "config" in each.key]


def test_interpolations_are_resolved() -> None:
    keys = {"variables.micro": 8, "device_train_microbatch_size": "${variables.micro}", "fsdp_config.verbose": True}
    assert _convert("foundry", keys).config.micro_batches.size == 8
    with pytest.raises(MigrationError, match="found no variables.mikro in this file"):
        _convert("foundry", {"device_train_microbatch_size": "${variables.mikro}"})


def test_composer_s_table_may_stand_alone() -> None:
    found = convert(
        {"sharding_strategy": "FULL_SHARD", "data_parallel_shard_degree": 8, "cpu_offload": True}, "x.yaml", ".yaml"
    )
    assert found.format.name == "composer"
    assert (found.config.sharding.data_parallel_shard_degree, found.config.sharding.cpu_offload) == (8, True)


# ---- the command and bad input ---------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


ACCELERATE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sharding_strategy: SHARD_GRAD_OP
mixed_precision: 'no'
num_processes: 8
"""


def test_the_command_writes_a_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "acc.yaml").write_text(ACCELERATE)
    assert main(["migrate", "acc.yaml"]) == 0
    said = capsys.readouterr().out
    assert "acc.yaml:5: exact: fsdp_config.fsdp_sharding_strategy" in said
    config = read_config(here / "acc.fullshard.toml")
    assert (config.wrap.by, config.sharding.reshard_after_forward) == ("no_split_modules", False)
    assert main(["migrate", "acc.yaml", "--json", "--output", "b.toml"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "accelerate" and found["counts"]["exact"] >= 5
    assert read_config(found["settings"]) == config


def test_what_is_lost_is_an_exit_code_that_can_be_accepted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    key = "zero_optimization.zero_quantized_weights"
    assert main(["migrate", "ds.json"]) == 1
    assert main(["migrate", "ds.json", "--accept-lossy", key, "--output", "b.toml"]) == 0
    assert "(accepted)" in capsys.readouterr().out
    assert main(["migrate", "ds.json", "--accept-lossy", "stage", "--output", "c.toml"]) == 2
    assert f"there are {key}" in capsys.readouterr().err and not (here / "c.toml").exists()


# name of the file, its text, the place and a part of the message
BAD = {
    "an unknown key": (
        "a.yaml",
        ACCELERATE.replace("fsdp_state_dict_type", "fsdp_state_dict_typ"),
        "a.yaml:4: ",
        "fsdp_config.fsdp_state_dict_type",
    ),
    "an unknown outermost key": ("a.yaml", ACCELERATE + "num_procs: 3\n", "a.yaml:8: ", "nearest valid: num_processes"),
    "a wrong type": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: 3\n",
        "a.yaml:3: fsdp_config.fsdp_offload_params = 3: ",
        "expected true or false",
    ),
    "a value for a table": ("c.yaml", "fsdp: [1]\n", "c.yaml:1: fsdp = [1]: ", "expected a table"),
    "a number for Accelerate's table": (
        "a.yaml",
        "distributed_type: FSDP\nfsdp_config: 3\n",
        "a.yaml:2: fsdp_config = 3: ",
        "expected a table",
    ),
    "a switch for DeepSpeed's table": (
        "d.json",
        '{"zero_optimization": true}',
        "d.json:1: zero_optimization = true: ",
        "expected a table",
    ),
    "a number for Composer's table": (
        "c.yaml",
        "parallelism_config: 3\n",
        "c.yaml:1: parallelism_config = 3: ",
        "expected a table",
    ),
    "a switch for a table of DeepSpeed's": (
        "d.json",
        '{"zero_optimization": {"stage": 3, "offload_param": true}}',
        "d.json:1: zero_optimization.offload_param = true: ",
        "expected a table",
    ),
    "a wrong value": (
        "a.yaml",
        ACCELERATE.replace("SHARD_GRAD_OP", "HALF_SHARD"),
        "a.yaml:5: ",
        "FULL_SHARD or 1 or SHARD_GRAD_OP or 2",
    ),
    "a number for a switch": (
        "t.toml",
        "[training]\nenable_cpu_offload = 3\n[parallelism]\n",
        "t.toml:2: ",
        "expected true or false",
    ),
    "a degree beside a strategy": (
        "c.yaml",
        "fsdp:\n  sharding_strategy: NO_SHARD\n  data_parallel_shard_degree: 4\n",
        "c.yaml:3: ",
        "contradicts fsdp.sharding_strategy",
    ),
    "contradictory strategies": (
        "c.yaml",
        "fsdp:\n  sharding_strategy: FULL_SHARD\n  reshard_after_forward: false\n",
        "c.yaml:3: ",
        "contradicts fsdp.sharding_strategy",
    ),
    "several unknown keys": (
        "a.yaml",
        ACCELERATE.replace("fsdp_state_dict_type", "fsdp_state_dict_typ") + "num_procs: 3\n",
        "a.yaml:4: ",
        "nearest valid: fsdp_config.fsdp_state_dict_type; a.yaml:8: num_procs = 3: ",
    ),
    "an unknown key of ZeRO": (
        "d.json",
        '{"zero_optimization": {"stage": 2, "stage3_max_live": 1}}',
        "d.json:1: zero_optimization.stage3_max_live = 1: ",
        "nearest valid: zero_optimization.stage3_max_live_parameters",
    ),
    "a misspelled outermost key": (
        "d.json",
        '{"zero_optimization": {"stage": 2}, "gradient_cliping": 1}',
        "d.json:1: gradient_cliping = 1: ",
        "nearest valid: gradient_clipping",
    ),
    "contradictory degrees": (
        "t.toml",
        "[parallelism]\ndata_parallel_shard_degree = -1\ndata_parallel_replicate_degree = -1\n",
        "t.toml:3: parallelism.data_parallel_replicate_degree: ",
        "expected one of the two degrees, found -1 for both; nearest valid: 1",
    ),
    "a degree of nothing": ("t.toml", "[parallelism]\ndata_parallel_shard_degree = 0\n", "t.toml:2: ", "at least 1"),
    "a tag of Python": (
        "a.yaml",
        "fsdp_config: !!python/object/apply:os.system ['true']\n",
        "a.yaml:1:14: ",
        "could not determine a constructor",
    ),
    "a key that is a number": ("a.yaml", "1: 2\n", "a.yaml: ", "found the key 1, which is no text"),
    "no configuration": ("a.yaml", "colour: red\n", "a.yaml: ", "expected a configuration of one of these"),
    "a list": ("a.json", "[1, 2]", "a.json: ", "expected keys with values, found a list"),
    "an empty file": ("a.yaml", "", "a.yaml: ", "found nothing"),
    "broken YAML": ("a.yaml", "a: [1,\nb: 2\n", "a.yaml:3:", "not valid YAML"),
    "broken JSON": ("a.json", '{"a": 1,}', "a.json: ", "not valid JSON"),
    "broken TOML": ("a.toml", "a = \n", "a.toml: ", "not valid TOML"),
    "another kind of file": ("a.ini", "[x]\n", "a.ini: ", "expected a file named"),
    "a program in another language": ("a.sh", "echo\n", "a.sh: ", "expected a file named"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text, place, part = BAD[name]
    (here / file).write_text(text)
    assert main(["migrate", file]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert f"fullshard migrate: {place}" in said.err and part in said.err
    assert [path.name for path in here.iterdir()] == [file]


def test_an_existing_file_is_not_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "acc.yaml").write_text(ACCELERATE)
    (here / "acc.fullshard.toml").write_text("mine")
    assert main(["migrate", "acc.yaml"]) == 2
    assert "acc.fullshard.toml: expected no file there" in capsys.readouterr().err
    assert (here / "acc.fullshard.toml").read_text() == "mine"
