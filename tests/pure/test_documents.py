"""The documents say what the code says: links, commands, settings, names and lists are compared with it."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from fullshard import cli
from fullshard.train.config import load_config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fullshard"
README = ROOT / "README.md"
INSTALL = ROOT / "docs" / "install.md"
FEATURES = ROOT / "docs" / "features.md"
ADRS = ROOT / "docs" / "adr"

FOLDERS = ("docs", "examples", "benchmarks", "tests", "src")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
# Those whose code paths are checked, too; the notes beside golden traces speak of torch's files as well,
# and a dated record of the files of its day.
DATED = re.compile(r"_\d{4}-\d\d-\d\d")
OURS = [path for path in DOCUMENTS if path.parent in (ROOT, ROOT / "docs", ADRS) and not DATED.search(path.name)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block."""
    return re.findall(r"^```(\w*)[^`\n]*\n(.*?)^```$", text, flags=re.M | re.S)


def prose(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """What `#...` may point to: headings as they are spelt in links."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def dead_links(text: str, folder: Path) -> list[str]:
    """Links of a document in `folder` that lead nowhere. Addresses outside of the repository are not followed."""
    dead = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = folder / path if path else None
        if found is not None and not found.exists():
            dead.append(target)
        elif anchor:
            there = text if found is None else found.read_text()
            if anchor not in anchors(there):
                dead.append(target)
    return dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_a_document_names_what_is_there(path: Path) -> None:
    """Links, make targets, commands, files of code, and the torch that is installed; in a record of a day, links."""
    text = path.read_text()
    assert dead_links(text, path.parent) == []
    if not DATED.search(path.name):
        assert other_torches(path) == []
    if path in OURS:
        wanted = {command.split()[1] for command in commands(path, "make")}
        wanted |= {target for target in re.findall(r"`make ([a-z-]+)[^`]*`", prose(text))}
        assert wanted <= TARGETS, f"not in the Makefile: {wanted - TARGETS}"
        accept(commands(path, "fullshard"))
        assert missing_paths(text) == []


def test_dead_links_are_found() -> None:
    text = "# Two words, here\n[a](README.md) [b](#two-words-here) [c](https://example.org/x) [d](no.md) [e](#no)"
    assert dead_links(text, ROOT) == ["no.md", "#no"]


# ---- commands ------------------------------------------------------------------------------------------------


def commands(path: Path, program: str) -> list[str]:
    """The lines of code blocks that call `program`, without a comment behind."""
    lines = [line.split("#")[0].strip() for _, code in fences(path.read_text()) for line in code.splitlines()]
    return [line for line in lines if line.startswith(f"{program} ")]


MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, flags=re.M))


(TORCH,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def other_torches(path: Path) -> list[str]:
    """Commands that install torch in another range than the declared one; without one it may be any that nothing ran
    with."""
    parts = set(TORCH.removeprefix("torch").split(","))
    return [
        command
        for command in commands(path, "pip")
        for word in shlex.split(command)[2:]
        if re.match(r"torch\b", word) and set(word.removeprefix("torch").split(",")) != parts
    ]


def test_the_two_commands_are_in_the_readme() -> None:
    assert commands(README, "make") == ["make train", "make test"]
    assert {"train", "test"} <= TARGETS


def accept(lines: list[str]) -> None:
    """Read `lines` as the command does: options by its parser, keys and values of `--set` by its configuration."""
    for command in lines:
        words = shlex.split(command.split(">")[0])[1:]
        arguments: argparse.Namespace = cli.parser().parse_args(words)
        if arguments.command == "train":
            folder = [f"model.folder={arguments.model}"] if arguments.model else []
            load_config(None, [*folder, *arguments.set])


def test_the_first_example_is_the_file() -> None:
    """tests/procs/test_first_example.py runs it."""
    blocks = [code for language, code in fences(INSTALL.read_text()) if language == "python"]
    assert blocks == [(ROOT / "examples" / "quickstart.py").read_text()]


# ---- lists ---------------------------------------------------------------------------------------------------


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    assert set(first_cells(INSTALL, "extra")) == extras
    extra = first_cells(ADRS / "0013-torch-is-the-only-requirement.md", "extra")
    assert set(extra) == extras - {"train"}  # a sum of others
    assert project["dependencies"] == ["torch<2.16,>=2.10"], (
        "docs/install.md, ADR 0013 and docs/engine.md say 2.10 to 2.15"
    )


def first_cells(path: Path, heading: str) -> list[str]:
    """The words in backticks of the first column of the table whose first column has this heading."""
    cells = [line.split("|")[1].strip() for line in table(path, heading)]
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def table(path: Path, heading: str) -> list[str]:
    """The rows of the table that begins `| heading |`; one table at most has it."""
    lines = path.read_text().splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return lines[start + 2 : end]


def refusals(source: str) -> set[str]:
    """What `not_built(...)` is called with first, as far as it is written there, and the names in `NOT_BUILT`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("not_built"):
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):
                first = first.values[0]
            if isinstance(first, ast.Constant):
                names.add(str(first.value).strip())
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NOT_BUILT":
            names |= {name for name in ast.literal_eval(node.value) if not name.startswith("_")}
    return names - {"FSDPModule."}


def test_what_is_refused_is_documented() -> None:
    """Both ways: what is refused is said, and what is said to be refused is."""
    refused = {name for path in (PACKAGE / "api").glob("*.py") for name in refusals(path.read_text())}
    assert refusals('NOT_BUILT = ("a",)\nnot_built("b", 1, "c")') == {"a", "b"}
    said = {re.sub(r"\W.*", "", word) for word in first_cells(FEATURES, "refused so far")}
    assert said == refused


