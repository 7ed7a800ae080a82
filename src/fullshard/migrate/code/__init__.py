"""`fullshard migrate CODE.py`: programs that use FSDP1, DDP or torch's FSDP2, explained and rewritten.

arguments    what each argument and call means here: the tables
project      the files of the program, and what names in them stand for
flow         which variables hold wrapped models
plan         the changes of a file, as data
calls        decides about calls | wrapping: about wrapped models | states: about state dicts
rewriting    carries a plan out
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ..verdict import Finding, MigrationError, in_order


@dataclass(frozen=True)
class Migration:
    """`texts`: (old, new) of each file that changes, by the path that was given. `files`: all that were read."""

    findings: list[Finding]
    texts: dict[str, tuple[str, str]]
    files: tuple[str, ...]

    @property
    def patch(self) -> str:
        """For `patch -p1` or `git apply`, from the folder that the paths begin in."""
        lines: list[str] = []
        for path, (old, new) in self.texts.items():
            name = path.lstrip("/")
            for line in difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
            ):
                lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(lines)


def migrate_code(path: Path) -> Migration:
    """What becomes of the program that begins in the file `path`, and of the modules beside it that it imports.

    Nothing is written. Raises `MigrationError`: LibCST is missing, a file cannot be read, or is no valid Python.
    """
    if importlib.util.find_spec("libcst") is None:
        raise MigrationError("reading programs needs LibCST, which is not installed: pip install libcst")
    from .calls import decide
    from .flow import Flow
    from .project import read_project
    from .rewriting import rewrite

    project = read_project(path)
    flow = Flow(project)
    plans = [decide(project, flow, file) for file in project.files]
    texts = {}
    for plan in plans:
        old, new = plan.file.tree.code, rewrite(plan)
        if old != new:
            compile(new, plan.file.shown, "exec")  # what is written can be read again
            texts[plan.file.shown] = old, new
    findings = in_order(finding for plan in plans for finding in plan.findings)
    return Migration(findings, texts, tuple(file.shown for file in project.files))
