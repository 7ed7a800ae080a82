"""What surrounds the code: contacts of one file, the release check, the built package, what is declared and ran."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fullshard
from tests.data import exchange_checkpoints
from tests.workers import TIERS
from tools import cuda_stubs, readme_links, release_check, site_versions, try_package, version_table, versions
from tools.cuda_stubs import Elf, Wanted
from tools.versions import VERSIONS

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTACTS = PYPROJECT["tool"]["fullshard"]["contacts"]


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("SECURITY.md", "security"),
        ("CODE_OF_CONDUCT.md", "conduct"),
        (".github/CODEOWNERS", "owners"),
        ("CITATION.cff", "repository"),
    ],
)
def test_contacts_are_those_of_pyproject(path: str, key: str) -> None:
    assert CONTACTS[key] in (ROOT / path).read_text()


def test_addresses_are_in_the_repository_of_pyproject() -> None:
    urls = PYPROJECT["project"]["urls"]
    assert set(urls) >= {"Source", "Issues", "Changelog"}
    assert all(url.startswith(CONTACTS["repository"]) for url in urls.values())


def test_each_night_all_tests_run() -> None:
    """By tiers, of which each machine has some, or a part of one."""
    night = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert 'make test-all PYTHON=python ARGS="${{ matrix.tests }}"' in night and "--full" not in night
    lines = re.findall(r"^ +- (tests/.*)$", night, re.MULTILINE)
    found = [tier for line in lines for tier in re.findall(r"tests/(\w+)", line) if "--part" not in line]
    parts: dict[str, list[str]] = {}
    for tier, part in re.findall(r"tests/(\w+) --part=(\d+/\d+)$", "\n".join(lines), re.MULTILINE):
        parts.setdefault(tier, []).append(part)
    for tier, each in parts.items():
        assert each == [f"{number}/{len(each)}" for number in range(len(each))]
        found.append(tier)
    assert sorted(found) == sorted(TIERS["processes-1"])


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository that can be released."""
    for name in ("CHANGELOG.md", "CITATION.cff", "src/fullshard/_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n## [7.1.0] - 2030-01-02\n\n* A line.\n")
    (tmp_path / "src/fullshard/_version.py").write_text('__version__ = "7.1.0"\n')
    citation = (tmp_path / "CITATION.cff").read_text().replace(CONTACTS["repository"], "https://example.org")
    citation = re.sub("^version: .*", "version: 7.1.0", citation, flags=re.M)
    (tmp_path / "CITATION.cff").write_text(re.sub("(?<=^date-released: ).*", "2030-01-02", citation, flags=re.M))
    return tmp_path


def test_a_release_is_refused_for_each_reason(released: Path) -> None:
    assert release_check.findings(released) == []
    security = released / "SECURITY.md"
    security.write_text(f"to\n{release_check.PLACEHOLDER}-contact\n")
    assert release_check.findings(released) == [f"SECURITY.md:2: fill in {release_check.PLACEHOLDER}"]
    security.unlink()
    (released / "src/fullshard/_version.py").write_text('__version__ = "7.2.0"\n')
    said = release_check.findings(released)
    assert len(said) == 2 and "CHANGELOG.md: expected ## [7.2.0]" in said[0] and "found 7.1.0" in said[1]


def test_a_tag_names_the_version(released: Path) -> None:
    """The workflow of releases runs for any tag that begins with v."""
    assert release_check.findings(released, "v7.1.0") == []
    assert release_check.findings(released, "v7.2.0") == ["tag: expected v7.1.0, found v7.2.0"]
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert 'make release-check PYTHON=python ARGS="--tag $GITHUB_REF_NAME"' in workflow


def test_lines_that_are_not_released_are_found(released: Path) -> None:
    path = released / "CHANGELOG.md"
    path.write_text(path.read_text().replace("[Unreleased]\n", "[Unreleased]\n\n* Another line.\n"))
    assert release_check.findings(released) == ["CHANGELOG.md: lines under Unreleased; move them under the version"]


