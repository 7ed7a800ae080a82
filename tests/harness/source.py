"""Reading the package's source, for the boundary tests: the room of a file, what it imports, calls and touches.

Every finder takes a `Source` and returns findings as text "file:line: what", so that a red test says where to look.
They look at names, not at types: a finder knows `dist.all_reduce` by what `dist` was imported as, and
`x._local_tensor` by nobody in the package defining an attribute of that name. That is enough to keep honest people
from crossing a boundary by accident, which is all they are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "fullshard"
SRC = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Source:
    """One file of the package. `name` is its path below src/fullshard, such as "comm/group.py"."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @property
    def room(self) -> str:
        """The folder ("comm"), or the module for a file at the top ("_version", "__init__")."""
        first, _, rest = self.name.partition("/")
        return first if rest else first.removesuffix(".py")

    @property
    def module(self) -> str:
        parts = [PACKAGE, *self.name.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports())

    @cached_property
    def bound(self) -> dict[str, str]:
        """Local name -> full dotted name of what an import bound to it: {"dist": "torch.distributed"}."""
        names: dict[str, str] = {}
        for found in self.imports:
            if found.alias is None and found.member is None:
                top = found.module.split(".")[0]  # `import a.b` binds a
                names[top] = top
            else:
                names[found.alias or found.member or ""] = found.full
        return names

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name, None, alias.asname)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    yield Import(node.lineno, base, alias.name, alias.asname or alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        if not self.name.endswith("__init__.py"):
            parts = parts[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, node.module] if node.module else parts)

    def full_name(self, node: ast.expr) -> str | None:
        """ "torch.distributed.all_reduce" for `dist.all_reduce`; None where the chain does not start at an imported
        name.
        """
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.bound:
            return None
        return ".".join([self.bound[node.id], *reversed(chain)])

    def at(self, node: ast.AST | Import, what: str) -> str:
        line = node.line if isinstance(node, Import) else getattr(node, "lineno", 0)
        return f"{self.name}:{line}: {what}"


@dataclass(frozen=True)
class Import:
    """`import module` (member None) or `from module import member`, as `alias` if that is given."""

    line: int
    module: str
    member: str | None
    alias: str | None

    @property
    def full(self) -> str:
        return f"{self.module}.{self.member}" if self.member else self.module


def package_sources() -> list[Source]:
    """All files of the package, in order of their names."""
    root = SRC / PACKAGE
    return [Source(path.relative_to(root).as_posix(), path.read_text()) for path in sorted(root.rglob("*.py"))]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


# ---- rooms ---------------------------------------------------------------------------------------------------


def imported_rooms(source: Source) -> list[tuple[Import, str]]:
    """(import, room) for every import from the package itself; room "" is the public surface `fullshard`."""
    found = []
    for imported in source.imports:
        parts = imported.full.split(".")
        if parts[0] != PACKAGE:
            continue
        is_submodule = len(parts) > 1 and (
            (SRC / PACKAGE / parts[1]).is_dir() or (SRC / PACKAGE / f"{parts[1]}.py").is_file()
        )
        found.append((imported, parts[1] if is_submodule else ""))
    return found


def layering_violations(source: Source, allowed: dict[str, frozenset[str]]) -> list[str]:
    """Imports of rooms that this file's room may not know."""
    may = allowed.get(source.room)
    if may is None:
        return [f"{source.name}:1: room {source.room!r} is not in the table of rooms; say there what it may import"]
    return [
        source.at(imported, f"{source.room} imports {room or 'the public surface'} ({imported.full})")
        for imported, room in imported_rooms(source)
        if room != source.room and room not in may
    ]


def torch_imports(source: Source) -> list[str]:
    return [
        source.at(imported, f"imports {imported.full}")
        for imported in source.imports
        if imported.module.split(".")[0] in ("torch", "numpy")
    ]


# ---- collectives and hooks -----------------------------------------------------------------------------------

