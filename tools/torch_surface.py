"""What changed between two installed versions of torch in the parts that fullshard stands beside.

    python -m tools.torch_surface /path/of/2.14.1 /path/of/2.15.0

Each path is a folder that holds `torch/`. Sources are parsed and nothing is imported, so the versions need neither run
nor fit this Python. Compared: public names, their parameters with defaults, fields of classes, `__all__`, deprecations.
docs/torch-versions.md was written from it.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

# Below torch/distributed. Underscored modules hold the definitions of public names here.
PARTS = (
    "fsdp/__init__.py",
    "fsdp/_fully_shard/_fsdp_api.py",
    "fsdp/_fully_shard/_fully_shard.py",
    "_composable/replicate_with_fsdp.py",
    "device_mesh.py",
    "distributed_c10d.py",
    "checkpoint",
    "tensor/__init__.py",
    "tensor/_api.py",
    "tensor/placement_types.py",
    "tensor/parallel",
    "pipelining/schedules.py",
    "pipelining/stage.py",
)

Surface = dict[str, str]


def surface(folder: Path) -> Surface:
    """Every public name below `folder`/torch, as `file::name`, with its parameters, value or base classes."""
    root = folder / "torch" / "distributed"
    if not root.is_dir():
        raise ValueError(
            f"folder: expected one that holds torch/distributed, found {folder}; give the parent of torch/"
        )
    found: Surface = {}
    for part in PARTS:
        paths = sorted((root / part).rglob("*.py")) if (root / part).is_dir() else [root / part]
        for path in paths:
            if path.is_file():
                name = path.relative_to(root).as_posix()
                found |= {f"{name}::{key}": value for key, value in _names(ast.parse(path.read_text()).body, "")}
    return found


def differences(old: Surface, new: Surface) -> list[str]:
    """One line for each name that came (+), went (-) or changed (~)."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old:
            lines.append(f"+ {key} {new[key]}")
        elif key not in new:
            lines.append(f"- {key}")
        elif old[key] != new[key]:
            lines.append(f"~ {key}\n    {old[key]}\n    {new[key]}")
    return lines


def _names(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _names([*node.body, *node.orelse], prefix)
        elif isinstance(node, ast.FunctionDef):
            if not node.name.startswith("_") or node.name in ("__init__", "_apply"):
                yield prefix + node.name, f"({_parameters(node.args)}){_deprecated(node)}"
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, f"class({', '.join(map(ast.unparse, node.bases))}){_deprecated(node)}"
            yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and prefix and isinstance(node.target, ast.Name):
            yield prefix + node.target.id, "a field" if node.value is None else f"= {ast.unparse(node.value)}"
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield "__all__", ast.unparse(node.value)


def _parameters(args: ast.arguments) -> str:
    """With defaults and without annotations, which change without a meaning."""
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if one is not None:
            one.annotation = None
    return ast.unparse(args)


def _deprecated(node: ast.FunctionDef | ast.ClassDef) -> str:
    texts = [ast.unparse(decorator) for decorator in node.decorator_list]
    return "".join(f" @{text}" for text in texts if text.startswith(("deprecated(", "typing_extensions.deprecated(")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args()
    print("\n".join(differences(surface(given.old), surface(given.new))))