def test_placeholders_of_pyproject_prevent_a_release() -> None:
    unfilled = [value for value in CONTACTS.values() if release_check.PLACEHOLDER in value]
    named = [line for line in release_check.findings(ROOT) if line.startswith("pyproject.toml:")]
    assert len(named) >= len(unfilled) and bool(named) == bool(unfilled)


def test_the_package_holds_what_it_must(tmp_path: Path) -> None:
    with zipfile.ZipFile(try_package.build(tmp_path)) as wheel:
        names = set(wheel.namelist())
        (metadata,) = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
        (entries,) = [wheel.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    assert "fullshard/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert source <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fullshard"}, "tests and tools stay at home"
    assert "fullshard = fullshard.cli:main" in entries
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, flags=re.M)
    assert [one for one in required if "extra ==" not in one] == PYPROJECT["project"]["dependencies"]
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    left_out = {".gitignore", ".pre-commit-config.yaml"}
    # What git does not track yet is there too; without git a checkout says nothing.
    assert {name for name in tracked if (ROOT / name).is_file()} - left_out <= held


def test_links_of_the_description_are_absolute_and_a_placeholder_is_refused() -> None:
    text = "[a](docs/a.md#b) [c](https://x.example) [d](#d) ![e](docs/e.svg) `[f](f.md)`\n"
    text += "```sh\n[g](g.md)\n```\n[`h`](h.md)"
    made = readme_links.absolute(text, "https://example.org/fullshard/", "v1.2.3")
    base = "https://example.org/fullshard"
    assert (
        f"[a]({base}/blob/v1.2.3/docs/a.md#b) [c](https://x.example) [d](#d) ![e]({base}/raw/v1.2.3/docs/e.svg)" in made
    )
    assert "`[f](f.md)`\n```sh\n[g](g.md)\n```" in made and f"[`h`]({base}/blob/v1.2.3/h.md)" in made
    filled = {"repository": "https://example.org/fullshard"}
    description = readme_links.built(ROOT, filled, "1.2.3", for_index=True)
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", description) == []
    empty = {"repository": f"https://{readme_links.PLACEHOLDER}-repository"}
    assert readme_links.built(ROOT, empty, "1.2.3", for_index=False) == (ROOT / "README.md").read_text()
    with pytest.raises(ValueError, match="expected the address of the repository"):
        readme_links.built(ROOT, empty, "1.2.3", for_index=True)


def test_what_is_deprecated_has_a_date() -> None:
    """Each name that warns is in the table of docs/versioning.md."""
    rows = [line for line in (ROOT / "docs" / "versioning.md").read_text().splitlines() if line.startswith("| ")]
    table = "\n".join(row for row in rows if "2027-" in row or "torch's" in row)
    assert all(re.search(rf"`(fullshard\.)?{name}`", table) for name in fullshard._FORMER)
    warned = [path for path in (ROOT / "src").rglob("*.py") if "DeprecationWarning" in path.read_text()]
    assert {path.name for path in warned} == {"__init__.py", "report.py", "settings.py"}, "a row for the new one"


