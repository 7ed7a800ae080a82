"""Optimizers as torch's own `state_dict` has them, with numbers for parameters; and what the numbers stand for.

    {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}

A number is a place in the order in which parameters were given to the optimizer, which only the program that made it
knows. So the names are asked for, and what can be compared is compared: how many there are, and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointMismatch
from ..manifest import key_of
from ..state import Optimizers, all_of, names_in_order, parameter_names
from .source import KeyPath

# State of torch's optimizers that has an element for each of the parameter's.
_PER_ELEMENT = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta grad_avg sum prev step_size "
    "ax".split()
)
HINT = (
    "the state of an optimizer whose parameters are numbered: say their names in that order (optimizer_names=[...] of "
    "open_source and load_full, --optimizer-names FILE)"
)


def optimizer_names(model: nn.Module, optimizers: Optimizers) -> list[str]:
    """The names of the parameters of `optimizers`, in the order in which their `state_dict` numbers them; one optimizer
    behind the other. For a file that this program, or one that builds the same, saved."""
    names = parameter_names(model)
    return [name for optimizer in all_of(optimizers) for name in names_in_order(optimizer, names)]


def is_numbered(value: object) -> bool:
    """Whether `value` is torch's own state dict of an optimizer.

    >>> is_numbered({"state": {}, "param_groups": [{"params": [0, 1]}]})
    True
    >>> is_numbered({"state": {}, "param_groups": [{"params": ["a", "b"]}]})
    False
    """
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    numbers = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return any(numbers) and all(isinstance(one, list) and all(map(_is_number, one)) for one in numbers)


def is_numbered_state(value: object) -> bool:
    """Whether `value` is what stands under "state" of such an optimizer."""
    return isinstance(value, dict) and bool(value) and all(map(_is_number, value))


def with_names(root: Any, names: Sequence[str] | None, where: Path) -> Any:
    """`root`, a nested state dict, with names in the place of numbers in every optimizer of it.

    `names`: of the parameters of all its optimizers, one behind the other in the order of the file. None: the names
    that an optimizer of named parameters stored itself (`param_names`); without them it stays as it is. Raises
    `CheckpointMismatch` with everything that does not fit.
    """
    found = list(_optimizers(root))
    problems: list[str] = []
    if names is not None:
        count = sum(len(_numbers(value)) for _, value in found)
        if not found:
            problems.append("no optimizer whose parameters are numbered")
        elif count != len(names):
            places = ", ".join(f"{key_of(path) or 'the file'} has {len(_numbers(value))}" for path, value in found)
            problems.append(f"{len(names)} names for {count} numbered parameters: {places}")
        problems += [f"{name} is named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    made: dict[int, Any] = {}
    shapes = _shapes(root)
    left = iter(names or ())
    for path, value in found if not problems else ():
        own = list(islice(left, len(_numbers(value)))) if names is not None else _stored_names(value)
        if own is not None:
            problems += _differences(path, value, own, shapes)
            made[id(value)] = own
    if problems:
        raise CheckpointMismatch(f"{where}: names of the optimizer's parameters do not fit", problems)
    return _renamed(root, made)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _optimizers(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Those that are numbered, with where they stand."""
    if is_numbered(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _optimizers(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _optimizers(item, (*path, i))


def _numbers(value: dict[str, Any]) -> list[int]:
    return [number for group in value["param_groups"] for number in group["params"]]


def _stored_names(value: dict[str, Any]) -> list[str] | None:
    names = [group.get("param_names") for group in value["param_groups"]]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in names):
        return None
    flat = [str(name) for one in names for name in one]
    return flat if len(flat) == len(_numbers(value)) == len(set(flat)) else None


def _shapes(root: Any) -> dict[str, set[tuple[int, ...]]]:
    """Of the tensors outside of optimizers, by their names."""
    found: dict[str, set[tuple[int, ...]]] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict) and not is_numbered(value):
            for key, item in value.items():
                if isinstance(item, Tensor) and isinstance(key, str):
                    found.setdefault(key, set()).add(tuple(item.shape))
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)

    look(root)
    return found


def _differences(
    path: KeyPath, value: dict[str, Any], names: Sequence[str], shapes: dict[str, set[tuple[int, ...]]]
) -> Iterator[str]:
    """What shows that the names are not those of these numbers."""
    where = key_of(path) or "the file"
    if sorted(_numbers(value)) != list(range(len(names))):
        yield f"{where}: expected the numbers 0 to {len(names) - 1}, found {str(sorted(_numbers(value)))[:80]}"
        return
    for number, entries in value["state"].items():
        if number not in range(len(names)):
            yield f"{where}: state of {number!r}, which is in no group of parameters"
            continue
        known = shapes.get(names[number], set())
        for item, tensor in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(tensor, Tensor) or not known or tuple(tensor.shape) in known:
                continue
            # Of what others keep, that with as many dims as the parameter has; counters and factors have fewer.
            if item in _PER_ELEMENT or (tensor.dim() and tensor.dim() in map(len, known)):
                (shape, *_) = sorted(known)
                yield f"{where}: {item} of number {number} is {tuple(tensor.shape)}, {names[number]} is {shape}"


def _renamed(value: Any, made: dict[int, Any]) -> Any:
    names = made.get(id(value))
    if names is not None:
        groups = [{**group, "params": [names[n] for n in group["params"]]} for group in value["param_groups"]]
        return {**value, "state": {names[n]: entries for n, entries in value["state"].items()}, "param_groups": groups}
    if not made or isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return {key: _renamed(item, made) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_renamed(item, made) for item in value)
    return value
