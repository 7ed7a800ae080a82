"""The user's program as syntax trees: its files, those of the repository that it imports, and what each name means."""

from __future__ import annotations

import ast
import builtins
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..verdict import MigrationError, Place

# torch's modules that have FSDP1 and FSDP2, old places included, longest first; and the adapter.
FSDP_MODULES = (
    "fullshard.compat.fsdp1",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp",
)
_DDP = ("torch.nn.parallel.distributed.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Where a repository begins.
_ROOTS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"}


class Name(NamedTuple):
    """The meaning of an expression. `kind`: "fsdp" (of torch's FSDP modules; `path` is "MixedPrecision", say), "ddp",
    "local" (`node`: its scope, or its definition in the program) or "other" (`path` dotted)."""

    kind: str
    path: str
    node: ast.AST | None = None


class Binding(NamedTuple):
    """The expression that gives a variable its value. `path`: of an import; `value`: of `name = value`; `node`: the
    statement."""

    node: ast.AST
    path: str = ""
    value: ast.expr | None = None


class File:
    """One file of the program. Positions are offsets in `text`."""

    def __init__(self, path: Path, shown: str, text: str, tree: ast.Module) -> None:
        self.path, self.shown, self.text, self.tree = path, shown, text, tree
        self.nodes: list[Any] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.bindings: dict[ast.AST, dict[str, list[Binding]]] = {}
        self.stars: list[str] = []
        lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text)
        self.lines = lines
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self._walk(tree)
        self._outer = {  # names that a function takes from outside by `global`
            (self.scope(node), name)
            for node in self.nodes
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }
        for node in self.nodes:
            self._bind(node)

    def _walk(self, node: ast.AST) -> None:
        self.nodes.append(node)
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            self._walk(child)

    # ---- text ------------------------------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return self.starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: Any) -> tuple[int, int]:
        if isinstance(node, ast.withitem):
            return self.span(node.context_expr)[0], self.span(node.optional_vars or node.context_expr)[1]
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def outer(self, node: Any, low: int) -> tuple[int, int]:
        """The span with the parentheses around it, from position `low`."""
        start, end = self.span(node)
        while self.text[low:start].rstrip().endswith("(") and self.text[end:].lstrip().startswith(")"):
            start, end = low + self.text[low:start].rindex("("), self.text.index(")", end) + 1
        return start, end

    def code(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line_span(self, node: Any) -> tuple[int, int]:
        """Returns the span of the whole lines that a statement is on."""
        return self.starts[node.lineno - 1], self.starts[node.end_lineno]

    def is_alone(self, node: Any) -> bool:
        """Whether no other statement is on the lines of this one."""
        start, end = self.span(node)
        first, last = self.line_span(node)
        after = self.text[end:last].strip()
        return not self.text[first:start].strip() and (not after or after.startswith("#"))

    def is_first(self, node: Any) -> bool:
        """Whether nothing is before a statement on its line."""
        return not self.indent(node).strip()

    def indent(self, node: Any) -> str:
        return str(self.text[self.starts[node.lineno - 1] : self.span(node)[0]])

    def indent_at(self, node: Any) -> str:
        """The white space at the beginning of the line of a node."""
        line: str = self.lines[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def place(self, node: Any) -> Place:
        while not hasattr(node, "lineno"):
            node = self.parents[node]
        return Place(self.shown, node.lineno)

    # ---- tree ------------------------------------------------------------------------------------------------------

    def above(self, node: ast.AST, *kinds: type[ast.AST]) -> Any:
        """The nearest node of these kinds around `node`, or None."""
        found = self.parents.get(node)
        while found is not None and not isinstance(found, kinds):
            found = self.parents.get(found)
        return found

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Returns the nodes around a node, inmost first."""
        found = self.parents.get(node)
        while found is not None:
            yield found
            found = self.parents.get(found)

    def statement(self, node: ast.AST) -> Any:
        return node if isinstance(node, ast.stmt) else self.above(node, ast.stmt)

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a name is looked up in first; for a definition, the one around it.
        Defaults, decorators and annotations belong to the outer one."""
        child = node
        for found in self.around(node):
            of_function = isinstance(found, _SCOPES) and isinstance(child, ast.arguments) and isinstance(node, ast.arg)
            if of_function or isinstance(found, (ast.Module, *_COMPREHENSIONS)):
                return found
            if isinstance(found, ast.Lambda) and child is found.body:
                return found
            if isinstance(found, (*FUNCTIONS, ast.ClassDef)) and child in found.body:
                return found
            child = found
        return self.tree

    def _bind(self, node: Any) -> None:
        def add(name: str, binding: Binding, scope: ast.AST | None = None) -> None:
            self.bindings.setdefault(scope or self.scope(node), {}).setdefault(name, []).append(binding)

        if isinstance(node, ast.Import):
            for alias in node.names:
                add(
                    alias.asname or alias.name.partition(".")[0],
                    Binding(node, alias.name if alias.asname else alias.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(base)
                else:
                    dot = "" if base.endswith(".") else "."
                    add(alias.asname or alias.name, Binding(node, f"{base}{dot}{alias.name}"))
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            add(node.name, Binding(node))
        elif isinstance(node, ast.arg):
            add(node.arg, Binding(node))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            add(node.name, Binding(node))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            parent = self.parents[node]
            value = parent.value if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else None
            scope = self.scope(node)
            add(node.id, Binding(parent, "", value), self.tree if (scope, node.id) in self._outer else scope)

    def lookup(self, node: ast.Name) -> tuple[ast.AST, list[Binding]] | None:
        """The scope that has the variable of this name where it is used, and what it is given there."""
        scope: ast.AST = self.scope(node)
        first = True
        while True:
            if (first or not isinstance(scope, ast.ClassDef)) and node.id in (found := self.bindings.get(scope, {})):
                return scope, found[node.id]
            if scope is self.tree:
                return None
            first, scope = isinstance(scope, _COMPREHENSIONS) and first, self.scope(scope)

    def loads(self, name: ast.Name) -> list[ast.Name]:
        """The uses of the variable `name` in this file."""
        scope = self.lookup(name)
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Load)
            if scope is not None and (self.lookup(node) or (None,))[0] is scope[0]
        ]


@dataclass
class Project:
    """The files of a program, the first one first."""

    files: list[File] = field(default_factory=list)
    roots: dict[Path, list[Path]] = field(default_factory=dict)

    def file(self, path: Path) -> File | None:
        return next((each for each in self.files if each.path == path), None)

    # ---- names -----------------------------------------------------------------------------------------------------

    def resolve(self, file: File, node: ast.AST | None) -> Name | None:
        """Returns the meaning of a name, or of a dotted one. None if it is nothing known, or not surely one thing."""
        found = self.candidates(file, node)
        return found.pop() if len(found) == 1 else None

    def candidates(self, file: File, node: ast.AST | None, depth: int = 0) -> set[Name]:
        """Returns the candidates without None, which an `except ImportError` assigns to a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or depth > 8:
            return set()
        found = file.lookup(node)
        if found is None:
            for star in file.stars:
                for name in self.follow(file, f"{star}.{node.id}", parts, depth + 1):
                    if name.kind != "other" or name.path.startswith("torch."):
                        return {name}
            return {Name("other", ".".join([*(["builtins"] if hasattr(builtins, node.id) else []), node.id, *parts]))}
        return self._of_bindings(file, *found, node.id, parts, depth)

    def _of_bindings(
        self, file: File, scope: ast.AST, bindings: list[Binding], name: str, parts: list[str], depth: int
    ) -> set[Name]:
        result: set[Name] = set()
        for each in bindings:
            if each.path:
                result |= self.follow(file, each.path, parts, depth + 1)
            elif isinstance(each.value, ast.Constant) and each.value.value is None:
                continue
            elif isinstance(each.value, (ast.Name, ast.Attribute)) and len(bindings) == 1:
                inner = self.candidates(file, each.value, depth + 1)
                torch = {n for n in inner if n.kind in ("fsdp", "ddp")}
                result |= {Name(n.kind, ".".join([n.path, *parts]) if n.path else ".".join(parts)) for n in torch}
                result |= set() if torch else {Name("local", ".".join([name, *parts]), scope)}
            else:
                defined = each.node if isinstance(each.node, (*FUNCTIONS, ast.ClassDef)) else scope
                result.add(Name("local", ".".join([name, *parts]), defined))
        return result

    def follow(self, file: File, path: str, parts: list[str], depth: int) -> set[Name]:
        """Returns the meaning of a dotted path of an import, with attributes after it."""
        text = ".".join([path, *parts])
        for module in FSDP_MODULES:
            if text.startswith(f"{module}."):
                return {Name("fsdp", text[len(module) + 1 :])}
        if text in FSDP_MODULES:
            return {Name("fsdp", "")}
        for name in _DDP:
            if text == name or text.startswith(f"{name}."):
                return {Name("ddp", f"DistributedDataParallel{text.removeprefix(name)}")}
        level = len(text) - len(text.lstrip("."))
        names = text[level:].split(".")
        for cut in range(len(names) - 1, -1, -1):
            found = self.module(file, "." * level + ".".join(names[:cut])) if cut or level else None
            other = self.file(found) if found is not None else None
            if other is not None and other is not file and depth <= 8:
                bindings = other.bindings.get(other.tree, {}).get(names[cut])
                if bindings:
                    return self._of_bindings(other, other.tree, bindings, names[cut], names[cut + 1 :], depth + 1)
                for star in other.stars:
                    found_there = self.follow(other, f"{star}.{names[cut]}", names[cut + 1 :], depth + 1)
                    if any(each.kind != "other" for each in found_there):
                        return found_there
        return {Name("other", text)}

    def value(self, file: File, node: Any, depth: int = 0) -> list[tuple[File, Any]]:
        """Returns the value of an expression: all that its variable is given, or itself if that cannot be seen."""
        if isinstance(node, ast.IfExp):
            return self.value(file, node.body, depth) + self.value(file, node.orelse, depth)
        found = file.lookup(node) if isinstance(node, ast.Name) and depth < 8 else None
        result: list[tuple[File, Any]] = []
        for each in found[1] if found is not None else ():
            owner, bindings = (self.definition(file, each.path) if each.path else None) or (file, [each])
            if any(binding.value is None for binding in bindings):
                return [(file, node)]
            if owner is not file:
                result += [(owner, binding.value) for binding in bindings]
            else:
                result += self.value(file, each.value, depth + 1)
        return result or [(file, node)]

    def definition(self, file: File, path: str) -> tuple[File, list[Binding]] | None:
        """The file and the bindings of a name of the program that an import brings."""
        head, _, name = path.rpartition(".")
        found = (
            self.module(file, head or ".")
            if not path.startswith(".") or head.strip(".")
            else self.module(file, head + ".")
        )
        other = self.file(found) if found is not None else None
        bindings = None if other is None else other.bindings.get(other.tree, {}).get(name)
        return (other, bindings) if other is not None and bindings else None

    # ---- modules ---------------------------------------------------------------------------------------------------

    def module(self, file: File, name: str) -> Path | None:
        """The file of the program's module `name`, as `file` imports it; None if it is not in the repository."""
        level = len(name) - len(name.lstrip("."))
        parts = [part for part in name[level:].split(".") if part]
        if level:
            base = file.path.parent
            for _ in range(level - 1):
                base = base.parent
            return _module_at(base, parts)
        if not parts or parts[0] in sys.stdlib_module_names or parts[0] in ("torch", "fullshard"):
            return None
        for root in self._roots(file.path.parent):
            if (found := _module_at(root, parts)) is not None:
                return found
        return None

    def _roots(self, folder: Path) -> list[Path]:
        """Where modules may be: beside the file, above it up to the repository's root, and in `src` there. Without any
        sign of a root, the folder above counts."""
        if folder not in self.roots:
            up = [folder, *folder.parents]
            end = next((i for i, each in enumerate(up) if any((each / sign).exists() for sign in _ROOTS)), 1)
            found = up[: end + 1]
            self.roots[folder] = found + [each / "src" for each in found if (each / "src").is_dir()]
        return self.roots[folder]


def _module_at(base: Path, parts: list[str]) -> Path | None:
    for path in (
        base.joinpath(*parts[:-1], f"{parts[-1]}.py") if parts else None,
        base.joinpath(*parts, "__init__.py"),
    ):
        if path is not None and path.is_file():
            return path.resolve()
    return None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_project(path: Path) -> Project:
    """The program that begins in the file `path`, or all programs in the folder `path`, with what they import of the
    repository. Raises `MigrationError` with the place of a syntax error."""
    project = Project()
    left = [path]
    if path.is_dir():
        left = [
            each
            for each in sorted(path.rglob("*.py"))
            if not any(part in _SKIPPED or part.startswith(".") for part in each.relative_to(path).parts)
        ]
        if not left:
            raise MigrationError(f"{path}: expected a folder with programs, found no .py file in it; name a file")
    base = Path.cwd()
    while left:
        here = left.pop(0)
        if project.file(here.resolve()) is None:
            project.files.append(file := _read(here))
            for found in imported(project, file):
                left.append(
                    found.relative_to(base.resolve())
                    if not path.is_absolute() and found.is_relative_to(base.resolve())
                    else found
                )
    return project


def imported(project: Project, file: File) -> list[Path]:
    """The modules of the repository that `file` imports."""
    names: list[str] = []
    for node in file.nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)]
    names = [name[:end] for name in names for end in (*(i for i, c in enumerate(name) if c == "." and i), len(name))]
    found = (project.module(file, name) for name in dict.fromkeys(names) if name)
    return [path for path in dict.fromkeys(found) if path is not None]


def _read(path: Path) -> File:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MigrationError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        return File(path.resolve(), str(path), text, ast.parse(text))
    except SyntaxError as error:
        if error.lineno is None:
            raise MigrationError(
                f"{path}: expected a Python program, found text that is not one: {error.msg}"
            ) from error
        raise MigrationError(
            f"{path}:{error.lineno}:{error.offset or 1}: a syntax error: {error.msg}; fix it first"
        ) from None
    except (LookupError, ValueError, RecursionError) as error:
        raise MigrationError(f"{path}: expected a Python program, found text that is not one: {error}") from error
