"""The evidence for `fullshard verify`: a hundred seeded faults are found, a hundred sound settings equal.

`make test` runs a sample, `make test-full` a larger one, `make test-all` all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fullshard.rounding import sums
from fullshard.verify.reference import read_before, read_step
from tests.harness.seeded_faults import FAULTS, PROVEN, Case
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


@pytest.mark.sample(1)
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


# ---- faults of the engine, of the registry that the tier of devices has too ------------------------------------------

# What the issue of `fullshard verify` names, and the faults of it.
KINDS = {
    "a dropped reduction": {
        "a reduction is dropped",
        "the result is zero",
        "a rank sends zeros",
        "held gradients are dropped",
    },
    "a doubled reduction": {"the result is doubled", "a rank sends too much", "held gradients are added twice"},
    "a wrong divisor": {"the divisor is too large"},
    "stale weights": {"weights are stale"},
    "half-updated weights": {"a rank sends stale shards", "half of the shards are sent before the step"},
    "swapped shards": {"shards are sent in each other's place", "shards arrive in each other's place"},
    "an off-by-one row": {"rows are sent off by one", "rows arrive off by one"},
    "a wrong dtype": {"the result is rounded", "shards are not cast for backward"},
    "a lost tie": {"a tie is lost in the modules", "a tie is lost where parameters are found"},
    "a missing all-reduce": {"replicas are not summed"},
    "a skipped recomputation cast": {"a cast of inputs is skipped in recomputation"},
    "a stale buffer": {"a buffer is moved where nothing is to move", "buffers are put back after a forward"},
    "other random numbers": {f"random numbers{of} are drawn" for of in ("", " of Python", " of numpy")},
}


def test_each_kind_of_fault_is_in_the_registry() -> None:
    assert set.union(*KINDS.values()) == set(PROVEN)
    assert not set(PROVEN) & set(FAULTS)


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Path]:
    """The records of a library without a fault."""
    made: dict[tuple[object, ...], Path] = {}

    def train(library: str, case: Case) -> Path:
        key = library, case.strategy, case.world, case.program
        if key not in made:
            made[key] = tmp_path_factory.mktemp(library)
            entry = f"tests.harness.verified:{case.program}"
            record(made[key], case.strategy, case.world, entry=entry, library=library)
        return made[key]

    return train


def _apart(ours: Path, theirs: Path, world: int, dtype: torch.dtype) -> set[tuple[str, str]]:
    """Where two records are apart, in the first step that has any, and rounding in `dtype` does not explain it: (phase,
    name)."""
    found = set()

    def note(phase: str, name: str, value: Tensor | None, other: Tensor | None) -> None:
        if value is None or other is None:
            if value is not other:
                found.add((phase, name))
        elif value.shape != other.shape or (value - other).abs().max() > other.abs().max() * sums(
            dtype, 1024, value.numel()
        ):
            found.add((phase, name))

    if read_before(ours, 0).ties != read_before(theirs, 0).ties:
        found.add(("initial values", "ties"))
    for step in range(2):
        for rank in range(world):
            one, two = read_step(ours, step, rank), read_step(theirs, step, rank)
            for value, other in zip(one.losses, two.losses, strict=True):
                note("forward", "loss", value, other)
            for name, value in one.buffers.items():
                note("buffers", name, value, two.buffers[name])
            for name in one.gradients.keys() & two.gradients.keys():
                note("backward", name, one.gradients[name], two.gradients[name])
            if one.generators != two.generators:
                found.add(("generators", "states"))
        if found:
            break
    return found


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", _sampled([*PROVEN], 6), ids=str)
def test_a_fault_of_the_engine_moves_what_it_is_found_by(
    name: str, trained_by: Callable[[str, Case], Path], tmp_path: Path
) -> None:
    """Beside a training by torch's FSDP2, without the comparison of `fullshard verify`."""
    case = PROVEN[name]
    by_torch, sound = trained_by("torch", case), trained_by("fullshard", case)
    # Kernels in bfloat16 may run in another order.
    dtype = torch.bfloat16 if _apart(sound, by_torch, case.world, torch.float32) else torch.float32
    assert dtype is torch.float32 or "bf16" in case.strategy
    assert _apart(sound, by_torch, case.world, dtype) == set()
    record(tmp_path, case.strategy, case.world, case.fault, entry=f"tests.harness.verified:{case.program}")
    moved = _apart(tmp_path, by_torch, case.world, dtype)
    # No record of torch has full parameters; they show in what the model computes.
    shows = {"forward": "loss", "initial values": "ties", "generators": "states"}.get(case.phase, case.name)
    assert (case.phase, shows) in moved, moved


WORDS = itertools.product(
    ("zero3", "zero2"), ("", "bf16"), ("", "offload"), ("", "micro=2"), ("", "recompute"), (1, 2, 3)
)
SETTINGS = [("+".join(filter(None, words)), world) for *words, world in WORDS]
SETTINGS += [
    (f"{level}+hsdp=2{extra}", 4) for level in ("zero3", "zero2") for extra in ("", "+bf16", "+micro=2", "+offload")
]


@pytest.mark.slow
@pytest.mark.sample(full=26)
@pytest.mark.parametrize(("strategy", "world"), SETTINGS, ids=[f"{s}-{w}" for s, w in SETTINGS])
def test_a_sound_setting_is_equal(strategy: str, world: int, tmp_path: Path) -> None:
    assert len(SETTINGS) >= 100 and ENTRY
    result = compare(tmp_path, record(tmp_path, strategy, world))
    assert result.verdict == "equal", result.difference
