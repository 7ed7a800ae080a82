"""Docstrings of this project as Markdown, for mkdocstrings: arguments become a list, examples at a prompt become code.

Ours are plain sentences. An argument is explained in a line `name: text`, continued by indented lines; where torch
differs and where a definition comes from (`Source: ...`) is for maintainers.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ITEM = re.compile(r"(?P<names>`?[\w*]+`?(?:(?:, | and )`?[\w*]+`?)*): (?P<text>.*)")
_SENTENCE = re.compile(r"(Returns|Raises|Return|Raise|Yields)\b")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, _names(obj))


def _names(obj: griffe.Object) -> set[str]:
    """What lines of its docstring may explain."""
    names = set(obj.members)
    if isinstance(obj, griffe.Function):
        names |= {parameter.name for parameter in obj.parameters}
    init = obj.members.get("__init__")
    if isinstance(init, griffe.Function):
        names |= {parameter.name for parameter in init.parameters}
    return names


def markdown(text: str, names: set[str]) -> str:
    lines: list[str] = []
    prompt = inside = False  # in an example at a prompt; in the text of an argument
    for line in text.splitlines():
        if prompt and not line.strip():
            lines.append("```")
            prompt = False
        if line.lstrip().startswith(">>> ") and not prompt:
            lines += ["", "```pycon"]
            prompt = True
        if prompt:
            lines.append(line.strip())
            continue
        item = _ITEM.match(line)
        if item is not None and {name.strip("`*") for name in re.split(r", | and ", item["names"])} <= names:
            said = ", ".join(f"`{name.strip('`')}`" for name in re.split(r", | and ", item["names"]))
            lines += ["", f"* {said}: {item['text']}"]
            inside = True
        elif inside and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            if (inside or _SENTENCE.match(line)) and line.strip():
                lines.append("")
            inside = False
            lines.append(line)
    if prompt:
        lines.append("```")
    return re.sub(r"\s*\bSource: [^\n]*(?:\n(?!\n)[^\n]+)*", "", "\n".join(lines))
