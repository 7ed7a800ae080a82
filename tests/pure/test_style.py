"""The words that docs/style.md rules out, in documents, docstrings, comments, errors, help and the changelog."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.test_reference import reference
from tools import words

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


READ = [path for path in DOCUMENTS if words.group(path.relative_to(ROOT).as_posix()) in (*words.READ, "in detail")]


def sentences(text: str) -> Iterator[str]:
    """Sentences of running text and of lists; code and addresses are one word."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.M | re.S)):
        if not paragraph.lstrip().startswith(("|", "#")):
            for item in re.split(r"\n(?=\s*(?:\* |\d+\. ))", paragraph):
                line = re.sub(r"`[^`]*`", "X", " ".join(item.split()))
                line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
                yield from re.split(r"(?<=[.!?])\s+(?=[A-Z*])", line)


# Patterns that stop a reader, and that a sentence of this project has no use for.
PARTICIPLES = (
    "Accepted Called Checked Compared Counted Exchanged Expected Found Kept Listed Measured Named Printed Promised "
    "Recognised Refused Registered Seen Sent Shown Skipped Tested Written"
).split()
MAY_BE_OF_IT = ("all", "All", "most", "part", "half", "share", "rest", "copies", "outside", "inside", "nothing")
STOPS = {
    "a sentence that says who acts, found a participle at its beginning": re.compile(
        rf"^(?:\* |\d+\. )?(?:{'|'.join(PARTICIPLES)}|Not \w+ed|Not (?:run|seen))\b"
    ),
    "the name of what has the part": re.compile("".join(rf"(?<!\b{word} )" for word in MAY_BE_OF_IT) + r"\bof it\b"),
    "the name of a place": re.compile(r"\bas there\b|\bthere too\b|\bby itself there\b|, there,"),
}
# Names of programs, with which a paragraph may begin.
NAMES = re.compile(r"fullshard|torch|transformers")


def stops(text: str) -> list[str]:
    """What stops a reader of these sentences, with its place."""
    return [
        f"expected {wanted}; found {said[max(0, match.start() - 40) : match.end() + 40]!r}"
        for said in sentences(text)
        for wanted, expression in STOPS.items()
        if (match := expression.search(said.strip()))
    ]


def beginnings(text: str) -> list[str]:
    """Paragraphs that do not begin a sentence, as after code that they continue."""
    paragraphs = re.split(r"\n\s*\n", blanked(text, r"^ *```+.*?^ *```+$", r"<!--.*?-->").strip())
    return [
        one[:60]
        for one in (each.strip() for each in paragraphs)
        if re.match(r"\(?[a-z]+[ ,.]", one) and not NAMES.match(one)
    ]


