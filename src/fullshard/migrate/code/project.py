"""The user's program as syntax trees: its file, the modules beside it that it imports, and what each name stands for.

Needs LibCST, the extra `migrate`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    Assignment,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    Scope,
    ScopeProvider,
)

from ..verdict import MigrationError, Place

# torch's modules that have FSDP1 and FSDP2, old places included, longest first.
_FSDP_MODULES = (
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp",
)
_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")


@dataclass(frozen=True, slots=True)
class Name:
    """What an expression stands for. `kind`: "fsdp" (of torch's FSDP modules; `path` is "MixedPrecision", say),
    "ddp", "local" (`path` in the module `module` of the program) or "other" (`path` dotted)."""

    kind: str
    path: str
    module: str = ""


class File:
    """One file of the program. `module`: its dotted name from the folder of the first file."""

    def __init__(self, path: Path, shown: str, module: str, tree: cst.Module) -> None:
        self.path, self.shown, self.module = path, shown, module
        self.wrapper = MetadataWrapper(tree)
        self.tree = self.wrapper.module

    @cached_property
    def names(self) -> dict[cst.CSTNode, set[tuple[str, bool]]]:
        """The dotted names that a node may stand for, each with whether it is of this file."""
        found = self.wrapper.resolve(QualifiedNameProvider)
        return {
            node: {(each.name, each.source.name == "LOCAL") for each in (value() if callable(value) else value)}
            for node, value in found.items()
        }

    @cached_property
    def parents(self) -> dict[cst.CSTNode, cst.CSTNode]:
        return dict(self.wrapper.resolve(ParentNodeProvider))

    @cached_property
    def scopes(self) -> dict[cst.CSTNode, Scope]:
        return {node: scope for node, scope in self.wrapper.resolve(ScopeProvider).items() if scope is not None}

    @cached_property
    def _positions(self) -> dict[cst.CSTNode, tuple[int, int]]:
        found = self.wrapper.resolve(PositionProvider)
        return {node: (at.start.line, at.start.column) for node, at in found.items()}

    def place(self, node: cst.CSTNode) -> Place:
        return Place(self.shown, self.position(node)[0])

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line from 1, column."""
        return self._positions[node]

    def code(self, node: cst.CSTNode) -> str:
        return self.tree.code_for_node(node)

    def walk(self) -> Iterator[cst.CSTNode]:
        """Every node, in the order of the source."""
        left: list[cst.CSTNode] = [self.tree]
        while left:
            node = left.pop()
            yield node
            left.extend(reversed(node.children))

    def above(self, node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> cst.CSTNode | None:
        """The nearest node of these kinds around `node`."""
        found: cst.CSTNode | None = self.parents.get(node)
        while found is not None and not isinstance(found, kinds):
            found = self.parents.get(found)
        return found

    def scope(self, node: cst.CSTNode) -> Scope | None:
        found: cst.CSTNode | None = node
        while found is not None and found not in self.scopes:
            found = self.parents.get(found)
        return None if found is None else self.scopes[found]

    def assigned(self, name: cst.Name) -> list[cst.BaseExpression | None]:
        """What is assigned to the variable `name` where this use sees it; None for anything but `name = value`."""
        scope = self.scope(name)
        found: list[cst.BaseExpression | None] = []
        for assignment in scope[name.value] if scope is not None else ():
            node = assignment.node if isinstance(assignment, Assignment) else None
            parent = None if node is None else self.parents.get(node)
            if isinstance(parent, cst.AssignTarget):
                statement = self.parents[parent]
                found.append(statement.value if isinstance(statement, cst.Assign) else None)
            elif isinstance(parent, cst.AnnAssign):
                found.append(parent.value)
            else:
                found.append(None)
        return found


@dataclass
class Project:
    """The files of a program, the first one first."""

    files: list[File] = field(default_factory=list)

    def file(self, module: str) -> File | None:
        return next((each for each in self.files if each.module == module), None)

    def resolve(self, file: File, node: cst.CSTNode) -> Name | None:
        """What `node`, a name or a dotted one, stands for. None if it is nothing known, or not surely one thing."""
        known = self._candidates(file, node)
        return known.pop() if len(known) == 1 else None

    def is_ambiguous(self, file: File, node: cst.CSTNode) -> bool:
        """Whether `node` may be torch's FSDP1 or DDP, and may be something else."""
        known = self._candidates(file, node)
        return len(known) > 1 and any(name.kind in ("fsdp", "ddp") for name in known)

    def find(self, file: File, imported: ImportAssignment) -> Name | None:
        """What an import brings; for `import a.b as c`, the module counts as one of its own names."""
        for found in imported.get_qualified_names_for(imported.name):
            name = self._follow(file, found.name, False)
            if name is not None and name.kind == "other" and name.path in _FSDP_MODULES:
                return Name("fsdp", "")
            return name
        return None

    def _candidates(self, file: File, node: cst.CSTNode) -> set[Name]:
        """Without None, which an `except ImportError` assigns to a name."""
        found = {self._follow(file, text, local) for text, local in file.names.get(node, ())}
        return {name for name in found if name is not None and (name.kind, name.path) != ("other", "builtins.None")}

    def _follow(self, file: File, text: str, local: bool, depth: int = 0) -> Name | None:
        if local:
            return self._local(file, text, depth)
        if text.startswith("."):
            text = _absolute(file, text)
        for module in _FSDP_MODULES:
            if text.startswith(f"{module}."):
                return Name("fsdp", text.removeprefix(f"{module}."))
        for name in _DDP:
            if text == name or text.startswith(f"{name}."):
                return Name("ddp", f"DistributedDataParallel{text.removeprefix(name)}")
        if depth > 8:
            return None
        parts = text.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            other = self.file(".".join(parts[:cut]))
            if other is not None and other is not file:
                return self._exported(other, ".".join(parts[cut:]), depth + 1)
        return Name("other", text)

    def _local(self, file: File, text: str, depth: int) -> Name | None:
        """A name of the file itself: an alias of something else, or itself."""
        first, _, rest = text.partition(".")
        if "<locals>" not in text and (value := _alias(file, first)) is not None:
            if isinstance(value, cst.Name) and value.value == "None":
                return Name("other", "builtins.None")
            for target, local in file.names.get(value, ()):
                if target != first and depth <= 8:
                    return self._follow(file, f"{target}.{rest}" if rest else target, local, depth + 1)
        return Name("local", text, file.module)

    def _exported(self, file: File, text: str, depth: int) -> Name | None:
        """What another file of the program has under this name."""
        first, _, rest = text.partition(".")
        scope = file.scopes.get(file.tree)
        for assignment in scope[first] if scope is not None else ():
            for name in assignment.get_qualified_names_for(first):
                full = f"{name.name}.{rest}" if rest else name.name
                return self._follow(file, full, name.source.name == "LOCAL", depth)
        return None


def _alias(file: File, name: str) -> cst.BaseExpression | None:
    """The right side of the one `name = other` or `name = a.b` at the top of the file."""
    scope = file.scopes.get(file.tree)
    found = scope[name] if scope is not None else ()
    nodes = [each.node for each in found if isinstance(each, Assignment) and not isinstance(each, ImportAssignment)]
    if len(nodes) != 1 or not isinstance(parent := file.parents.get(nodes[0]), cst.AssignTarget):
        return None
    statement = file.parents[parent]
    value = statement.value if isinstance(statement, cst.Assign) else None
    return value if isinstance(value, (cst.Name, cst.Attribute)) else None


def _absolute(file: File, text: str) -> str:
    """`text` begins with dots, as a relative import does."""
    level = len(text) - len(text.lstrip("."))
    package = file.module.split(".") if file.path.name == "__init__.py" else file.module.split(".")[:-1]
    base = package[: len(package) - level + 1]
    return ".".join([*base, text[level:]])


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_project(path: Path) -> Project:
    """The program that begins in `path`: this file, and the modules beside and below it that it imports. Raises
    `MigrationError` with the place of a syntax error."""
    project = Project()
    root = path.resolve().parent
    left = [(path, path.stem)]
    while left:
        here, module = left.pop(0)
        if project.file(module) is not None:
            continue
        project.files.append(_read(here, module))
        left += _imported(project.files[-1], root, path)
    return project


def _read(path: Path, module: str) -> File:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise MigrationError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return File(path, str(path), module, cst.parse_module(text))
    except cst.ParserSyntaxError as error:
        line, column, problem = error.raw_line, error.raw_column + 1, "a syntax that LibCST does not read"
        try:
            ast.parse(text)
        except SyntaxError as own:  # Python's message is nearer to the mistake
            line, column, problem = own.lineno or line, own.offset or column, f"a syntax error: {own.msg}"
        raise MigrationError(f"{path}:{line}:{column}: {problem}; fix it first") from None
    except (SyntaxError, LookupError, ValueError) as error:
        raise MigrationError(f"{path}: expected a Python program, found text that is not one: {error}") from error


def _imported(file: File, root: Path, first: Path) -> list[tuple[Path, str]]:
    """The modules of the program that `file` imports: their paths and names."""
    wanted: list[str] = []
    for node in file.walk():
        if isinstance(node, cst.Import):
            wanted += [_dotted(alias.name) for alias in node.names]
        elif isinstance(node, cst.ImportFrom):
            base = "." * len(node.relative) + (_dotted(node.module) if node.module else "")
            if base.startswith("."):
                base = _absolute(file, base)
            members = [] if isinstance(node.names, cst.ImportStar) else [_dotted(alias.name) for alias in node.names]
            wanted += [base, *(f"{base}.{member}" if base else member for member in members)]
    found = []
    for module in dict.fromkeys(wanted):
        parts = module.split(".")
        for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")) if module else ():
            if path.is_file():
                found.append((first.parent / path.relative_to(root), module))
                break
    return found


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
