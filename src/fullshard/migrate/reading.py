"""Reading a `ShardingConfig` from dicts and TOML, JSON and YAML files, and printing it with all defaults. No torch.

Reading is strict as in `fullshard.keys`. A section may be short, its first setting alone (`precision = "PURE"`),
and a key that only one section has may stand outside of it (`data_parallel_shard_degree = 8`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any

from ..keys import ConfigError, checked, find_key, invalid, line, names_of, show, unknown
from .config import ALWAYS, DEFAULT, NEVER, Override, ShardingConfig, ShardingKeys
from .levels import find_level
from .parallelism import Parallelism, ParallelismKeys, refuse_async
from .schedules import find_schedule, parts_of

# ---- files -----------------------------------------------------------------------------------------------------------


def read_table(path: Path) -> dict[str, Any]:
    """The outermost table of a TOML, JSON or YAML file, by its suffix. Raises `ConfigError`, with the mistake's place.

    YAML is read by PyYAML's safe loader, an extra (`pip install "fullshard[yaml]"`): a tag such as `!!python/object`
    is an error and runs nothing.
    """
    readers = {".toml": _toml, ".json": _json, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: expected a file named *.toml, *.json, *.yaml or *.yml")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error}") from None
    table = readers[path.suffix](path, text)
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        found = "nothing" if table is None else f"a {type(table).__name__}"
        if isinstance(table, dict):
            found = f"the key {next(key for key in table if not isinstance(key, str))!r}, which is no text"
        raise ConfigError(f"{path}: expected keys with values, found {found}")
    return table


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f'{path}: YAML needs PyYAML: pip install "fullshard[yaml]", or write TOML or JSON') from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        if "for the tag" in problem:
            problem += "; a tag is never run: write plain values"
        raise ConfigError(f"{path}{place}: not valid YAML: {problem}") from None


# ---- reading ---------------------------------------------------------------------------------------------------------

_SECTION_SPELLINGS = {"mixed_precision": "precision", "initialization": "initialisation"}

# The key that the short form of a section sets.
_SHORT = {
    "wrap": "by",
    "sharding": "strategy",
    "precision": "mode",
    "initialisation": "source",
    "activation_checkpointing": "at",
    "micro_batches": "size",
    "state_dict": "kind",
}
# A key that is given alone implies the choice that it goes with.
_IMPLIED = {
    "wrap": {"classes": ("by", "classes"), "plan": ("by", "plan"), "function": ("by", "function")}
    | {"min_params": ("by", "size")},
    "initialisation": {"path": ("source", "pretrained")},
    "activation_checkpointing": {"classes": ("at", "classes")},
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "half": "float16"}
_VALUES: dict[str, dict[Any, Any]] = {
    "wrap.by": {"SIZE_BASED_WRAP": "size", "NO_WRAP": "none", "TRANSFORMER_BASED_WRAP": "no_split_modules"},
    "sharding.reshard_after_forward": {ALWAYS: True, NEVER: False},
    "state_dict.kind": {"SHARDED_STATE_DICT": "sharded", "FULL_STATE_DICT": "full"},
    "activation_checkpointing.at": {True: "children", False: "none"},
}


def read_config(source: Mapping[str, Any] | ShardingConfig | str | Path | None = None) -> ShardingConfig:
    """The configuration of a dict, or of a file; None: the defaults. It is checked; raises `ConfigError`.

    >>> read_config({"precision": "PURE", "dp_shard_size": 8}).sharding.data_parallel_shard_degree
    8
    """
    if isinstance(source, ShardingConfig):
        source.check()
        return source
    if isinstance(source, (str, Path)):
        source = read_table(Path(source))
    if source is not None and not isinstance(source, Mapping):
        raise ConfigError(
            f"config: expected a dict, the path of a file or a ShardingConfig, found a {type(source).__name__}"
        )
    return of_settings(settings_of(source or {}))


def settings_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a dict by `section.key`, each under its own name and checked by itself; `override` as it is
    kept. Raises `ConfigError`."""
    default = ShardingConfig()
    tables: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    for name, value in source.items():
        if name == "override":
            settings[name] = _overrides(value)
            continue
        for section, table in _places(default, name, value):
            given = tables.setdefault(section, {})
            if given.keys() & table.keys():
                raise ConfigError(f"{section}.{next(iter(given.keys() & table.keys()))}: expected once, found twice")
            given.update(table)
    for section, table in tables.items():
        found = _found(section, getattr(default, section), table)
        settings |= {f"{section}.{key}": value for key, value in found.items()}
    return settings


