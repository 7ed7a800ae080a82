"""How many programs, faults and settings the documents say that tests run: counted in those tests."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from benchmarks.figures import results
from tests.fake import test_golden_fullshard, test_plan_truth
from tests.harness import planned, seeded_faults, verified
from tests.procs import test_checkpoint_kills, test_train_resume, test_verify_evidence
from tests.programs import PROGRAMS
from tests.pure.test_documents import ROOT
from tests.threads import test_checkpoint_faults

NOTES = " ".join((ROOT / "tests" / "device" / "README.md").read_text().split())
PAGE = {path.stem: " ".join(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}


def _matrix() -> tuple[int, int]:
    """Cases of fullshard and, of those, the ones that ran on torch's FSDP2: the line that the matrix writes itself."""
    (line,) = re.findall(r"of (\d+) cases correct or clear.*? of the (\d+) that ran on it", PAGE["reliability"])
    return int(line[0]), int(line[1])


def _same_order() -> tuple[int, int]:
    cases = test_golden_fullshard.CASES
    return sum(name != test_golden_fullshard.EARLIER for name, _ in cases), len(cases)


def _points() -> tuple[int, int]:
    kills = test_checkpoint_kills
    per_world = sum(kills.POINTS_IN_FULL.values())
    return sum(kills.POINTS.values()), per_world * len(("sync", "async")) * len((False, True))


CLAIMS: list[tuple[str, str, Callable[[], tuple[int, ...]]]] = [
    ("features", r"(\d+) programs as users write them", lambda: (len(PROGRAMS),)),
    ("features", r"(\d+) programs with one fault each and its exact outcome; (\d+) of them ran on torch", _matrix),
    ("results", r"In (\d+) of (\d+) recorded programs", _same_order),
    ("features", r"those counted for (\d+) models", lambda: (len(planned.MODELS),)),
    ("troubleshooting", r"those counted on a CPU for (\d+) models", lambda: (len(planned.MODELS),)),
    (
        "plan",
        r"for (\d+) models \([^)]*\) and (\d+) strategies",
        lambda: (len(planned.MODELS), len(test_plan_truth.STRATEGIES)),
    ),
    ("verify", r"\* (\d+) faults were put into the engine", lambda: (len(verified.GRADIENT_FAULTS),)),
    ("verify", r"\* (\d+) more faults of the engine", lambda: (len(seeded_faults.PROVEN),)),
    ("verify", r"\* (\d+) settings without a fault", lambda: (len(test_verify_evidence.SETTINGS),)),
    (
        "checkpoints",
        r"(\d+) cases by seed, ([\d,]+) in the full run",
        lambda: (len(test_checkpoint_faults.SEEDS), len(test_checkpoint_faults.SEEDS_IN_FULL)),
    ),
    ("checkpoints", r"at least (\d+) points, at least (\d+) more in the full run", _points),
    (
        "checkpoints",
        r"(\d+) stops, in the full run (\d+)",
        lambda: (len(test_train_resume.STOPS), len(test_train_resume.STOPS) + len(test_train_resume.MANY)),
    ),
]


@pytest.mark.parametrize(("page", "words", "counted"), CLAIMS, ids=[f"{page}: {words}" for page, words, _ in CLAIMS])
def test_a_count_is_that_of_the_tests(page: str, words: str, counted: Callable[[], tuple[int, ...]]) -> None:
    (match,) = re.finditer(words, PAGE[page])
    assert tuple(int(number.replace(",", "")) for number in match.groups()) == counted()


def test_at_least_sixty_faults_of_the_device() -> None:
    (least,) = re.findall(r"at least (\d+) faults of the executor and the channels", NOTES)
    assert len(seeded_faults.FAULTS) >= int(least)


def test_the_host_time_of_the_faq_is_in_the_results() -> None:
    dated = results.ROOT / "benchmarks" / "host_2026-11-25.md"
    row = r"^\| fp32: added for each block / FSDP2 \| 1 \| [^|]*\| ([\d.]+) \("
    (share,) = re.findall(row, dated.read_text(), flags=re.M)
    assert f"a whole step adds {share} of the host time that FSDP2's adds, in float32" in PAGE["troubleshooting"]
