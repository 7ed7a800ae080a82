"""Keys of a configuration: their types, limits and meanings as field metadata of frozen dataclasses; strict reading.

An unknown key, or a value of the wrong type, out of its limits or not among its choices raises `ConfigError`, whose
text is one line that names the key, the value and the nearest valid one. No torch.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """The user's configuration cannot be used. The text is one line: key, value, problem, nearest valid choice."""


def invalid(key: str, value: object, problem: str, nearest: str = "") -> ConfigError:
    """`invalid("training.steps", 0, "expected at least 1", "1")` -> the one line that the user sees."""
    line = f"{key} = {show(value)}: {problem}"
    return ConfigError(f"{line}; nearest valid: {nearest}" if nearest else line)


def show(value: object) -> str:
    """A value in TOML syntax (JSON's, for scalars and lists of them)."""
    return json.dumps(value, ensure_ascii=False, default=str)


def setting(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),  # for a key of type `int | str`: words allowed instead of a number
    least: float | None = None,  # inclusive lower limit
    above: float | None = None,  # exclusive lower limit
    most: float | None = None,  # inclusive upper limit
    spellings: tuple[str, ...] = (),  # other names of the key, read but never written
) -> Any:
    """A field of a dataclass of keys."""
    limits = {"doc": doc, "choices": choices, "words": words, "least": least, "above": above, "most": most}
    return field(default=default, metadata=limits | {"spellings": spellings})


_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a string"),
    "tuple[str, ...]": (tuple, "a list of strings"),
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

# Common names for these choices. Used only to suggest the nearest valid choice.
_SYNONYMS = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"),
    **dict.fromkeys(("bf16", "half", "mixed"), "bfloat16"),
    **dict.fromkeys(("fp32", "single", "full"), "float32"),
    **dict.fromkeys(("fp16",), "float16"),
    **dict.fromkeys(("true", "on", "yes"), "always"),
    **dict.fromkeys(("false", "off", "no"), "never"),
    **dict.fromkeys(("byte", "utf-8", "utf8"), "bytes"),
}


def checked(name: str, key: Field[Any], value: Any) -> Any:
    """`value`, converted to the key's type and checked against its limits."""
    limits = key.metadata
    words, choices = limits["words"], limits["choices"]
    if isinstance(value, str) and value in words:
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = tuple(value)
    kinds = [_TYPES[kind] for kind in _kinds(key)]
    if any(kind is float for kind, _ in kinds) and type(value) is int:
        value = float(value)
    # type, not isinstance: a bool is an int
    if all(type(value) is not kind for kind, _ in kinds) or (type(value) is tuple and not _are_texts(value)):
        expected = " or ".join([*(meaning for _, meaning in kinds), *map(show, words)])
        raise invalid(name, value, f"expected {expected}", _nearest_value(key, value))
    if choices and value not in choices:
        nearest = _SYNONYMS.get(value.lower(), "")
        if nearest not in choices:
            folded = {choice.lower(): choice for choice in choices}
            nearest = folded[difflib.get_close_matches(value.lower(), folded, n=1, cutoff=0.0)[0]]
        raise invalid(name, value, f"expected one of {', '.join(map(show, choices))}", show(nearest))
    if type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{name} = {value}: expected a finite number; nearest valid: {show(key.default)}")
    if type(value) not in (int, float):
        return value
    least, above, most = limits["least"], limits["above"], limits["most"]
    if least is not None and value < least:
        raise invalid(name, value, f"expected at least {show(least)}", show(least))
    if above is not None and value <= above:
        raise invalid(name, value, f"expected more than {show(above)}", show(key.default))
    if most is not None and value > most:
        raise invalid(name, value, f"expected at most {show(most)}", show(most))
    return value


def unknown(name: str, value: Any, valid: list[str], what: str) -> ConfigError:
    """The error for a `what` ("key", "section") of that name: with the nearest of `valid` where one is near, else with
    what its section has."""
    if isinstance(value, dict):
        head = f"[{name}]" if what == "section" else name
    else:
        head = f"{name} = {value if isinstance(value, str) else show(value)}"
    # The last part decides if the section is wrong or missing: `training.stps`, `trainer.steps`.
    section, _, last = name.rpartition(".")
    same_key = [v for v in valid if v.rpartition(".")[2] == last]
    if near := same_key or _near(name, valid):
        return ConfigError(f"{head}: there is no such {what}; nearest valid: {near[0]}")
    beside = [v.rpartition(".")[2] for v in valid if v.rpartition(".")[0] == section]
    inside = f"[{section}] has {', '.join(beside)}" if section and beside else f"there are {', '.join(valid)}"
    return ConfigError(f"{head}: there is no such {what}; {inside}")


# How alike two words are at least, for one to be proposed for the other: `stps` and `steps`, not `wandb` and
# `eval_windows`.
_ALIKE = 0.6


def _near(name: str, valid: list[str]) -> list[str]:
    """Returns the one of `valid` that `name` misspells: its last part is alike, and of those it is the nearest."""
    last = name.rpartition(".")[2]
    alike = [v for v in valid if difflib.SequenceMatcher(None, last, v.rpartition(".")[2]).ratio() >= _ALIKE]
    return difflib.get_close_matches(name, alike, n=1, cutoff=0.0)


def names_of(sections: Iterable[tuple[str, Any]]) -> list[str]:
    """Every `section.key` of (name, dataclass of keys) pairs, in their order."""
    return [f"{name}.{key.name}" for name, keys in sections for key in fields(keys)]


def find_key(section: str, keys: Any, name: object, value: Any, valid: list[str]) -> Field[Any]:
    """The key of a section that is called `name`, or has it as another spelling. Raises `ConfigError`, with the nearest
    of `valid`."""
    for key in () if keys is None else fields(keys):
        if name in (key.name, *key.metadata["spellings"]):
            return key
    raise unknown(f"{section}.{name}", value, valid, "key")


def line(key: Field[Any], value: Any, note: str = "") -> str:
    """A key with its value in TOML, and its meaning beside it; `note`: what an automatic setting is here."""
    doc = key.metadata["doc"] + (f" [{note}]" if note else "")
    return f"{f'{key.name} = {show(value)}':<40}  # {doc}"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError` for a file that cannot be read or is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _are_texts(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, str) for value in values)


def _kinds(key: Field[Any]) -> list[str]:
    """The types of a key as written, without the words allowed instead of a number."""
    kinds = str(key.type).split(" | ")
    return [kind for kind in kinds if kind != "None" and not (kind == "str" and key.metadata["words"])]


def _nearest_value(key: Field[Any], value: Any) -> str:
    """Proposes, for a value of the wrong type, the same value in the right type if that is obvious, else the
    default."""
    kinds, text = _kinds(key), str(value).strip()
    if _SYNONYMS.get(text.lower(), "") in key.metadata["words"]:
        return show(_SYNONYMS[text.lower()])
    if isinstance(value, str) and (close := difflib.get_close_matches(value, key.metadata["words"], n=1)):
        return show(close[0])
    if "int" in kinds and isinstance(value, float) and abs(value) < 2**53:
        return str(round(value))
    if "int" in kinds and isinstance(value, str) and text.lstrip("-").isdigit():
        return text
    if "bool" in kinds and text.lower() in (*_TRUE, *_FALSE):
        return show(text.lower() in _TRUE)
    if "tuple[str, ...]" in kinds and isinstance(value, str):
        return show([value])
    if "str" in kinds and isinstance(value, (int, float)):
        return show(text.lower() if isinstance(value, bool) else text)
    return show(key.default)