def test_sites_of_versions_lie_beside_each_other(tmp_path: Path) -> None:
    site, pages = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    pages.mkdir()
    (site / "index.html").write_text("first")
    assert site_versions.place(site, pages, "dev") == ["dev"]
    assert site_versions.place(site, pages, "v0.9.0") == ["0.9.0", "dev"]
    (site / "index.html").write_text("second")
    assert site_versions.place(site, pages, "v0.10.0") == ["0.10.0", "0.9.0", "dev"]
    assert (pages / "0.9.0" / "index.html").read_text() == "first" and "0.10.0/" in (pages / "index.html").read_text()
    assert json.loads((pages / "versions.json").read_text())[0] == {
        "version": "0.10.0", "title": "0.10.0", "aliases": ["latest"]
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected dev or a tag"):
        site_versions.place(site, pages, "main")


def test_every_declared_version_ran_the_tests() -> None:
    """Classifiers, requirements and the matrix of the workflow are the versions of `make versions`, and each of those
    passed (docs/support.json)."""
    declared_runs = {(one.python, one.torch) for one in VERSIONS.values()}
    passed = {(run.python.rpartition(".")[0], run.torch.split("+")[0]) for run in version_table.load() if run.is_green}
    assert declared_runs <= passed
    prefix = "Programming Language :: Python :: 3."
    declared = {f"3.{one[len(prefix) :]}" for one in PYPROJECT["project"]["classifiers"] if one.startswith(prefix)}
    assert declared == {python for python, _ in declared_runs}
    minors = [int(one.removeprefix("3.")) for one in declared]
    assert PYPROJECT["project"]["requires-python"] == f">=3.{min(minors)},<3.{max(minors) + 1}"
    torches = sorted(int(torch.split(".")[1]) for _, torch in declared_runs)
    assert PYPROJECT["project"]["dependencies"] == [f"torch<2.{torches[-1] + 1},>=2.{torches[0]}"]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r'{ python: "([^"]+)", torch: "([^"]+)" }', workflow)) == declared_runs


def test_the_table_of_support_is_the_results() -> None:
    page = version_table.PAGE.read_text()
    assert version_table.page(page, version_table.load()) == page, "run make versions"


def _run(**changes: Any) -> version_table.Run:
    tiers = {"threads": version_table.Result(7, {"torch lacks it": 2}), "procs": version_table.Result(3)}
    given = {"python": "3.11.7", "torch": "2.11.0+cu130", "date": "2030-01-02", "whole": False, "tiers": tiers}
    return version_table.Run(**{**given, "problems": [], "seconds": 1, **changes})


def test_a_version_is_green_only_where_all_ended_and_nothing_failed() -> None:
    assert _run().is_green and not _run(tiers={}).is_green
    assert not _run(problems=["threads: not over after 5 s, killed"]).is_green
    failed = {"threads": version_table.Result(6, {}, ["tests/threads/test_a.py::test_b[1]: assert 1 == 2"])}
    assert not _run(tiers=failed).is_green
    assert "| 1 failed: `test_b[1]` |" in version_table.table([_run(tiers=failed)])
    assert "tests/threads/test_a.py::test_b[1]: assert 1 == 2" in version_table.summary(_run(tiers=failed))
    assert "| 2.11.0 | cu130 | 2030-01-02 | selection | - | - | 7 | - | 3 | - | 2 | - | - | **passed** |" in (
        version_table.table([_run()])
    )
    exchanged = _run(
        loads=["python3.11-torch2.15.0", "python3.12-torch2.9.1", "python3.13-torch2.9.1"],
        loaded_by=["python3.11-torch2.12.1"],
    )
    assert "| 2 | 2.9, 2.15 | 2.12 | **passed** |" in version_table.table([exchanged])
    assert "loaded by python3.11-torch2.12.1" in version_table.summary(exchanged)


