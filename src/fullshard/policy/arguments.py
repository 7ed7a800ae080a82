"""Checks of arguments, before anything is changed: each error names the argument, what it expects and what it found.

A value of another kind is a `TypeError`, one of the right kind out of range a `ValueError`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn


def expect(
    argument: str, fits: bool, wanted: str, value: object, remedy: str, kind: type[Exception] = TypeError
) -> None:
    """Raise `kind` unless `fits`.

    >>> expect("seed", False, "an int", "7", "write the number")
    Traceback (most recent call last):
    ...
    TypeError: seed: expected an int, found '7'; write the number
    """
    if not fits:
        plain = value is None or isinstance(value, (str, bytes, bool, int, float, complex))
        found = repr(value) if plain else f"a value of type {type(value).__name__}"
        found = found if len(found) <= 200 else f"{found[:197]}..."
        raise kind(f"{argument}: expected {wanted}, found {found}; {remedy}")


def expect_known_fields(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise `TypeError` for a field of an options object that nothing here reads, unless it has its default: a newer
    torch may have it, and ignoring it would train something else.

    Fields are those of a dataclass, a named tuple or `__slots__`, and public attributes of the instance.
    """
    known = set(known)
    for name, found in _fields(value):
        if name not in known and not name.startswith("_") and found is not _DEFAULT:
            raise TypeError(
                f"{argument}.{name}: expected the fields {', '.join(sorted(known)) or 'none'}, found "
                f"{name}={found!r:.100} of {type(value).__module__}.{type(value).__qualname__}, which this version of "
                f"fullshard does not know and would ignore; leave it at its default, or use a version that knows it"
            )


_DEFAULT = object()


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """(name, value) of the fields; `_DEFAULT` for one with its default."""
    defaults: dict[str, object] = dict(getattr(value, "_field_defaults", {}))
    names = [*getattr(value, "_fields", ())]
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            names.append(field.name)
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                defaults[field.name] = field.default_factory()
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    for name in dict.fromkeys([*names, *getattr(value, "__dict__", ()), *slots]):
        if hasattr(value, name):
            found = getattr(value, name)
            is_default = name in defaults and (found is defaults[name] or bool(found == defaults[name]))
            yield name, _DEFAULT if is_default else found


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def expect_flag(argument: str, value: object, *, or_none: bool = False) -> bool:
    """True or False, as a bool, a bool of numpy, 0 or 1: for a text or a list, `bool` has an answer that nobody meant.

    >>> expect_flag("recurse", 1), expect_flag("foreach", None, or_none=True)
    (True, False)
    """
    fits = type(value) is bool or (isinstance(value, Integral) and value in (0, 1)) or type(value).__name__ == "bool_"
    fits = fits or (type(value).__module__ == "numpy" and type(value).__name__ == "bool")
    wanted = f"True or False{' or None' if or_none else ''}"
    expect(argument, fits or (or_none and value is None), wanted, value, "pass one of them")
    return bool(value)


def expect_module(argument: str, value: object) -> nn.Module:
    """A module, not its class and not a list of them."""
    expect(argument, isinstance(value, nn.Module), "an nn.Module", value, "pass the module itself")
    return cast(nn.Module, value)


def expect_whole(argument: str, value: object, least: int | None = None) -> int:
    """An int, of Python or numpy, and no bool; `least` is the smallest allowed."""
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    expect(argument, isinstance(value, Integral) and not isinstance(value, bool), wanted, value, "pass an int")
    number = int(cast(int, value))
    expect(argument, least is None or number >= least, wanted, value, "pass another one", ValueError)
    return number


def expect_number(argument: str, value: object, fits: Callable[[float], bool], wanted: str) -> None:
    """A real number for which `fits` holds, which is False of NaN; or a tensor of one element, whose value is looked at
    on a CPU only: elsewhere that would wait for the device."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    expect(argument, is_tensor or (isinstance(value, Real) and not isinstance(value, bool)), wanted, value, "pass one")
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        number = float(cast(float, value))
        expect(argument, not math.isnan(number) and fits(number), wanted, number, "pass another one", ValueError)


def expect_callable(argument: str, value: object, wanted: str, *, or_none: bool = False) -> None:
    """A function, or another object that can be called."""
    wanted = f"{wanted}{' or None' if or_none else ''}"
    expect(argument, callable(value) or (or_none and value is None), wanted, value, "pass the function, not its result")


def expect_text(argument: str, value: object, wanted: str = "a string", *, or_none: bool = False) -> None:
    """A string."""
    expect(argument, isinstance(value, str) or (or_none and value is None), wanted, value, "write it as text")


def expect_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """One of the strings `choices`; another one is a `ValueError`."""
    choices = list(choices)
    wanted = f"one of {', '.join(choices)}"
    expect_text(argument, value, wanted)
    expect(argument, value in choices, wanted, value, "check its spelling", ValueError)


def expect_each(argument: str, values: object, fits: Callable[[Any], bool], wanted: str) -> list[Any]:
    """The items of an iterable, each of which `fits`. A mapping or a string is no list of its parts.

    >>> expect_each("take_first", ["model"], lambda key: isinstance(key, str), "a list of keys")
    ['model']
    """
    listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Tensor))
    expect(argument, listed, wanted, values, "put it into a list")
    items = list(cast("Iterable[Any]", values))
    for position, item in enumerate(items):
        expect(f"{argument}[{position}]", fits(item), wanted, item, "leave it out")
    return items


def expect_keys(argument: str, values: object) -> list[str]:
    """A list of strings."""
    return expect_each(argument, values, lambda key: isinstance(key, str), "a list of keys")


def expect_tensors(argument: str, values: object) -> list[Tensor]:
    """A tensor, or an iterable of tensors."""
    if isinstance(values, Tensor):
        return [values]
    return expect_each(argument, values, lambda item: isinstance(item, Tensor), "a tensor, or an iterable of tensors")


def is_optimizer(value: object) -> bool:
    """Whether it is an optimizer, or one around one: torch's, Accelerate's, ..."""
    return isinstance(value, object) and not isinstance(value, type) and hasattr(value, "param_groups")


def expect_optimizers(argument: str, values: object) -> list[Any]:
    """An optimizer, or an iterable of optimizers."""
    if is_optimizer(values):
        return [values]
    return expect_each(argument, values, is_optimizer, "an optimizer, or a list of optimizers")


def expect_group(argument: str, value: object) -> None:
    """A process group that this rank is in, or None."""
    fits = value is None or isinstance(value, dist.ProcessGroup)
    expect(argument, fits, "a process group that this rank is in, or None", value, "None takes the default")


def expect_state(argument: str, value: object, keys: set[str]) -> None:
    """Checks what `state_dict()` returned, which has `keys`."""
    fits = isinstance(value, Mapping) and keys <= {*value}
    expect(argument, fits, f"a dict with {', '.join(sorted(keys))}", value, "pass what state_dict() returned")


def expect_dict(argument: str, value: object, *, or_none: bool = False) -> None:
    """A mapping with string keys."""
    fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    expect(argument, fits or (or_none and value is None), "a dict with string keys", value, "pass a state dict")
