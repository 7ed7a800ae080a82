"""`fullshard migrate` of programs: what is printed, and the patches."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from fullshard.migrate.code import Migration, migrate_code
from fullshard.migrate.verdict import GOOD, Judgement, MigrationError


def migrate_programs(path: Path, arguments: argparse.Namespace) -> int:
    """Migrate one program or all of a folder; the exit code. Raises `MigrationError`."""
    if arguments.format is not None:
        raise MigrationError(f"--format {arguments.format}: expected a configuration, found a program")
    found = migrate_code(path, adapter=arguments.adapter)
    judged = Judgement(found.findings, arguments.accept_lossy)
    judged.check_accepted()
    name = path.resolve().name if path.is_dir() else path.stem
    target = arguments.output or Path(f"{name}.patches" if path.is_dir() else f"{name}.patch")
    written = _write_all(path, target, found) if path.is_dir() else _write_one(target, found)
    if arguments.json:
        patch = None if not found.texts else str(target)
        files = {"patch": patch, "changed": [*found.texts], "read": [*found.files]}
        if path.is_dir():
            files["patches"] = [str(each) for each in written.values()]
        print(json.dumps({"program": str(path), **files, **judged.as_json()}))
    elif path.is_dir():
        print(_summary(target, found, judged, written))
    else:
        changed = f"{target}: {len(found.texts)} of {len(found.files)} files change; patch -p1 < {target}"
        print(f"{judged}\n{changed if found.texts else 'nothing changes'}")
    return judged.exit_code


def _write_one(target: Path, found: Migration) -> dict[str, Path]:
    if found.texts:
        _refuse(target)
        _write(target, found.patch)
    return dict.fromkeys(found.texts, target)


def _write_all(path: Path, target: Path, found: Migration) -> dict[str, Path]:
    """A patch for each file that changes, under the file's name in the folder."""
    written = {}
    if found.texts:
        _refuse(target)
    for name in found.texts:
        here = Path(name)
        inside = here.relative_to(path) if here.is_relative_to(path) else Path(here.name)
        written[name] = target / f"{inside}.patch"
        written[name].parent.mkdir(parents=True, exist_ok=True)
        _write(written[name], found.patch_of(name))
    return written


def _summary(target: Path, found: Migration, judged: Judgement, written: dict[str, Path]) -> str:
    """Says for each file what becomes of it, then what a person has to do, then how to apply the rest."""
    lines = []
    for name in found.files:
        counts = Counter(each.verdict for each in found.findings if each.place.file == name)
        if counts or name in written:
            said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in judged.counts if counts[verdict])
            lines.append(f"{name}: {said or 'imports'}" + (f" -> {written[name]}" if name in written else ""))
    todo = [each for each in found.findings if each.verdict not in GOOD]
    if todo:
        lines += ["", f"{len(todo)} {'line needs' if len(todo) == 1 else 'lines need'} you:", *map(str, todo)]
    lines += ["", f"{len(found.texts)} of {len(found.files)} files change"]
    if written:
        lines.append(f"fullshard migrate FILE explains each change; cat $(find {target} -name '*.patch') | patch -p1")
    return "\n".join(lines).lstrip()


def _refuse(target: Path) -> None:
    if target.exists():
        raise MigrationError(f"{target}: expected no file there, found one; remove it, or give --output another name")


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text)
    except OSError as error:
        raise MigrationError(f"{target}: cannot be written: {error.strerror}; give --output another name") from error
