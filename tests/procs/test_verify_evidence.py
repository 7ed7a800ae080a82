"""The evidence for `fullshard verify`: a hundred seeded faults are found, a hundred sound settings equal.

`make test` runs a sample, `make test-full` all.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fullshard.rounding import sums
from fullshard.verify.reference import read_step
from tests.harness.verified import (
    ENTRY,
    GRADIENT_FAULTS,
    RESULTS,
    SENT,
    TRAINABLE,
    GradientFault,
    compare,
    record,
    record_gradient_fault,
)

# What must be said of each kind of fault. Of the others no cause gives exactly that gradient.
CAUSES = {
    "doubled": "a wrong divisor: it is 2 times too large",
    "halved": "a wrong divisor: it is 2 times too small",
    "zero": "it is zero: the result was not written",
    "rounded to bfloat16": "reduced in a narrower dtype: all of its values are numbers of bfloat16",
    "rank 1 sends zeros": "the part of rank 1 is missing",
    "rank 1 sends twice as much": "the part of rank 1 was added twice",
}
UNKNOWN = {
    "negative",
    "rows in another place",
    "one element",
    "a percent too large",
    "rank 1 sends the negative",
    "rank 1 sends other rows",
}


def test_each_kind_of_fault_is_seeded_into_each_parameter() -> None:
    assert {*RESULTS, *SENT} == {*CAUSES} | UNKNOWN
    assert {(fault.kind, fault.name) for fault in GRADIENT_FAULTS} == {*itertools.product({*RESULTS, *SENT}, TRAINABLE)}
    assert len(GRADIENT_FAULTS) == len({*GRADIENT_FAULTS}) >= 100


def _sampled(cases: list[object], every: int) -> list[object]:
    """All but each `every`-th are slow."""
    marked = [pytest.param(case, id=str(i)) for i, case in enumerate(cases)]
    return [
        p if i % every == 0 else pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for i, p in enumerate(marked)
    ]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    record(folder, "zero3")
    return folder


@pytest.mark.parametrize("fault", _sampled([*GRADIENT_FAULTS], 23))
def test_a_seeded_fault_is_found_and_its_parameter_is_named(fault: GradientFault, sound: Path, tmp_path: Path) -> None:
    setting = record_gradient_fault(tmp_path, fault)
    # Independently of the comparison: it moves that gradient, and no other, beyond what rounding explains.
    ours, theirs = read_step(tmp_path, 0, 0).gradients, read_step(sound, 0, 0).gradients
    for name, gradient in ours.items():
        other = theirs[name]
        if gradient is None or other is None:
            assert gradient is other is None
            continue
        moved = (gradient - other).abs().max().item() / other.abs().max().item()
        allowed = sums(gradient.dtype, 1024, gradient.numel())
        assert (moved > allowed) == (name == fault.name), (name, moved, allowed)
    found = compare(tmp_path, setting).difference
    assert found is not None
    assert (found.step, found.phase, found.name, found.others) == (0, "backward", fault.name, 0), found
    assert found.cause == CAUSES.get(fault.kind, "unknown"), found


WORDS = itertools.product(
    ("zero3", "zero2"), ("", "bf16"), ("", "offload"), ("", "micro=2"), ("", "recompute"), (1, 2, 3)
)
SETTINGS = [("+".join(filter(None, words)), world) for *words, world in WORDS]
SETTINGS += [
    (f"{level}+hsdp=2{extra}", 4) for level in ("zero3", "zero2") for extra in ("", "+bf16", "+micro=2", "+offload")
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), SETTINGS, ids=[f"{s}-{w}" for s, w in SETTINGS])
def test_a_sound_setting_is_equal(strategy: str, world: int, tmp_path: Path) -> None:
    assert len(SETTINGS) >= 100 and ENTRY
    result = compare(tmp_path, record(tmp_path, strategy, world))
    assert result.verdict == "equal", result.difference
