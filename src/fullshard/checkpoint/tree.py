"""Nested state dicts as lists of leaves, and back: `{"model": {"w": t}, "step": 3}` is `model.w` and `step`.

Dicts with string keys are descended, lists where a tensor is in them; whatever has `state_dict` and `load_state_dict`
(a module, a scheduler, a data loader) is what its state dict is. All else that is no tensor is one value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .manifest import Path, key_of
from .values import encode


@dataclass
class Leaf:
    """A tensor or a value at `path`, and how another value is put in its place."""

    path: Path
    value: Any
    put: Callable[[Any], None]

    @property
    def key(self) -> str:
        return key_of(self.path)


@dataclass
class Tree:
    """The leaves of a state dict, by key. `problems`: what cannot be saved, and why; such leaves are left out."""

    tensors: dict[str, Leaf] = field(default_factory=dict)
    values: dict[str, Leaf] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # Objects that take their state by `load_state_dict`, innermost first, each with the state dict that was flattened.
    stateful: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    # Optimizer states that take whatever is stored for their parameters: (path, the state).
    open: list[tuple[Path, OpenState]] = field(default_factory=list)


class OpenState(dict[str, dict[str, Any]]):
    """The state of an optimizer by parameter, `{name: {"exp_avg": ...}}`, that a load fills as the checkpoint has it.

    An optimizer that has not stepped has none yet, and what it will have only itself knows. `like`: the parameter of
    each name. A stored tensor of a parameter's shape gets its dtype's own, and the parameter's placements.
    """

    def __init__(self, state: dict[str, dict[str, Any]], like: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.like = like


def flatten(state_dict: dict[str, Any]) -> Tree:
    """The leaves of `state_dict`. Never raises for what is in it: `problems` lists that."""
    tree = Tree()

    def descend(path: Path, value: Any, put: Callable[[Any], None]) -> None:
        if _is_stateful(value):
            if isinstance(value, torch.optim.Optimizer):
                tree.problems.append(
                    f"{key_of(path)}: expected the state of an optimizer under the names of its parameters, found an "
                    f"optimizer, which numbers them; take it with get_state_dict(model, optimizer)"
                )
                return
            try:
                state = value.state_dict()
            except Exception as error:
                tree.problems.append(f"{key_of(path)}: its state_dict() raised {type(error).__name__}: {error}")
                return
            descend_dict(path, state)
            tree.stateful.append((value, state))
        elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            if isinstance(value, OpenState):
                tree.open.append((path, value))
            descend_dict(path, value)
        elif isinstance(value, OpenState):
            tree.open.append((path, value))
        elif isinstance(value, list) and any(map(_holds_tensor, value)):
            for index, item in enumerate(value):
                descend((*path, index), item, _setter(value, index))
        else:
            leaf(path, value, put)

    def descend_dict(path: Path, value: dict[str, Any]) -> None:
        for key, item in list(value.items()):
            descend((*path, key), item, _setter(value, key))

    def leaf(path: Path, value: Any, put: Callable[[Any], None]) -> None:
        key = key_of(path)
        problem = _problem(path, value)
        if key in tree.tensors or key in tree.values:
            problem = "a second entry whose path has the same spelling; rename one of the two keys"
        if problem:
            tree.problems.append(f"{key}: {problem}")
        else:
            (tree.tensors if isinstance(value, Tensor) else tree.values)[key] = Leaf(path, value, put)

    descend_dict((), state_dict)
    return tree


def _problem(path: Path, value: Any) -> str | None:
    try:
        key_of(path).encode()
    except UnicodeEncodeError:
        return "expected a name that is text, found half of a surrogate pair in it"
    if isinstance(value, Tensor):
        return None
    if _holds_tensor(value):
        return (
            f"expected tensors in dicts with string keys and in lists, found one in a {type(value).__name__}"
            f"{' with other keys' if isinstance(value, dict) else ''}, where it could not be loaded in place"
        )
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _setter(container: Any, key: str | int) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        held = container[key]
        if isinstance(held, dict) and type(held) is not dict and isinstance(value, dict):
            # A Counter stays one: the object that the program gave, with the contents that were saved.
            held.clear()
            for name, item in value.items():
                held[name] = item
        else:
            container[key] = value

    return put


def _is_stateful(value: Any) -> bool:
    return (
        not isinstance(value, (dict, Tensor))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth > 64:  # circular, which encode() refuses with words
        return False
    if isinstance(value, dict):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensor(item, depth + 1) for item in value)
    return _is_stateful(value)


class _Node(dict[Any, Any]):
    """A dict or list that is being put together; a dict of another type is a value."""


def nested(leaves: dict[Path, Any]) -> dict[str, Any]:
    """The nested state dict that `leaves` were taken from: dicts for strings, lists for numbers."""
    root = _Node()
    for path, value in leaves.items():
        current = root
        for part in path[:-1]:
            current = current.setdefault(part, _Node())
        current[path[-1]] = value
    made: dict[str, Any] = _plain(root)
    return made


def _plain(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_plain(node[key]) for key in sorted(node)]
    return {key: _plain(item) for key, item in node.items()}
