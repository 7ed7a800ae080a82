"""What is to be changed in one file, as data: made by `calls`, `wrapping` and `states`, carried out by `rewriting`."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from ..verdict import Finding, Place
from .arguments import Row
from .project import File


@dataclass(frozen=True)
class Of:
    """An old expression with text after it: `Of(model, ".parameters()")`. With its own changes."""

    node: cst.BaseExpression
    suffix: str


Source = cst.BaseExpression | Of | str  # an old expression, with its own changes; or new text


@dataclass(frozen=True)
class Part:
    """An argument of a new call. `keyword`: "" for a positional one, "**" for a dict."""

    keyword: str
    source: Source


@dataclass(frozen=True)
class NewCall:
    function: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Units:
    """The modules that a wrap policy chose. `condition`: on {module}, in the model {model}. `inner_first`: units may
    hold others."""

    condition: str
    inner_first: bool


@dataclass
class Wrapping:
    """One model that is wrapped. `subject`: the model's name, None if the old program wraps an expression (`value`),
    which then gets a name. `full_classes`: modules of them, in the way that `isinstance` takes classes, are units that
    compute in float32. `before`, `after`: lines around it, on {model}."""

    old: cst.Call
    function: str
    value: cst.BaseExpression
    subject: str | None
    options: list[Part] = field(default_factory=list)
    units: Units | None = None
    full_classes: str = ""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    at: cst.CSTNode | None = None  # the statement around it

    @property
    def takes_lines(self) -> bool:
        return bool(self.units or self.before or self.after)


@dataclass
class Plan:
    """All changes of a file. Nodes are those of `file.tree`. `handled`: uses of names that are gone afterwards."""

    file: File
    calls: dict[cst.CSTNode, NewCall] = field(default_factory=dict)
    texts: dict[cst.CSTNode, Source] = field(default_factory=dict)
    wrappings: dict[cst.CSTNode, Wrapping] = field(default_factory=dict)  # by statement
    functions: dict[cst.CSTNode, Wrapping] = field(default_factory=dict)  # classes that become functions
    removed: set[cst.CSTNode] = field(default_factory=set)  # statements, and items of `with`
    dropped: dict[cst.CSTNode, set[str]] = field(default_factory=dict)  # names of import statements
    imports: set[tuple[str, str]] = field(default_factory=set)
    helpers: set[str] = field(default_factory=set)
    handled: set[cst.CSTNode] = field(default_factory=set)
    full: set[cst.CSTNode] = field(default_factory=set)  # `MixedPrecision(...)` whose classes a wrapping has
    findings: list[Finding] = field(default_factory=list)

    def say(self, node: cst.CSTNode, row: Row, value: str = "", *, default: bool = False, key: str = "") -> None:
        """Add a finding at a node by a row of the tables."""
        name = key or row.old.partition("=")[0]
        self.findings.append(Finding(self.place(node), name, value, row.verdict, row.reason, row.new, default))

    def say_verdict(self, node: cst.CSTNode, key: str, verdict: str, reason: str, value: str = "") -> None:
        self.findings.append(Finding(self.place(node), key, value, verdict, reason))

    def place(self, node: cst.CSTNode) -> Place:
        return self.file.place(node)

    def use(self, name: str, module: str = "fullshard") -> str:
        """The name as the program may write it, imported."""
        if self._is_taken(name, module):
            self.imports.add((module, ""))
            return f"{module}.{name}"
        self.imports.add((module, name))
        return name

    def _is_taken(self, name: str, module: str) -> bool:
        """Whether the file has something else under this name."""
        for scope in set(self.file.scopes.values()):
            for each in scope.assignments[name]:
                for found in each.get_qualified_names_for(name):
                    if found.source.name == "LOCAL" or found.name not in (f"{module}.{name}", *_MOVED.get(name, ())):
                        return True
        return False

    def fresh(self, *names: str) -> str:
        """The first of these names that the file does not use."""
        used = {node.value for node in self.file.walk() if isinstance(node, cst.Name)}
        return next((name for name in names if name not in used), f"{names[0]}_")


# Names that the file may already have from torch, and that are moved here.
_MOVED = {
    name: (f"torch.distributed.fsdp.{name}", f"torch.distributed._composable.fsdp.{name}")
    for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
}
