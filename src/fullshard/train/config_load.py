"""From a TOML file and `--set section.key=value` to a `Config`, and back to commented TOML.

Reading is strict: an unknown section or key, a value of another type, out of its limits or not among its choices is a
`ConfigError` of one line. Nothing is ignored.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, invalid, show

_TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}

# What people write from habit, and what it is called here. Used only to name the nearest valid choice.
_SYNONYMS = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"),
    **dict.fromkeys(("bf16", "half", "mixed", "float16", "fp16"), "bfloat16"),
    **dict.fromkeys(("fp32", "single", "full"), "float32"),
    **dict.fromkeys(("true", "on", "yes"), "always"),
    **dict.fromkeys(("false", "off", "no"), "never"),
    **dict.fromkeys(("byte", "utf-8", "utf8"), "bytes"),
}


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, then the file, then the overrides (`section.key=value`) in order; checked.

    Raises `ConfigError` for everything that is wrong with them, an unreadable file included.
    """
    config = Config()
    if path is not None:
        config = _apply_tables(config, _read_toml(path))
    for text in overrides:
        config = _apply_override(config, text)
    config.check()
    return config


def to_toml(config: Config, *, notes: Mapping[str, str] | None = None) -> str:
    """The configuration as TOML with each key's meaning beside it; `load_config` of it gives `config` again.

    `notes` maps "section.key" to what an automatic value became here, for instance "2 here".
    """
    lines: list[str] = []
    for section in fields(config):
        lines.append(f"[{section.name}]")
        keys = getattr(config, section.name)
        for key in fields(keys):
            setting = f"{key.name} = {show(getattr(keys, key.name))}"
            note = (notes or {}).get(f"{section.name}.{key.name}")
            doc = key.metadata["doc"] + (f" [{note}]" if note else "")
            lines.append(f"{setting:<40}  # {doc}")
        lines.append("")
    return "\n".join(lines)


def key_names() -> list[str]:
    """Every `section.key`, in the order of the file."""
    config = Config()
    return [f"{s.name}.{k.name}" for s in fields(config) for k in fields(getattr(config, s.name))]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _apply_tables(config: Config, tables: dict[str, Any]) -> Config:
    for section, table in tables.items():
        if not hasattr(config, section):
            raise _unknown(section, table, [f.name for f in fields(config)], "section")
        if not isinstance(table, dict):
            raise invalid(section, table, f"expected a section, written [{section}]")
        for key, value in table.items():
            config = _with_value(config, section, key, value)
    return config


def _apply_override(config: Config, text: str) -> Config:
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise ConfigError(f"--set {text}: expected section.key=value, for example --set training.steps=20")
    if not hasattr(config, section):
        raise _unknown(name.strip(), raw, key_names(), "key")
    found = _find_key(config, section, key, raw)
    return _with_value(config, section, key, _parse_value(raw.strip(), text_wanted=found.type == "str"))


def _parse_value(raw: str, *, text_wanted: bool) -> Any:
    """A TOML value; what is not one is taken as a string, so that quotes need not survive the shell."""
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
    return raw if text_wanted and not isinstance(value, str) else value


def _with_value(config: Config, section: str, key: str, value: Any) -> Config:
    found = _find_key(config, section, key, value)
    checked = _checked(f"{section}.{key}", found, value)
    return replace(config, **{section: replace(getattr(config, section), **{key: checked})})


def _find_key(config: Config, section: str, key: str, value: Any) -> Field[Any]:
    for candidate in fields(getattr(config, section)):
        if candidate.name == key:
            return candidate
    raise _unknown(f"{section}.{key}", value, key_names(), "key")


def _unknown(name: str, value: Any, valid: list[str], what: str) -> ConfigError:
    if isinstance(value, dict):
        head = f"[{name}]" if what == "section" else name
    else:
        head = f"{name} = {value if isinstance(value, str) else show(value)}"
    # The last part decides where the section is right or merely forgotten: `training.stps`, `trainer.steps`.
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    same_key = [v for v in valid if v.rpartition(".")[2] == name.rpartition(".")[2]]
    nearest = same_key[0] if same_key else close[0]
    return ConfigError(f"{head}: there is no such {what}; nearest valid: {nearest}")


def _checked(name: str, key: Field[Any], value: Any) -> Any:
    """`value` in the key's type and within its limits."""
    kind, limits = _kind(key), key.metadata
    words: tuple[str, ...] = limits["words"]
    if isinstance(value, str) and value in words:
        return value
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected_type = {"int": int, "float": float, "bool": bool, "str": str}[kind]
    if not isinstance(value, expected_type) or (isinstance(value, bool) and kind != "bool"):
        expected = " or ".join([_TYPE_NAMES[kind], *map(show, words)])
        raise invalid(name, value, f"expected {expected}", _nearest_value(key, value))
    choices: tuple[str, ...] = limits["choices"]
    if choices and value not in choices:
        nearest = _SYNONYMS.get(str(value).lower(), "")
        if nearest not in choices:
            nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise invalid(name, value, f"expected one of {', '.join(map(show, choices))}", show(nearest))
    if kind in ("int", "float") and isinstance(value, (int, float)):
        _check_limits(name, key, value)
    return value


def _check_limits(name: str, key: Field[Any], value: float) -> None:
    least, above, most = key.metadata["least"], key.metadata["above"], key.metadata["most"]
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{name} = {value}: expected a finite number; nearest valid: {show(key.default)}")
    if least is not None and value < least:
        raise invalid(name, value, f"expected at least {show(least)}", show(least))
    if above is not None and value <= above:
        raise invalid(name, value, f"expected more than {show(above)}", show(key.default))
    if most is not None and value > most:
        raise invalid(name, value, f"expected at most {show(most)}", show(most))


def _kind(key: Field[Any]) -> str:
    """The type of a key as it is written, without the words that may stand for a number."""
    return str(key.type).removesuffix(" | str") if key.metadata["words"] else str(key.type)


def _nearest_value(key: Field[Any], value: Any) -> str:
    """For a value of the wrong type: the same value in the right type where that is plain, else the default."""
    kind = _kind(key)
    if isinstance(value, str) and (close := difflib.get_close_matches(value, key.metadata["words"], n=1)):
        return show(close[0])
    if kind == "int" and isinstance(value, float) and value == value and abs(value) < 2**53:
        return str(round(value))
    if kind == "int" and isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return value.strip()
    if kind == "bool" and str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return "true" if str(value).lower() in ("true", "yes", "on", "1") else "false"
    if kind == "str" and isinstance(value, (int, float, bool)):
        return show(str(value).lower() if isinstance(value, bool) else str(value))
    return show(key.default)
