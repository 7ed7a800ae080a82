"""The reference pages say what the code says: names, commands, keys, messages, variables."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from fullshard import cli
from fullshard.migrate.config import ShardingConfig
from fullshard.train.config import Config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fullshard"
PAGES = ROOT / "docs" / "reference"


@functools.cache
def _nodes() -> tuple[ast.AST, ...]:
    """Of all sources of the package."""
    return tuple(node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))


def _load(name: str) -> ModuleType:
    """A file of docs/_site, which mkdocs imports by its path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


reference = _load("reference")


# ---- names -----------------------------------------------------------------------------------------------------


def _documented(module: str) -> list[str]:
    return [name for _, names in reference.API[module][2].items() for name in names]


def _public(module: str) -> set[str]:
    if module == "observe":  # no list of its own: what it imports by name
        tree = ast.parse((PACKAGE / "observe" / "__init__.py").read_text())
        return {a.asname for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names if a.asname}
    found = importlib.import_module("fullshard" if module == "fullshard" else f"fullshard.{module}")
    return {name for name in found.__all__ if not name.startswith("__")}


@pytest.mark.parametrize("module", ["fullshard", "checkpoint", "observe", "migrate"])
def test_every_public_name_is_on_its_page_once(module: str) -> None:
    assert sorted(_documented(module)) == sorted(_public(module))


@pytest.mark.parametrize("module", list(reference.API))
def test_names_have_a_definition_with_a_docstring(module: str) -> None:
    """mkdocstrings leaves out what has none, without a word."""
    title, _, groups = reference.API[module]
    for group, names in groups.items():
        for name in names:
            path, _, last = reference.defined(group if group.startswith("fullshard.") else title, name).rpartition(".")
            found = getattr(importlib.import_module(path), last)
            assert not callable(found) or inspect.getdoc(found), f"{path}.{last} has no docstring"


# ---- commands and keys -----------------------------------------------------------------------------------------


def test_every_command_and_option_is_on_the_page() -> None:
    page = reference.cli()
    seen = []
    for words, parser in reference.commands(cli.parser()):
        assert f"\n## {words}\n" in page
        section = page.split(f"\n## {words}\n")[1].split("\n## ")[0]
        for option in reference.options(parser):
            for flag in option.option_strings or [str(option.metavar or option.dest)]:
                assert f"`{flag}" in section, f"{words}: {flag}"
        seen.append(words)
    assert {"fullshard train", "fullshard verify", "fullshard checkpoint export"} <= set(seen)
    assert len(seen) == len(set(seen)) >= 11


def test_help_of_every_option_is_filled_in() -> None:
    for words, parser in reference.commands(cli.parser()):
        for option in reference.options(parser):
            assert reference._help(option, parser).strip(), f"{words}: {option.option_strings or option.dest}: no help"


def test_an_option_that_the_help_hides_is_left_out() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seen", help="x")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    assert [option.dest for option in reference.options(parser)] == ["seen"]


@pytest.mark.parametrize(
    ("config", "page"), [(Config, reference.trainer_keys()), (ShardingConfig, reference.sharding_keys())]
)
def test_every_key_is_on_the_page(config: type, page: str) -> None:
    own, below = reference.sections(config)
    keys = [key.name for key in own]
    for name, section in below:
        assert f"\n## {name}\n" in page
        keys += [key.name for key in fields(section) if "doc" in key.metadata]
    assert len(keys) > 20
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.M) == keys


# ---- messages --------------------------------------------------------------------------------------------------

GAP = reference.GAP


@functools.cache
def _templates() -> set[str]:
    """Every text of the source, a gap for each value."""
    texts = (node for node in _nodes() if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)))
    return {text for node in texts if len(text := " ".join(reference._text(node).split())) > 12}


def _entries() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)


def _texts_of_sections() -> list[str]:
    """What the sections of the page quote of an error, from "expected" to where it says what was found."""
    sections = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## Errors by their text\n")[0]
    quoted = re.findall(r"`[^`\n]*?(expected [^`]*)`", sections)
    return [text.partition(", found")[0] for text in quoted]


def _is_in(entry: str, template: str) -> bool:
    """Its pieces between the gaps, in order; a gap is a value there, or words that this page leaves out."""
    at = 0
    for piece in filter(None, (piece.strip() for piece in entry.split(GAP))):
        at = template.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.sample(12)
def test_a_text_of_the_catalogue_is_in_the_source() -> None:
    missing = [entry for entry in _entries() if not any(_is_in(entry, template) for template in _templates())]
    assert not missing, "no text of the source has these words in this order"


def test_the_catalogue_names_cause_and_cure_for_each() -> None:
    rows = [line for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(_entries()) == len(set(_entries())) >= 60
    assert all(len(row.strip("| ").split(" | ")) == 3 for row in rows)


def test_the_catalogue_covers_enough_of_what_training_raises() -> None:
    """All messages are on a page of their own; those with cause and cure are the usual ones."""
    rooms = ("api/", "engine/", "param/", "extras/", "peers/")
    raised = {message.text for message in reference.messages() if message.file.startswith(rooms)}
    entries = (*_entries(), *_texts_of_sections())
    covered = {text for text in raised if any(_is_in(entry, text) for entry in entries)}
    assert len(raised) > 150 and len(covered) / len(raised) >= 0.22, f"{len(covered)} of {len(raised)}"


def test_all_messages_are_on_their_page() -> None:
    page = reference.messages_section()
    messages = reference.messages()
    raised = sum(
        isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and bool(node.exc.args) for node in _nodes()
    )
    assert len(messages) >= 0.85 * raised
    shown = [message for message in messages if message.file.partition("/")[0] in reference.AREAS]
    assert len(shown) >= 0.9 * len(messages)
    assert all(reference._markdown(reference._one_line(message.text)) in page for message in shown)


# ---- environment -----------------------------------------------------------------------------------------------

VARIABLE = re.compile(
    r"(FULLSHARD|TORCH|NCCL|GLOO|TORCHELASTIC|MASTER|OMP|TF|GRPC|LOCAL|WORLD|CUDA|PYTORCH)_[A-Z_]+|RANK"
)
# Words of this shape that are none.
NOT_VARIABLES = {"LOCAL_STATE_DICT"}


def test_every_variable_is_on_the_page_and_in_the_code() -> None:
    in_code = {
        node.value
        for node in _nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    } - NOT_VARIABLES
    page = (PAGES / "environment.md").read_text()
    on_page = {
        word
        for line in page.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`([A-Z_]+)`", line.split("|")[1])
    }
    assert on_page == in_code


# ---- docstrings ------------------------------------------------------------------------------------------------


def test_docstrings_become_markdown() -> None:
    docstrings = _load("docstrings")
    text = (
        "Do it.\n\nmesh: a mesh, on\n    all ranks.\nrank, size: numbers.\nReturns nothing: at all.\n\n"
        ">>> 1 + 1\n2\n\nSource: torch 2.13."
    )
    assert docstrings.markdown(text, {"mesh", "rank", "size"}).strip() == (
        "Do it.\n\n\n* `mesh`: a mesh, on\n  all ranks.\n\n* `rank`, `size`: numbers.\n\nReturns nothing: at all.\n\n\n"
        "```pycon\n>>> 1 + 1\n2\n```"
    )
