"""The words that docs/style.md rules out, in documents, docstrings, comments, errors, help and the changelog."""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STYLE = ROOT / "docs" / "style.md"

# A dated record keeps the words of its day.
DATED = re.compile(r"_\d{4}-\d\d-\d\d")
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"))
    if not DATED.search(path.name) and path != STYLE
)
SOURCES = sorted(path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def rows(text: str) -> Iterator[tuple[str, str]]:
    """(a word that is ruled out, what is written instead), from the tables of the style."""
    for line in text.splitlines():
        if line.startswith("| `"):
            words, instead = line.strip("|").split("|")
            for word in re.findall(r"`([^`]+)`", words):
                yield word, instead.strip()


RULES = dict(rows(STYLE.read_text()))


@functools.cache
def pattern() -> re.Pattern[str]:
    """Any of the words, alone: neither in quotes nor a part of a name (`by_hand`, `told=`) or of a path."""
    words = "|".join(r"\s+".join(map(re.escape, word.split())) for word in sorted(RULES, key=len, reverse=True))
    return re.compile(rf"(?<![\w./\-'])(?:{words})(?![\w/=(']|-\w|\.\w)", re.IGNORECASE)


# Words of others: the text of a warning that torch gives.
QUOTED = {
    ("src/fullshard/train/launch.py", "initialize"),
}


def blanked(text: str, *patterns: str) -> str:
    """`text` with what matches replaced by as many lines: line numbers stay."""
    for one in patterns:
        text = re.sub(one, lambda match: "\n" * match[0].count("\n"), text, flags=re.M | re.S)
    return text


def prose_of_document(text: str) -> str:
    return blanked(text, r"^```.*?^```$", r"`[^`\n]*`", r"\]\([^)\n]*\)")


def prose_of_source(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each comment, docstring and message. A string of one word is a name."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], blanked(token.string, r"`[^`\n]*`")
        elif token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            if " " in token.string.strip():
                yield token.start[0], blanked(token.string, r"`[^`]*`", r"\{[^{}\n]*\}")


def found(prose: str, first: int = 1, path: str = "") -> list[str]:
    """What is ruled out in `prose`, each with its line and what to write."""
    problems = []
    for match in pattern().finditer(prose):
        word = re.sub(r"\s+", " ", match[0].lower())
        if (path, word) in QUOTED:
            continue
        line = first + prose.count("\n", 0, match.start())
        problems.append(f"{line}: expected {RULES[word]}; found {match[0]!r}")
    return problems


def test_the_style_has_rules() -> None:
    assert {"behind", "told", "in the place of", "by hand", "behavior"} <= set(RULES)
    assert all(RULES.values())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_keep_to_the_style(path: Path) -> None:
    assert found(prose_of_document(path.read_text())) == []


def test_sources_keep_to_the_style() -> None:
    problems = [
        f"{path}:{problem}"
        for path in (source.relative_to(ROOT).as_posix() for source in SOURCES)
        for first, prose in prose_of_source((ROOT / path).read_text())
        for problem in found(prose, first, path)
    ]
    assert problems == []


def test_words_are_found() -> None:
    document = "One\n\n```\nbehind\n```\n`told` [a](behind/told.md)\nput in the\nplace of\n\nBehind it."
    assert [problem.split(":")[0] for problem in found(prose_of_document(document))] == ["7", "10"]
    assert found("units_by_hand told=1 docs/behind.md behind() behinds") == []
    source = 'told = {"told": 1}  # Behind\nraise ValueError(f"it was\\n {told} told to")\n"""Gathers\n\nby hand."""\n'
    problems = [problem for first, prose in prose_of_source(source) for problem in found(prose, first)]
    assert [problem.split(":")[0] for problem in problems] == ["1", "2", "5"]
