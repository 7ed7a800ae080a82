"""`fullshard migrate PROGRAM.py`: programs that use FSDP1, DDP or torch's FSDP2, explained and rewritten.

arguments    what each argument and call means here: the tables
project      the files of the program, and what names in them mean
flow         which variables hold wrapped models, and who calls whom
ranks        what only some ranks run
program      what is asked about all this
decision     looks at each use: wrapping and states decide, or adapter keeps FSDP1's class
edits        the changes of a file, and its new text
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..verdict import UNSUPPORTED, Finding, in_order
from .decision import Decision
from .flow import Flow
from .project import File, Project, imported, read_project


@dataclass(frozen=True)
class Migration:
    """`texts`: (old, new) of each file that changes, by the path that was given. `files`: all that were read."""

    findings: list[Finding]
    texts: dict[str, tuple[str, str]]
    files: tuple[str, ...]

    @property
    def patch(self) -> str:
        """Returns a patch for `patch -p1` or `git apply`, from the folder that the paths begin in."""
        return "".join(self.patch_of(path) for path in self.texts)

    def patch_of(self, path: str) -> str:
        """The part of one file."""
        old, new = self.texts[path]
        name = path.lstrip("/")
        lines = difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def migrate_code(path: Path, *, adapter: bool = False) -> Migration:
    """Returns what becomes of the program that begins in the file `path`, or of all programs in the folder `path`, and
    of the modules of the repository that they import. With `adapter` FSDP1's calls stay, and their imports change.

    Nothing is written. Raises `MigrationError`: a file cannot be read, or is no valid Python.
    """
    project = read_project(path)
    flow = Flow(project)
    findings, texts = [], {}
    for files in _programs(project):
        decision = Decision(project, flow, files)
        edits = decision.decide(adapter=adapter)
        for file in files:
            new = edits[file].text()
            findings += edits[file].findings
            if new != file.text:
                compile(new, file.shown, "exec", dont_inherit=True)  # what is written can be read again
                texts[file.shown] = file.text, new
    order = {file.shown: number for number, file in enumerate(project.files)}
    texts = {name: texts[name] for name in sorted(texts, key=order.__getitem__)}
    return Migration(in_order(findings), texts, tuple(file.shown for file in project.files))


def _programs(project: Project) -> list[list[File]]:
    """Files that import each other, together: what a name is in one of them decides what changes in another."""
    group = {file: number for number, file in enumerate(project.files)}
    for file in project.files:
        for path in imported(project, file):
            other = project.file(path)
            if other is not None and group[other] != group[file]:
                old, new = group[other], group[file]
                group = {each: new if number == old else number for each, number in group.items()}
    found: dict[int, list[File]] = {}
    for file, number in group.items():
        found.setdefault(number, []).append(file)
    return list(found.values())


__all__ = ["UNSUPPORTED", "Migration", "migrate_code"]