def test_results_of_a_tier_are_read_from_pytest_s_reports(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_a(): pass\n\ndef test_b(): assert 1 == 2\n\ndef test_c(): pytest.skip('why')\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    (tmp_path / "killed.xml").write_text("<testsuites><tests")
    (found,) = versions.tiers_of([report, tmp_path / "killed.xml"]).values()
    assert (found.passed, found.skipped, len(found.failed)) == (1, {"why": 1}, 1) and "assert 1 == 2" in found.failed[0]


EXCHANGING = """
import pytest

def test_a(record_property):
    record_property("loads", "python3.11-torch2.15.0")
    record_property("loads", "python3.11-torch2.10.0")

def test_b(record_property):
    record_property("loaded_by", "python3.11-torch2.15.0")
    record_property("another", "python3.11-torch2.14.0")

@pytest.mark.parametrize("what", ["loads", "loaded_by"])
def test_that_fails(what, record_property):
    record_property(what, "python3.11-torch2.11.0")
    assert what == ""
"""


def test_what_was_exchanged_is_read_from_pytest_s_reports(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(EXCHANGING)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", *versions.REPORT, "-Werror", f"--junitxml={report}", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    assert versions.exchanged_of([report, tmp_path / "none.xml"]) == {
        "loads": ["python3.11-torch2.10.0", "python3.11-torch2.15.0"],
        "loaded_by": ["python3.11-torch2.15.0"],
    }


def test_versions_of_earlier_runs_load_checkpoints_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = versions.Cache(tmp_path, [])
    monkeypatch.setattr(versions, "_has", lambda python, torch: torch == "2.13.0")

    def made(version: versions.Version) -> Path:
        if version.torch == "2.14.1":
            raise versions.NotPossible("it has another torch")
        return Path(version.torch)

    monkeypatch.setattr(cache, "interpreter", made)

    def others(*chosen: str) -> list[str]:
        return [path.name for path in versions.others(chosen, cache)]

    assert others("torch-2.12.1") == ["2.12.1"] and others("python-3.12") == []
    (tmp_path / "bin").mkdir()
    for torch in ("2.10.0", "2.13.0", "2.14.1"):  # 2.10.0 has no torch any more
        (tmp_path / "bin" / f"python3.11-torch{torch}").touch()
    assert others("python-3.12") == others("torch-2.13.0") == ["2.13.0"]
    (tmp_path / "torch-2.10.0-cp311").mkdir()
    assert others("torch-2.13.0") == ["2.13.0"]
    (tmp_path / "torch-2.10.0-cp311" / "made").touch()
    assert others("torch-2.13.0") == ["2.10.0", "2.13.0"] and others("torch-2.15.0") == ["2.10.0", "2.15.0"]
    (tmp_path / "torch-2.14.1-cp311").mkdir()
    (tmp_path / "torch-2.14.1-cp311" / "made").touch()
    assert others("torch-2.13.0") == ["2.10.0"]


def test_a_version_has_one_name() -> None:
    """The tool's own is that under which a test leaves checkpoints."""
    python, torch = f"{sys.version_info[0]}.{sys.version_info[1]}", importlib.metadata.version("torch").split("+")[0]
    assert exchange_checkpoints.name() == versions.Version(python, torch).name


def test_stubs_have_the_symbols_that_missing_libraries_lack() -> None:
    wanted = [
        ("cudaFree", "libcudart.so.13", "libcudart.so.13"),
        ("ncclSend", "", ""),
        ("malloc", "GLIBC_2", "libc.so.6"),
    ]
    one = Elf(
        frozenset({"libcudart.so.13", "libnccl.so.2", "libc.so.6", "libc10.so"}),
        frozenset(Wanted(*found) for found in [*wanted, ("cuOwn", "", ""), ("other", "", "")]),
        frozenset(),
    )
    other = Elf(frozenset(), frozenset(), frozenset({"cuOwn"}))
    stubs = cuda_stubs.stubs_of([one, other], frozenset({"libc.so.6", "libc10.so"}))
    assert stubs.keys() == {"libcudart.so.13", "libnccl.so.2"}
    assert {symbol: version for stub in stubs.values() for symbol, version in stub.items()} == {
        "cudaFree": "libcudart.so.13",
        "ncclSend": "",
    }
    assert cuda_stubs.stubs_of([one], one.needed) == {}
    code = cuda_stubs.code_of(["cudaFree", "cudaGetErrorString", "__cudaRegisterFatBinary"])
    assert "int cudaFree(void) { return 100; }" in code and "const char *cudaGetErrorString" in code


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_name_versions_and_targets_that_exist(path: Path) -> None:
    text = path.read_text()
    actions = re.findall(r"uses: (.+)", text)
    # A tag can be moved, a commit cannot; the version beside it is for people.
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert "permissions:" in text
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