SETTING = re.compile(r"\bFULLSHARD_[A-Z][A-Z_]*\b")


def settings(texts: Iterable[str]) -> set[str]:
    """The names of environment variables of ours in `texts`."""
    return {name for text in texts for name in SETTING.findall(text)}


def test_settings_are_documented_and_exist() -> None:
    in_code = settings(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert in_code >= {"FULLSHARD_COMMUNICATION", "FULLSHARD_CHECK"}
    assert settings([(ROOT / "docs" / "engine.md").read_text()]) == in_code
    # Dated records and the changelog have names of their day; the faults page has settings that are none, on purpose.
    of_today = [path for path in OURS if path.name not in ("CHANGELOG.md", "reliability.md")]
    assert settings(path.read_text() for path in of_today) <= in_code


def test_settings_have_the_defaults_that_are_documented() -> None:
    from fullshard.peers import Settings
    from fullshard.policy import Options

    rows = [line.split("|")[1:4] for line in table(ROOT / "docs" / "engine.md", "variable")]
    documented = {name.strip(" `"): default.strip(" `") for name, default, _ in rows}
    options, guard = Options.current({}), Settings.read(1800.0, {})
    assert documented == {
        "FULLSHARD_COMMUNICATION": options.communication,
        "FULLSHARD_WATCH": options.watch,
        "FULLSHARD_REDUCE_DTYPE": options.reduce_default,
        "FULLSHARD_GUARD": guard.mode,
        "FULLSHARD_SILENCE": f"{guard.silence_seconds:g}",
        "FULLSHARD_CHECK": str(int(options.check)),
    }


# ---- records -------------------------------------------------------------------------------------------------

RECORDS = sorted(path for path in ADRS.glob("*.md") if path.name != "README.md")
SECTIONS = ["Context", "Decision", "Alternatives", "What would change our mind"]


@pytest.mark.parametrize("path", RECORDS, ids=_name)
def test_a_record_has_its_number_and_its_four_sections(path: Path) -> None:
    text = path.read_text()
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", path.name)
    assert text.startswith(f"# {path.name[:4]}: ")
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    assert parts[1::2] == SECTIONS
    assert all(part.strip() for part in parts[2::2]), "an empty section"


def test_records_are_numbered_and_listed() -> None:
    assert [path.name[:4] for path in RECORDS] == [f"{i:04}" for i in range(1, len(RECORDS) + 1)]
    listed = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \|", (ADRS / "README.md").read_text(), flags=re.M)
    assert listed == [(path.name[:4], path.name) for path in RECORDS]


def test_records_named_in_the_source_exist() -> None:
    named = {n for path in PACKAGE.rglob("*.py") for n in re.findall(r"\bADR (\d{4})\b", path.read_text())}
    assert named and named <= {path.name[:4] for path in RECORDS}


# ---- names of code -------------------------------------------------------------------------------------------

CODE_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py|(?:[\w.-]+/)+)`")
WHERE_PATHS_BEGIN = (ROOT, PACKAGE, ROOT / "tests", ROOT / "src")


def missing_paths(text: str) -> list[str]:
    """Python files and folders in backticks that are neither in the repository, nor in the package, nor in tests."""
    named = [name for name in CODE_PATH.findall(text) if "/" in name or name.endswith(".py")]
    # What a run leaves is no part of the repository.
    named = [name for name in named if not name.startswith(("runs/", "tensorboard/", "build/", "dist/"))]
    bare = {path.name for path in PACKAGE.rglob("*.py")}  # a document about one room leaves the folder away
    return [
        name for name in named if name not in bare and not any((base / name).exists() for base in WHERE_PATHS_BEGIN)
    ]


def test_missing_files_are_found() -> None:
    text = "`comm/pool.py` `comm/` `comm/lanes.py` `_version.py` `lanes.py` `lanes/`"
    assert missing_paths(text) == ["comm/lanes.py", "lanes.py", "lanes/"]


def glossary() -> list[tuple[str, str, list[str]]]:
    """(word, file, names) of each row."""
    rows = []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] != "word" and not set(cells[0]) <= set("-"):
            path, *names = re.findall(r"`([^`]+)`", cells[2])
            rows.append((cells[0], path, names))
    return rows


GLOSSARY = glossary()


def test_words_of_the_glossary_are_in_the_code() -> None:
    """As names that the file defines or assigns, not in a comment."""
    defined = {path: defined_names((PACKAGE / path).read_text()) for _, path, _ in GLOSSARY}
    assert [(word, path) for word, path, names in GLOSSARY if not defined[path] >= set(names)] == []


def defined_names(source: str) -> set[str]:
    """Functions, classes, variables and attributes that a source defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                names.add(node.attr)
    return names


def test_the_glossary_has_the_words_of_the_design() -> None:
    words = {part for word, _, _ in GLOSSARY for part in re.findall(r"[\w ]+", word)}
    words = {word.strip() for word in words}
    assert words >= {"unit", "group", "shard", "full", "unshard", "reshard", "reduce", "flat layout", "axis", "dim"}
    assert len(GLOSSARY) <= 40
    assert len({word for word, _, _ in GLOSSARY}) == len(GLOSSARY), "a word stands there twice"


def test_commands_and_gradient_words_are_explained() -> None:
    from fullshard.schedule import COMMANDS

    words = {part.strip() for word, _, _ in GLOSSARY for part in word.split(",")}
    assert set(COMMANDS) <= words
