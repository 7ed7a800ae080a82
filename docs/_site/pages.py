"""What mkdocs does not do by itself: fill the sections of `mkdocs.yml` from folders, make pages of the files of the
repository that our pages link to, and show or hide attributes of code blocks that are for the tests."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages that are written beside docs/, because people look for them in the root of a repository.
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Files that become pages where a page links to them; a link to any other file of the repository is shown as its path.
SHOWN = ("examples/", "benchmarks/", "src/", "tests/programs/", "LICENSE")

# Words of tables that are longer than a column may be; without a place to break, the browser breaks them anywhere.
TABLE = re.compile(r"<table>.*?</table>", flags=re.S)
AFTER = re.compile(r"(?<=[./(,=])(?=[A-Za-z_])")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}).*?^(?P=indent)(?P=ticks) *$", flags=re.M | re.S)
LINK = re.compile(r"`[^`\n]*`|(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
COMMENT = re.compile(r"^<!-- run:.*?-->\n", flags=re.M | re.S)
NORUN = re.compile(r'^( *`{3,}\w+)(?P<more>[^\n]*?) norun="(?P<why>[^"]*)"(?P<rest>[^\n]*)$', flags=re.M)
TESTS = re.compile(r'^( *`{3,}\w+[^\n]*?) (?:exit|output)="[^"]*"', flags=re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, then fill the sections."""
    for path, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    for uri, make in reference.pages().items():
        files.append(File.generated(config, uri, content=make()))
    waiting = [file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        uri = waiting.pop()
        file = files.get_file_from_path(uri)
        assert file is not None
        for path in _linked(file.content_string, _home(uri)):
            new = _shown_as(path)
            if new is not None and new not in seen and (ROOT / path).is_file():
                seen.add(new)
                content = _page_of(path)
                files.append(File.generated(config, new, content=content))
                if isinstance(content, str):  # a picture links nothing, and is no text
                    waiting.append(new)
    config.nav = _filled(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_prose(markdown[end : fence.start()], uri), _fence(fence.group())]
        end = fence.end()
    return "".join([*parts, _prose(markdown[end:], uri)])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return TABLE.sub(lambda table: re.sub(r">[^<]+", _breakable, table.group()), html)


def _breakable(text: re.Match[str]) -> str:
    """Text of a table whose long words may break: after dots and the like, long parts after underscores too."""

    def broken(word: re.Match[str]) -> str:
        parts = AFTER.split(word.group())
        return "<wbr>".join(re.sub(r"(?<=_)(?=\w)", "<wbr>", part) if len(part) > 24 else part for part in parts)

    return re.sub(r"[^\s<>]{18,}", broken, text.group())


def _fence(text: str) -> str:
    """A block without what is for the tests alone; why they do not run it is its title."""
    text = TESTS.sub(r"\1", text, count=1)
    found = NORUN.match(text)
    if found is None:
        return text
    head = found.group(1) + found["more"] + found["rest"]
    if "title=" not in head:
        head += f' title="not run by the tests: {found["why"]}"'
    return head + text[found.end() :]


def _prose(text: str, uri: str) -> str:
    home = _home(uri)

    def moved(link: re.Match[str]) -> str:
        target = link["target"]
        if target is None or re.match(r"\w+:|#", target):
            return link.group()
        path, hash_, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(home, path))
        new = _page(there)
        if new is None:
            words = link["text"][1:-1]
            return words if words.startswith("`") else f"`{words}`" if words == there else words
        return f"{link['text']}({posixpath.relpath(new, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    return LINK.sub(moved, COMMENT.sub("", text))


def _home(uri: str) -> str:
    """The folder of the repository that links of this page start from."""
    for path, page in ROOT_PAGES.items():
        if page == uri:
            return posixpath.dirname(path)
    if uri.startswith("files/"):
        return posixpath.dirname(uri.removeprefix("files/"))
    return posixpath.join("docs", posixpath.dirname(uri))


def _page(path: str) -> str | None:
    """The page, or the other file of the site, that a file of the repository becomes."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return ROOT_PAGES.get(path) or (_shown_as(path) if (ROOT / path).is_file() else None)


def _shown_as(path: str) -> str | None:
    if path in ROOT_PAGES or not path.startswith(SHOWN):
        return None
    if path.endswith(".md") or (ROOT / path).suffix in (".png", ".svg"):
        return f"files/{path}"
    return f"files/{path}.md"


def _linked(text: str, home: str) -> Iterator[str]:
    for link in LINK.finditer(FENCE.sub("", text)):
        if link["target"] and not re.match(r"\w+:|#", link["target"]):
            yield posixpath.normpath(posixpath.join(home, link["target"].partition("#")[0]))


def _page_of(path: str) -> str | bytes:
    """A file of the repository as a page; the search finds what is written for readers first, so not these."""
    if path.endswith((".png", ".svg")):
        return (ROOT / path).read_bytes()
    text = (ROOT / path).read_text()
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return head + text
    language = {".py": "python", ".toml": "toml", ".json": "json"}.get((ROOT / path).suffix, "text")
    ticks = "`" * 5
    return f"{head}# {posixpath.basename(path)}\n\n`{path}`\n\n{ticks}{language}\n{text.rstrip()}\n{ticks}\n"


def _filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """The nav with each pattern replaced by the pages that it matches and that are not named; empty sections go."""
    named = set(_names(nav))

    def fill(entries: list[Any]) -> list[Any]:
        full: list[Any] = []
        for entry in entries:
            if isinstance(entry, str) and "*" in entry:
                pattern = re.compile(re.escape(entry).replace(r"\*", "[^/]*"))
                full += sorted(page for page in pages if pattern.fullmatch(page) and page not in named)
            elif isinstance(entry, dict) and isinstance(below := next(iter(entry.values())), list):
                below = fill(below)
                full += [{title: below} for title in entry if below]
            else:
                full.append(entry)
        return full

    return fill(nav)


def _names(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from _names(below) if isinstance(below, list) else [below]
