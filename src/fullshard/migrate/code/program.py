"""Answers questions about one program while its changes are decided: files that import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from .edits import Blocked, Edits
from .flow import FSDP1, Flow
from .project import FUNCTIONS, File, Project
from .ranks import Ranks

# Functions that give a value and do nothing else.
_VALUES = {f"builtins.{name}" for name in "int str set tuple list dict len type getattr bool frozenset".split()} | {
    *("functools.partial", "torch.device", "torch.cuda.current_device", "os.getenv", "os.environ.get"),
    *("torch.distributed.get_rank", "torch.distributed.get_world_size"),
}


class Program:
    """`edits`: the changes so far. `references`: uses of torch's FSDP modules and DDP. `kinds`: what models are."""

    def __init__(self, project: Project, flow: Flow, files: list[File]) -> None:
        self.project, self.flow, self.files, self.ranks = project, flow, files, Ranks(flow)
        self.edits = {file: Edits(project, file) for file in files}
        self.references = {file: list(self._references(file)) for file in files}
        self.kinds = {kind for file, _, kind in flow.wraps if file in files}
        self.kinds |= {FSDP1 for each in self.references.values() for _, name in each if name.path == "enable_wrap"}
        self.device = "cuda" if any(sign in f.text for f in files for sign in ("cuda", "nccl")) else "cpu"

    def named(self, call: ast.Call, positions: tuple[str, ...]) -> dict[str, ast.expr]:
        """The arguments by name."""
        if any(isinstance(each, ast.Starred) for each in call.args) or any(k.arg is None for k in call.keywords):
            raise Blocked(call, "stars")
        return {**dict(zip(positions, call.args, strict=False)), **{str(k.arg): k.value for k in call.keywords}}

    def _references(self, file: File) -> Iterator[tuple[Any, Any]]:
        """The longest dotted names that are of torch's FSDP modules or DDP, and what each means."""
        for node in file.nodes:
            inner: Any = node
            while isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                if isinstance(file.parents[node], ast.Attribute):
                    break
                names = [n for n in self.project.candidates(file, inner) if n.kind in ("fsdp", "ddp") and n.path]
                if names:
                    yield inner, names[0]
                    break
                inner = getattr(inner, "value", None)

    def path(self, file: File, node: ast.AST) -> str:
        """ "MixedPrecision" of FSDP1's class of that name, "" of what is none of FSDP1's names."""
        name = self.project.resolve(file, node)
        return name.path if name is not None and name.kind == "fsdp" else ""

    def dotted(self, file: File, node: ast.AST) -> str:
        """The dotted name of what is no part of the program, "" of anything else."""
        name = self.project.resolve(file, node)
        return name.path if name is not None and name.kind == "other" else ""

    def values(self, file: File, node: Any, depth: int = 0) -> list[tuple[File, Any]]:
        """All that an expression may come to, through variables and parameters of the program."""
        found: list[tuple[File, Any]] = []
        for owner, value in self.project.value(file, node):
            given = self._given(owner, value) if isinstance(value, ast.Name) and depth < 4 else []
            found += [each for f, v in given for each in self.values(f, v, depth + 1)] or [(owner, value)]
        return found

    def _given(self, file: File, node: ast.Name) -> list[tuple[File, Any]]:
        """Returns what callers give a parameter, its default included; nothing if that is not all of it."""
        scope, bindings = file.lookup(node) or (None, [])
        if len(bindings) != 1 or not isinstance(bindings[0].node, ast.arg) or not isinstance(scope, FUNCTIONS):
            return []
        found: list[tuple[File, Any]] = []
        for owner, call in self.flow.callers.get(scope, []):
            given = dict(self.flow.arguments(call, scope))
            value = given.get(node.id, _default(scope, node.id))
            if value is None:
                return []
            found.append((owner if node.id in given else file, value))
        return found

    def is_value(self, file: File, node: ast.AST) -> bool:
        """Whether an expression only gives a value: the calls in it have no effect."""
        if isinstance(node, ast.Lambda):
            return True
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        if isinstance(node, ast.Call) and not self.path(file, node.func):
            of_text = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "index", "lower", "upper")
            if not of_text and self.dotted(file, node.func) not in _VALUES:
                return False
        return all(self.is_value(file, child) for child in ast.iter_child_nodes(node))


def _default(function: Any, name: str) -> ast.expr | None:
    """The default of a parameter."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((value for argument, value in pairs if argument.arg == name), None)
