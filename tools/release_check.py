"""Whether the repository can be released: `make release-check`.

    python -m tools.release_check
    python -m tools.release_check --tag v0.2.0      the tag, too, as the workflow of releases asks

Fails while a placeholder is in a file that git tracks, and where version, changelog, CITATION.cff or the tag differ.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In two parts: this file is not a finding.
PLACEHOLDER = "PLACE" + "HOLDER"


def tracked(root: Path) -> list[Path]:
    """The files of the repository; without git all files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [root / name for name in listed.stdout.split("\0") if name]
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


def findings(root: Path, tag: str | None = None) -> list[str]:
    """What prevents a release, and one by this tag, a line each."""
    found = []
    for path in tracked(root):
        try:
            lines = path.read_text().splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        name = path.relative_to(root).as_posix()
        found += [f"{name}:{i}: fill in {PLACEHOLDER}" for i, line in enumerate(lines, 1) if f"{PLACEHOLDER}-" in line]
    (version,) = re.findall(r'^__version__ = "(.*)"$', (root / "src/fullshard/_version.py").read_text(), flags=re.M)
    cuts = re.findall(r"^## \[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?$", (root / "CHANGELOG.md").read_text(), flags=re.M)
    released = [cut for cut in cuts if cut[0] != "Unreleased"]
    newest, date = released[0] if released else ("", "")
    if tag is not None and tag != f"v{version}":
        found.append(f"tag: expected v{version}, found {tag}")
    if newest != version:
        found.append(f"CHANGELOG.md: expected ## [{version}] - date first, found {newest or 'no version'}")
    unreleased = re.search(
        r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), flags=re.M | re.S
    )
    if unreleased and unreleased[1].strip():
        found.append("CHANGELOG.md: lines under Unreleased; move them under the version")
    citation = (root / "CITATION.cff").read_text()
    for key, expected in (("version", version), ("date-released", date)):
        (cited,) = re.findall(rf"^{key}: (.*)$", citation, flags=re.M)
        if cited != expected:
            found.append(f"CITATION.cff: {key}: expected {expected}, found {cited}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tag")
    problems = findings(ROOT, parser.parse_args().tag)
    print("\n".join(problems) or "ready")
    sys.exit(bool(problems))
