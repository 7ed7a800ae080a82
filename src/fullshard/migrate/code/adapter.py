"""Programs that keep FSDP1's class: the imports change to `fullshard.compat.fsdp1`, and nothing else does."""

from __future__ import annotations

import ast

from ..verdict import EQUIVALENT, UNSUPPORTED
from .arguments import ADAPTER, ADAPTER_NAMES, ADAPTER_REFUSES, FSDP1_ARGUMENTS, TOLD
from .program import Program
from .project import FSDP_MODULES, File

# Modules of torch that the adapter's module replaces; names that work as torch has them; parts of flat parameters.
_MODULES = ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel")
_OF_TORCH = ("", "wrap", "_or_policy", "_module_wrap_policy", "_Policy", "_wrap", "_recursive_wrap")
_OURS = ("FullyShardedDataParallel", "ShardedGradScaler")
_FLAT = ("_flat_param", "_handle", "_fsdp_state", "flat_param")


def adapt(program: Program, uses: list[tuple[File, ast.AST, str]]) -> None:
    """Change what the names of FSDP1 are imported from, and say what the adapter has not."""
    for file, edits in program.edits.items():
        changed = []
        for statement in [n for n in file.nodes if isinstance(n, (ast.Import, ast.ImportFrom))]:
            for alias in statement.names:
                if module := _new_module(statement, alias):
                    edits.moved[alias] = module
                    changed.append(statement)
        if changed:
            reason = "FSDP1's class on fullshard; the program keeps its calls"
            edits.tell(changed[0], "torch.distributed.fsdp", EQUIVALENT, reason, new=ADAPTER)
    for file, node, path in uses:
        edits, (head, _, method) = program.edits[file], path.partition(".")
        if head in _OURS and (inner := _dotted(file, node, head)) is not None:
            edits.wanted.add((ADAPTER, ""))
            edits.replace(inner, f"{ADAPTER}.{head}")
            edits.drop(inner)
        call = file.parents[node]
        for keyword in call.keywords if path == _OURS[0] and isinstance(call, ast.Call) and call.func is node else ():
            if keyword.arg is not None and keyword.arg not in FSDP1_ARGUMENTS:
                edits.tell(keyword, keyword.arg, UNSUPPORTED, TOLD["no_argument"].format(keyword.arg))
        if head not in (*ADAPTER_NAMES, *_OF_TORCH):
            edits.tell(node, head, UNSUPPORTED, TOLD["not_there"].format(head))
        elif method in ADAPTER_REFUSES:
            edits.tell(node, f"{method}()", UNSUPPORTED, ADAPTER_REFUSES[method])
        elif path.endswith("LOCAL_STATE_DICT"):
            edits.tell(node, "LOCAL_STATE_DICT", UNSUPPORTED, TOLD["flat"])
    for file, edits in program.edits.items():
        for each in file.nodes:
            if isinstance(each, ast.Attribute) and each.attr in _FLAT:
                edits.tell(each, each.attr, UNSUPPORTED, TOLD["flat"])
            elif (
                isinstance(each, ast.Attribute)
                and each.attr in ADAPTER_REFUSES
                and program.flow.wrapped(file, each.value)
            ):
                edits.tell(each, f"{each.attr}()", UNSUPPORTED, ADAPTER_REFUSES[each.attr])
            elif isinstance(each, ast.keyword) and each.arg == "with_grads" and file.code(each.value) != "False":
                edits.tell(each, "with_grads", UNSUPPORTED, TOLD["with_grads"])


def _new_module(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The module that has the name now, or the whole new line; "" if the import stays."""
    if isinstance(statement, ast.Import):
        return ADAPTER if alias.asname is not None and alias.name in _MODULES else ""
    if statement.level or f"{statement.module}.{alias.name}" in _MODULES:
        package, _, name = ADAPTER.rpartition(".")
        return "" if statement.level else f"from {package} import {name} as {alias.asname or alias.name}"
    if statement.module == ADAPTER:
        return ""
    a_module = f"{statement.module}.{alias.name}" in FSDP_MODULES
    of_fsdp1 = statement.module in FSDP_MODULES and alias.name in (*ADAPTER_NAMES, "*")
    return ADAPTER if of_fsdp1 and not a_module else ""


def _dotted(file: File, node: ast.AST, name: str) -> ast.AST | None:
    """The part of a dotted name that ends in `name`, reached through the import of a module that stays."""
    inner, found = node, None
    while isinstance(inner, ast.Attribute):
        found = inner if inner.attr == name else found
        inner = inner.value
    bindings = (file.lookup(inner) or (None, []))[1] if isinstance(inner, ast.Name) else []
    return found if any(each.path and each.path not in _MODULES for each in bindings) else None
