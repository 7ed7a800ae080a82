"""What is no tensor: plain Python values, written as JSON so that they come back as what they were, types included.

None, bool, int, finite float, str and list are themselves; every JSON object is a tag, so nothing is ambiguous:

    {"float": "nan"}                 also "inf", "-inf"
    {"tuple": [1, 2]}
    {"dict": [["lr", 0.1], [3, 1]]}  pairs, because keys need not be strings
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

Value: TypeAlias = "None | bool | int | float | str | list[Value] | tuple[Value, ...] | dict[object, Value]"
Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

# Deeper nesting is no state of a training; it bounds the recursion of whoever reads.
MAX_DEPTH = 32
_KEYS = (str, bool, int, float, type(None), tuple)


def encode(value: object, depth: int = 0) -> Json:
    """`value` as JSON. Raises `TypeError` for what only a pickle could hold, `ValueError` for what is nested too deep.

    >>> encode({"betas": (0.9, float("inf"))})
    {'dict': [['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of lists and dicts, found more")
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)  # a subclass (IntEnum) would come back as the number as well
        case float():
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        case list():
            return [encode(item, depth + 1) for item in value]
        case tuple():
            return {"tuple": [encode(item, depth + 1) for item in value]}
        case Mapping():
            for key in value:
                if not isinstance(key, _KEYS):
                    raise TypeError(f"expected keys of str, int, float, bool, None or tuples of them, found {key!r}")
            return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    kind = type(value).__qualname__
    raise TypeError(f"expected a tensor, or None, bool, int, float, str, list, tuple or dict, found {kind}")


def decode(value: Json, depth: int = 0) -> Value:
    """What was encoded. Raises `ValueError` for JSON that `encode` does not make."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels of lists and dicts")
    match value:
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case list():
            return [decode(item, depth + 1) for item in value]
        case {"float": ("nan" | "inf" | "-inf") as text, **rest} if not rest:
            return float(text)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, depth + 1) for item in items)
        case {"dict": list(pairs), **rest} if not rest:
            return _decode_dict(pairs, depth)
    raise ValueError(f"a value that no save writes: {str(value)[:80]}")


def _decode_dict(pairs: list[Json], depth: int) -> dict[object, Value]:
    made: dict[object, Value] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"expected a pair of key and value, found {str(pair)[:80]}")
        key = decode(pair[0], depth + 1)
        try:
            known = key in made
        except TypeError:
            known = True
        if known:
            raise ValueError(f"a key twice, or one that cannot be a key: {str(pair[0])[:80]}")
        made[key] = decode(pair[1], depth + 1)
    return made


def kind_of(value: object) -> str:
    """What values of equal kind may take the place of each other when state is loaded.

    >>> kind_of(0) == kind_of(0.5), kind_of([1]) == kind_of((1,)), kind_of("0") == kind_of(0)
    (True, True, False)
    """
    match value:
        case None:
            return "None"
        case bool() | int() | float():
            return "number"
        case str():
            return "str"
        case list() | tuple():
            return "sequence"
    return "dict"
