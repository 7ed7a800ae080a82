"""How far a reader walks: files, functions and calls from `fully_shard` to a steady step, for FSDP2 and for ours.

    python -m benchmarks.walk                     both implementations, and ours with FULLSHARD_GUARD=off; a few
                                                  seconds; the same on any machine
    python -m benchmarks.walk --files             and which files a steady step visits, with their calls

The program is a chain of three two-layer blocks on two gloo ranks, each block and the model sharded, AdamW. Python
calls of functions that are defined in the package are counted on rank 0, with default settings:

    files from fully_shard on    that have a call from `fully_shard` to the end of the third step
    classes until step 2         with a method that was called until the end of the second step
    calls, functions, files      of the third step
    switches                     how often, in that step, a call is in another file than the one before it
    lines of these files         as they are, with blank lines, comments and docstrings

The rest is read off the source (`--source` another checkout's package): lines of code without blank lines, comments and
docstrings; modules; the share of modules that exactly one other imports; attributes of the largest class (assigned to
`self` in its body); the largest circle of files that import each other, imports for types counted; what the first
`fully_shard` puts into torch instead of its own functions; and the lines that serve "ranks agree": all lines, with
blank ones, of the rooms and files in `AGREE`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

import fullshard
from benchmarks.common import facts, on_ranks

PACKAGE = Path(fullshard.__file__).parent
FSDP2 = Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard"
# Where torch keeps functions that others could replace for the whole process.
PATCHED = (
    "torch.autograd",
    "torch.autograd.graph",
    "torch.nn.modules.module",
    "torch.distributed.tensor",
    "torch.optim",
)
STEPS = 3
# What compares ranks, finds out why one of them waits, and lets all of them reach one outcome: two rooms, and the files
# elsewhere that they need, counted whole. The same parts as in the count of 7,516 lines in 24 files of 0.2.0.
AGREE = (
    "agree/*",
    "peers/*",
    "engine/seam.py",
    "comm/comparison.py",  # the digest in a reduction
    "comm/data_group.py",  # connections that can be cut
    "comm/messages.py",  # small messages, by which ranks compare
    "param/initial.py",  # digests of initial values
    "checkpoint/agreement.py",
    "_torch/groups.py",  # what torch tells of process groups
)


class Walk:
    """Counts calls of functions in files below `package`, while it is entered."""

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + "/"
        self.files: Counter[str] = Counter()
        self.functions: set[Any] = set()
        # File and name of each class with a method that was called.
        self.classes: set[tuple[str, str]] = set()
        self.switches = 0
        self._last = ""

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._prefix):
            return
        name = code.co_filename.removeprefix(self._prefix)
        self.files[name] += 1
        if code not in self.functions:
            self.functions.add(code)
            first, _, rest = code.co_qualname.partition(".")
            if rest and not rest.startswith("<locals>"):
                self.classes.add((name, first))
        self.switches += self._last not in ("", name)
        self._last = name

    def __enter__(self) -> Walk:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _walk(rank: int, world: int, ours: bool) -> dict[str, Any]:
    package = PACKAGE if ours else FSDP2
    shard: Any = fullshard.fully_shard
    if not ours:
        from torch.distributed.fsdp import fully_shard as shard
    before = _torch_functions()
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP() for _ in range(3)))
    with Walk(package) as walk:
        for module in (*model, model):
            shard(module)
    visited, classes = set(walk.files), set(walk.classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        with Walk(package) as walk:
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        visited |= set(walk.files)
        classes |= walk.classes if step < 2 else set()
    after = _torch_functions()
    return {
        "files from fully_shard on": len(visited),
        "classes until step 2": len(classes),
        "calls": sum(walk.files.values()),
        "functions": len(walk.functions),
        "files": len(walk.files),
        "switches": walk.switches,
        "lines of these files": sum(len((package / file).read_text().splitlines()) for file in walk.files),
        "patches": sorted(name for name in before if before[name] is not after[name]),
        "by file": dict(walk.files.most_common()),
    }


def _torch_functions() -> dict[str, Any]:
    return {
        f"{module}.{name}": value
        for module in PATCHED
        for name, value in vars(sys.modules[module]).items()
        if callable(value) and not isinstance(value, ModuleType)
    }


# ---- the source ------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def imports(package: Path, path: Path, modules: Iterable[str]) -> set[str]:
    """The modules of `package` that the file at `path` imports, those for types too."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    inside = parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join((*inside[: len(inside) - node.level + 1], *filter(None, [node.module])))
            base = base if node.level else node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names} | {base}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def circles(imported: dict[str, set[str]]) -> Iterator[set[str]]:
    """Sets of modules each of which imports, by way of others, all others of its set."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for other in imported.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reached = {name: reach(name) for name in imported}
    done: set[str] = set()
    for name in imported:
        circle = {other for other in reached[name] if name in reached[other]}
        if name not in done and len(circle) > 1:
            done |= circle
            yield circle


def attributes(text: str) -> dict[str, int]:
    """How many attributes each class assigns to its instances."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            found[node.name] = len(
                {
                    target.attr
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign)
                    for whole in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
                    for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                }
            )
    return found


