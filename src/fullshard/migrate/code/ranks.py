"""Finds what only some ranks run: conditions, early returns and decorators that ask for the rank, also around
callers."""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

from .flow import Flow
from .project import FUNCTIONS, File

_RANK = re.compile(
    r"(^|(?<!n)(?<!num)_)(rank|gpu|gpu_id|local_rank|global_rank|node_rank|process_index|rank_id|proc_id)$|get_rank$",
    re.I,
)
_MAIN = re.compile(
    r"(^|_)(main_process|is_main|master_process|is_master|is_primary|is_chief|rank_?zero|rank_?0|is_zero_rank|is_root|"
    r"main_rank|master|is_local_main|is_logger|is_saver|should_save|is_first_rank|on_main)($|_)",
    re.I,
)


class Guard(NamedTuple):
    """`test`: what asks for the rank. `own`: it is an `if` around the node, in the same function."""

    file: File
    node: Any
    test: str
    own: bool

    def __str__(self) -> str:
        return f"`{self.test}`, {self.file.place(self.node)}"


class Ranks:
    """Whether all ranks come to a place."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def guard(self, file: File, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> Guard | None:
        """Returns the condition that lets only some ranks come to `node`, or None."""
        child = node
        for around in file.around(node):
            if isinstance(around, (ast.If, ast.IfExp)) and child is not around.test and self.asks(file, around.test):
                return Guard(
                    file, around, " ".join(file.code(around.test).split()), isinstance(around, ast.If) and not seen
                )
            if isinstance(around, ast.BoolOp):
                earlier = around.values[: next((i for i, v in enumerate(around.values) if v is child), 0)]
                if any(self.asks(file, value) for value in earlier):
                    return Guard(file, around, " ".join(file.code(around).split()), False)
            if (left := self._left(file, around, child)) is not None:
                return Guard(file, left, " ".join(file.code(left.test).split()), False)
            if isinstance(around, FUNCTIONS):
                for decorator in around.decorator_list:
                    if _MAIN.search(file.code(decorator)):
                        return Guard(file, decorator, f"@{file.code(decorator)}", False)
                if around in seen:
                    return None
                for other, call in self.flow.callers.get(around, ()):
                    if (found := self.guard(other, call, seen | {around})) is not None:
                        return found
                return None
            child = around
        return None

    def _left(self, file: File, around: ast.AST, child: ast.AST) -> Any:
        """`if rank != 0: return` before `child` in the same block."""
        for body in (getattr(around, "body", None), getattr(around, "orelse", None)):
            if isinstance(body, list) and child in body:
                for each in body[: body.index(child)]:
                    leaves = isinstance(each, ast.If) and isinstance(
                        each.body[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise)
                    )
                    if leaves and self.asks(file, each.test):
                        return each
        return None

    def asks(self, file: File, test: ast.AST, depth: int = 0) -> bool:
        """Whether a condition holds on some ranks only."""
        if isinstance(test, ast.BoolOp):
            return any(self.asks(file, value, depth) for value in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.asks(file, test.operand, depth)
        if isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            ranks = [side for side in sides if _RANK.search(_last(side)) or _MAIN.search(_last(side))]
            others = [file.code(side).replace(" ", "") for side in sides if side not in ranks]
            without = all(text in ("-1", "None", "[-1]", "(-1,)") for text in others)
            ordered = all(isinstance(op, (ast.Gt, ast.GtE)) for op in test.ops) and others == ["0"]
            order = ordered and isinstance(test.ops[0], ast.GtE)
            return bool(ranks) and not without and not order
        if _MAIN.search(_last(test)):
            return True
        if isinstance(test, (ast.Name, ast.Call)) and _RANK.search(_last(test)):
            return True
        if isinstance(test, ast.Name) and depth < 3:
            values = self.flow.project.value(file, test)
            return any(
                value is not test
                and isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp))
                and self.asks(owner, value, depth + 1)
                for owner, value in values
            )
        return False


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`, or of a call of it, or the key of `a["c"]`."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
