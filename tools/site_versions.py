"""Put a built site beside those of other versions: `python -m tools.site_versions site PAGES v0.3.0`.

PAGES holds a folder for each version, `versions.json`, from which the site offers them, and `index.html`, which leads
to the newest release, or to `dev` where there is none. An earlier site of the same version is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path


def place(site: Path, pages: Path, name: str) -> list[str]:
    """Copies `site` into `pages`; returns the versions there, the newest first. `name`: vX.Y.Z or dev."""
    if name != "dev" and not re.fullmatch(r"v\d+\.\d+\.\d+", name):
        raise ValueError(f"name: expected dev or a tag such as v0.3.0, found {name!r}")
    folder = name.removeprefix("v")
    shutil.rmtree(pages / folder, ignore_errors=True)
    shutil.copytree(site, pages / folder)
    found = [path.name for path in pages.iterdir() if path.name == "dev" or re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
    found.sort(
        key=lambda version: [-1] if version == "dev" else [int(part) for part in version.split(".")], reverse=True
    )
    newest = found[0]
    listed = [{"version": one, "title": one, "aliases": ["latest"] if one == newest else []} for one in found]
    (pages / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (pages / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>fullshard</title>'
        f'<meta http-equiv="refresh" content="0; url={newest}/index.html"><a href="{newest}/index.html">{newest}</a>\n'
    )
    (pages / ".nojekyll").touch()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", type=Path)
    parser.add_argument("name")
    chosen = parser.parse_args()
    print(*place(chosen.site, chosen.pages, chosen.name))
