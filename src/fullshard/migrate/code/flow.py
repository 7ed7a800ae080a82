"""Which variables, attributes, parameters and results of functions hold a wrapped model, and since which line.

A plain data flow without order but one rule: before the line that wraps it, a variable of the same function is not
wrapped. What cannot be followed (lists of models, names made at run time) counts as not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .project import File, Name, Project

FSDP1, DDP, FSDP2 = "fsdp1", "ddp", "fsdp2"
_SAME = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "half",
    "float",
    "bfloat16",
    "requires_grad_",
}  # methods that return self
_AT_START = (0, 0)
Key = Name


class Flow:
    """`kind(file, node)` says how the model in an expression is wrapped, "" if it is not."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.kinds: dict[Key, str] = {}
        self.since: dict[Key, tuple[int, int]] = {}
        self.makers: dict[Key, str] = {}  # subclasses of FSDP1, and partial(FSDP1, ...)
        self.returns: dict[Key, dict[int, str]] = {}  # by function: what it returns, -1, or the parts of a tuple
        self.functions: dict[Key, tuple[File, cst.FunctionDef]] = {}
        self.methods: dict[str, list[Key]] = {}
        for file in project.files:
            self._note_functions(file)
        for _ in range(12):
            before = len(self.kinds) + len(self.makers) + sum(map(len, self.returns.values()))
            for file in project.files:
                self._pass(file)
            if before == len(self.kinds) + len(self.makers) + sum(map(len, self.returns.values())):
                break

    # ---- questions -----------------------------------------------------------------------------------------------

    def kind(self, file: File, node: cst.CSTNode) -> str:
        """How the model that this expression gives is wrapped: FSDP1, DDP, FSDP2, or ""."""
        if isinstance(node, cst.Call):
            return self._kind_of_call(file, node)
        if isinstance(node, cst.IfExp):
            return self.kind(file, node.body) or self.kind(file, node.orelse)
        if isinstance(node, cst.NamedExpr):
            return self.kind(file, node.value)
        if isinstance(node, cst.Attribute) and node.attr.value == "module":
            inner = self.kind(file, node.value)
            if inner in (FSDP1, DDP):
                return inner
        key = self.key(file, node)
        if key is None or key not in self.kinds:
            return ""
        early = key.kind == "local" and file.position(node) < self.since.get(key, _AT_START)
        return "" if early and key.module == file.module else self.kinds[key]

    def maker(self, file: File, node: cst.CSTNode) -> str:
        """The kind of model that a call of this expression makes, "" if it makes none."""
        name = self.project.resolve(file, node)
        if name is None:
            return ""
        if name.kind == "fsdp" and name.path == "FullyShardedDataParallel":
            return FSDP1
        if name.kind == "fsdp" and name.path == "fully_shard":
            return FSDP2
        if name.kind == "ddp" and name.path == "DistributedDataParallel":
            return DDP
        return self.makers.get(name, "")

    def key(self, file: File, node: cst.CSTNode) -> Key | None:
        """The variable or the attribute that an expression names."""
        if isinstance(node, cst.Name):
            name = self.project.resolve(file, node)
            return name if name is not None and name.kind == "local" else None
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
            owner = file.above(node, cst.ClassDef)
            if isinstance(owner, cst.ClassDef):
                return Name("attribute", node.attr.value, f"{file.module}:{owner.name.value}")
        elif isinstance(node, cst.Attribute):  # of some object: if all classes with such an attribute agree
            found = {kind for key, kind in self.kinds.items() if (key.kind, key.path) == ("attribute", node.attr.value)}
            return Name("attribute", node.attr.value, "") if len(found) == 1 else None
        return None

    # ---- one pass over a file ------------------------------------------------------------------------------------

    def _note_functions(self, file: File) -> None:
        for node in file.walk():
            if isinstance(node, cst.FunctionDef):
                for text, _ in file.names.get(node, ()):
                    key = Name("local", text, file.module)
                    self.functions[key] = file, node
                    if isinstance(file.above(node, cst.ClassDef, cst.FunctionDef), cst.ClassDef):
                        self.methods.setdefault(node.name.value, []).append(key)

    def _pass(self, file: File) -> None:
        for node in file.walk():
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._assign(file, target.target, node.value, node)
            elif isinstance(node, cst.AnnAssign) and node.value is not None:
                self._assign(file, node.target, node.value, node)
            elif isinstance(node, cst.Call):
                self._note_call(file, node)
            elif isinstance(node, cst.ClassDef):
                self._note_class(file, node)
            elif isinstance(node, cst.FunctionDef):
                self._note_function(file, node)

    def _assign(self, file: File, target: cst.CSTNode, value: cst.BaseExpression, at: cst.CSTNode) -> None:
        if isinstance(target, cst.Tuple):
            parts = self._parts(file, value)
            for i, element in enumerate(target.elements):
                if i in parts:
                    self._mark(file, element.value, parts[i], file.position(at))
            return
        if isinstance(target, cst.Name) and (made := self._partial(file, value)):
            if (key := self.key(file, target)) is not None:
                self.makers[key] = made
        if kind := self.kind(file, value):
            self._mark(file, target, kind, file.position(at))

    def _parts(self, file: File, value: cst.BaseExpression) -> dict[int, str]:
        if isinstance(value, cst.Tuple):
            return {i: kind for i, each in enumerate(value.elements) if (kind := self.kind(file, each.value))}
        if isinstance(value, cst.Call):
            return {
                i: kind for i, kind in self.returns.get(self._callee(file, value) or Name("", ""), {}).items() if i >= 0
            }
        return {}

    def _mark(self, file: File, node: cst.CSTNode, kind: str, since: tuple[int, int]) -> None:
        key = self.key(file, node)
        if key is not None and (key.kind != "attribute" or key.module):
            # A class that wraps it at all is stronger than fully_shard, which makes nothing of its own.
            if self.kinds.get(key, FSDP2) == FSDP2:
                self.kinds[key] = kind
            self.since[key] = min(since, self.since.get(key, since))

    def _note_call(self, file: File, call: cst.Call) -> None:
        made = self.maker(file, call.func)
        if made and call.args:
            models = call.args[0].value
            for each in models.elements if isinstance(models, cst.List) else [call.args[0]]:
                self._mark(file, each.value, made, file.position(call))
            return
        callee = self._callee(file, call)
        if callee is None or callee not in self.functions:
            return
        for parameter, value in self.arguments(call, callee):
            if kind := self.kind(file, value):
                key = Name("local", f"{callee.path}.<locals>.{parameter}", callee.module)
                self.kinds.setdefault(key, kind)
                self.since[key] = _AT_START

    def arguments(self, call: cst.Call, callee: Key) -> Iterator[tuple[str, cst.BaseExpression]]:
        """(parameter, value) of a call of a function of the program."""
        _, function = self.functions[callee]
        names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        for position, argument in enumerate(call.args):
            if argument.keyword is not None:
                yield argument.keyword.value, argument.value
            elif not argument.star and position < len(names):
                yield names[position], argument.value

    def _note_class(self, file: File, node: cst.ClassDef) -> None:
        for base in node.bases:
            if made := self.maker(file, base.value):
                for text, _ in file.names.get(node, ()):
                    self.makers[Name("local", text, file.module)] = made

    def _note_function(self, file: File, node: cst.FunctionDef) -> None:
        for text, _ in file.names.get(node, ()):
            for parameter in (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params):
                if parameter.annotation is not None and (made := self.maker(file, parameter.annotation.annotation)):
                    key = Name("local", f"{text}.<locals>.{parameter.name.value}", file.module)
                    self.kinds.setdefault(key, made)
                    self.since[key] = _AT_START
            own = self.returns.setdefault(Name("local", text, file.module), {})
            for value in _returned(node):
                if kind := self.kind(file, value):
                    own[-1] = kind
                own.update(self._parts(file, value) if isinstance(value, cst.Tuple) else {})

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _kind_of_call(self, file: File, call: cst.Call) -> str:
        if made := self.maker(file, call.func):
            return made
        name = self.project.resolve(file, call.func)
        if name is not None and name.path in ("torch.compile", "copy.deepcopy") and call.args:
            return self.kind(file, call.args[0].value)
        callee = self._callee(file, call)
        if callee is not None and callee in self.returns:
            return self.returns[callee].get(-1, "")
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in _SAME:
            return self.kind(file, call.func.value)
        return ""

    def _callee(self, file: File, call: cst.Call) -> Key | None:
        """The function of the program that a call runs."""
        name = self.project.resolve(file, call.func)
        if name is not None and name in self.functions:
            return name
        if name is not None and (made := Name("local", f"{name.path}.__init__", name.module)) in self.functions:
            return made
        if isinstance(call.func, cst.Attribute):
            named = self.methods.get(call.func.attr.value, [])
            return named[0] if len(named) == 1 and (name is None or name.kind == "local") else None
        return None

    def _partial(self, file: File, value: cst.BaseExpression) -> str:
        """The kind of model that `partial(FSDP, ...)` makes."""
        if not isinstance(value, cst.Call) or not value.args:
            return ""
        name = self.project.resolve(file, value.func)
        return self.maker(file, value.args[0].value) if name is not None and name.path == "functools.partial" else ""


def _returned(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    """What a function returns, but not what functions inside of it return."""
    found: list[cst.BaseExpression] = []
    left: list[cst.CSTNode] = list(function.body.children)
    while left:
        node = left.pop()
        if isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            continue
        if isinstance(node, cst.Return) and node.value is not None:
            found.append(node.value)
        left.extend(node.children)
    return found