def source(package: Path) -> dict[str, Any]:
    """The figures of a package that need no run of it."""
    files = sorted(package.rglob("*.py"))
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in files}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    own = {name for path, name in names.items() if not path.name.startswith("__")}
    imported = {names[path]: imports(package, path, names.values()) - {names[path]} for path in files}
    importers: Counter[str] = Counter(other for name in imported for other in imported[name])
    between = {name: imported[name] & own for name in own}
    largest = max(((n, name) for path in files for name, n in attributes(path.read_text()).items()), default=(0, ""))
    circle = max(circles(between), key=len, default=set())
    lines = {names[path]: path.read_text().count("\n") for path in files}
    return {
        "lines of code": sum(code_lines(path.read_text()) for path in files),
        "modules": len(files),
        "imported by one": f"{100 * sum(importers[name] == 1 for name in own) / max(len(own), 1):.0f} %",
        "files under 60 lines": sum(lines[name] < 60 for name in own),
        "files over 600 lines": sum(n > 600 for n in lines.values()),
        "attributes of the largest class": f"{largest[0]} ({largest[1]})",
        "largest circle of imports": len(circle),
        'lines that serve "ranks agree"': sum(len(path.read_text().splitlines()) for path in agreeing(package)),
    }


def agreeing(package: Path) -> list[Path]:
    """The files that serve "ranks agree", if `package` is ours. Raises `ValueError` for a part that is not there."""
    found: list[Path] = []
    for part in AGREE if package.name == PACKAGE.name else ():
        files = sorted(path for path in package.glob(part) if path.suffix == ".py")
        if not files:
            raise ValueError(f"AGREE: expected files at {part} in {package}, found none; name where they are now")
        found += files
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How far a reader walks from fully_shard to a steady step.")
    parser.add_argument("--files", action="store_true", help="which files a steady step visits")
    parser.add_argument("--source", type=Path, default=PACKAGE, help="the package whose source is read")
    options = parser.parse_args()
    walked = {name: on_ranks(2, _walk, name == "fullshard")[0] for name in ("fullshard", "FSDP2")}
    # Read by the ranks when they begin.
    os.environ["FULLSHARD_GUARD"] = "off"
    walked["guard off"] = on_ranks(2, _walk, True)[0]
    read = {"fullshard": source(options.source), "FSDP2": source(FSDP2)}
    print(f"| torch {torch.__version__} | fullshard | FSDP2 | fullshard, FULLSHARD_GUARD=off |\n|---|---|---|---|")
    for key in next(iter(walked.values())):
        if key != "by file":
            shown = [
                ", ".join(value) or 0 if isinstance(value := each[key], list) else value for each in walked.values()
            ]
            print(f"| {key} | {' | '.join(map(str, shown))} |")
    for key in read["fullshard"]:
        print(f"| {key} | {read['fullshard'][key]} | {read['FSDP2'][key]} | |")
    if options.files:
        for name, each in walked.items():
            print(f"\n{name}")
            for file, calls in each["by file"].items():
                print(f"    {calls:5} {file}")
    sys.stdout.flush()
    print(json.dumps({"benchmark": "walk", "facts": facts(), "results": {"walked": walked, "source": read}}))


if __name__ == "__main__":
    main()
