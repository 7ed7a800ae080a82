"""Finds the variables, attributes and results of functions that hold a wrapped model or an optimizer, and who calls
whom.

A slot is a place for a value: a variable of a scope, an attribute of a class, a result of a function. Assignments,
arguments and `return` carry values from slot to slot; what a wrapper or an optimizer makes follows them. Members of a
list count as the list. Dicts, and names that are made at run time, are not followed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from .project import FUNCTIONS, File, Project

FSDP1, DDP, OPTIMIZER = "fsdp1", "ddp", "optimizer"
# Methods of a module that return it.
_SAME = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_", "module"}
_PASSED_ON = {"torch.compile", "torch.jit.script", "builtins.list", "builtins.tuple", "builtins.reversed"}
# Methods that modules, optimizers and others have too: their names do not tell the class.
_OF_MANY = set(
    "train eval step forward to apply zero_grad backward state_dict load_state_dict update save load".split()
)
Slot = tuple[Any, ...]


class Flow:
    """`kinds(file, node)` says what an expression may hold, `callers` the calls of a function."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.held: dict[Slot, set[str]] = {}
        self.since: dict[tuple[Slot, ast.AST], int] = {}  # where a slot is wrapped first, in this scope
        self.targets: dict[Slot, dict[Slot, tuple[ast.AST, int]]] = {}  # with where it is carried last
        self.origins: dict[Slot, set[Slot]] = {}
        self.wraps: list[tuple[File, ast.Call, str]] = []
        self.optimizers: list[tuple[File, ast.Call]] = []
        self.callers: dict[ast.AST, list[tuple[File, ast.Call]]] = {}
        self._methods: dict[str, list[ast.AST]] = {}
        self._files: dict[ast.AST, File] = {}
        for file in project.files:
            for node in file.nodes:
                if isinstance(node, FUNCTIONS):
                    self._files[node] = file
                    if isinstance(file.parents[node], ast.ClassDef):
                        self._methods.setdefault(node.name, []).append(node)
        for file in project.files:
            for node in file.nodes:
                self._visit(file, node)
        self._spread()
        self._mark_outside()

    # ---- questions -------------------------------------------------------------------------------------------------

    def kinds(self, file: File, node: Any) -> set[str]:
        """FSDP1, DDP and OPTIMIZER, as far as the expression holds them."""
        slots, made = self._sources(file, node)
        found = set(made)
        for slot in slots:
            if file.span(node)[0] >= self.since.get((slot, file.scope(node)), 0):
                found |= self.held.get(slot, set())
        return found

    def wrapped(self, file: File, node: Any) -> bool:
        return bool(self.kinds(file, node) & {FSDP1, DDP})

    def maker(self, file: File, node: ast.AST, depth: int = 0) -> str:
        """The kind of model that a call of this expression makes, "" if it makes none."""
        name = self.project.resolve(file, node)
        if name is not None and name.kind in ("fsdp", "ddp"):
            return {"FullyShardedDataParallel": FSDP1, "DistributedDataParallel": DDP}.get(name.path, "")
        if name is not None and isinstance(name.node, ast.ClassDef) and "." not in name.path and depth < 4:
            owner = next((f for f in self.project.files if name.node in f.parents), file)
            return next((made for base in name.node.bases if (made := self.maker(owner, base, depth + 1))), "")
        if isinstance(node, ast.Name):
            for owner, value in self.project.value(file, node):
                if isinstance(value, ast.Call) and value.args and depth < 4:
                    inner = self.project.resolve(owner, value.func)
                    if inner is not None and inner.path == "functools.partial":
                        return self.maker(owner, value.args[0], depth + 1)
        return ""

    def callee(self, file: File, call: ast.Call) -> ast.AST | None:
        """The function of the program that a call runs; for a class its `__init__`."""
        name = self.project.resolve(file, call.func)
        if name is not None and isinstance(name.node, FUNCTIONS) and "." not in name.path:
            return name.node
        if name is not None and isinstance(name.node, ast.ClassDef) and "." not in name.path:
            return next((n for n in name.node.body if isinstance(n, FUNCTIONS) and n.name == "__init__"), None)
        if isinstance(call.func, ast.Attribute):
            named = self._methods.get(call.func.attr, [])
            of_self = _is_self(call.func.value)
            owner = file.above(call, ast.ClassDef) if of_self else self._class_of(file, call.func.value)
            own = [each for each in named if self._files[each].parents[each] is owner]
            alone = len(named) == 1 and (name is None or name.kind == "local") and call.func.attr not in _OF_MANY
            return own[0] if own else named[0] if alone else None
        return None

    def _class_of(self, file: File, node: ast.expr) -> ast.AST | None:
        """The class of the program that an object is of, if its only value is a call of that class."""
        values = self.project.value(file, node)
        if len(values) != 1 or not isinstance(values[0][1], ast.Call):
            return None
        name = self.project.resolve(values[0][0], values[0][1].func)
        return name.node if name is not None and isinstance(name.node, ast.ClassDef) else None

    def arguments(self, call: ast.Call, function: Any) -> Iterator[tuple[str, ast.expr]]:
        """(parameter, value) of a call of a function of the program."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(self._files[function].parents[function], ast.ClassDef) and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        for name, value in zip(names, call.args, strict=False):
            if isinstance(value, ast.Starred):
                return
            yield name, value
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value

    def before(self, file: File, node: ast.expr) -> set[Slot]:
        """The slots from which the value of an expression may have come, its own included."""
        return self.origins_of(self.slots(file, node))

    def origins_of(self, slots: set[Slot]) -> set[Slot]:
        found: set[Slot] = set()
        left = list(slots)
        while left:
            if (slot := left.pop()) not in found:
                found.add(slot)
                left += self.origins.get(slot, ())
        return found

    def slots(self, file: File, node: ast.expr) -> set[Slot]:
        return self._sources(file, node)[0]

    # ---- slots -----------------------------------------------------------------------------------------------------

    def _sources(self, file: File, node: Any) -> tuple[set[Slot], set[str]]:
        """The slots that an expression reads, and the kinds that it makes itself."""
        if isinstance(node, ast.Name):
            slot = self._variable(file, node)
            return ({slot} if slot is not None else set()), set()
        if isinstance(node, ast.Attribute):
            owner = file.above(node, ast.ClassDef)
            if _is_self(node.value) and owner is not None:
                return {("attribute", owner, node.attr)}, set()
            if node.attr == "module":
                return self._sources(file, node.value)
            return {("attribute", None, node.attr)}, set()  # of some object: as all classes have it
        if isinstance(node, ast.Call):
            return self._of_call(file, node)
        parts: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, (ast.NamedExpr, ast.Subscript, ast.Starred, ast.Await)):
            parts = [node.value]
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = node.elts
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            parts = [node.elt]
        slots, made = set(), set()
        for part in parts:
            of_part = self._sources(file, part)
            slots |= of_part[0]
            made |= of_part[1]
        return slots, made

    def _of_call(self, file: File, call: ast.Call) -> tuple[set[Slot], set[str]]:
        if kind := self.maker(file, call.func):
            return set(), {kind}
        name = self.project.resolve(file, call.func)
        if name is not None and name.path.startswith("torch.optim.") and "lr_scheduler" not in name.path:
            return set(), {OPTIMIZER}
        if name is not None and name.path in _PASSED_ON and call.args:
            return self._sources(file, call.args[0])
        function = self.callee(file, call)
        if function is not None and getattr(function, "name", "") != "__init__":
            return {("result", function, -1)}, set()
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME:
            return self._sources(file, call.func.value)
        return set(), set()

    def _variable(self, file: File, node: ast.Name) -> Slot | None:
        found = file.lookup(node)
        if found is None:
            return None
        scope, bindings = found
        if bindings[0].path:
            where = self.project.definition(file, bindings[0].path)
            return None if where is None else ("var", where[0].tree, bindings[0].path.rpartition(".")[2])
        return ("var", scope, node.id)

    # ---- one look at each node -------------------------------------------------------------------------------------

    def _visit(self, file: File, node: Any) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(file, target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._assign(file, node.target, node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._assign(file, node.target, node.iter)
        elif isinstance(node, ast.Return) and node.value is not None:
            function = file.above(node, *FUNCTIONS)
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
            for number, part in enumerate(parts):
                self._carry(file, part, ("result", function, number))
            if not parts:
                self._carry(file, node.value, ("result", function, -1))
        elif isinstance(node, ast.Call):
            self._call(file, node)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            if kind := self.maker(file, node.annotation):
                self._hold(("var", file.scope(node), node.arg), kind)

    def _call(self, file: File, call: ast.Call) -> None:
        if kind := self.maker(file, call.func):
            self.wraps.append((file, call, kind))
            for slot in self.slots(file, call.args[0]) if call.args else ():  # it is sharded in place
                self._hold(slot, kind)
                self._note_since(slot, file, call)
            return
        if self._of_call(file, call)[1] == {OPTIMIZER}:
            self.optimizers.append((file, call))
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "add") and call.args:
            for slot in self.slots(file, call.func.value):
                self._carry(file, call.args[0], slot)
        function = self.callee(file, call)
        if function is not None:
            self.callers.setdefault(function, []).append((file, call))
            for parameter, value in self.arguments(call, function):
                self._carry(file, value, ("var", function, parameter))

    def _assign(self, file: File, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            function = self.callee(file, value) if isinstance(value, ast.Call) else None
            for number, each in enumerate(target.elts):
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                    self._assign(file, each, value.elts[number])
                elif function is not None:
                    for slot in self.slots(file, each):
                        for which in (number, -1):
                            self._link(("result", function, which), slot, (function, sys.maxsize))
            return
        if isinstance(target, ast.Subscript):
            target = target.value
        for slot in self.slots(file, target):
            self._carry(file, value, slot)
            if slot[0] == "attribute" and slot[1] is not None:
                self._link(slot, ("attribute", None, slot[2]), (slot[1], sys.maxsize))
            if self._sources(file, value)[1] & {FSDP1, DDP}:
                self._note_since(slot, file, value)

    def _note_since(self, slot: Slot, file: File, at: ast.AST) -> None:
        key = slot, file.scope(at)
        self.since[key] = min(file.span(at)[1], self.since.get(key, sys.maxsize))

    def _carry(self, file: File, value: ast.expr, slot: Slot) -> None:
        slots, made = self._sources(file, value)
        for kind in made:
            self._hold(slot, kind)
        for source in slots:
            self._link(source, slot, (file.scope(value), file.span(value)[0]))

    def _link(self, source: Slot, target: Slot, at: tuple[ast.AST, int]) -> None:
        if source != target:
            links = self.targets.setdefault(source, {})
            links[target] = max(at, links.get(target, at), key=lambda each: each[1])
            self.origins.setdefault(target, set()).add(source)

    def _hold(self, slot: Slot, kind: str) -> None:
        self.held.setdefault(slot, set()).add(kind)

    def _spread(self) -> None:
        left = list(self.held)
        while left:
            slot = left.pop()
            for target, (scope, position) in self.targets.get(slot, {}).items():
                early = position < self.since.get((slot, scope), 0)
                if not early and not self.held[slot] <= self.held.get(target, set()):
                    self.held.setdefault(target, set()).update(self.held[slot])
                    left.append(target)

    def _mark_outside(self) -> None:
        """Marks what a function was given and wraps: it is sharded in place for its callers too, from the call on."""
        for file, call, kind in self.wraps:
            left = [slot for slot in self.before(file, call.args[0]) if call.args] if call.args else []
            for source in left:
                for scope, position in (at for at in self.targets.get(source, {}).values()):
                    if source[0] == "var" and source[1] is scope and kind not in self.held.get(source, set()):
                        self._hold(source, kind)
                        self.since[source, scope] = position + 1
        self._spread()


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
