"""`make docs` builds without a warning, and the site needs nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody answers: a build that asks for a network fails.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    environment["https_proxy"] = environment["http_proxy"]
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


# What a browser fetches by itself: scripts, styles, pictures, frames, and what styles import.
EXTERNAL = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"'\s]+"
)


def external(text: str) -> list[str]:
    return [found for found in EXTERNAL.findall(text) if 'rel="canonical"' not in found]


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_nothing_of_the_site_comes_from_elsewhere(site: Path) -> None:
    files = [path for kind in ("*.html", "*.css") for path in site.rglob(kind)]
    assert len(files) > 50
    assert {path.relative_to(site).as_posix(): found for path in files if (found := external(path.read_text()))} == {}


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_pages_have_no_marks_of_the_tests_and_all_names(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert "run: setup" not in path.read_text() or path.name == "code-blocks.html", path.name
    page = (site / "reference" / "fullshard.html").read_text()
    from fullshard import __all__ as names

    missing = [name for name in names if name != "__version__" and f'id="fullshard.{name}"' not in page]
    assert missing == []
    for name in ("fully_shard", "clip_grad_norm_", "guard", "MicroBatches"):
        assert re.search(rf'<h3 id="fullshard\.[\w.]+\.{name}"', page), f"{name} has no entry of its own"


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_words_of_tables_can_break_and_show_no_escapes(site: Path) -> None:
    """Where a browser finds no place, it breaks a name after every few letters."""
    page = (site / "reference" / "every-key.html").read_text()
    assert "<code>sharding.<wbr>data_<wbr>parallel_<wbr>replicate_<wbr>degree = -1</code>" in page
    assert "<code>sharding.<wbr>cpu_offload = true</code>" in page
    assert "<wbr>" not in page.split("<table>")[0]
    keys = (site / "reference" / "configuration-trainer.html").read_text()
    assert "runs/&lt;date&gt;-&lt;time&gt;" in keys and "<code>10000.0</code>" in keys


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_records_are_out_of_the_search_and_the_navigation(site: Path) -> None:
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    home = (site / "index.html").read_text()
    for record in ("compatibility.html", "reliability.html", "mutations.html", "programs.html", "torch-suite.html"):
        assert (site / record).is_file() and record not in found and f'href="{record}"' not in home
    assert {"reference/every-key.html", "troubleshooting.html", "memory.html"} <= found


@pytest.mark.slow
@pytest.mark.hang_after(600)
def test_a_page_says_where_its_text_is_and_old_addresses_lead_on(site: Path) -> None:
    assert '<p class="source">Source: ' in (site / "memory.html").read_text()
    assert 'url=how-to/offload.html"' in (site / "offload.html").read_text()
    assert 'url=../precision.html"' in (site / "how-to" / "mixed-precision.html").read_text()
    assert "not run by the tests" not in "".join(path.read_text() for path in (site / "how-to").glob("*.html"))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('<script src="https://x.example/a.js">', 1),
        ('<link rel="stylesheet" href="//x.example/a.css">', 1),
        ("@import url(https://x.example/a.css)", 1),
        ('<img alt="a" src="a.svg"><a href="https://x.example">', 0),
    ],
)
def test_external_resources_are_found(text: str, count: int) -> None:
    assert len(external(text)) == count


def _hook(name: str) -> ModuleType:
    """A file of docs/_site, which mkdocs imports by its path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_nav_is_there_or_made() -> None:
    """Without a build, so that a missing page has a name in every run of the tests."""
    reference = _hook("reference")
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = set(re.findall(r"([\w/.-]+\.md)$", nav, flags=re.M))
    made = set(reference.pages()) | {"index.md", "changelog.md", "contributing.md"}
    assert len(pages) > 40
    assert {page for page in pages - made if not (ROOT / "docs" / page).exists()} == set()


def test_pages_that_moved_are_gone_and_their_places_are_there() -> None:
    _hook("reference")
    pages = _hook("pages")
    assert len(pages.MOVED) >= 8
    for old, new in pages.MOVED.items():
        page, _, anchor = new.partition("#")
        assert not (ROOT / "docs" / old).exists()
        headings = re.findall(r"^## (.*)$", (ROOT / "docs" / page).read_text(), flags=re.M)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_a_source_is_a_link_where_the_repository_has_an_address() -> None:
    _hook("reference")
    pages = _hook("pages")
    there = "https://example.org/fullshard"
    assert f'<a href="{there}/blob/main/README.md">README.md</a>' in pages.source_line("index.md", there)
    assert "<code>docs/memory.md</code>" in pages.source_line("memory.md", None)
    assert "examples/qlora.py<" in pages.source_line("files/examples/qlora.py.md", there)
    assert "docs/_site/reference.py<" in pages.source_line("reference/cli.md", there)


def test_cells_of_wide_tables_have_their_heads() -> None:
    """For phones, where a row is a list."""
    _hook("reference")
    pages = _hook("pages")
    wide = "<table><tr><th>a</th><th><code>b</code></th><th>c</th></tr><tr><td>1</td><td>2</td><td>3</td></tr></table>"
    assert '<td data-head="a">1</td><td data-head="b">2</td><td data-head="c">3</td>' in pages.with_heads(wide)
    narrow = "<table><tr><th>a</th></tr><tr><td>1</td></tr></table>"
    assert pages.with_heads(narrow) == narrow


def test_marks_of_the_tests_are_not_shown() -> None:
    _hook("reference")
    pages = _hook("pages")
    assert pages._fence('```sh norun="needs Slurm"\nsrun\n```') == "```sh\nsrun\n```"
    assert pages._fence('```sh title="a" norun="x" exit="1"\nls\n```') == '```sh title="a"\nls\n```'
