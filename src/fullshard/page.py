"""HTML pages that need no other file and no network: the document, its tables and its figures. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1110px; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.marked td { color: #b3261e; font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text:not([fill]) { fill: #444; }
figcaption, .small { color: #555; font-size: 13px; } figure { margin: .6rem 0 1.6rem; overflow: hidden; }
pre { overflow-x: auto; background: #f6f6f6; padding: 1em; font-size: 12px; }
h2 { margin-top: 2rem; border-bottom: 1px solid #ddd; }
.good { color: #14713d; } .bad { color: #b3261e; font-weight: 600; } .warn { color: #b3261e; }
"""


def document(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A page of `parts`, which are HTML. `style`, `script`: of this kind of page, beside what all have."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}{style}</style>\n" + "\n".join(parts) + f"\n{code}</html>\n"
    )


def heading(text: str, *, level: int = 1, name: str = "") -> str:
    anchor = f' id="{name}"' if name else ""
    return f"<h{level}{anchor}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: a class of the style."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """A picture over its caption, which is HTML."""
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    marked: Iterable[int] = (),
    name: str = "",
) -> str:
    """A table of texts. `right`: columns of numbers; `marked`: rows in red; `name`: its class."""
    numbers, red = set(right), set(marked)

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    lines = [f"<tr>{cells(head, 'th')}</tr>"]
    lines += [f"<tr{' class=marked' if i in red else ''}>{cells(row, 'td')}</tr>" for i, row in enumerate(rows)]
    return f'<table class="{name}">{"".join(lines)}</table>'
