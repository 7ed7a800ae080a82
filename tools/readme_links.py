"""README.md as the package index shows it: links are absolute, since no other page is beside it there.

The build runs this for each wheel and sdist (`[tool.hatch.metadata.hooks.custom]` of pyproject.toml). The address is
that of the contacts in pyproject.toml. While it is a placeholder links stay relative, and a build for the index, which
says `FOR_INDEX=1`, is refused: the workflow of releases says so (.github/workflows/release.yml).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PLACEHOLDER = "PLACE" + "HOLDER"
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """`text` with each relative link as one into `repository` at `tag`; code is left alone."""
    parts = re.split(r"(^```.*?^```$|`[^`\n]*`(?!\]))", text, flags=re.M | re.S)
    return "".join(
        part if i % 2 else _LINK.sub(lambda m: _moved(m, repository, tag), part) for i, part in enumerate(parts)
    )


def _moved(link: re.Match[str], repository: str, tag: str) -> str:
    target = link["target"]
    if re.match(r"\w+:|#", target):
        return link.group()
    kind = "raw" if link["text"].startswith("!") else "blob"
    return f"{link['text']}({repository.rstrip('/')}/{kind}/{tag}/{target})"


def built(root: Path, contacts: dict[str, str], version: str, *, for_index: bool) -> str:
    """The text for a package of `version`. Raises `ValueError` for the index while the repository is a placeholder."""
    text = (root / "README.md").read_text(encoding="utf-8")
    repository = contacts["repository"]
    if PLACEHOLDER not in repository:
        return absolute(text, repository, f"v{version}")
    if for_index:
        raise ValueError(
            f"pyproject.toml: expected the address of the repository in [tool.fullshard.contacts], found {repository}: "
            "links of README.md would lead nowhere on a package index"
        )
    return text


class CustomMetadataHook(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        import tomllib

        root = Path(self.root)
        tool = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        (version,) = re.findall(r'^__version__ = "(.*)"$', (root / "src/fullshard/_version.py").read_text(), flags=re.M)
        text = built(root, tool["fullshard"]["contacts"], version, for_index=os.environ.get("FOR_INDEX") == "1")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
