"""Decides which inputs of a forward are cast: by the names of its arguments, or by a function."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

# Of (name of the argument, tensor); None: all are cast.
Chosen = Callable[[str, Tensor], bool]


@functools.cache
def by_names(names: tuple[str, ...]) -> Chosen:
    """A function that accepts arguments with these names.

    >>> accepts, excepts = by_names(("x", "pos_*")), by_names(("!freqs",))
    >>> [accepts(name, None) for name in ("x", "y", "pos_ids")], [excepts(name, None) for name in ("x", "freqs")]
    ([True, False, True], [True, False])
    """
    excepted = all(name.startswith("!") for name in names)
    return lambda name, tensor: any(matches_name(pattern, name) for pattern in names) is not excepted


def matches_name(pattern: str, name: str) -> bool:
    """Whether `pattern`, with or without "!", is about the argument `name`; "**" for a name: any may come."""
    return name == "**" or fnmatch.fnmatchcase(name, pattern.removeprefix("!"))


def keyword_names(call: Callable[..., Any]) -> list[str]:
    """The names of all arguments of `call`; "**" where any name may come."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return ["**"]
    return ["**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters]


def check_known_names(argument: str, units: Iterable[tuple[Any, Sequence[nn.Module]]]) -> None:
    """Raise `ValueError` for a name that no unit with it has. `units`: of each the option, and its modules. A name is
    that of an argument of `forward`, or of another method of the module's own class, which may be registered later."""
    holders: dict[str, list[nn.Module]] = {}
    for option, modules in units:
        for name in () if isinstance(option, bool) or callable(option) else option:
            holders.setdefault(name, []).extend(modules)
    for name, modules in holders.items():
        known = {known for module in modules for known in keyword_names(module.forward)}
        if any(matches_name(name, one) for one in known):
            continue
        own = {known for module in modules for method in _own_methods(module) for known in keyword_names(method)}
        if not any(matches_name(name, one) for one in own - {"**"}):
            raise ValueError(
                f"{argument}: expected names of arguments of forwards of units, found {name!r}, which none has; they "
                f"have {', '.join(sorted(known)[:12])}"
            )


def _own_methods(module: nn.Module) -> list[Callable[..., Any]]:
    classes = [cls for cls in type(module).__mro__ if not issubclass(nn.Module, cls)]
    return [found for cls in classes for found in vars(cls).values() if inspect.isfunction(found)]


def chosen(option: Any) -> Chosen | None:
    """Returns what `cast_forward_inputs` chooses, if it is not False; None for True."""
    if callable(option):
        accepts: Chosen = option
        return accepts
    return None if option is True else by_names(tuple(option))


def check_cast_inputs(argument: str, option: Any) -> None:
    """Raise `TypeError` for what is none of the forms, `ValueError` for names that mean nothing."""
    if isinstance(option, bool) or callable(option):
        return
    if isinstance(option, str) or not isinstance(option, Sequence) or not all(isinstance(n, str) for n in option):
        raise TypeError(
            f"{argument}: expected True, False, names of arguments, or a function of (name, tensor), found "
            f"{option!r:.200}; pass ['hidden_states'], for example"
        )
    excepted = {name.startswith("!") for name in option}
    if len(excepted) != 1 or not all(name.removeprefix("!") for name in option):
        raise ValueError(
            f"{argument}: expected names, all of them with ! or none, found {list(option)!r:.200}; False casts nothing"
        )


def shown_cast_inputs(option: Any) -> str:
    """`option` in words that are the same on all ranks."""
    if isinstance(option, bool):
        return str(option)
    if callable(option):
        return f"function {getattr(option, '__module__', '?')}.{getattr(option, '__qualname__', type(option).__name__)}"
    return ", ".join(option)


def argument_names(call: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional arguments of `call`; of `*args` the name `args`, and so on."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return [str(position) for position in range(count)]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return (names + [parameter.name] * count)[:count]
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [str(position) for position in range(len(names), count)])[:count]
