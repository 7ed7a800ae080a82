"""The changes of one file: spans of its text with what is written instead. What is in no span keeps its formatting."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ..verdict import Finding
from .arguments import TOLD, Row
from .project import FUNCTIONS, File, Project

# New text: literal parts, and old expressions with their own changes.
Text = Sequence[str | ast.AST]


class Blocked(Exception):
    """The place is not rewritten, for a reason of the table, about `shown`."""

    def __init__(self, node: ast.AST, reason: str, shown: str = "") -> None:
        self.node, self.reason = node, TOLD[reason].format(" ".join(shown.split()))
        super().__init__(self.reason)


class Edits:
    """`gone`: names that are in no line any more. `wanted`: (module, name) to import; `name` "" for the module."""

    def __init__(self, project: Project, file: File) -> None:
        self.project, self.file = project, file
        self.spans: list[tuple[int, int, Text]] = []
        self.lines: dict[ast.stmt, list[Text]] = {}  # before a statement
        self.lines_after: dict[ast.stmt, list[Text]] = {}
        self.removed: set[ast.stmt] = set()
        self.opened: dict[ast.With, set[ast.withitem]] = {}
        self.helpers: set[str] = set()
        self.gone: set[ast.AST] = set()
        self.kept: set[ast.AST] = set()  # what is in new lines
        self.wanted: set[tuple[str, str]] = set()
        self.moved: dict[ast.alias, str] = {}  # names that come from another module now
        self.findings: list[Finding] = []

    # ---- what changes ----------------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, *text: str | ast.AST) -> None:
        self.spans.append((*self.file.span(node), text))

    def drop(self, node: ast.AST) -> None:
        """Names in this expression are gone."""
        self.gone |= set(ast.walk(node)) - self.kept

    def before(self, statement: ast.stmt, *text: str | ast.AST) -> None:
        self._add(self.lines, statement, text)

    def after(self, statement: ast.stmt, *text: str | ast.AST) -> None:
        self._add(self.lines_after, statement, text)

    def _add(self, lines: dict[ast.stmt, list[Text]], statement: ast.stmt, text: Text) -> None:
        lines.setdefault(statement, []).append(text)
        self.kept |= {node for part in text if isinstance(part, ast.AST) for node in ast.walk(part)}

    def remove(self, statement: ast.stmt) -> None:
        self.removed.add(statement)
        self.drop(statement)

    def open(self, block: ast.With, item: ast.withitem) -> None:
        """This context goes away; without any, its body is written instead."""
        self.opened.setdefault(block, set()).add(item)
        self.drop(item)

    def rewrite_call(self, call: ast.Call, function: str, arguments: Sequence[tuple[Any, Text | None]]) -> None:
        """Replaces a call by that of another function, with what each old argument or keyword becomes: None drops it.
        New ones come with None as the old one. Arguments that stay keep their lines."""
        self.replace(call.func, function)
        self.drop(call.func)
        opening = self.file.text.index("(", self.file.span(call.func)[1]) + 1
        kept = [new for _, new in arguments if new is not None]
        if len(kept) == 1 or all(old is None or new is None for old, new in arguments):
            text = [part for number, new in enumerate(kept) for part in ([", ", *new] if number else new)]
            self.spans.append((opening - 1, self.file.span(call)[1], ("(", *text, ")")))
        else:
            self._arguments(opening, arguments, [new for old, new in arguments if old is None and new is not None])
        for old, new in arguments:
            if old is not None:
                kept_nodes = {n for part in new or () if isinstance(part, ast.AST) for n in ast.walk(part)}
                self.gone |= set(ast.walk(old)) - kept_nodes - self.kept

    def _arguments(self, opening: int, arguments: Sequence[tuple[Any, Text | None]], added: list[Text]) -> None:
        file = self.file
        olds = sorted((file.outer(old, opening), old, new) for old, new in arguments if old is not None)
        gap = file.text[olds[0][0][1] : olds[1][0][0]] if len(olds) > 1 else ", "
        between = f",{file.newline}{file.indent_at(olds[1][1])}" if "\n" in gap else ", "
        last_kept = max(number for number, (_, _, new) in enumerate(olds) if new is not None)
        for number, ((start, end), old, new) in enumerate(olds):
            if new is None and number < last_kept:
                self.spans.append((start, olds[number + 1][0][0], ()))
            elif new is None:
                self.spans.append((olds[number - 1][0][1], end, ()))
            elif list(new) != [old] or (number == last_kept and added):
                more = [part for text in added if number == last_kept for part in (between, *text)]
                # With what is before it, so that the old argument has a span of its own where it goes elsewhere.
                head = file.text[opening - 1 : start] if number == 0 else ""
                self.spans.append((start - len(head), end, (head, *new, *more)))

    # ---- names -----------------------------------------------------------------------------------------------------

    def use(self, name: str, module: str = "fullshard") -> str:
        """The name as the program may write it, imported."""
        same = {f"{each}.{name}" for each in (module, "torch.distributed.fsdp", "torch.distributed._composable.fsdp")}
        taken = any(each.path not in same for names in self.file.bindings.values() for each in names.get(name, ()))
        self.wanted.add((module, "" if taken else name))
        return f"{module}.{name}" if taken else name

    def fresh(self, *names: str) -> str:
        """The first of these names that the file does not use."""
        used = {node.id for node in self.file.nodes if isinstance(node, ast.Name)}
        used |= {name for names in self.file.bindings.values() for name in names}
        return next((name for name in names if name not in used), f"{names[0]}_")

    # ---- findings --------------------------------------------------------------------------------------------------

    def say(self, node: ast.AST, row: Row, value: str = "", *, default: bool = False, key: str = "") -> None:
        """Add a finding at a node by a row of the tables."""
        name = key or row.old.partition("=")[0]
        self.findings.append(Finding(self.file.place(node), name, value, row.verdict, row.reason, row.new, default))

    def tell(self, node: ast.AST, key: str, verdict: str, reason: str, value: str = "", new: str = "") -> None:
        self.findings.append(Finding(self.file.place(node), key, value, verdict, reason, new))

    # ---- the new text ----------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The new text of the file."""
        file, final = self.file, list(self.spans)
        shifts = [shift for block, items in self.opened.items() for shift in self._without(block, items, final)]
        for statement in self.removed:
            body = next(b for b in _bodies(file.parents[statement]) if statement in b)
            empty = all(each in self.removed for each in body) and statement is body[0]
            keeps = empty and not isinstance(file.parents[statement], ast.Module)
            final.append(
                (*file.line_span(statement), (f"{file.indent(statement)}pass{file.newline}",) if keeps else ())
            )
        for at, lines in ((1, self.lines_after), (0, self.lines)):
            for statement, texts in lines.items():
                position, start = file.line_span(statement)[at], file.line_span(statement)[0]
                depth = sum(len(width) for first, last, width in shifts if first <= start < last)
                indent = file.indent(statement)[depth:]
                final += [(position, position, self._indented(text, indent)) for text in texts]
        self._imports(final)
        return self._render(0, len(file.text), final)

    def _indented(self, text: Text, indent: str) -> Text:
        parts = [part.replace("\n", f"{self.file.newline}{indent}") if isinstance(part, str) else part for part in text]
        return (indent, *parts, self.file.newline)

    def _render(self, start: int, end: int, spans: list[tuple[int, int, Text]], own: int = -1) -> str:
        """The text between two positions with the changes in it; an outer change has the inner ones of its parts."""
        inside = []
        for number, (a, b, _) in enumerate(spans):
            around = own >= 0 and ((spans[own][:2] == (a, b) and number < own) or a == b == start)
            if start <= a and b <= end and number != own and not around:
                inside.append((a, b > a, -b, number))
        found, at = [], start
        for a, _, b, number in sorted(inside):
            if a >= at:
                found.append(self.file.text[at:a])
                for part in spans[number][2]:
                    new = part if isinstance(part, str) else self._render(*self.file.span(part), spans, number)
                    found.append(new)
                at = -b
        return "".join([*found, self.file.text[at:end]])

    def _without(self, block: Any, items: set[ast.withitem], final: list[tuple[int, int, Text]]) -> list[Any]:
        """Drop items of a `with`; returns which lines move to the left, and by what."""
        file, first = self.file, block.body[0]
        start, end = file.span(block.items[0].context_expr)[0], file.span(block.items[-1])[1]
        kept = [file.code(item) for item in block.items if item not in items]
        if kept:
            final.append((start, end, (", ".join(kept),)))
            return []
        header = block.items[-1].context_expr.end_lineno
        if first.lineno == header:  # on the line of the with
            final.append((file.span(block)[0], file.span(first)[0], ()))
            return []
        while not file.lines[header - 1].split("#")[0].rstrip().endswith(":"):
            header += 1
        final.append((file.line_span(block)[0], file.starts[header], ()))
        inner, last = file.indent(first), block.end_lineno
        width = inner.removeprefix(file.indent(block))
        while last < len(file.lines) and file.lines[last].startswith(inner + "#"):
            last += 1  # comments at the end
        texts = [node for node in ast.walk(block) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        quoted = {line for node in texts for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
        for line in range(header + 1, last + 1):
            if file.lines[line - 1].startswith(inner) and line not in quoted:
                final.append((file.starts[line - 1], file.starts[line - 1] + len(width), ()))
        return [(file.starts[header], file.starts[last], width)]

    # ---- imports ---------------------------------------------------------------------------------------------------

    def _imports(self, final: list[tuple[int, int, Text]]) -> None:
        """Names that moved or are gone, and what the new text uses: where the first old import was, or after the
        last one at the top."""
        file, body = self.file, self.file.tree.body
        statements = [n for n in file.nodes if isinstance(n, (ast.Import, ast.ImportFrom))]
        gone = {alias for each in statements for alias in each.names if self._is_unused(alias)}
        changed = [each for each in statements if any(a in self.moved or a in gone for a in each.names)]
        at_top = [each for each in changed if each in body and not getattr(each, "module", "") == "__future__"]
        wanted = {each for each in self.wanted if not self._has(*each)}
        lines: dict[ast.stmt, list[str]] = {}
        for each in changed:
            kept = [alias for alias in each.names if alias not in self.moved and alias not in gone]
            moved = [(self.moved[alias], alias) for alias in each.names if self.moved.get(alias)]
            if each in at_top and isinstance(each, ast.ImportFrom):
                wanted |= {(m, a.name) for m, a in moved if m == "fullshard" and a.asname is None}
                moved = [(m, a) for m, a in moved if m != "fullshard" or a.asname is not None]
            modules = dict.fromkeys(module for module, _ in moved)
            lines[each] = [_import(each, module, [a for m, a in moved if m == module]) for module in modules]
            lines[each] += [_import(each, None, kept)] if kept else []
        new = [f"import {module}" for module, name in sorted(wanted) if not name]
        for module in sorted({module for module, name in wanted if name}):
            new.append(_from(module, sorted(name for each, name in wanted if each == module and name)))
        definition = next((i for i, s in enumerate(body) if isinstance(s, (*FUNCTIONS, ast.ClassDef))), len(body))
        last = next((s for s in reversed(body[:definition]) if s in statements), None)
        after = last or (body[0] if ast.get_docstring(file.tree) else None)
        end = file.line_span(after)[1] if after is not None else 0
        for each in changed:
            own = [*new, *lines[each]] if at_top and each is at_top[0] else lines[each]
            span, indent = file.span(each), file.indent(each)
            alone = file.is_alone(each) and not any(body == [each] for body in _bodies(file.parents[each]))
            span = span if own or not alone else file.line_span(each)
            text = "\n".join(own) if own else "" if alone else "pass"
            final.append((*span, (text.replace("\n", f"{file.newline}{indent}"),)))
        if new and not at_top:
            final.append((end, end, ("".join(f"{line}{file.newline}" for line in new),)))
        for helper in sorted(self.helpers):
            blank = len(file.text[end:]) - len(file.text[end:].lstrip("\r\n"))
            gap = file.newline * max(0, 2 - blank // len(file.newline)) if file.text[end:].strip() else ""
            final.append((end, end, (f"\n\n{helper}".replace("\n", file.newline) + gap,)))

    def _is_unused(self, alias: ast.alias) -> bool:
        """Whether it is a name from torch that only lines that are gone have used."""
        name = alias.asname or alias.name.partition(".")[0]
        nodes = self.file.nodes
        uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        if alias in self.moved or not uses or not all(use in self.gone for use in uses):
            return False
        use: ast.AST = uses[0]
        while isinstance(self.file.parents[use], ast.Attribute):
            use = self.file.parents[use]
        return any(each.kind in ("fsdp", "ddp") for each in self.project.candidates(self.file, use))

    def _has(self, module: str, name: str) -> bool:
        """Whether the top of the file imports it already."""
        found = self.file.bindings.get(self.file.tree, {}).get(name or module.partition(".")[0], [])
        return any(each.path == (f"{module}.{name}" if name else module) for each in found)


def _import(old: Any, module: str | None, names: list[ast.alias]) -> str:
    """The import of these names from another module, or from the old one."""
    shown = [each.name + (f" as {each.asname}" if each.asname else "") for each in names]
    if module is not None and " " in module:
        return module  # a whole line
    if isinstance(old, ast.ImportFrom):
        return _from(module or "." * old.level + (old.module or ""), shown)
    return f"import {', '.join(shown)}" if module is None else f"import {module} as {names[0].asname}"


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= 120 else f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [body for body in found if isinstance(body, list)]
