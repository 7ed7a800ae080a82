"""What mkdocs does not do by itself: fill the sections of `mkdocs.yml` from folders, make pages of the files of the
repository that our pages link to, keep records out of search and navigation, show where a page comes from, lead from
addresses that pages had before, and hide attributes of code blocks that are for the tests."""

from __future__ import annotations

import html as html_
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by its path
from tools import words  # noqa: E402

# Pages that were joined with another one: where each is now, so that old addresses lead there.
MOVED = {
    "concepts/failure-model.md": "failures.md",
    "concepts/memory-of-a-step.md": "memory.md",
    "concepts/precision.md": "precision.md",
    "faq.md": "troubleshooting.md#questions-that-people-asked",
    "how-to/hugging-face-checkpoints.md": "foreign-checkpoints.md",
    "how-to/mixed-precision.md": "precision.md",
    "offload.md": "how-to/offload.md",
    "reference/errors.md": "troubleshooting.md#errors-by-their-text",
}
# Pages that are written beside docs/, because people look for them in the root of a repository.
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Files that become pages where a page links to them; a link to any other file of the repository is shown as its path.
SHOWN = ("examples/", "benchmarks/", "src/", "tests/programs/", "tests/device/README.md", "LICENSE")

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
    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = _filled(config.nav or [], [uri for uri in pages if not is_record(uri)])
    return files


def is_record(uri: str) -> bool:
    """Whether a page is a record, which another page leads to."""
    # What becomes of a key is searched for.
    return uri != "reference/every-key.md" and words.group(posixpath.join("docs", uri)) == words.RECORDS


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if is_record(uri):
        page.meta.setdefault("search", {})["exclude"] = True
    if uri == "troubleshooting.md":
        markdown += "\n" + reference.messages_section()
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_prose(markdown[end : fence.start()], uri), _fence(fence.group())]
        end = fence.end()
    return "".join([*parts, _prose(markdown[end:], uri)])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    html = TABLE.sub(lambda table: re.sub(r">[^<]+", _breakable, with_heads(table.group())), html)
    return html + source_line(page.file.src_uri, _repository())


def on_post_build(config: MkDocsConfig) -> None:
    for old, new in MOVED.items():
        path = Path(config.site_dir, old).with_suffix(".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        page, hash_, anchor = new.partition("#")
        target = posixpath.relpath(page.removesuffix(".md") + ".html", posixpath.dirname(old) or ".") + hash_ + anchor
        path.write_text(
            '<!doctype html><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={target}">'
            f'<p>This page is now a part of <a href="{target}">another one</a>.</p>\n'
        )


def with_heads(table: str) -> str:
    """The table with the head of its column on each cell: a phone shows a row as a list of them (site.css)."""
    heads = [re.sub(r"<[^>]*>", "", head).strip() for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table, flags=re.S)]
    if len(heads) < 3:
        return table

    def row(found: re.Match[str]) -> str:
        cells = iter(heads)
        return re.sub(r"<td\b", lambda _: f'<td data-head="{html_.escape(next(cells, ""))}"', found.group())

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.S)


def source_line(uri: str, repository: str | None) -> str:
    """Where the text of a page is: a link, where the repository has an address."""
    path = next((path for path, page in ROOT_PAGES.items() if page == uri), None)
    if path is None:
        path = uri.removeprefix("files/") if uri.startswith("files/") else posixpath.join("docs", uri)
        if not (ROOT / path).exists():
            path = path.removesuffix(".md")
    if not (ROOT / path).exists():  # made from the code
        path = "docs/_site/reference.py"
    shown = f'<a href="{repository}/blob/main/{path}">{path}</a>' if repository else f"<code>{path}</code>"
    return f'\n<p class="source">Source: {shown}</p>\n'


def _repository() -> str | None:
    """The address in the contacts of pyproject.toml; None while it is a placeholder."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    address = str(tool["fullshard"]["contacts"]["repository"])
    return None if "PLACEHOLDER" in address else address.rstrip("/")


def _breakable(text: re.Match[str]) -> str:
    """Text of a table whose long words may break: after dots and the like, long parts after underscores too."""

    def broken(word: re.Match[str]) -> str:
        parts = AFTER.split(word.group())
        return "<wbr>".join(re.sub(r"(?<=_)(?=\w)", "<wbr>", part) if len(part) > 24 else part for part in parts)

    return re.sub(r"[^\s<>]{18,}", broken, text.group())


def _fence(text: str) -> str:
    """A block without what is for the tests alone."""
    return NORUN.sub(r"\g<1>\g<more>\g<rest>", TESTS.sub(r"\1", text, count=1), count=1)


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
