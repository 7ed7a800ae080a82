"""How many bytes one element of a dtype takes, by the dtype's name: byte arithmetic without torch.

Names are torch's own, with or without the `torch.` in front, so `itemsize(str(tensor.dtype))` works.
"""

from __future__ import annotations

_ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

# torch's second names of the same dtypes.
_ALIASES: dict[str, str] = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


def known_dtypes() -> tuple[str, ...]:
    """The canonical names `itemsize` knows, sorted."""
    return tuple(sorted(_ITEMSIZES))


def itemsize(name: str) -> int:
    """Bytes of one element of dtype `name`.

    >>> itemsize("bfloat16"), itemsize("torch.float32"), itemsize("float8_e4m3fn")
    (2, 4, 1)

    Raises `ValueError` for a name that is not a whole-byte torch dtype.
    """
    short = name.removeprefix("torch.")
    nbytes = _ITEMSIZES.get(_ALIASES.get(short, short))
    if nbytes is None:
        raise ValueError(
            f"dtype: expected the name of a torch dtype of whole bytes, found {name!r}; "
            f"use one of {', '.join(known_dtypes())}"
        )
    return nbytes