@pytest.mark.parametrize("path", READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_stops_a_reader(path: Path) -> None:
    """Three clauses around colons are three sentences, too."""
    text = path.read_text()
    assert stops(text) == [] and beginnings(text) == []
    assert [said for said in sentences(text) if said.count(": ") > 1] == []


def public_docstrings() -> Iterator[tuple[str, str]]:
    """(name, docstring) of what the reference shows, methods included."""
    for title, _, groups in reference.API.values():
        for group, names in groups.items():
            module = importlib.import_module(group if group.startswith("fullshard.") else title)
            for name in names:
                found = getattr(module, name)
                inside = vars(found).items() if inspect.isclass(found) else ()
                for each, value in ((name, found), *inside):
                    if getattr(value, "__module__", "").startswith("fullshard") and not each.startswith("_"):
                        yield f"{module.__name__}.{name}.{each}", inspect.getdoc(value) or ""


def test_nothing_stops_a_reader_of_the_reference() -> None:
    read = list(public_docstrings())
    assert [(name, found) for name, text in read if (found := stops(text))] == [] and len(read) > 200


def test_what_stops_a_reader_is_found() -> None:
    text = (
        "Refused by name: x. It is kept. All of it, a part of it.\n\n* Not run on a GPU.\n* A copy of it. Go there.\n"
    )
    assert [found.rpartition("found ")[2] for found in stops(text)] == [
        "'Refused by name: x.'", "'* Not run on a GPU.'", "'* A copy of it.'"
    ]  # fmt: skip
    assert len(stops("It averages, as there. It does so there too.")) == 2
    assert beginnings("A:\n\n```sh\nx\n```\n\nruns it.\n\nfullshard runs.\n\n`x` runs.\n") == ["runs it."]


def test_sentences_are_found() -> None:
    text = "One: two.\nThree: `a: b`, four.\n\n* Five: six: seven [e](f).\n\n| a: b: c |\n"
    assert list(sentences(text)) == ["One: two.", "Three: X, four.", "* Five: six: seven e."]
    assert len(READ) > 60


def test_words_are_found() -> None:
    document = "One\n\n```\nbehind\n```\n`told` [a](behind/told.md)\nput in the\nplace of\n\nBehind it."
    assert [problem.split(":")[0] for problem in found(prose_of_document(document))] == ["7", "10"]
    assert found("units_by_hand told=1 docs/behind.md behind() behinds") == []
    source = 'told = {"told": 1}  # Behind\nraise ValueError(f"it was\\n {told} told to")\n"""Gathers\n\nby hand."""\n'
    problems = [problem for first, prose in prose_of_source(source) for problem in found(prose, first)]
    assert [problem.split(":")[0] for problem in problems] == ["1", "2", "5"]


# ---- first lines -------------------------------------------------------------------------------------------------

# A docstring's first line has a finite verb or names what is returned; the comment of an attribute begins with
# "Whether", an article or a verb. A test can find neither, but what neither begins with.
NOT_FIRST = frozenset(
    "about another around as behind beside by for from in inside into it its of on over per see since something there "
    "those to under what which who whose with without".split()
)
# Rooms that have such lines left. One without any comes off the list.
LEFT: frozenset[str] = frozenset()


def first_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the beginning of each docstring, and of each comment right above an attribute."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (docstring := ast.get_docstring(node)) and not docstring.startswith(">>>"):
                yield node.body[0].lineno, docstring
        for attribute in attributes(node):
            first = attribute.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            if first < attribute.lineno - 1:
                yield first + 1, lines[first].strip("# ")


def attributes(node: ast.AST) -> list[ast.stmt]:
    """Fields of a class, and assignments to attributes of `self`."""
    if isinstance(node, ast.ClassDef):
        return [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    own = [t for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"]
    return [node] if own and isinstance(node, ast.stmt) else []


def badly_begun(text: str) -> list[str]:
    return [f"{line}: {said[:60]}" for line, said in first_lines(text) if said.split()[0].lower() in NOT_FIRST]


@functools.cache
def rooms() -> dict[str, list[str]]:
    """By room of the package, the lines that begin as none should."""
    found: dict[str, list[str]] = {}
    package = ROOT / "src" / "fullshard"
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        found.setdefault(room, []).extend(
            f"{path.relative_to(ROOT)}:{said}" for said in badly_begun(path.read_text(encoding="utf-8"))
        )
    return found


def test_first_lines_have_a_verb_or_name_what_is_returned() -> None:
    assert [said for room, each in rooms().items() if room not in LEFT for said in each] == []


def test_rooms_that_are_left_have_such_lines() -> None:
    done = {room for room in LEFT if not rooms().get(room)}
    assert not done, f"take them off the list: {done}"


def test_first_lines_are_found() -> None:
    text = '''"""Of a unit."""


class A:
    """Holds it."""

    # By name.
    x: int = 0
    # A size.
    y = 0

    def f(self):
        """What is there."""
        # Those that
        # went.
        self.z = self.y
'''
    assert sorted(badly_begun(text)) == ["13: What is there.", "14: Those that", "1: Of a unit.", "7: By name."]