# Functions of torch.distributed that communicate (names of 2.11 to 2.13; the functional ones share them).
COLLECTIVES = frozenset(
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single all_gather_tensor barrier batch_isend_irecv broadcast
    broadcast_object_list gather gather_object irecv isend monitored_barrier recv recv_object_list reduce
    reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter
    scatter_object_list send send_object_list""".split()
)
# Methods of a ProcessGroup that no tensor, module or unit has as well: `gather` or `reduce` say nothing by
# themselves.
GROUP_METHODS = frozenset(
    """_allgather_base _reduce_scatter_base allgather allgather_coalesced allgather_into_tensor_coalesced
    all_gather_single all_gather_single_coalesced allreduce allreduce_coalesced alltoall alltoall_base
    all_to_all_single barrier broadcast monitored_barrier recv_anysource reduce_scatter reduce_scatter_single
    reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced""".split()
)


def collective_uses(source: Source, own: frozenset[str] = frozenset()) -> list[str]:
    """Collectives of torch.distributed or of a ProcessGroup. `own`: names that `comm` defines, which others may call
    there.
    """
    found = []
    for imported in source.imports:
        if imported.module.startswith("torch.distributed") and (imported.member in COLLECTIVES):
            found.append(source.at(imported, f"imports the collective {imported.full}"))
        if "_functional_collectives" in imported.full or "_c10d_functional" in imported.full:
            found.append(source.at(imported, f"imports {imported.full}"))
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute):
            continue
        full = source.full_name(node) or ""
        if full.startswith("torch.distributed.") and node.attr in COLLECTIVES or "_c10d_functional" in full:
            found.append(source.at(node, f"uses the collective {full}"))
        elif not full and node.attr in GROUP_METHODS - own:
            found.append(source.at(node, f"uses the process group method .{node.attr}"))
    return found


def defined_functions(sources: Iterable[Source]) -> frozenset[str]:
    return frozenset(
        node.name
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def hook_registrations(source: Source) -> list[str]:
    """Uses of anything called register_*hook: module, tensor, autograd node, optimizer, state dict, global ones."""
    found = []
    for node in ast.walk(source.tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if name and name.startswith("register_") and name.endswith("hook"):
            found.append(source.at(node, f"registers a hook ({name})"))
    return found


# ---- private names -------------------------------------------------------------------------------------------

# Underscored names that are documented and public all the same.
_PUBLIC_UNDERSCORES = frozenset({"_asdict", "_fields", "_field_defaults", "_make", "_replace", "_exit"})


def _is_documented(name: str) -> bool:
    return name in _PUBLIC_UNDERSCORES or name.startswith(
        "_foreach_"
    )  # torch documents its foreach functions by these names


def own_private_names(sources: Iterable[Source]) -> frozenset[str]:
    """Every underscored name that the package itself defines: functions, classes, variables, attributes set on
    anything of its own.

    An attribute counts as defined by `self._x = ...` or by a name in a class body.
    """
    names: set[str] = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
    return frozenset(name for name in names if is_private(name))


def private_torch_uses(source: Source, own: frozenset[str]) -> list[str]:
    """Private names of torch: imported, reached through a module of torch, or an underscored attribute that is not
    ours.
    """
    found = []
    for imported in source.imports:
        parts = imported.full.split(".")
        if parts[0] == "torch" and any(is_private(part) for part in parts):
            found.append(source.at(imported, f"imports the private name {imported.full}"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not _is_documented(node.attr):
            full = source.full_name(node)
            if full is not None and full.startswith("torch."):
                found.append(source.at(node, f"uses the private name {full}"))
            elif node.attr not in own:
                found.append(source.at(node, f"uses .{node.attr}, which nothing in the package defines"))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr")
        ):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            ours = name in own or str(name).startswith(f"_{PACKAGE}")
            if isinstance(name, str) and is_private(name) and not ours and not _is_documented(name):
                found.append(source.at(node, f"{node.func.id} of {name!r}, which nothing in the package defines"))
    return found


def torch_fsdp_imports(source: Source) -> list[str]:
    """Imports of torch's own FSDP, whose names may be needed for interoperation but whose runtime must not be used."""
    prefixes = ("torch.distributed.fsdp", "torch.distributed._composable")
    found = [
        source.at(imported, f"imports {imported.full}")
        for imported in source.imports
        if f"{imported.full}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
    ]
    for node in ast.walk(source.tree):
        full = source.full_name(node) if isinstance(node, ast.Attribute) else None
        if full in prefixes:
            found.append(source.at(node, f"uses {full}"))
    return found