def of_settings(settings: Mapping[str, Any]) -> ShardingConfig:
    """The configuration with these settings, checked. Raises `ConfigError` for rules between keys."""
    config = ShardingConfig(override=settings.get("override", ()))
    for section in _sections():
        own = {n.partition(".")[2]: value for n, value in settings.items() if n.startswith(f"{section}.")}
        config = replace(config, **{section: replace(getattr(config, section), **own)})
    config.check()
    return config


def _sections() -> list[str]:
    return [section.name for section in fields(ShardingConfig) if section.name != "override"]


def key_names() -> list[str]:
    """Every `section.key`, in the order of the file."""
    return names_of((name, getattr(ShardingConfig(), name)) for name in _sections())


def _places(config: ShardingConfig, name: object, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The sections that the outermost entry `name` belongs to, with their tables. [parallelism] may have all degrees,
    as torchtitan's does; those of data parallelism are kept in [sharding]."""
    if name != "parallelism":
        return [_place(config, name, value)]
    if isinstance(value, ParallelismKeys):
        changed = {key.name: getattr(value, key.name) for key in fields(value)}
        value = {key: each for key, each in changed.items() if each != getattr(Parallelism(), key)}
    if not isinstance(value, Mapping):
        return [_place(config, "sharding", value)]
    data = {"strategy"}.union(*((key.name, *key.metadata["spellings"]) for key in fields(ShardingKeys)))
    tables = {"sharding": {k: v for k, v in value.items() if k in data}}
    tables["parallelism"] = {k: v for k, v in value.items() if k not in data}
    return list(tables.items())


def _place(config: ShardingConfig, name: object, value: Any) -> tuple[str, dict[str, Any]]:
    """The section that the outermost entry `name` belongs to, and its table there."""
    section = _SECTION_SPELLINGS.get(str(name), str(name))
    if section in _sections():
        if isinstance(value, Mapping):
            return section, dict(value)
        if section == "wrap" and isinstance(value, list):
            return section, {"classes": value}
        if section == "precision" and isinstance(value, str) and (dtype := _dtype(value)) in _DTYPES.values():
            return section, {"mode": "DEFAULT", "dtype": dtype}
        return section, {} if value is None else {_SHORT[section]: value}
    owners = [
        section
        for section in _sections()
        if name == "strategy" == _SHORT.get(section)
        or any(name in (key.name, *key.metadata["spellings"]) for key in fields(getattr(config, section)))
    ]
    if len(owners) == 1:
        return owners[0], {str(name): value}
    if owners:
        raise ConfigError(f"{name}: expected it in a section, one of {', '.join(f'[{owner}]' for owner in owners)}")
    what = "section" if isinstance(value, Mapping) else "key"
    raise unknown(str(name), value, [*_sections(), "override"] if what == "section" else key_names(), what)


def _found(section: str, keys: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a table makes of `keys`, by their own names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if (section, name) == ("sharding", "strategy"):
            continue
        if (section, name) == ("parallelism", "disable_loss_parallel"):
            name, value = "enable_loss_parallel", value if type(value) is not bool else not value
        if (section, name) == ("parallelism", "enable_async_tensor_parallel"):
            refuse_async(value)
            continue
        key = _find_key(section, keys, name, value)
        if key.name in found:
            raise ConfigError(f"{section}.{name}: expected {key.name} once, found it under two names")
        if value is not None:
            found[key.name] = _value(f"{section}.{key.name}", key, value)
    if section == "sharding" and table.get("strategy") is not None:
        found |= _of_strategy(table["strategy"], found)
    for name, (lead, choice) in _IMPLIED.get(section, {}).items():
        if found.get(name, getattr(keys, name)) != getattr(keys, name) and (
            lead not in table or found[lead] == "no_split_modules"
        ):
            found[lead] = choice
    return found


def _find_key(section: str, keys: Any, name: object, value: Any) -> Field[Any]:
    if section == "precision" and name == "buffer_dtype":
        raise ConfigError("precision.buffer_dtype: buffers keep their dtype; leave it out, or convert them with .to()")
    known = section.partition("[")[0] in _sections()
    return find_key(section, keys, name, value, key_names() if known else [key.name for key in fields(keys)])


def _value(name: str, key: Field[Any], value: Any) -> Any:
    """A value in the form that is kept: other spellings replaced, lists as tuples, then checked."""
    if key.name == "plan":
        return _plan(value)
    if key.name == "styles":
        return _styles(value)
    if key.name == "module_fqns_per_model_part":
        return parts_of(value)
    if key.name == "pipeline_parallel_schedule":
        return find_schedule(value).name
    if "bfloat16" in key.metadata["choices"]:
        value = _dtype(value)
    spelled = _VALUES.get("sharding.reshard_after_forward" if key.name == "reshard_after_forward" else name, {})
    if name == "state_dict.kind" and value == "LOCAL_STATE_DICT":
        raise invalid(name, value, "shards of flat parameters, which nothing here has", '"sharded"')
    if isinstance(value, (str, bool)) and value in spelled:
        value = spelled[value]
    return checked(name, key, value)


def _dtype(value: object) -> object:
    """The name of a dtype: of a torch object, with its module, of Composer's precisions, or short."""
    text = str(value).removeprefix("torch.").removeprefix("amp_")
    return _DTYPES.get(text, text if text in _DTYPES.values() else value)


def _plan(value: Any) -> tuple[str | tuple[str, ...], ...]:
    entries = list(value) if isinstance(value, (list, tuple)) else []
    for position, entry in enumerate(entries):
        parts = entry if isinstance(entry, (list, tuple)) else [entry]
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise invalid(f"wrap.plan[{position}]", entry, "expected the name of a module, or a list of names")
    if not isinstance(value, (list, tuple)):
        raise invalid("wrap.plan", value, "expected a list of names and lists of names", show([str(value)]))
    return tuple(entry if isinstance(entry, str) else tuple(entry) for entry in entries)


def _styles(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        for pair in pairs
    ):
        problem = "expected a table of names of modules with their styles"
        raise invalid("parallelism.styles", value, problem, '{"layers.*.up" = "column"}')
    return tuple((name, style) for name, style in pairs)


def _of_strategy(name: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a level's name, which other settings beside it complete and may not contradict."""
    level = find_level("sharding.strategy", name)
    found: dict[str, Any] = {}
    for key, value in {
        "data_parallel_shard_degree": level.shard,
        "data_parallel_replicate_degree": level.replicate,
        "reshard_after_forward": level.reshard_after_forward,
    }.items():
        other = given.get(key)
        if value is None or (value == 0 and value is not False):
            if other is None or type(other) is bool:
                raise ConfigError(f"sharding.strategy = {show(name)}: expected {key}, found none; {level.note}")
        elif other not in (None, value) and not (value == -1 and type(other) is int and key.endswith("degree")):
            if not (key == "reshard_after_forward" and other == DEFAULT):
                raise ConfigError(
                    f"sharding.strategy = {show(name)}: means {key} = {show(value)}, found {show(other)}; leave one out"
                )
        elif other is None:
            found[key] = value
    return found


def _overrides(value: Any) -> tuple[Override, ...]:
    if isinstance(value, Mapping):  # {"layers.0": {"reshard_after_forward": False}}
        value = [{"modules": modules, **(table or {})} for modules, table in value.items()]
    if not isinstance(value, (list, tuple)) or not all(isinstance(table, (Mapping, Override)) for table in value):
        raise ConfigError("override: expected tables, written [[override]], each with modules and settings")
    return tuple(
        table
        if isinstance(table, Override)
        else replace(Override(), **_found(f"override[{number}]", Override(), table))
        for number, table in enumerate(value)
    )


# ---- printing --------------------------------------------------------------------------------------------------------


def to_dict(config: ShardingConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars; `read_config` reads it back as `config`."""
    table = asdict(config)
    table["override"] = [{k: v for k, v in found.items() if v is not None} for found in table["override"]]
    if not table["override"]:
        del table["override"]
    listed: dict[str, Any] = json.loads(json.dumps(table))  # tuples as lists
    return listed


def to_toml(config: ShardingConfig, *, only_changes: bool = False) -> str:
    """The configuration as TOML with the meaning of each key beside it; `read_config` reads it back as `config`.

    only_changes: leave out what has its default.
    """
    table, default, blocks = to_dict(config), to_dict(ShardingConfig()), []
    for section in _sections():
        keys = fields(getattr(config, section))
        lines = [
            line(key, table[section][key.name])
            for key in keys
            if not only_changes or table[section][key.name] != default[section][key.name]
        ]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines, ""]))
    for found in table.get("override", ()):
        lines = [line(key, found[key.name]) for key in fields(Override) if key.name in found]
        blocks.append("\n".join(["[[override]]", *lines, ""]))
    return "\n".join(blocks)
