"""`make docs` builds without a warning, and the site needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
    page = (site / "how-to" / "from-deepspeed.html").read_text()
    assert "<code>sharding.<wbr>data_<wbr>parallel_<wbr>replicate_<wbr>degree = -1</code>" in page
    assert "<code>sharding.<wbr>cpu_offload = true</code>" in page
    assert "<wbr>" not in page.split("<table>")[0]
    keys = (site / "reference" / "configuration-trainer.html").read_text()
    assert "runs/&lt;date&gt;-&lt;time&gt;" in keys and "<code>10000.0</code>" in keys


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


def test_every_page_of_the_nav_is_there_or_made() -> None:
    """Without a build, so that a missing page has a name in every run of the tests."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "_site" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = reference
    spec.loader.exec_module(reference)
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = set(re.findall(r"([\w/.-]+\.md)$", nav, flags=re.M))
    made = set(reference.pages()) | {"index.md", "changelog.md", "contributing.md"}
    assert len(pages) > 40
    assert {page for page in pages - made if not (ROOT / "docs" / page).exists()} == set()
