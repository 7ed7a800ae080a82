"""The figures of the documents are what their scripts make; the reasons of the README are those of results."""

from __future__ import annotations

import re

import pytest

from benchmarks.figures import results
from benchmarks.figures.__main__ import FIGURES, FOLDER

ROOT = results.ROOT
# These plan a step of a model of 8B: seconds each.
LONG = {"levels_memory", "memory_step", "memory_ranks"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in FIGURES])
def test_a_figure_is_what_its_script_makes(name: str) -> None:
    """Red after a change of the engine or of results: run `python -m benchmarks.figures`, and look at them."""
    assert FIGURES[name]().svg() == (FOLDER / f"{name}.svg").read_text()


def test_each_figure_has_a_script_and_a_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(FIGURES)
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"\]\((?:\.\./)?figures/(\w+)\.svg\)", pages)) == set(FIGURES)


def test_what_overlaps_is_counted() -> None:
    messages = [["send", 0.0, 3.0], ["recv", 2.0, 4.0], ["send", 8.0, 9.0]]
    compute = [["forward a", 1.0, 5.0], ["forward b", 5.0, 8.0], ["backward a", 8.5, 10.5], ["backward b", 11.0, 12.0]]
    assert results.overlapping({"compute": compute, "messages": messages}) == 2


def test_the_reasons_of_the_readme_are_in_the_results() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    step = (ROOT / "benchmarks" / "cpu_step_two-cores_2026-11-25.md").read_text()
    heavy, light = re.findall(r"^\| (?:compute|communication)-heavy \| 2 \| ([\d.]+) \|", step, flags=re.M)
    assert f"{heavy} of FSDP2's time where computation dominates, and {light} where communication does" in readme
    written = (ROOT / "benchmarks" / "bytes_2026-11-23.md").read_text().partition("**mixed precision**")[0]
    by_plan = dict(re.findall(r"^\| 8 \| (fsdp2|gloo plan) \| ([\d.]+) \|", written, flags=re.M))
    said = f"writes {by_plan['gloo plan']} bytes for each element of the parameters on gloo, where FSDP2 writes"
    assert f"{said} {by_plan['fsdp2']}" in readme
    known = list(results.verdicts().values())
    right = {"CORRECT", "CLEAR"}
    assert all(verdict in right for mine, _ in known for verdict in mine)
    number, fsdp2 = sum(len(mine) for mine, _ in known), sum(v in right for _, theirs in known for v in theirs)
    assert f"{number} programs with one fault each ran on both" in readme and f"With FSDP2 {fsdp2} do" in readme


def test_the_table_of_times_is_in_the_results() -> None:
    """Its columns are some of the dated table's; its ratio is that of the second one."""
    dated = (ROOT / "benchmarks" / "cpu_step_two-cores_2026-11-25.md").read_text()
    rows = re.findall(r"^\| ((?:compute|communication)-heavy)[^|]* \| (\d) \| (.*) \|$", dated, flags=re.M)
    times, ratios = rows[:4], rows[4:]
    expected = []
    for (name, ranks, cells), (*_, ratio) in zip(times, ratios, strict=True):
        plain, ddp, fsdp1, fsdp2, _, ours, _ = (cell.split(" (")[0].strip() for cell in cells.split("|"))
        expected.append([name, ranks, plain, ddp, fsdp1, fsdp2, ours, ratio.split("|")[0].strip()])
    page = (ROOT / "docs" / "results.md").read_text()
    shown = re.findall(r"^\| ((?:compute|communication)-heavy .*) \|$", page, flags=re.M)
    assert [[cell.strip() for cell in row.split("|")] for row in shown] == expected
