"""The modules of a model under all their names, and where each parameter is registered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from .._torch import children_of
from ..api import original_class
from ..engine.names import clean_name


class Tree:
    """A model as it is before anything is changed.

    modules: every dotted name, also the second one of a module that is registered twice; outer ones first, "" is the
    model. names: each module's first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(_walk(model, "", ()))
        self.names: dict[nn.Module, str] = {}
        for name, module in self.modules.items():
            self.names.setdefault(module, name)

    def slots(self) -> dict[nn.Parameter, list[tuple[str, str]]]:
        """Returns for each parameter: (name of the module, attribute) of every place where it is registered."""
        found: dict[nn.Parameter, list[tuple[str, str]]] = {}
        for name, module in self.modules.items():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(parameter, []).append((name, attribute))
        return found

    def has_parameters(self, name: str) -> bool:
        return next(self.modules[name].parameters(), None) is not None

    def can_be_unit(self, name: str) -> bool:
        """Whether the module has a forward of its own, which lists and dicts of modules lack."""
        own = type(self.modules[name]).forward
        return own not in (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Module.forward)

    def children(self, name: str = "") -> list[str]:
        """Direct children with parameters; of lists and dicts of modules their members."""
        found: list[str] = []
        for child, _ in self.modules[name].named_children():
            below = f"{name}.{child}" if name else child
            found += [below] if self.can_be_unit(below) else self.children(below)
        return [below for below in found if self.has_parameters(below)]

    def matching(self, pattern: str) -> list[str]:
        """First names of the modules that `pattern` means: a name in which `*` stands for one part of it."""
        parts = pattern.split(".")
        return [name for name in self.names.values() if name and _matches(clean_name(name).split("."), parts)]

    def of_class(self, wanted: str) -> list[str]:
        """First names of the modules of the class with that name, its subclasses not included."""
        return [name for module, name in self.names.items() if name and class_of(module) == wanted]

    def classes(self) -> list[str]:
        return sorted({class_of(module) for module in self.names if module is not self.model})


def class_of(module: nn.Module) -> str:
    """The name of a module's class, also after `fully_shard`."""
    return original_class(module).__name__


def names_above(name: str) -> Iterator[str]:
    """`name` and those of the modules around it, the model's "" last.

    >>> list(names_above("a.b"))
    ['a.b', 'a', '']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def lowest_common(names: Iterable[str]) -> str:
    """The lowest module around all of `names`, which may be one of them.

    >>> lowest_common(["a.b.c", "a.b", "a.bc"])
    'a'
    """
    parts = [name.split(".") if name else [] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def nearest(wanted: str, names: Iterable[str]) -> str:
    """The most similar of `names`, as a clause of an error; empty if there is none."""
    close = difflib.get_close_matches(wanted, sorted(set(names)), n=1, cutoff=0.0)
    return f"; the nearest is {close[0]}" if close else ""


def _walk(module: nn.Module, name: str, path: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    # `named_modules(remove_duplicate=False)` does not end for a module that contains itself.
    yield name, module
    for child_name, child in children_of(module).items():
        if child is not None and child is not module and child not in path:
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, (*path, module))


def _matches(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
